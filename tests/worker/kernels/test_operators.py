"""Operators: fakes, launches, and the choice of Triton."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from longshore.worker.kernels.gpu.rms_norm import rms_norm
from longshore.worker.kernels.operators import num_launches, uses_triton
from tests.worker.kernels.variants import in_triton


def test_a_fake_has_the_shape_and_dtype_of_the_result() -> None:
    x, weight = torch.randn(3, 5, dtype=torch.float16), torch.randn(5)
    with in_triton():
        real = rms_norm(x, None, weight, 1e-5)
    with FakeTensorMode() as mode:
        fake = rms_norm(mode.from_tensor(x), None, mode.from_tensor(weight), 1e-5)
    assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)


def test_the_launches_of_an_operator_are_declared() -> None:
    assert num_launches("rms_norm") == 1
    with pytest.raises(KeyError):
        num_launches("unknown")


def test_cpu_tensors_are_computed_by_triton_only_in_tests() -> None:
    x = torch.empty(1)
    assert not uses_triton(x)
    with in_triton():
        assert uses_triton(x)
    assert not uses_triton(x)


def test_the_interpreter_rejects_arithmetic_in_bfloat16() -> None:
    """It would add the bits."""
    import triton
    import triton.language as tl

    @triton.jit
    def twice(x_ptr, N: tl.constexpr):
        places = x_ptr + tl.arange(0, N)
        tl.store(places, tl.load(places) + tl.load(places))

    with in_triton(), pytest.raises(Exception, match="in bf16: convert"):
        twice[(1,)](torch.ones(4, dtype=torch.bfloat16), N=4)
