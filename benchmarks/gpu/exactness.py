"""The distance of a result from the same computation in float64, and unwritten outputs."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longshore.worker.kernels.operators import NAMESPACE

LIMITS: Final = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of `worst_error`, by the dtype of the operands. In float32, a key too many or too few is found in
any context; products in TF32, which have errors of about 3e-4, are found as well."""


def worst_error(got: Tensor, exact: Tensor) -> float:
    """(..., size): the largest ||got - exact|| / ||exact|| of a vector, so that one wrong vector
    among many is found. Infinite if anything is NaN."""
    assert got.shape == exact.shape, f"the result is {tuple(got.shape)}, not {tuple(exact.shape)}"
    distances = (got.double() - exact).norm(dim=-1)
    errors = distances / exact.norm(dim=-1).clamp_min(1e-30)
    return float(errors.nan_to_num(nan=float("inf")).max()) if errors.numel() else 0.0


def assert_near(got: Tensor, exact: Tensor, dtype: torch.dtype | None = None) -> None:
    """dtype: of the operands; None: of `got`."""
    error, limit = worst_error(got, exact), LIMITS[dtype or got.dtype]
    assert error <= limit, f"the worst error is {error:.2e}, and at most {limit:g} is allowed"


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within the block, torch fills memory that it allocates with NaN, or the largest integer. What
    a kernel forgets to write is then wrong."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operations that are not deterministic
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was_deterministic)


class CalledOperators(TorchDispatchMode):
    """Within a `with` block, collects the names of our operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == NAMESPACE:
            self.names.add(func.name().partition("::")[2].partition(".")[0])
        return func(*args, **(kwargs or {}))
