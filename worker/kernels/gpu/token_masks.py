"""Token masks, one program per row. See `worker/kernels/token_masks.py`."""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.operators import operator

MAX_BLOCK: Final = 8192


@triton.jit
def _is_allowed(bits_ptr, ids, vocab_size):
    octets = tl.load(bits_ptr + ids // 8, mask=ids < vocab_size, other=0)
    return ((octets.to(tl.int32) >> (ids % 8)) & 1) != 0


@triton.jit
def _kernel(
    logits_ptr,
    samples_ptr,
    bits_ptr,
    unedited_ptr,
    stride,
    vocab_size,
    HAS_UNEDITED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    line_ptr = logits_ptr + tl.load(samples_ptr + index) * stride
    bits_ptr += index * ((vocab_size + 7) // 8)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        is_allowed = _is_allowed(bits_ptr, ids, vocab_size)
        if HAS_UNEDITED:
            logits = tl.load(line_ptr + ids, mask=is_allowed, other=float("-inf"))
            most = tl.where(logits > most, logits, most)
        is_forbidden = (ids < vocab_size) & (is_allowed == 0)
        tl.store(line_ptr + ids, float("-inf"), mask=is_forbidden)
    if HAS_UNEDITED:  # noqa: SIM102  # without them, the rest is not compiled
        if tl.max(most, axis=0) == float("-inf"):
            for start in range(0, vocab_size, BLOCK):
                ids = start + tl.arange(0, BLOCK)
                is_allowed = _is_allowed(bits_ptr, ids, vocab_size)
                logits = tl.load(unedited_ptr + index * vocab_size + ids, mask=is_allowed)
                tl.store(line_ptr + ids, logits, mask=is_allowed)


def _fake(*_: object) -> None:
    return None


@operator(
    "forbid_tokens(Tensor(a!) logits, Tensor samples, Tensor bits, Tensor? unedited) -> ()",
    fake=_fake,
)
def forbid_tokens(logits: Tensor, samples: Tensor, bits: Tensor, unedited: Tensor | None) -> None:
    """See the wrapper."""
    if len(samples) == 0:
        return
    vocab_size = logits.shape[1]
    _kernel[(len(samples),)](
        logits,
        samples,
        bits,
        unedited,
        logits.stride(0),
        vocab_size,
        HAS_UNEDITED=unedited is not None,
        BLOCK=min(MAX_BLOCK, triton.next_power_of_2(vocab_size)),
        num_warps=8,
    )
