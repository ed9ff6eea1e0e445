"""The index of the engines' blocks, compared with sets and a search by brute force."""

from collections.abc import Sequence
from typing import Final
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from longshore.deploy.gateway.router import block_index
from longshore.deploy.gateway.router.block_index import (
    MEDIA,
    BlockIndex,
    GroupInfo,
    PromptHashes,
)

NUM_ENGINES: Final = 3
MAX_ENGINES: Final = 6
PROMPTS: Final = [
    [bytes([prompt if block >= 3 else 0, block]) for block in range(12)] for prompt in range(3)
]
"""Prompts of 12 blocks; the first three are common."""
TOKENS_PER_HASH: Final = 4
GROUPS: Final = (
    [GroupInfo(4)],
    [GroupInfo(4), GroupInfo(4)],
    [GroupInfo(8)],
    [GroupInfo(4), GroupInfo(8)],
    [GroupInfo(4), GroupInfo(4, 6)],
    [GroupInfo(4), GroupInfo(8, 1)],
    [GroupInfo(4, 5)],
    [GroupInfo(8, 1), GroupInfo(4, 9)],
    [GroupInfo(4), GroupInfo(12, 1), GroupInfo(8, 3)],
)


def hashes_of(prompt: Sequence[bytes]) -> PromptHashes:
    return PromptHashes(
        len(prompt), lambda hashes, count: hashes.extend(prompt[len(hashes) : count])
    )


def small_index(max_hashes: int = 1000) -> BlockIndex:
    index = BlockIndex(NUM_ENGINES, tokens_per_hash=TOKENS_PER_HASH, max_hashes=max_hashes)
    index.describe_group(0, GroupInfo(TOKENS_PER_HASH))
    return index


