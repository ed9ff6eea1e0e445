"""The recurrence over the pieces of chunks, one program per chunk, head and part of its state. See
`worker/kernels/carry_state.py`."""

import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.operators import operator

BLOCK = 512


@triton.jit
def _kernel(
    state_ptr,
    added_ptr,
    log_decay_ptr,
    firsts_ptr,
    num_pieces_ptr,
    num_heads,
    size,
    BLOCK: tl.constexpr,
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < size
    places = state_ptr + (chunk.to(tl.int64) * num_heads + head) * size + columns
    state = tl.load(places, mask=is_column, other=0.0)
    for nth in range(tl.load(num_pieces_ptr + chunk)):
        line = (tl.load(firsts_ptr + nth) + chunk) * num_heads + head
        piece = added_ptr + line * size + columns
        added = tl.load(piece, mask=is_column, other=0.0)
        tl.store(piece, state, mask=is_column)
        state = state * tl.exp(tl.load(log_decay_ptr + line)) + added
    tl.store(places, state, mask=is_column)


def _fake(
    state: Tensor, added: Tensor, log_decay: Tensor, firsts: Tensor, num_pieces: Tensor
) -> None:
    return None


@operator(
    "carry_state(Tensor(a!) state, Tensor(b!) added, Tensor log_decay, Tensor firsts, "
    "Tensor num_pieces) -> ()",
    fake=_fake,
)
def carry_state(
    state: Tensor, added: Tensor, log_decay: Tensor, firsts: Tensor, num_pieces: Tensor
) -> None:
    """See the wrapper."""
    num_chunks, num_heads = state.shape[:2]
    size = state.shape[2] * state.shape[3]
    _kernel[(num_chunks, num_heads, triton.cdiv(size, BLOCK))](
        state, added, log_decay, firsts, num_pieces, num_heads, size, BLOCK=BLOCK, num_warps=4
    )
