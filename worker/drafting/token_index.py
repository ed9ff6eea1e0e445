"""Finds earlier occurrences of the last tokens of a sequence.

Like the match finders of LZ77 compressors (RFC 1951, section 4): the positions of equal n-grams are
chained, the newest first, and a table has the head of each chain. A hash collision costs time only,
because candidates are compared.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from longshore.protocol.arrays import Int32Array, Int64Array

MAX_CANDIDATES: Final = 32
"""Of one chain; older ones are not looked at, so that the work for a token is bounded."""

_NONE: Final = -1
_FACTOR: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1
_BULK: Final = 64
"""From so many tokens on, NumPy is faster than a loop."""


@dataclass(frozen=True)
class Matches:
    """Places where the end of a sequence has occurred before, the newest first.

    following: (n,) index of the token after each of them.
    lengths:   (n,) tokens that are equal, up to a maximum.
    """

    following: Int64Array
    lengths: Int64Array


class TokenIndex:
    """A sequence of tokens that grows, with the places of each of its n-grams.

    size: n; shorter repetitions are not found.

    Appending a token takes constant time; so does a search, with MAX_CANDIDATES comparisons.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._tokens = array("i")
        self._previous = array("i")  # by index of an n-gram's last token: that of the one before
        self._heads: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def tail(self, count: int) -> list[int]:
        """The last `count` tokens, or all."""
        return self._tokens[-count:].tolist()

    def slice(self, start: int, end: int) -> Int32Array:
        """A copy of the tokens from `start` to `end`."""
        return np.array(self._tokens[start:end], np.int32)

    def extend(self, token_ids: Sequence[int] | Int32Array) -> None:
        """Append tokens."""
        if len(token_ids) < _BULK:
            for token_id in token_ids:
                self._append(int(token_id))
        else:
            self._extend(np.asarray(token_ids, np.int32))

    def _append(self, token_id: int) -> None:
        tokens, size = self._tokens, self._size
        tokens.append(token_id)
        previous, index = _NONE, len(tokens) - 1
        if index + 1 >= size:
            key = _key(tokens[-size:])
            previous = self._heads.get(key, _NONE)
            self._heads[key] = index
        self._previous.append(previous)

    def _extend(self, token_ids: Int32Array) -> None:
        """The same for many tokens, in the order of n log n."""
        size, first = self._size, max(len(self._tokens) - self._size + 1, 0)
        start = len(self._tokens)
        self._tokens.frombytes(token_ids.tobytes())
        previous = np.full(len(token_ids), _NONE, np.int32)
        tokens = np.frombuffer(self._tokens[first:], np.int32).astype(np.uint64)
        num_grams = len(tokens) - size + 1
        if num_grams > 0:
            keys = np.zeros(num_grams, np.uint64)
            for offset in range(size):
                keys = (
                    keys * np.uint64(_FACTOR) + tokens[offset : offset + num_grams] + np.uint64(1)
                )
            ends = first + size - 1 + np.arange(num_grams)
            order = keys.argsort(kind="stable")
            is_repeat = keys[order[1:]] == keys[order[:-1]]
            previous[ends[order[1:][is_repeat]] - start] = ends[order[:-1][is_repeat]]
            firsts = order[np.append(True, ~is_repeat)]
            heads = map(self._heads.get, keys[firsts].tolist())
            previous[ends[firsts] - start] = [_NONE if head is None else head for head in heads]
            lasts = order[np.append(~is_repeat, True)]
            self._heads.update(zip(keys[lasts].tolist(), ends[lasts].tolist(), strict=True))
        self._previous.frombytes(previous.tobytes())

    def find(self, tail: Sequence[int], max_length: int) -> Matches | None:
        """Where the last tokens of `tail` occur, by at least n; None: nowhere, or only at the end
        of the sequence, with no token after them."""
        candidates = list(self._candidates(tail))
        if not candidates:
            return None
        ends = np.array(candidates)
        wanted = np.array(tail[-max_length:][::-1])
        places = ends[:, np.newaxis] - np.arange(len(wanted))
        tokens = np.frombuffer(self._tokens, np.int32)
        is_equal = (tokens[np.maximum(places, 0)] == wanted) & (places >= 0)
        lengths = np.logical_and.accumulate(is_equal, axis=1).sum(axis=1)
        matches = lengths >= self._size
        return Matches(ends[matches] + 1, lengths[matches]) if matches.any() else None

    def _candidates(self, tail: Sequence[int]) -> Iterator[int]:
        """The indices of the last tokens of n-grams that may equal the tail's, newest first."""
        if len(tail) < self._size:
            return
        index = self._heads.get(_key(tail[-self._size :]), _NONE)
        for _ in range(MAX_CANDIDATES):
            if index == _NONE:
                return
            if index < len(self._tokens) - 1:
                yield index
            index = self._previous[index]

    def following(self, starts: Int64Array, count: int) -> npt.NDArray[np.int32]:
        """(n, count) the tokens from each of `starts` on; -1 after the end."""
        places = starts[:, np.newaxis] + np.arange(count)
        tokens = np.frombuffer(self._tokens, np.int32)
        is_there = places < len(tokens)
        found: npt.NDArray[np.int32] = np.where(
            is_there, tokens[np.where(is_there, places, 0)], _NONE
        )
        return found


def _key(token_ids: Sequence[int]) -> int:
    key = 0
    for token_id in token_ids:
        key = (key * _FACTOR + token_id + 1) & _MASK
    return key
