"""Token masks: which tokens of the vocabulary the rows with structured output may sample.

A mask is applied after all logit edits and penalties, so no setting makes a token possible that the
grammar forbids. Log probabilities are those of the logits before both.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from longshore.protocol.arrays import UInt8Array
from longshore.worker.kernels.operators import uses_triton
from longshore.worker.kernels.token_masks import forbid_tokens
from longshore.worker.step.step_batch import Int64s


def mask_width(vocab_size: int) -> int:
    """Bytes of one row's mask."""
    return -(-vocab_size // 8)


@dataclass(frozen=True)
class TokenMask:
    """The masks of n rows, on the host (pinned for CUDA).

    samples: (n,) int64, indices among the step's sampling rows.
    bits:    (n, mask_width) uint8, packed with the lowest token id in the lowest bit.
    """

    samples: Tensor
    bits: Tensor

    @staticmethod
    def of(samples: Int64s, bits: UInt8Array, *, vocab_size: int, pin_memory: bool) -> "TokenMask":
        """bits: (n * mask_width,), which is copied: the message will be freed."""
        shape = (len(samples), mask_width(vocab_size))
        copied = torch.empty(shape, dtype=torch.uint8, pin_memory=pin_memory)
        copied.numpy()[:] = bits.reshape(shape)
        index = torch.from_numpy(np.array(samples, np.int64))
        return TokenMask(index.pin_memory() if pin_memory else index, copied)

    def on_device(self, device: torch.device) -> "DeviceMask":
        """Two copies, on the compute queue."""
        return DeviceMask(
            self.samples.to(device, non_blocking=True), self.bits.to(device, non_blocking=True)
        )


@cache
def _forbidden_in_byte(device: torch.device) -> Tensor:
    """(256,) int64 by the value of a byte: the 8 bools that say which of its bits are 0."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy((bits == 0).view(np.int64).reshape(-1)).to(device)


@dataclass(frozen=True)
class DeviceMask:
    """The masks of n rows, on the device.

    samples: (n,) int64, indices among the step's sampling rows.
    bits:    (n, mask_width) uint8; see `TokenMask`.
    """

    samples: Tensor
    bits: Tensor

    def unedited(self, logits: Tensor) -> Tensor:
        """A copy of the masked rows of logits, (num_sampled, vocab_size), before their edits."""
        return logits.index_select(0, self.samples)

    def apply(self, logits: Tensor, unedited: Tensor | None = None) -> Tensor:
        """Forbid tokens in logits, (num_sampled, vocab_size) float32, in place. Returns the masked
        rows, (n, vocab_size).

        unedited: the result of `unedited` if the logits were edited since. A row whose edits forbid
                  all that the grammar allows (an end before min_tokens, say) is sampled from these:
                  the alternative is output that the grammar does not describe.
        """
        if uses_triton(logits):
            forbid_tokens(logits, self.samples, self.bits, unedited)
            return logits.index_select(0, self.samples)
        is_forbidden = self._is_forbidden(logits.shape[1])
        masked = logits.index_select(0, self.samples)
        masked.masked_fill_(is_forbidden, -math.inf)
        if unedited is not None:
            has_none = masked.amax(dim=-1, keepdim=True).isneginf()
            others = unedited.masked_fill(is_forbidden, -math.inf)
            masked = torch.where(has_none, others, masked)
        logits.index_copy_(0, self.samples, masked)
        return masked

    def _is_forbidden(self, vocab_size: int) -> Tensor:
        """(n, vocab_size) bool."""
        eights = _forbidden_in_byte(self.bits.device).index_select(0, self.bits.flatten().int())
        return eights.view(torch.bool).view(len(self.bits), -1)[:, :vocab_size]
