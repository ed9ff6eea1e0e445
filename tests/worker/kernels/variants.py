"""The implementations of the kernels that this machine can run: plain torch, every instruction set
of the compiled library, and Triton in its interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from longshore.worker.kernels.native import (
    INSTRUCTION_SETS,
    Native,
    library_path,
    load,
    select,
)
from longshore.worker.kernels.operators import interpreted


def load_all() -> dict[str, Native]:
    path = library_path()
    loaded = {}
    for name in INSTRUCTION_SETS if path is not None else ():
        try:
            loaded[name] = load(path, name)
        except ValueError:  # not of this processor
            continue
    return loaded


NATIVE = load_all()

NEWEST = next(reversed(NATIVE), None)


def _marked(name: str, value: object) -> Any:
    """Those of all instruction sets but the newest are slow."""
    marks = pytest.mark.slow if name in NATIVE and name != NEWEST else ()
    return pytest.param(value, id=name, marks=marks)


native_only = pytest.mark.parametrize(
    "kernels",
    [_marked(name, kernels) for name, kernels in NATIVE.items()]
    or [pytest.param(None, marks=pytest.mark.skip(reason="the CPU kernels are not built"))],
)

TRITON = "triton"

_VARIANTS = [_marked(name, name) for name in ("torch", *NATIVE)]

every_variant = pytest.mark.parametrize("variant", _VARIANTS)
"""Of kernels without a Triton source."""

every_variant_and_triton = pytest.mark.parametrize("variant", [*_VARIANTS, TRITON])


@contextmanager
def in_triton() -> Iterator[None]:
    """Within the block, CPU tensors are computed by the Triton kernels, in the interpreter."""
    from tests.worker.kernels.triton_interpreter import (  # needs Triton
        exact_narrow_types,
        quick_calls,
    )

    with interpreted(), exact_narrow_types(), quick_calls():
        yield


@contextmanager
def using(variant: str, *, num_threads: int = 1) -> Iterator[Native | None]:
    """Within the block, the wrappers use this variant, which it returns, and torch this number of
    threads."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    if variant in ("torch", TRITON):
        select(use_native=False)
    else:
        select(use_native=True, instruction_set=variant)
    try:
        with in_triton() if variant == TRITON else nullcontext():
            yield NATIVE.get(variant)
    finally:
        select(use_native=True)
        torch.set_num_threads(threads_before)
