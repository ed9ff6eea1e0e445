"""Drafters that look up what followed the last tokens before: in the request, or in others.

`NgramDrafter` is prompt lookup (Saxena, 2023): what followed the longest repetition.
`SuffixDrafter` follows SuffixDecoding (Oliaro et al., 2024): it also looks into recent outputs, a
longer repetition gives more drafts, and they end where the earlier continuations disagree.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from longshore.protocol.arrays import Int32Array
from longshore.worker.drafting.config import SpeculativeConfig
from longshore.worker.drafting.drafter import Drafter
from longshore.worker.drafting.token_index import TokenIndex

MIN_SUFFIX: Final = 2
"""Tokens that `suffix` compares at least; repetitions of one token are mostly chance."""

MAX_CACHED_TOKENS: Final = 1 << 18
"""Of recent outputs in each of two generations; an index takes up to 130 bytes per token."""

_SEPARATOR: Final = -1


class _Rows(Drafter):
    """The tokens of each row, indexed by n-grams of `size` tokens."""

    def __init__(self, config: SpeculativeConfig, size: int) -> None:
        self._size = size
        self._rows: dict[int, TokenIndex] = {}
        self._num_prompt: dict[int, int] = {}

    def start(self, row: int, token_ids: Int32Array, num_prompt: int) -> None:
        self._rows[row] = index = TokenIndex(self._size)
        self._num_prompt[row] = num_prompt
        index.extend(token_ids)

    def append(self, row: int, token_ids: Sequence[int]) -> None:
        self._rows[row].extend(token_ids)

    def rewind(self, row: int, num_tokens: int) -> None:
        known = self._rows[row].slice(0, num_tokens)
        self._rows[row] = index = TokenIndex(self._size)
        index.extend(known)

    def end(self, row: int, *, is_finished: bool) -> None:
        del self._rows[row], self._num_prompt[row]


class NgramDrafter(_Rows):
    """What followed the longest repetition of the last tokens in the request, the latest one of
    equal length."""

    def __init__(self, config: SpeculativeConfig) -> None:
        low, self._longest = config.lookup
        super().__init__(config, low)

    def propose(self, row: int, max_tokens: int) -> Sequence[int]:
        index = self._rows[row]
        found = index.find(index.tail(self._longest), self._longest)
        if found is None:
            return ()
        best = found.following[[found.lengths.argmax()]]
        tokens: list[int] = index.following(best, max_tokens)[0].tolist()
        return [token for token in tokens if token >= 0]


class SuffixDrafter(_Rows):
    """What followed most repetitions of the longest suffix, in the request and recent outputs."""

    def __init__(self, config: SpeculativeConfig) -> None:
        super().__init__(config, MIN_SUFFIX)
        self._depth = config.suffix_decoding_max_tree_depth
        self._factor = config.suffix_decoding_max_spec_factor
        self._min_share = config.suffix_decoding_min_token_prob
        self._max_cached = config.suffix_decoding_max_cached_requests
        # Outputs of ended requests. When the newer index is full, it becomes the older one, so that
        # no step pays for the removal of tokens.
        self._newer, self._older = TokenIndex(MIN_SUFFIX), TokenIndex(MIN_SUFFIX)
        self._num_cached = 0

    def end(self, row: int, *, is_finished: bool) -> None:
        if is_finished and self._max_cached:
            index = self._rows[row]
            output = index.slice(self._num_prompt[row], len(index))[-MAX_CACHED_TOKENS:]
            is_full = len(self._newer) + len(output) > MAX_CACHED_TOKENS
            if is_full or 2 * self._num_cached >= self._max_cached:
                self._newer, self._older = TokenIndex(MIN_SUFFIX), self._newer
                self._num_cached = 0
            self._newer.extend(np.append(output, np.int32(_SEPARATOR)))
            self._num_cached += 1
        super().end(row, is_finished=is_finished)

    def propose(self, row: int, max_tokens: int) -> Sequence[int]:
        own = self._rows[row]
        tail = own.tail(self._depth)
        lengths, continuations = [], []
        for index in (own, self._newer, self._older):
            if (found := index.find(tail, self._depth)) is not None:
                lengths.append(found.lengths)
                continuations.append(index.following(found.following, max_tokens))
        if not lengths:
            return ()
        length_of = np.concatenate(lengths)
        longest = int(length_of.max())
        best = np.concatenate(continuations)[length_of == longest]
        return self._agreed(best[:, : max(1, int(self._factor * longest))])

    def _agreed(self, continuations: npt.NDArray[np.int32]) -> list[int]:
        """The most frequent next token, then that of the continuations with it, and so on.
        continuations: (n, m), -1 after the end."""
        drafts: list[int] = []
        share = 1.0
        for place in range(continuations.shape[1]):
            tokens = continuations[:, place]
            # `argmax` takes the first of equally frequent ones: that of the newest occurrence.
            equal = (tokens[:, np.newaxis] == tokens).sum(axis=1)
            choice = int(equal.argmax())
            token_id = int(tokens[choice])
            share *= equal[choice] / len(tokens)
            if token_id == _SEPARATOR or share < self._min_share:
                break
            drafts.append(token_id)
            continuations = continuations[tokens == token_id]
        return drafts
