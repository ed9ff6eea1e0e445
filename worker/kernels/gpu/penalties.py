"""Penalties of tokens that occur in a row: counted, then applied, by programs for pieces of the
row's tokens. See `worker/kernels/penalties.py`."""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.operators import operator

BLOCK: Final = 1024

IN_PROMPT: tl.constexpr = tl.constexpr(1 << 30)
"""Added to the number of occurrences in the output, which is smaller."""

COLUMNS: Final = (
    "samples_ptr",
    "rows_ptr",
    "num_prompt_ptr",
    "num_tokens_ptr",
    "repetition_ptr",
    "presence_ptr",
    "frequency_ptr",
)
"""Anywhere in a packed upload; another alignment must not be another compilation."""


@triton.jit
def _tokens(token_ids_ptr, stride, rows_ptr, num_tokens_ptr, index, BLOCK: tl.constexpr):
    """Positions and ids of a piece of a row, and which of them are tokens."""
    positions = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = positions < tl.load(num_tokens_ptr + index)
    line_ptr = token_ids_ptr + tl.load(rows_ptr + index) * stride
    return positions, tl.load(line_ptr + positions, mask=is_token, other=0), is_token


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _count(
    token_ids_ptr,
    rows_ptr,
    num_prompt_ptr,
    num_tokens_ptr,
    counts_ptr,
    stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(1).to(tl.int64)
    positions, ids, is_token = _tokens(
        token_ids_ptr, stride, rows_ptr, num_tokens_ptr, index, BLOCK
    )
    is_output = positions >= tl.load(num_prompt_ptr + index)
    counts_ptr += index * vocab_size
    tl.atomic_add(counts_ptr + ids, 1, mask=is_token & is_output, sem="relaxed")
    tl.atomic_or(counts_ptr + ids, IN_PROMPT, mask=is_token & (is_output == 0), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _apply(
    logits_ptr,
    token_ids_ptr,
    samples_ptr,
    rows_ptr,
    num_tokens_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    counts_ptr,
    stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(1).to(tl.int64)
    _, ids, is_token = _tokens(token_ids_ptr, stride, rows_ptr, num_tokens_ptr, index, BLOCK)
    # Only one occurrence of a token takes the count, and changes the logit.
    counts = tl.atomic_xchg(counts_ptr + index * vocab_size + ids, 0, mask=is_token, sem="relaxed")
    is_first = is_token & (counts != 0)
    num_outputs = counts & (IN_PROMPT - 1)
    places = logits_ptr + tl.load(samples_ptr + index) * vocab_size + ids
    logits = tl.load(places, mask=is_first, other=0.0)
    repetition = tl.load(repetition_ptr + index)
    logits = tl.where(logits > 0, logits / repetition, logits * repetition)
    logits -= tl.load(frequency_ptr + index) * num_outputs.to(tl.float32)
    logits = tl.where(num_outputs > 0, logits - tl.load(presence_ptr + index), logits)
    tl.store(places, logits, mask=is_first)


def _fake(*_: object) -> None:
    return None


@operator(
    "penalise(Tensor(a!) logits, Tensor token_ids, Tensor samples, Tensor rows, Tensor num_prompt, "
    "Tensor num_tokens, Tensor repetition, Tensor presence, Tensor frequency, int longest) -> ()",
    fake=_fake,
    launches=3,
)
def penalise(
    logits: Tensor,
    token_ids: Tensor,
    samples: Tensor,
    rows: Tensor,
    num_prompt: Tensor,
    num_tokens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    longest: int,
) -> None:
    """See the wrapper."""
    if len(rows) == 0 or longest == 0:
        return
    vocab_size, stride = logits.shape[1], token_ids.stride(0)
    counts = torch.zeros((len(rows), vocab_size), dtype=torch.int32, device=logits.device)
    grid = (triton.cdiv(longest, BLOCK), len(rows))
    _count[grid](token_ids, rows, num_prompt, num_tokens, counts, stride, vocab_size, BLOCK=BLOCK)
    _apply[grid](
        logits,
        token_ids,
        samples,
        rows,
        num_tokens,
        repetition,
        presence,
        frequency,
        counts,
        stride,
        vocab_size,
        BLOCK=BLOCK,
    )
