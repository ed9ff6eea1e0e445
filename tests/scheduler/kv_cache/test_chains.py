"""Chains of kept states: what they retain, and what goes first."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from longshore.protocol.kv_cache_spec import page_hashes
from longshore.scheduler.kv_cache.block_pool import BlockPool
from longshore.scheduler.kv_cache.chains import Chains
from longshore.scheduler.kv_cache.habits import (
    CONSUMED,
    INSURANCE,
    Habits,
    StateKind,
    turn_kind,
    used_kind,
)

NUM_BLOCKS = 400
ATTENTION, STATES = 0, 1
KINDS = (INSURANCE, CONSUMED, used_kind(0), used_kind(2), turn_kind(0), turn_kind(1, 3))

Prompt = tuple[int, ...]
"""One number per block."""


class Cache:
    """A pool with chains, in which prompts of blocks of one token are computed."""

    def __init__(self, num_pages: int = 2, num_blocks: int = NUM_BLOCKS) -> None:
        self.pool = BlockPool(num_blocks, 2)
        self.chains = Chains(self.pool, num_pages, [1], 1)
        self.num_pages = num_pages

    def compute(self, prompt: Prompt, kind: StateKind, end: int | None = None) -> None:
        """Keep the state after the first `end` blocks, or all of them; nothing stays held."""
        hashes = hashes_of(prompt)
        found = list(self.pool.find_cached_prefix(hashes, ATTENTION))
        self.pool.touch(found)
        new = list(self.pool.get_new_blocks(len(prompt) - len(found)))
        self.pool.cache_blocks(new, hashes[len(found) :], ATTENTION)
        hashes = hashes[:end]
        pages = list(self.pool.get_new_blocks(self.num_pages))
        self.pool.cache_pages(pages, page_hashes(hashes[-1], self.num_pages), STATES, 0)
        hits = self.pool.find_cached_prefix(hashes, ATTENTION)
        self.chains.add(hashes, len(hashes), pages, [hits], kind)
        self.pool.free_blocks(pages)
        self.pool.free_blocks([*found, *new][::-1])

    def has_state(self, prompt: Prompt) -> bool:
        names = page_hashes(hashes_of(prompt)[-1], self.num_pages)
        return len(self.pool.find_cached_prefix(names, STATES)) == self.num_pages

    def num_found(self, prompt: Prompt) -> int:
        return len(self.pool.find_cached_prefix(hashes_of(prompt), ATTENTION))


def hashes_of(prompt: Prompt) -> list[bytes]:
    return [bytes(prompt[: end + 1]) + bytes(2) for end in range(len(prompt))]


class ChainMachine(RuleBasedStateMachine):
    """States are kept at any places of prompts that share prefixes, and let go."""

    @initialize()
    def begin(self) -> None:
        self.cache = Cache()
        self.kept: set[Prompt] = set()

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=7).map(tuple),
        kind=st.sampled_from(KINDS),
        data=st.data(),
    )
    def keep(self, prompt: Prompt, kind: StateKind, data: st.DataObject) -> None:
        end = data.draw(st.integers(1, len(prompt)))
        if not self.cache.has_state(prompt[:end]):
            self.cache.chains.now_s += 1.0
            self.cache.compute(prompt, kind, end)
            self.kept.add(prompt[:end])

    @rule(data=st.data(), kind=st.sampled_from(KINDS))
    def use(self, data: st.DataObject, kind: StateKind) -> None:
        if self.kept:
            prompt = data.draw(st.sampled_from(sorted(self.kept)))
            link = self.cache.chains.get(hashes_of(prompt)[-1])
            assert link is not None
            self.cache.chains.place(link, kind)

    @rule(count=st.integers(1, 8))
    def make_room(self, count: int) -> None:
        pool = self.cache.pool
        before = pool.free_queue.num_before_retained()
        self.cache.chains.make_room(count)
        assert pool.free_queue.num_before_retained() >= before + count or not self.cache.chains
        self.kept = {prompt for prompt in self.kept if self.cache.has_state(prompt)}

    @rule(data=st.data())
    def lose_a_page(self, data: st.DataObject) -> None:
        if self.kept:
            prompt = data.draw(st.sampled_from(sorted(self.kept)))
            link = self.cache.chains.get(hashes_of(prompt)[-1])
            assert link is not None
            self.cache.pool.uncache_blocks([link.pages[-1]])
            self.cache.chains.prune()
            self.kept.discard(prompt)

    @invariant()
    def exactly_what_leads_to_a_state_is_in_a_chain(self) -> None:
        if not hasattr(self, "cache"):
            return
        pool = self.cache.pool
        leading = set()
        for prompt in self.kept:
            assert self.cache.has_state(prompt)
            assert self.cache.num_found(prompt) == len(prompt)
            leading.update(list(pool.find_cached_prefix(hashes_of(prompt), ATTENTION)))
            names = page_hashes(hashes_of(prompt)[-1], self.cache.num_pages)
            leading.update(list(pool.find_cached_prefix(names, STATES)))
        marks = pool.marks(np.arange(NUM_BLOCKS, dtype=np.int32))
        assert set(np.flatnonzero(marks).tolist()) == leading
        self.cache.chains.check()
        pool.check(np.zeros(NUM_BLOCKS, np.int64))


def test_exactly_what_leads_to_a_kept_state_is_retained() -> None:
    run_state_machine_as_test(
        ChainMachine,
        settings=settings(max_examples=60, stateful_step_count=25, deadline=None, derandomize=True),
    )


def test_what_is_behind_the_last_state_goes_before_what_leads_to_it() -> None:
    cache = Cache(num_blocks=1 + 12)
    cache.compute((1, 2, 3, 4, 5, 6), turn_kind(0), end=3)  # 3 blocks and 2 pages; 3 behind
    assert cache.pool.get_new_blocks(4 + 3)
    assert cache.num_found((1, 2, 3, 4, 5, 6)) == 3
    assert cache.has_state((1, 2, 3))
    cache.pool.get_new_blocks(1)
    assert not cache.has_state((1, 2, 3))
    assert cache.pool.num_free == 4


@pytest.mark.parametrize("first", [INSURANCE, CONSUMED])
def test_states_that_are_hardly_used_again_go_first(first: StateKind) -> None:
    cache = Cache()
    cache.compute((1, 2), turn_kind(0))
    cache.compute((2, 2, 2, 2, 2, 2, 2, 2), first)
    cache.chains.make_room(1)
    assert cache.has_state((1, 2))
    assert not cache.has_state((2,) * 8)


def test_of_states_that_save_as_much_the_kind_that_goes_on_sooner_and_more_often_stays() -> None:
    cache = Cache()
    for _ in range(20):
        cache.chains.habits.make(turn_kind(0, 1))
        cache.chains.habits.make(turn_kind(0, 2))
        cache.chains.habits.use(turn_kind(0, 2))
        cache.chains.habits.wait(turn_kind(0, 2), 2.0)
    cache.compute((1, 1, 1), turn_kind(0, 2))
    cache.chains.now_s = 1.0
    cache.compute((2, 2, 2), turn_kind(0, 1))
    cache.chains.make_room(1)
    assert cache.has_state((1, 1, 1))
    assert not cache.has_state((2, 2, 2))


def test_the_state_that_saves_more_per_block_stays() -> None:
    cache = Cache()
    cache.compute((1,) * 9, turn_kind(0))
    cache.compute((2, 2), turn_kind(1))
    cache.chains.make_room(1)
    assert cache.has_state((1,) * 9)
    assert not cache.has_state((2, 2))


def test_an_old_state_goes_before_a_new_one_that_saves_as_much() -> None:
    cache = Cache()
    cache.compute((1, 1), turn_kind(0))
    cache.chains.now_s = 100.0
    cache.compute((2, 2), turn_kind(1))
    cache.chains.make_room(1)
    assert not cache.has_state((1, 1))


def test_a_kind_begins_with_what_is_known_about_a_wider_one() -> None:
    habits = Habits()
    assert habits.probability(turn_kind(3)) == pytest.approx(0.5)
    for _ in range(98):
        habits.make(turn_kind(3, 1))
    assert habits.probability(turn_kind(3)) < 0.02
    assert habits.probability(turn_kind(3, 7)) < 0.02
    assert habits.probability(turn_kind(2)) < 0.02, "so it was with all turns"
    for _ in range(4):
        habits.make(turn_kind(3, 7))
        habits.use(turn_kind(3, 7))
        habits.wait(turn_kind(3, 7), 2.0)
    assert habits.probability(turn_kind(3, 7)) > 0.45
    assert habits.probability(turn_kind(3, 1)) < 0.1
    assert habits.gap_s(turn_kind(3, 7)) < habits.gap_s(turn_kind(2)) < Habits.FIRST_GUESS_S
    assert habits.probability(used_kind(0)) == pytest.approx(0.5), "that is something else"


def test_a_block_that_is_shared_stays_until_the_last_chain_goes() -> None:
    cache = Cache()
    cache.compute((1, 1, 1, 2, 2), turn_kind(0))
    cache.compute((1, 1, 1, 3, 3), turn_kind(0))
    cache.chains.make_room(1)
    cache.chains.make_room(1)
    assert cache.pool.free_queue.num_before_retained() == NUM_BLOCKS - 1
    cache.compute((1, 1, 1, 2, 2), turn_kind(0))
    cache.compute((1, 1, 1, 3, 3), CONSUMED)
    cache.chains.make_room(1)
    marks = cache.pool.marks(np.arange(NUM_BLOCKS, dtype=np.int32))
    assert np.count_nonzero(marks) == 5 + 2
