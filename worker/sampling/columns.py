"""The sampling settings of all rows, as columns from which a step gathers its rows."""

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np

from longshore.protocol.plan import RowStart
from longshore.protocol.sampling import SamplingParams
from longshore.worker.sampling.logit_edits import RowEdits
from longshore.worker.sampling.uniform import SEED_MASK

# What a row may need in addition to a token; bits of `SamplingColumns.asks`.
ASKS_EDITS: Final = 1
ASKS_PENALTIES: Final = 2
ASKS_LOGPROBS: Final = 4
ASKS_PROMPT_LOGPROBS: Final = 8
ASKS_MASK: Final = 16


_OF_POOLING: Final = SamplingParams(temperature=0.0)
"""Settings of pooling requests, whose own sampling settings are ignored."""


class SamplingColumns:
    """Sampling settings by row, (max_num_seqs,) each.

    num_prompt: prompt tokens; output position 0 comes after them.
    asks:       bits `ASKS_*`: features of this row that most rows do not use.
    logprobs, prompt_logprobs: number of most likely tokens to list; unused without the `asks` bit.
    edits:      logit edits of rows with `ASKS_EDITS`.
    """

    def __init__(
        self, max_num_seqs: int, *, vocab_size: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self.num_prompt = np.zeros(max_num_seqs, np.int64)
        self.temperature = np.zeros(max_num_seqs, np.float64)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.top_p = np.ones(max_num_seqs, np.float64)
        self.min_p = np.zeros(max_num_seqs, np.float64)
        self.seed = np.zeros(max_num_seqs, np.uint64)
        self.asks = np.zeros(max_num_seqs, np.uint8)
        self.repetition_penalty = np.ones(max_num_seqs, np.float64)
        self.presence_penalty = np.zeros(max_num_seqs, np.float64)
        self.frequency_penalty = np.zeros(max_num_seqs, np.float64)
        self.logprobs = np.zeros(max_num_seqs, np.int64)
        self.prompt_logprobs = np.zeros(max_num_seqs, np.int64)
        self.edits: list[RowEdits | None] = [None] * max_num_seqs

    def start(self, start: RowStart) -> None:
        """Set every column of the row. Token ids must be within the vocabulary."""
        row = start.row
        sampling = start.sampling if start.pooling is None else _OF_POOLING
        self.num_prompt[row] = len(start.prompt_token_ids)
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        seed = _seed_of_id(start.request_id) if sampling.seed is None else sampling.seed
        self.seed[row] = seed & SEED_MASK
        self.repetition_penalty[row] = sampling.repetition_penalty
        self.presence_penalty[row] = sampling.presence_penalty
        self.frequency_penalty[row] = sampling.frequency_penalty
        self.logprobs[row] = sampling.logprobs or 0
        self.prompt_logprobs[row] = sampling.prompt_logprobs or 0
        edits = RowEdits.of(
            sampling,
            start.prompt_token_ids,
            eos_token_ids=self._eos_token_ids,
            vocab_size=self._vocab_size,
        )
        self.edits[row] = edits
        self.asks[row] = _asked_for(sampling) | (0 if edits is None else ASKS_EDITS)
        if start.has_structured_output:
            self.asks[row] |= ASKS_MASK


def _asked_for(sampling: SamplingParams) -> int:
    asks = 0
    penalties = (sampling.presence_penalty, sampling.frequency_penalty)
    if sampling.repetition_penalty != 1 or any(penalties):
        asks |= ASKS_PENALTIES
    if sampling.logprobs is not None:
        asks |= ASKS_LOGPROBS
    if sampling.prompt_logprobs is not None:
        asks |= ASKS_PROMPT_LOGPROBS
    return asks


def _seed_of_id(request_id: str) -> int:
    """A seed that depends on the request alone, for a request without one."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")
