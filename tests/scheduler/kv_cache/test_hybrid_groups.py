"""The facade over groups of several kinds: what rows hold, free and find."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import (
    NULL_BLOCK,
    CustomSpec,
    KVCacheSpec,
    LongestRequest,
    SinkFullAttentionSpec,
    StateSpec,
)
from longshore.protocol.requests import AddRequest
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.config import CacheConfig
from longshore.scheduler.kv_cache.blocks import HeldBlocks
from longshore.scheduler.kv_cache.full import FullAttentionManager
from longshore.scheduler.kv_cache.habits import CONSUMED, INSURANCE, turn_kind, used_kind
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.request import Request
from tests.harness.kv_groups import chunked, config_of, first_seen, full, latent, state, window

NUM_ROWS, MAX_LEN = 4, 48


def make_manager(*specs: KVCacheSpec, num_blocks: int = 40, **cache: Any) -> KVCacheManager:
    return KVCacheManager(
        CacheConfig(**({"block_size": 4, "hash_block_size": 2} | cache)),
        config_of(num_blocks, *specs),
        LongestRequest(MAX_LEN),
        max_num_seqs=NUM_ROWS,
        hash_seed=b"seed",
    )


def request_of(tokens: list[int]) -> Request:
    message = AddRequest("r", 0, int32_array(tokens), SamplingParams())
    return Request(message, client_index=0, now=0.0, max_model_len=MAX_LEN, eos_token_ids=())


class HybridMachine(RuleBasedStateMachine):
    """Rows compute their tokens chunk by chunk, as a scheduler without I/O would have them do.

    content: what each block was last written with: group and prefix up to its last token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, tuple[Request, int]] = {}  # and tokens computed
        self.held: list[HeldBlocks] = []
        self.content: dict[int, tuple[int, bytes]] = {}
        self.generation = np.zeros(NUM_ROWS, np.int64)
        self.step = 0

    @initialize(
        specs=st.lists(
            st.one_of(
                st.builds(full, st.sampled_from([4, 8])),
                st.builds(latent),
                st.builds(window, st.integers(1, 14), st.sampled_from([2, 4])),
                st.builds(chunked, st.integers(1, 14), st.sampled_from([2, 4])),
                st.builds(state, st.integers(1, 3)),
            ),
            min_size=1,
            max_size=4,
        ),
        caching=st.sampled_from([True, True, False]),
    )
    def begin(self, specs: list[KVCacheSpec], caching: bool) -> None:
        states = [spec for spec in specs if isinstance(spec, StateSpec)]
        self.specs = specs = [spec for spec in specs if spec not in states] + states[:1]
        self.num_blocks = 1 + 14 * len(specs)
        self.manager = make_manager(
            *specs, num_blocks=self.num_blocks, enable_prefix_caching=caching
        )

    # A step: blocks go, rows grow, others come

    def begin_step(self) -> None:
        self.step += 1
        computed = np.zeros(NUM_ROWS, np.int64)
        for row, (_, count) in self.rows.items():
            computed[row] = count
        self.manager.free_skipped(
            computed, computed, self.generation, step=self.step, answered_step=self.step - 1
        )

    def compute(self, row: int, request: Request, first: int, last: int) -> None:
        """Blocks in place: read what the tokens attend to, write them, cache full blocks."""
        for group, (spec, table) in enumerate(
            zip(self.specs, self.manager.block_ids(row), strict=True)
        ):
            size = spec.block_size
            if isinstance(spec, StateSpec):
                for page in table if first else ():
                    self.check_content(group, page, request, first)
                for page in table:
                    self.write(group, page, request, last)
                continue
            for entry in range(first_seen(spec, first) // size, -(-first // size)):
                self.check_content(group, table[entry], request, min((entry + 1) * size, first))
            for entry in range(first // size, -(-last // size)):
                self.write(group, table[entry], request, min((entry + 1) * size, last))
        self.rows[row] = request, last
        self.manager.full_blocks.cache_row(row, request, request.token_ids, last, self.step)
        self.keep_state(row, request, first, last)

    def keep_state(self, row: int, request: Request, first: int, last: int) -> None:
        """The state at the last border that the tokens pass."""
        kept, end = self.manager.kept_states, last - last % self.manager.state_border
        if kept is None or end <= first:
            return
        kind = (CONSUMED, INSURANCE, turn_kind(0), turn_kind(9, 3), used_kind(1))[self.step % 5]
        kept.chains.now_s = float(self.step)
        generation = int(self.generation[row])
        pages = self.manager.keep_state(request, end, kind, generation=generation, step=self.step)
        for page in pages or ():
            self.write(kept.group, page, request, end)
        if pages:
            self.manager.pool.free_blocks(pages, self.step)
            assert kept.has(request.block_hashes[end // kept.tokens_per_hash - 1])

    def check_content(self, group: int, block_id: int, request: Request, end: int) -> None:
        assert block_id != NULL_BLOCK
        assert self.content[int(block_id)] == (group, request.token_ids[:end].tobytes())

    def write(self, group: int, block_id: int, request: Request, end: int) -> None:
        assert block_id != NULL_BLOCK
        self.content[int(block_id)] = group, request.token_ids[:end].tobytes()

    @precondition(lambda self: len(self.rows) < NUM_ROWS)
    @rule(
        shared=st.integers(0, 24),
        own=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=20),
        chunk=st.integers(1, 30),
    )
    def arrive(self, shared: int, own: list[int], chunk: int) -> None:
        self.begin_step()
        request = request_of(([7] * shared + own)[:MAX_LEN])
        computed = self.manager.get_computed_blocks(request)
        first = computed.num_tokens
        count = min(chunk, request.num_tokens - first)
        row = next(row for row in range(NUM_ROWS) if row not in self.rows)
        demand = self.manager.demand(computed, first + count)
        needed, num_free = demand.num_needed, self.manager.num_free_blocks
        tables = self.manager.start(row, demand)
        assert (tables is not None) is (needed <= num_free)
        if needed <= num_free:
            assert self.manager.num_free_blocks == num_free - needed
            self.generation[row] = self.step
            for copy in self.manager.state_copies(computed, tables, step=self.step):
                self.content[copy.target_id] = self.content[copy.source_id]
            self.compute(row, request, first, first + count)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), chunk=st.integers(1, 20), together=st.booleans())
    def grow(self, data: st.DataObject, chunk: int, together: bool) -> None:
        self.begin_step()
        row = data.draw(st.sampled_from(sorted(self.rows)))
        request, first = self.rows[row]
        if first == request.num_tokens:
            return
        last = first + min(chunk, request.num_tokens - first)
        if together:
            num_tokens = np.zeros(NUM_ROWS, np.int64)
            num_tokens[row] = last
            has_grown = self.manager.grow(num_tokens, self.generation) is not None
        else:
            has_grown = self.manager.grow_row(row, last) is not None
        if has_grown:
            self.compute(row, request, first, last)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), keep=st.booleans())
    def leave(self, data: st.DataObject, keep: bool) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        del self.rows[row]
        self.generation[row] = 0
        if keep:
            self.held.append(self.manager.detach([row])[0])
        else:
            self.manager.free(row, self.step)

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        self.manager.release(self.held.pop())

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        request, count = self.rows[row]
        num_good = data.draw(st.integers(0, count))
        num_good -= num_good % 8
        num_tokens = self.manager.resume_point(self.manager.block_ids(row), num_good)
        assert num_tokens <= num_good
        self.manager.truncate(row, num_tokens, self.step)
        if num_tokens:
            self.rows[row] = request, num_tokens
        else:
            del self.rows[row]
            self.manager.free(row)

    # What holds at any time

    @invariant()
    def null_held_and_free_are_all_blocks_and_references_are_the_holders(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check(self.held)
        tables = [ids for row in self.rows for ids in self.manager.block_ids(row)]
        tables += [ids for held in self.held for ids in held.block_ids]
        holders = Counter(block_id for ids in tables for block_id in ids.tolist() if block_id)
        assert 1 + len(holders) + self.manager.num_free_blocks == self.num_blocks

    @invariant()
    def every_position_that_the_next_token_looks_at_has_a_block_of_the_rows_own_prefix(
        self,
    ) -> None:
        for row, (request, count) in self.rows.items():
            for group, (spec, table) in enumerate(
                zip(self.specs, self.manager.block_ids(row), strict=True)
            ):
                size = spec.block_size
                if isinstance(spec, StateSpec):
                    for page in table:
                        self.check_content(group, page, request, count)
                    continue
                first = first_seen(spec, count)
                for entry in range(first // size, -(-count // size)):
                    self.check_content(group, table[entry], request, min((entry + 1) * size, count))

    @invariant()
    def no_block_stands_twice_in_the_tables_of_a_row(self) -> None:
        for row in self.rows:
            ids = [b for table in self.manager.block_ids(row) for b in table.tolist() if b]
            assert len(ids) == len(set(ids))


@pytest.mark.req("POO-11", "KVM-07", "KVM-08", "COO-07", "STM-09", "STM-10", "SCH-24")
def test_rows_of_any_groups_hold_what_they_need_and_find_only_what_is_equal() -> None:
    run_state_machine_as_test(
        HybridMachine,
        settings=settings(
            max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
        ),
    )


@pytest.mark.req("KVM-07")
def test_blocks_outside_a_window_come_back_before_capacity_is_checked() -> None:
    manager = make_manager(window(4, 4), num_blocks=5)
    request = request_of(list(range(40)))
    computed = np.array([16, 0, 0, 0])
    assert manager.start(0, manager.demand(manager.get_computed_blocks(request), 16))
    manager.full_blocks.cache_row(0, request, request.token_ids, 16)
    wanted, seniority = np.array([20, 0, 0, 0]), np.array([1, 0, 0, 0])
    assert manager.grow(wanted, seniority) is None
    for step in (1, 2):  # what the first step computed is settled when it is answered
        manager.free_skipped(computed, computed, seniority, step=step, answered_step=step - 1)
    (appended,) = manager.grow(wanted, seniority) or ()
    assert appended.block_ids.tolist() == [3]  # the tail of what came back first
    assert manager.block_ids(0)[0].tolist() == [0, 0, 0, 4, 3]


@pytest.mark.req("STM-08", "POO-04")
def test_a_window_group_caches_only_blocks_that_can_serve_a_hit() -> None:
    manager = make_manager(full(16), window(6, 4), num_blocks=20, enable_kv_cache_events=True)
    request = request_of(list(range(40)))
    assert manager.start(0, manager.demand(manager.get_computed_blocks(request), 36))
    manager.full_blocks.cache_row(0, request, request.token_ids, 12, step=1)
    numbers, order = np.array([36, 0, 0, 0]), np.array([1, 0, 0, 0])
    manager.full_blocks.cache_rows(
        np.array([0]), numbers, np.array([request.token_ids]), [request], step=1
    )
    table = manager.block_ids(0)[1].tolist()
    cached = [manager.pool.block_hash(block_id) is not None for block_id in table]
    assert cached == [False, False, True, True, False, False, True, True, False]
    stored = [(event.group, event.block_hash) for event in manager.take_events(1)]
    assert stored == [
        (group, request.block_hashes[index])
        for group, index in ((1, 5), (0, 7), (0, 15), (1, 7), (1, 13), (1, 15))
    ]
    for step in (1, 2):
        manager.free_skipped(numbers, numbers, order, step=step, answered_step=step - 1)
    free = manager.pool.free_block_ids()
    assert free[:4] == [table[0], table[1], table[4], table[5]]
    assert free[-3:] == [table[6], table[3], table[2]]
    hits = manager.get_computed_blocks(request)
    assert (hits.num_tokens, list(hits.block_ids[1][-2:])) == (32, [table[6], table[7]])
    manager.free(0)
    manager.check()


def test_decode_caches_only_blocks_of_a_window_that_can_serve_a_hit() -> None:
    manager = make_manager(full(8), window(5, 4), num_blocks=30)
    tokens = list(range(30))
    request = request_of(tokens)
    assert manager.start(0, manager.demand(manager.get_computed_blocks(request), 3))
    for num_tokens in range(4, 25, 4):  # one block at a time, as in decode
        assert manager.grow_row(0, num_tokens) is not None
        columns = np.array([num_tokens, 0, 0, 0])
        rows = manager.full_blocks.rows_to_cache(columns)
        assert rows.tolist() == [0]
        manager.full_blocks.cache_rows(rows, columns, np.array([tokens]), [request])
    table = manager.block_ids(0)[1].tolist()
    cached = [manager.pool.block_hash(block_id) is not None for block_id in table]
    assert cached == [False, True] * 3
    assert manager.get_computed_blocks(request).num_tokens == 24


def test_a_sink_takes_its_blocks_out_of_the_pool_for_good() -> None:
    sink = SinkFullAttentionSpec(4, 1, 8, 4, sink_tokens=6)
    manager = make_manager(full(), sink, num_blocks=20)
    assert manager.num_free_blocks == 17
    assert manager.usage == 0
    request = request_of(list(range(10)))
    assert manager.start(0, manager.demand(manager.get_computed_blocks(request), 10))
    tables = [ids.tolist() for ids in manager.block_ids(0)]
    assert tables == [[3, 4, 5], [6, 7, 8]]
    manager.check()
    manager.free(0)
    assert manager.reset_prefix_cache()
    manager.begin_epoch(np.zeros(0, np.int64), answered_step=None)
    manager.check()
    assert manager.num_free_blocks == 17


class HalfManager(FullAttentionManager):
    """A manager of another package."""


@pytest.mark.req("STM-12")
def test_a_spec_of_another_package_has_its_own_manager() -> None:
    spec = CustomSpec(4, 64, manager=f"{__name__}:HalfManager", settings={"ratio": 0.5})
    manager = make_manager(full(), spec)
    assert isinstance(manager._managers[1], HalfManager)
    for wrong, complaint in (
        (f"{__name__}:NoSuchManager", "cannot be loaded"),
        (f"{__name__}:HybridMachine", "does not extend"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            make_manager(CustomSpec(4, 64, manager=wrong))
