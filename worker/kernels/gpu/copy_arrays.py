"""Two small copies in one launch, which also read and write pinned host memory. See
`worker/kernels/copy_arrays.py`."""

import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.operators import operator

BLOCK = 1024


@triton.jit(do_not_specialize=["num_first", "num_second"])
def _kernel(
    first_ptr,
    from_first_ptr,
    second_ptr,
    from_second_ptr,
    num_first,
    num_second,
    BLOCK: tl.constexpr,
):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(from_first_ptr + places, mask=places < num_first)
    y = tl.load(from_second_ptr + places, mask=places < num_second)
    tl.store(first_ptr + places, x.to(first_ptr.dtype.element_ty), places < num_first)
    tl.store(second_ptr + places, y.to(second_ptr.dtype.element_ty), places < num_second)


def _fake(first: Tensor, from_first: Tensor, second: Tensor, from_second: Tensor) -> None:
    """Nothing is returned."""


@operator(
    "copy_arrays(Tensor(a!) first, Tensor from_first, Tensor(b!) second, Tensor from_second) -> ()",
    fake=_fake,
)
def copy_arrays(first: Tensor, from_first: Tensor, second: Tensor, from_second: Tensor) -> None:
    """See the wrapper."""
    most = max(len(first), len(second))
    if most:
        grid = (triton.cdiv(most, BLOCK),)
        _kernel[grid](
            first,
            from_first,
            second,
            from_second,
            len(first),
            len(second),
            BLOCK=BLOCK,
            num_warps=4,
        )
