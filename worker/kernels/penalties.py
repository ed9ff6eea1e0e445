"""Repetition, presence and frequency penalties on a GPU. The same in plain torch is in
`worker/sampling/penalties.py`."""

import torch
from torch import Tensor


def penalise(
    logits: Tensor,
    token_ids: Tensor,
    *,
    samples: Tensor,
    rows: Tensor,
    num_prompt: Tensor,
    num_tokens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    longest: int,
) -> None:
    """Change the logits of the tokens that n rows contain, in place. Three launches, one of which
    clears a counter per row and token of the vocabulary.

    logits:    (num_sampled, vocab_size) float32, contiguous.
    token_ids: (max_num_seqs, width) int32, contiguous within each row, ids of the vocabulary.
    The rest:  see `Penalties`; (n,) each, contiguous.

    Raises ValueError for logits or token ids of a wrong shape or dtype.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(
            f"logits {logits.dtype} {tuple(logits.shape)} must be contiguous torch.float32 "
            "(num_sampled, vocab_size)"
        )
    if token_ids.dtype != torch.int32 or token_ids.stride(1) != 1 or token_ids.shape[1] < longest:
        raise ValueError(
            f"token ids {token_ids.dtype} {tuple(token_ids.shape)} must be torch.int32 and have "
            f"at least {longest} contiguous columns"
        )
    from longshore.worker.kernels.gpu import penalties as gpu

    gpu.penalise(
        logits,
        token_ids,
        samples,
        rows,
        num_prompt,
        num_tokens,
        repetition,
        presence,
        frequency,
        longest,
    )
