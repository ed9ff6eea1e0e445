"""Ranks and log probabilities of tokens on a GPU. The same in plain torch is in
`worker/sampling/logprobs.py`."""

import torch
from torch import Tensor


def score(logits: Tensor, token_ids: Tensor, best: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """logits: (n, vocab_size) float32, contiguous within each line; token_ids: (n,) int32,
    contiguous; best: (n, k) int64, contiguous, tokens that are listed as well, or None.

    Returns the fields of `Scores`. Two launches. Raises ValueError for a wrong shape or dtype.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(
            f"logits {logits.dtype} {tuple(logits.shape)} with strides {logits.stride()} must be "
            "torch.float32 (n, vocab_size), contiguous within each line"
        )
    if token_ids.shape != logits.shape[:1] or token_ids.dtype != torch.int32:
        raise ValueError(
            f"token ids {token_ids.dtype} {tuple(token_ids.shape)} must be torch.int32 "
            f"({len(logits)},)"
        )
    if best is not None and (best.dtype != torch.int64 or not best.is_contiguous()):
        raise ValueError(f"the listed tokens, {best.dtype}, must be contiguous torch.int64")
    from longshore.worker.kernels.gpu import logprobs as gpu

    scores: tuple[Tensor, Tensor, Tensor] = gpu.score(logits, token_ids, best)
    return scores
