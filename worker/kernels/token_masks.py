"""Token masks on a GPU. The same in plain torch is in `worker/sampling/token_masks.py`."""

import torch
from torch import Tensor


def forbid_tokens(logits: Tensor, samples: Tensor, bits: Tensor, unedited: Tensor | None) -> None:
    """Set the logits of n rows to -inf where their bit is 0, in place. One launch.

    logits:   (num_sampled, vocab_size) float32, contiguous within each line.
    samples:  (n,) int64, indices of the rows, contiguous.
    bits:     (n, mask_width) uint8, contiguous; see `TokenMask`.
    unedited: (n, vocab_size) float32, contiguous, what replaces a row of which nothing is left; or
              None.

    Raises ValueError for arguments of a wrong shape or dtype.
    """
    shape = (len(samples), logits.shape[-1])
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(
            f"logits {logits.dtype} {tuple(logits.shape)} with strides {logits.stride()} must be "
            "torch.float32 (num_sampled, vocab_size), contiguous within each line"
        )
    if (
        bits.dtype != torch.uint8
        or bits.shape != (shape[0], -(-shape[1] // 8))
        or not bits.is_contiguous()
    ):
        raise ValueError(
            f"bits {bits.dtype} {tuple(bits.shape)} must be contiguous torch.uint8, one bit for "
            f"each of {shape[1]} tokens of {shape[0]} rows"
        )
    if unedited is not None and (unedited.shape != shape or not unedited.is_contiguous()):
        raise ValueError(f"unedited logits {tuple(unedited.shape)} must be contiguous {shape}")
    from longshore.worker.kernels.gpu import token_masks as gpu

    gpu.forbid_tokens(logits, samples, bits, unedited)
