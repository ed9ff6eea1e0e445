"""Repetitions, compared with a search through the whole sequence."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.worker.drafting.token_index import MAX_CANDIDATES, TokenIndex

MAX_LENGTH = 6


def expected(tokens: list[int], tail: list[int], size: int) -> list[tuple[int, int]]:
    """(index of the token after a repetition, its length), the newest first."""
    found = []
    for after in range(len(tokens) - 1, 0, -1):
        length = 0
        while (
            length < min(MAX_LENGTH, len(tail), after)
            and tokens[after - 1 - length] == tail[-1 - length]
        ):
            length += 1
        if length >= size:
            found.append((after, length))
    return found[:MAX_CANDIDATES]


def found(index: TokenIndex, tail: list[int]) -> list[tuple[int, int]]:
    matches = index.find(tail, MAX_LENGTH)
    if matches is None:
        return []
    return list(zip(matches.following.tolist(), matches.lengths.tolist(), strict=True))


@given(
    st.lists(st.lists(st.integers(-1, 3), max_size=90), max_size=4),
    st.integers(1, 4),
    st.lists(st.integers(0, 3), max_size=8),
)
def test_the_newest_repetitions_are_found(
    parts: list[list[int]], size: int, tail: list[int]
) -> None:
    """However the sequence is appended: few tokens one by one, many at once."""
    index, tokens = TokenIndex(size), []
    for part in parts:
        index.extend(np.array(part, np.int32) if len(part) % 2 else part)
        tokens += part
    assert len(index) == len(tokens)
    assert index.slice(0, len(tokens)).tolist() == tokens
    assert index.tail(5) == tokens[-5:]
    assert found(index, tail) == expected(tokens, tail, size)
    assert found(index, tokens[-8:]) == expected(tokens, tokens[-8:], size)


def test_tokens_after_the_end_are_padded() -> None:
    index = TokenIndex(2)
    index.extend([1, 2, 3, 1, 2])
    following = index.following(np.array([2, 4]), 4)
    assert following.tolist() == [[3, 1, 2, -1], [2, -1, -1, -1]]


@pytest.mark.parametrize("num_tokens", [1_000, 10_000])
def test_a_search_looks_at_a_limited_number_of_repetitions(num_tokens: int) -> None:
    index = TokenIndex(2)
    index.extend([7] * num_tokens)
    matches = index.find([7] * 8, MAX_LENGTH)
    assert matches is not None
    assert len(matches.following) == MAX_CANDIDATES - 1  # the end itself is one
    assert matches.following[0] == num_tokens - 1
