"""Triton kernels as torch operators, and the choice between them and plain torch.

torch must know what an operator returns without running it, and CUDA graphs, benchmarks and tests
on fake devices must know what it costs. So each operator has a fake, which only makes outputs of
the right shape, and a declared number of launches.

The Triton sources are in `gpu/`, a module per kernel, which needs Triton: the wrappers import it
when a tensor is on a GPU. Triton's interpreter runs the same sources on CPU tensors in tests, if
TRITON_INTERPRET=1 is set before the first of them is imported.
"""

import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

NAMESPACE: Final = "longshore"

_LIBRARY: Final = torch.library.Library(NAMESPACE, "DEF")
_LAUNCHES: Final[dict[str, int]] = {}


def operator(
    schema: str, *, fake: Callable[..., Any], launches: int = 1
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates the function that launches a kernel; the result is the operator.

    schema:   in torch's notation, such as `gate(Tensor gate_up, int kind) -> Tensor`. Tensors that
              are written are marked: `Tensor(a!) out`.
    fake:     takes the same arguments and returns new tensors of the right shape, dtype and device.
    launches: kernels per call. A launcher that skips an empty input still counts.
    """

    def register(launcher: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        for key in ("CUDA", "CPU"):
            _LIBRARY.impl(name, launcher, key)
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
        _LAUNCHES[name] = launches
        overload: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
        return overload

    return register


def num_launches(name: str) -> int:
    """Kernels that one call of the operator `name` launches. Raises KeyError if there is none."""
    return _LAUNCHES[name]


def operator_names() -> frozenset[str]:
    """The operators of the kernels that have been imported."""
    return frozenset(_LAUNCHES)


class _Selection:
    """Whether CPU tensors, too, are computed by Triton: in its interpreter, for tests."""

    is_interpreted = False


_selection = _Selection()


def uses_triton(x: Tensor) -> bool:
    """Whether to compute with the Triton kernels; otherwise with native kernels or plain torch."""
    if x.device.type == "cuda":
        return _has_triton()
    return _selection.is_interpreted


@contextmanager
def interpreted() -> Iterator[None]:
    """Within the block, CPU tensors are computed by the Triton kernels as well."""
    _selection.is_interpreted = True
    try:
        yield
    finally:
        _selection.is_interpreted = False


@cache
def _has_triton() -> bool:
    if importlib.util.find_spec("triton") is not None:
        return True
    logger.warning(
        "Triton is not installed, so the GPU computes in plain torch operations, which is much "
        "slower; install a CUDA build of torch, which brings it"
    )
    return False
