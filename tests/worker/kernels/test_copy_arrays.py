"""Two small copies at once: in plain torch and in Triton's interpreter."""

from contextlib import nullcontext

import pytest
import torch

from longshore.worker.kernels.copy_arrays import copy_arrays
from tests.worker.kernels.variants import in_triton


@pytest.mark.parametrize("uses_triton", [False, True])
@pytest.mark.parametrize(("num_ints", "num_reals"), [(1, 0), (0, 3), (0, 0), (2500, 5), (4, 1024)])
def test_both_arrays_are_copied_and_converted(
    num_ints: int, num_reals: int, uses_triton: bool
) -> None:
    ints, reals = torch.randint(1 << 30, (num_ints,)), torch.randn(num_reals)
    targets = torch.full((num_ints + 1,), -1, dtype=torch.int32), torch.full((num_reals + 1,), -1.0)
    with in_triton() if uses_triton else nullcontext():
        copy_arrays(targets[0][:num_ints], ints, targets[1][:num_reals], reals)
    assert targets[0].tolist() == [*ints.tolist(), -1]
    assert targets[1].tolist() == [*reals.tolist(), -1.0]