def longest(held: set[tuple[int, bytes]], groups: Sequence[GroupInfo], prompt: list[bytes]) -> int:
    """The longest prefix, in tokens, that all groups have."""

    def has(group: int, num_tokens: int) -> bool:
        size, num_needed = groups[group]
        first = 0 if num_needed is None else max(num_tokens - num_needed, 0) // size
        ends = range((first + 1) * size, num_tokens + 1, size)
        return num_tokens % size == 0 and all(
            (group, prompt[end // TOKENS_PER_HASH - 1]) in held for end in ends
        )

    for num_tokens in range(len(prompt) * TOKENS_PER_HASH, 0, -TOKENS_PER_HASH):
        if all(has(group, num_tokens) for group in range(len(groups))):
            return num_tokens
    return 0


class Index(RuleBasedStateMachine):
    """Engines come and go, and store and remove blocks, in any order. What one that is not there
    is said to do has no effect."""

    max_hashes = 1000

    @initialize(groups=st.sampled_from(GROUPS))
    def start(self, groups: list[GroupInfo]) -> None:
        self.groups = groups
        with patch.object(block_index, "MIN_WIDTH", 2):
            self.index = BlockIndex(1, tokens_per_hash=TOKENS_PER_HASH, max_hashes=self.max_hashes)
        for group, info in enumerate(groups):
            self.index.describe_group(group, info)
        self.present = {0}
        self.held: list[set[tuple[int, str, bytes]]] = [set() for _ in range(MAX_ENGINES)]
        self.expected: list[set[bytes]] = [set() for _ in range(MAX_ENGINES)]

    @rule(engine=st.integers(0, MAX_ENGINES - 1))
    def add_or_remove(self, engine: int) -> None:
        if engine in self.present:
            self.index.remove_engine(engine)
            self.held[engine].clear()
            self.expected[engine].clear()
        else:
            self.index.add_engine(engine)
        self.present ^= {engine}

    blocks = st.tuples(
        st.integers(0, MAX_ENGINES - 1),
        st.integers(0, 2),
        st.sampled_from(MEDIA),
        st.sampled_from(PROMPTS),
        st.integers(0, 11),
        st.integers(1, 12),
    )

    @rule(blocks=blocks)
    def store(self, blocks: tuple[int, int, str, list[bytes], int, int]) -> None:
        engine, group, medium, prompt, first, last = blocks
        hashes = prompt[first:last]
        self.index.store(engine, hashes, group, medium)  # type: ignore[arg-type]
        if self.index.has_slot(engine):
            self.held[engine] |= {(group, medium, each) for each in hashes}

    @rule(blocks=blocks)
    def remove(self, blocks: tuple[int, int, str, list[bytes], int, int]) -> None:
        engine, group, medium, prompt, first, last = blocks
        hashes = prompt[first:last]
        self.index.remove(engine, hashes, group, medium)  # type: ignore[arg-type]
        self.held[engine] -= {(group, medium, each) for each in hashes}

    @rule(blocks=blocks)
    def expect(self, blocks: tuple[int, int, str, list[bytes], int, int]) -> None:
        engine, _, _, prompt, first, last = blocks
        self.index.expect(engine, prompt[first:last])
        if self.index.has_slot(engine):
            self.expected[engine] |= set(prompt[first:last])

    @rule(blocks=blocks)
    def end_expecting(self, blocks: tuple[int, int, str, list[bytes], int, int]) -> None:
        engine, _, _, prompt, first, last = blocks
        self.index.end_expecting(engine, prompt[first:last])
        self.expected[engine] -= set(prompt[first:last])

    @rule(engine=st.integers(0, MAX_ENGINES - 1))
    def clear(self, engine: int) -> None:
        self.index.clear(engine)
        self.held[engine].clear()
        self.expected[engine].clear()

    @rule(count=st.integers(1, 20))
    def collect(self, count: int) -> None:
        self.index.collect(count)

    def by_brute_force(self, prompt: list[bytes]) -> dict[int, int]:
        found = {}
        for engine in self.present:
            held = {(group, each) for group, _, each in self.held[engine]}
            held |= {(g, each) for g in range(len(self.groups)) for each in self.expected[engine]}
            if num_tokens := longest(held, self.groups, prompt):
                found[engine] = num_tokens
        return found

    @invariant()
    def matches_are_those_of_the_model(self) -> None:
        for prompt in PROMPTS:
            found = self.index.match(hashes_of(prompt), self.present)
            assert found == self.by_brute_force(prompt)

    @invariant()
    def only_hashes_that_somebody_has_are_kept(self) -> None:
        if not self.index.has_garbage:
            kept = {
                each for held in self.held for group, _, each in held if group < len(self.groups)
            }
            assert len(self.index) == len(kept.union(*self.expected))


class BoundedIndex(Index):
    """The index has no room for all."""

    max_hashes = 9

    @invariant()
    def matches_are_those_of_the_model(self) -> None:
        for prompt in PROMPTS:
            found = self.index.match(hashes_of(prompt), self.present)
            wanted = self.by_brute_force(prompt)
            assert all(num_tokens <= wanted.get(each, 0) for each, num_tokens in found.items())

    @invariant()
    def only_hashes_that_somebody_has_are_kept(self) -> None:
        assert len(self.index) <= self.max_hashes


TestIndex = Index.TestCase
TestBoundedIndex = BoundedIndex.TestCase
TestIndex.settings = TestBoundedIndex.settings = settings(max_examples=60, stateful_step_count=40)


def test_only_engines_that_may_take_the_prompt_are_searched() -> None:
    index, (prompt, *_) = small_index(), PROMPTS
    index.store(0, prompt, 0, "GPU")
    index.store(2, prompt[:4], 0, "GPU")
    assert index.match(hashes_of(prompt), range(3)) == {0: 48, 2: 16}
    assert index.match(hashes_of(prompt), [1, 2]) == {2: 16}
    assert index.match(hashes_of(prompt), []) == {}


def test_a_prompt_is_hashed_only_as_far_as_some_engine_has_it() -> None:
    index, prompt = small_index(), [number.to_bytes(2, "big") for number in range(1000)]
    index.store(1, prompt[:100], 0, "GPU")
    chain = hashes_of(prompt)
    assert index.match(chain, range(3)) == {1: 400}
    assert len(chain.hashes) == 2 * PromptHashes.PART


def test_a_prefix_in_use_stays_and_an_end_is_evicted_before_its_beginning() -> None:
    index, (prompt, *_) = small_index(12), PROMPTS
    index.store(0, prompt, 0, "GPU")
    assert index.match(hashes_of(prompt[:5]), [0]) == {0: 20}
    index.store(0, [b"a", b"b", b"c"], 0, "GPU")
    assert index.match(hashes_of(prompt), [0]) == {0: 36}
    index.store(0, [bytes([7, number]) for number in range(7)], 0, "GPU")
    assert index.match(hashes_of(prompt), [0]) == {0: 20}
    assert index.num_evicted == 10
    assert len(index) == 12


def test_a_prefix_that_is_stored_again_is_evicted_after_what_was_stored_meanwhile() -> None:
    index, (first, second, _) = small_index(24), PROMPTS
    index.store(0, first[3:], 0, "GPU")
    index.store(0, second[3:], 0, "GPU")
    index.store(1, first[3:], 0, "GPU")
    index.store(0, [bytes([7, number]) for number in range(8)], 0, "GPU")
    assert index.match(hashes_of(first[3:]), [0]) == {0: 36}
    assert index.match(hashes_of(second[3:]), [0]) == {0: 28}


@given(st.lists(st.integers(0, NUM_ENGINES - 1), max_size=20))
def test_engines_that_clear_again_and_again_leave_nothing(cleared: list[int]) -> None:
    index, (prompt, *_) = small_index(), PROMPTS
    for engine in cleared:
        index.store(engine, prompt, 0, "GPU")
        index.clear(engine)
        assert index.match(hashes_of(prompt), range(NUM_ENGINES)) == {}
    while index.collect(5):
        pass
    assert len(index) == 0


@pytest.mark.parametrize("is_stored", [False, True])
def test_blocks_in_use_while_an_engine_is_cleared_are_not_those_of_the_next(
    is_stored: bool,
) -> None:
    """Hits, and blocks that are stored again, move entries past what `collect` has reached."""
    index, (prompt, *_) = small_index(1000 if is_stored else 12), PROMPTS
    for engine in (0, 1):
        index.store(engine, prompt, 0, "GPU")
    index.clear(0)
    assert index.collect(3)
    if is_stored:
        index.store(1, prompt, 0, "GPU")
    assert index.match(hashes_of(prompt), [1]) == {1: 48}
    while index.collect(3):
        pass
    for engine in (2, 0, 2, 0, 2, 0):  # each gets the slots that others had
        index.expect(engine, prompt[11:])
        index.clear(engine)
        assert index.match(hashes_of(prompt), range(3)) == {1: 48}


@pytest.mark.parametrize("info", [GroupInfo(0), GroupInfo(-4), GroupInfo(6)])
def test_a_group_that_does_not_fit_is_ignored(info: GroupInfo) -> None:
    index = BlockIndex(1, tokens_per_hash=4, max_hashes=10)
    for group in (0, -1, 64):
        index.describe_group(group, info if group == 0 else GroupInfo(4))
        index.store(0, [b"a"], group, "GPU")
    assert len(index) == 0
