"""All kernels against float64. Operators that no check calls are listed as not verified."""

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.gpu import (
    attention_checks,
    fused_checks,
    operator_checks,
    sampling_checks,
    state_checks,
)
from benchmarks.gpu.exactness import CalledOperators
from benchmarks.gpu.results import Run
from longshore.worker.kernels import gpu
from longshore.worker.kernels.operators import operator_names


def check(run: Run) -> None:
    torch.manual_seed(0)
    for module in pkgutil.iter_modules(gpu.__path__, f"{gpu.__name__}."):
        importlib.import_module(module.name)
    with _kernels(run), CalledOperators() as called:
        attention_checks.check(run)
        operator_checks.check(run)
        fused_checks.check(run)
        state_checks.check(run)
        sampling_checks.check(run)
    for name in sorted(operator_names() - called.names):
        run.not_verified(f"operator {name}", "no check calls it")


@contextmanager
def _kernels(run: Run) -> Iterator[None]:
    """In a dry run, Triton's interpreter runs the kernels."""
    if not run.is_dry:
        yield
        return
    from tests.worker.kernels.variants import in_triton

    with in_triton():
        yield
