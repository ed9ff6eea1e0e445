"""Log probabilities of sampled tokens and of prompt tokens, from the model's unedited logits.

The device always computes the maximum number of most likely tokens, and each row's result is cut
to the number it asked for. So a row's scores do not depend on what other rows ask for.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longshore.protocol.arrays import BoolArray, Float32Array, Int32Array, int32_array
from longshore.protocol.outputs import TokenLogprobs
from longshore.protocol.sampling import MAX_LOGPROBS
from longshore.worker.kernels import logprobs as kernels
from longshore.worker.kernels.operators import uses_triton

MAX_SCORED_ELEMENTS: Final = 1 << 24
"""Logits of prompt tokens that are in memory at once."""


@dataclass(frozen=True)
class Scores:
    """Scores of n tokens.

    ranks:     (n,) int32; 1 if no other token is more likely.
    token_ids: (n, 1 + k) int32: the token itself, then the k most likely ones.
    logprobs:  (n, 1 + k) float32.
    """

    ranks: Tensor
    token_ids: Tensor
    logprobs: Tensor


def score(logits: Tensor, token_ids: Tensor, num_listed: int) -> Scores:
    """logits: (n, vocab_size) float32; token_ids: (n,) int32; num_listed: 1 + k, or 1 for k = 0."""
    if uses_triton(logits):
        best = logits.topk(num_listed - 1, dim=-1).indices if num_listed > 1 else None
        return Scores(*kernels.score(logits, token_ids, best))
    chosen = token_ids.long().unsqueeze(1)
    chosen_logits = logits.gather(1, chosen)
    ranks = (logits > chosen_logits).sum(dim=-1, dtype=torch.int32).add_(1)
    if num_listed > 1:
        best_logits, best = logits.topk(num_listed - 1, dim=-1)
        chosen = torch.cat((chosen, best), dim=-1)
        chosen_logits = torch.cat((chosen_logits, best_logits), dim=-1)
    logprobs = chosen_logits - logits.logsumexp(dim=-1, keepdim=True)
    return Scores(ranks, chosen.int(), logprobs)


class ScoredTokens:
    """The tokens that one step scores, and the host memory of their scores.

    owners, positions: (n,) int64, as in TokenLogprobs.
    samples: (m,) int64, index among the step's samples of each of the last m tokens.
    num_best: (n,) int64, number of most likely tokens to list for each.
    num_listed: tokens whose log probabilities are computed for each, itself included.
    """

    def __init__(
        self,
        owners: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        num_best: npt.NDArray[np.int64],
        samples: npt.NDArray[np.int64],
        *,
        vocab_size: int,
        pin_memory: bool,
    ) -> None:
        self.vocab_size = vocab_size
        self._owners = owners
        self._positions = positions
        self._samples = samples
        # Always the maximum: among ties, topk may choose other tokens for another k.
        longest = min(MAX_LOGPROBS, vocab_size)
        self._num_listed = 1 + np.minimum(num_best, longest)
        self.num_listed = 1 + longest if num_best.any() else 1
        shape = (len(owners), self.num_listed)
        self._host = Scores(
            torch.empty(len(owners), dtype=torch.int32, pin_memory=pin_memory),
            torch.empty(shape, dtype=torch.int32, pin_memory=pin_memory),
            torch.empty(shape, dtype=torch.float32, pin_memory=pin_memory),
        )

    def receive(self, start: int, scores: Scores) -> None:
        """Start copying the scores of the tokens from `start` on to the host. On the compute
        queue."""
        span = slice(start, start + len(scores.ranks))
        self._host.ranks[span].copy_(scores.ranks, non_blocking=True)
        self._host.token_ids[span].copy_(scores.token_ids, non_blocking=True)
        self._host.logprobs[span].copy_(scores.logprobs, non_blocking=True)

    def result(self, is_valid: BoolArray | None = None) -> TokenLogprobs:
        """The scores; call it after the step is complete.

        is_valid: (num_samples,) samples whose scores count; None: all."""
        kept = np.ones(len(self._owners), np.bool_)
        if is_valid is not None:
            kept[len(kept) - len(self._samples) :] = is_valid[self._samples]
        num_listed = self._num_listed * kept
        is_listed = np.arange(self.num_listed) < num_listed[:, np.newaxis]
        token_ids: Int32Array = self._host.token_ids.numpy()[is_listed]
        logprobs: Float32Array = self._host.logprobs.numpy()[is_listed]
        return TokenLogprobs(
            owners=int32_array(self._owners[kept]),
            positions=int32_array(self._positions[kept]),
            ranks=int32_array(self._host.ranks.numpy()[kept]),
            num_listed=int32_array(num_listed[kept]),
            token_ids=token_ids,
            logprobs=logprobs,
        )
