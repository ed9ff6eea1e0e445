"""Forks: whose KV a request begins with, when, and that no request writes to shared blocks."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from longshore.protocol.arrays import EMPTY_INT32, int32_array
from longshore.protocol.errors import LongshoreError
from longshore.protocol.kv_cache_spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    LongestRequest,
    StateSpec,
)
from longshore.protocol.outputs import FinishReason
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.requests import ContinueSession, LoRARequest, PoolingParams
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.config import CacheConfig
from longshore.scheduler.kv_cache.manager import (
    BlockCopy,
    HeldBlocks,
    KVCacheManager,
)
from longshore.scheduler.request import Request
from tests.harness.driver import Driver
from tests.harness.kv_groups import full, state
from tests.harness.tokens import expected_output, prompt_of
from tests.scheduler.kv_cache.test_manager import (
    make_manager,
    request_of,
    run,
    table,
)

PROMPT = prompt_of(14)


def total_computed(driver: Driver) -> int:
    return sum(plan.num_scheduled_tokens for plan in driver.plans)


# The manager


SKIPPED = request_of([1], skip=True)


@pytest.mark.req("COW-01", "COW-02", "COW-04", "NUM-27")
def test_beam_of_four_over_three_blocks_copies_only_the_last_at_the_first_divergent_write() -> None:
    manager = make_manager(num_blocks=20, block_size=4)
    demand = manager.demand(manager.get_computed_blocks(SKIPPED), 4 * 12)
    taken = manager.reserve(demand, answered_step=0)
    assert taken is not None
    (ids,) = taken.block_ids
    parent = HeldBlocks((np.array([3, 7, 12], np.int32),))
    others = np.array([block_id for block_id in ids.tolist() if block_id not in (3, 7, 12)])
    manager.release(HeldBlocks((others.astype(np.int32),)))
    num_free = manager.num_free_blocks
    beams = [parent, *(manager.fork(parent.block_ids, 10) for _ in range(3))]
    assert manager.num_free_blocks == num_free  # ids are copied, no data
    assert all(beam.block_ids[0].tolist() == [3, 7, 12] for beam in beams)
    references = manager.pool.references()
    assert references[[3, 7, 12]].tolist() == [4, 4, 4]
    copies = manager.resume(0, beams[1], 10, 11, step=5, answered_step=4)
    new = table(manager, 0)[2]
    assert copies == [BlockCopy(12, new, 2)]
    assert table(manager, 0) == [3, 7, new]
    references = manager.pool.references()
    assert references[[3, 7, 12, new]].tolist() == [4, 4, 3, 1]
    assert manager.pool.block_hash(new) is None
    manager.check([beams[0], *beams[2:]])


@pytest.mark.req("COW-02")
def test_the_last_holder_writes_in_place_unless_others_may_find_or_still_write_the_block() -> None:
    manager = make_manager(block_size=4)
    for row, (is_cached, fence, copies) in enumerate([(0, 3, 0), (1, 3, 1), (0, 4, 1)]):
        parent = request_of(range(100 * row, 100 * row + 8))
        if is_cached:
            assert run(manager, row, parent)
        else:
            assert manager.start(row, manager.demand(manager.get_computed_blocks(parent), 8))
        fork = manager.fork(manager.block_ids(row), 6)
        manager.free(row, step=fence)
        made = manager.resume(row, fork, 6, 7, step=5, answered_step=3)
        assert made is not None
        assert len(made) == copies


@pytest.mark.req("COW-04")
def test_a_copy_gets_its_own_hash_when_it_is_full() -> None:
    manager = make_manager(block_size=4)
    assert run(manager, 0, request_of(range(8)))  # the parent has filled the block by now
    fork = manager.fork(manager.block_ids(0), 6)
    manager.free(0)
    child = request_of([*range(6), 90, 91])
    assert manager.resume(0, fork, 6, 7, step=1, answered_step=0)
    manager.full_blocks.cache_row(0, child, child.token_ids, 7)
    copy = table(manager, 0)[1]
    assert manager.pool.block_hash(copy) is None
    manager.full_blocks.cache_row(0, child, child.token_ids, 8)
    assert manager.pool.block_hash(copy) == child.block_hashes[1]
    wanted = manager.get_computed_blocks(request_of([*range(6), 90, 91, 5]))
    assert list(wanted.block_ids[0]) == table(manager, 0)


def test_a_fork_that_does_not_fit_changes_nothing() -> None:
    manager = make_manager(num_blocks=4, block_size=4)
    assert run(manager, 0, request_of(range(10)))
    fork = manager.fork(manager.block_ids(0), 9)
    assert manager.num_blocks_to_resume(fork, 9, 10, answered_step=0) == 1
    before = manager.pool.references().tolist()
    assert manager.resume(1, fork, 9, 10, step=1, answered_step=0) is None
    assert manager.pool.references().tolist() == before
    assert table(manager, 1) == []
    manager.check([fork])


def test_the_source_of_a_copy_is_no_target_of_a_load_before_the_copy_is_answered() -> None:
    manager = make_manager(num_blocks=5, block_size=4, enable_prefix_caching=False)
    assert manager.start(0, manager.demand(manager.get_computed_blocks(SKIPPED), 3))
    (source,) = table(manager, 0)
    fork = manager.fork(manager.block_ids(0), 3)
    assert manager.resume(1, fork, 3, 4, step=7, answered_step=6)
    manager.free(0)
    demand = manager.demand(manager.get_computed_blocks(SKIPPED), 12)
    assert manager.num_free_blocks == 3
    assert manager.reserve(demand, answered_step=6) is None
    held = manager.reserve(demand, answered_step=7)
    assert held is not None
    assert source in held.block_ids[0]


def test_groups_of_other_block_sizes_copy_their_own_last_block() -> None:
    specs = [FullAttentionSpec(size, num_kv_heads=1, head_size=8, dtype_bytes=4) for size in (4, 8)]
    groups = tuple(KVCacheGroup((f"layer.{i}",), spec) for i, spec in enumerate(specs))
    manager = KVCacheManager(
        CacheConfig(block_size=4),
        KVCacheConfig(16, groups, "float32"),
        LongestRequest(64),
        max_num_seqs=4,
        hash_seed=b"",
    )
    assert manager.start(0, manager.demand(manager.get_computed_blocks(SKIPPED), 12))
    fork = manager.fork(manager.block_ids(0), 12)
    copies = manager.resume(1, fork, 12, 13, step=1, answered_step=0)
    assert copies is not None
    assert [copy.num_tokens for copy in copies] == [4]
    ones, others = manager.block_ids(0), manager.block_ids(1)
    assert others[0].tolist()[:3] == ones[0].tolist()
    assert others[1].tolist()[0] == ones[1].tolist()[0]
    assert others[1].tolist()[1] == copies[0].target_id != ones[1].tolist()[1]


class ForkingRows(RuleBasedStateMachine):
    """Rows that write token after token, fork, hold and end. A block's content is what was written
    to it; every holder must find its own tokens, and none may write to a shared block."""

    @initialize(caching=st.booleans(), num_blocks=st.integers(6, 24))
    def begin(self, caching: bool, num_blocks: int) -> None:
        self.manager = make_manager(num_blocks, 4, enable_prefix_caching=caching, max_model_len=32)
        self.content: dict[tuple[int, int], int] = {}
        self.rows: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}
        self.holders: list[tuple[HeldBlocks, list[int]]] = []
        self.step = 1
        self.next_token = 0

    def free_row(self) -> int | None:
        return next((row for row in range(8) if row not in self.rows), None)

    def enter(self, row: int, tokens: list[int], num_computed: int) -> None:
        self.rows[row], self.tokens[row] = request_of([*tokens, 0]), list(tokens)
        self.write(row, num_computed)

    def write(self, row: int, first: int) -> None:
        """The row computes its tokens from `first` on; its full blocks are cached then."""
        (ids,) = self.manager.block_ids(row)
        references = self.manager.pool.references()
        tokens = self.tokens[row]
        for position in range(first, len(tokens)):
            block_id = int(ids[position // 4])
            assert references[block_id] == 1, "another request holds this block"
            assert self.manager.pool.block_hash(block_id) is None, "it can be found"
            self.content[block_id, position % 4] = tokens[position]
        request = self.rows[row]
        request.token_ids = np.array(tokens, np.int32)
        self.manager.full_blocks.cache_row(row, request, request.token_ids, len(tokens))

    def copy(self, copies: list[BlockCopy]) -> None:
        assert len(copies) <= 1
        for copy in copies:
            assert self.manager.pool.block_hash(copy.target_id) is None
            for offset in range(copy.num_tokens):
                self.content[copy.target_id, offset] = self.content[copy.source_id, offset]

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def start(self, tokens: list[int]) -> None:
        row = self.free_row()
        if row is None:
            return
        request = request_of([*tokens, 0])
        computed = self.manager.get_computed_blocks(request)
        if self.manager.start(row, self.manager.demand(computed, len(tokens))):
            self.enter(row, tokens, computed.num_tokens)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), token=st.integers(0, 1))
    def write_one(self, data: st.DataObject, token: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        tokens = self.tokens[row]
        if len(tokens) == 31 or self.manager.num_free_blocks < 2:
            return
        self.step += 1
        self.copy(
            self.manager.make_writable(
                row, len(tokens), step=self.step, answered_step=self.step - 1
            )
        )
        if self.manager.grow_row(row, len(tokens) + 1) is not None:
            tokens.append(token)
            self.write(row, len(tokens) - 1)

    @precondition(lambda self: self.rows or self.holders)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        owners = [(self.manager.block_ids(row), self.tokens[row]) for row in sorted(self.rows)]
        owners += [(held.block_ids, tokens) for held, tokens in self.holders]
        tables, tokens = data.draw(st.sampled_from(owners))
        count = data.draw(st.integers(1, len(tokens)))
        self.holders.append((self.manager.fork(tables, count), tokens[:count]))
        if data.draw(st.booleans()):
            self.resume(len(self.holders) - 1)

    @precondition(lambda self: self.holders)
    @rule(index=st.integers(0, 50))
    def resume(self, index: int) -> None:
        index %= len(self.holders)
        row, (held, tokens) = self.free_row(), self.holders[index]
        if row is None:
            return
        self.step += 1
        before = self.manager.num_free_blocks
        count = len(tokens) + 1
        needed = self.manager.num_blocks_to_resume(held, len(tokens), count, self.step - 1)
        copies = self.manager.resume(
            row, held, len(tokens), count, step=self.step, answered_step=self.step - 1
        )
        if copies is None:
            assert needed > before == self.manager.num_free_blocks
            return
        references = self.manager.pool.references()
        num_freed = sum(references[copy.source_id] == 0 for copy in copies)
        assert before - self.manager.num_free_blocks == needed - num_freed
        self.copy(copies)
        del self.holders[index]
        # What other rows hold in full they wrote with their own tokens; this one adds its own.
        self.next_token += 1
        self.enter(row, [*tokens, 2 + self.next_token % 90], len(tokens))

    @precondition(lambda self: self.holders)
    @rule(index=st.integers(0, 50))
    def take_over(self, index: int) -> None:
        held, _ = self.holders.pop(index % len(self.holders))
        self.manager.release(held)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), keeps=st.booleans())
    def leave(self, data: st.DataObject, keeps: bool) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        tokens = self.tokens.pop(row)
        del self.rows[row]
        held = self.manager.detach([row])[0]
        if keeps:
            self.holders.append((held, tokens))
        else:
            self.manager.release(held, step=self.step)

    @invariant()
    def all_blocks_are_accounted_for(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check([held for held, _ in self.holders])

    @invariant()
    def every_holder_finds_its_own_tokens(self) -> None:
        if not hasattr(self, "manager"):
            return
        owners = [(self.manager.block_ids(row)[0], self.tokens[row]) for row in self.rows]
        owners += [(held.block_ids[0], tokens) for held, tokens in self.holders]
        for ids, tokens in owners:
            found = [self.content[int(ids[p // 4]), p % 4] for p in range(len(tokens))]
            assert found == tokens


@pytest.mark.req("COW-01", "COW-02", "COW-04")
def test_no_write_goes_to_a_block_that_another_request_holds() -> None:
    run_state_machine_as_test(
        ForkingRows, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )


# The scheduler


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_samples_compute_their_prompt_once(caching: bool, in_flight: int) -> None:
    driver = Driver(enable_prefix_caching=caching, max_steps_in_flight=in_flight, verify_plan=True)
    first = driver.add("a", PROMPT)
    keys = [first, *(driver.add(f"a{i}", PROMPT, fork_of=first[1]) for i in range(3))]
    driver.run()
    for key, request_id in zip(keys, ["a", "a0", "a1", "a2"], strict=True):
        assert driver.received[key] == expected_output(request_id, 8)
    # Each of the others computes the prompt's last token again, to sample its own first one.
    assert total_computed(driver) <= len(PROMPT) + 3 + 4 * 7 + 4 * (in_flight - 1)
    assert driver.num_copies == 3
    assert [driver.finished[key].num_cached_tokens for key in keys] == [0, 13, 13, 13]
    assert driver.num_free_blocks == driver.num_blocks - 1


def test_a_fork_waits_parked_until_the_common_part_has_been_answered() -> None:
    driver = Driver(max_num_batched_tokens=8, max_steps_in_flight=2)
    first = driver.add("parent", PROMPT)
    driver.add("child", PROMPT, fork_of=first[1])
    (report,) = driver.scheduler.make_report(driver.now, "e").waiting[1:]
    assert report.waits_for == "request parent to compute the 13 tokens that both begin with"
    driver.plan()
    driver.plan()  # the rest of the prompt
    driver.answer()
    assert driver.scheduler.waiting.peek() is None
    driver.plan()
    assert driver.running == ["parent"]
    driver.answer()
    driver.plan()
    assert driver.running == ["parent", "child"]
    assert driver.scheduled["child"] == 1
    driver.run()


@pytest.mark.parametrize("caching", [True, False])
def test_forks_of_one_that_leaves_hold_what_they_share_and_the_last_writes_in_place(
    caching: bool,
) -> None:
    driver = Driver(enable_prefix_caching=caching, max_num_seqs=1)
    first = driver.add("parent", PROMPT, max_tokens=3)
    keys = [driver.add(f"child{i}", PROMPT, fork_of=first[1], max_tokens=3) for i in range(2)]
    driver.run()
    assert total_computed(driver) == 16 + 2 * 3
    # With a cache, the parent has filled the block and others may find it as it is.
    assert driver.num_copies == (2 if caching else 1)
    assert [driver.finished[key].num_cached_tokens for key in keys] == [13, 13]


def test_a_fork_of_an_unknown_request_is_one_like_any_other() -> None:
    driver = Driver()
    key = driver.add("a", PROMPT, fork_of=77)
    driver.run()
    assert driver.reason(key) is FinishReason.LENGTH_CAPPED
    assert driver.num_copies == 0


def test_a_fork_shares_only_as_many_tokens_as_agree() -> None:
    driver = Driver(enable_prefix_caching=False)
    first = driver.add("parent", PROMPT)
    key = driver.add("child", [*PROMPT[:6], 99, 98, 97], fork_of=first[1])
    stranger = driver.add("stranger", [99, *PROMPT], fork_of=first[1])
    driver.run()
    assert driver.finished[key].num_cached_tokens == 6
    assert driver.finished[stranger].num_cached_tokens == 0


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_fork_of_an_aborted_request_continues_without_it(when: str) -> None:
    driver = Driver(max_num_seqs=1, enable_prefix_caching=False)
    first = driver.add("parent", PROMPT)
    key = driver.add("child", PROMPT, fork_of=first[1])
    if when == "after":
        driver.steps(2)
    driver.abort(first)
    driver.run()
    assert driver.received[key] == expected_output("child", 8)
    assert driver.finished[key].num_cached_tokens == (13 if when == "after" else 0)


@pytest.mark.parametrize("budget", [8, 64])
def test_a_fork_of_a_preempted_request_waits_until_that_has_computed_again(budget: int) -> None:
    driver = Driver(
        max_steps_in_flight=2, enable_prefix_caching=False, max_num_batched_tokens=budget
    )
    first = driver.add("parent", PROMPT)
    driver.steps(4)
    driver.add("child", PROMPT, fork_of=first[1])
    driver.scheduler._lifecycle.preempt(driver.requests["parent"], driver.now)
    step = 0
    while "child" not in driver.scheduled:
        driver.step()
        if driver.scheduled.get("parent", 0) > 1:
            step = driver.plans[-1].step
    assert 0 < step <= driver.plans[-1].answered_step
    driver.run()
    assert driver.finished[0, 1].num_cached_tokens == 13
    assert driver.received[0, 1] == expected_output("child", 8)


def test_what_a_request_computed_before_its_preemption_is_no_fork_s() -> None:
    driver = Driver(max_num_seqs=1, enable_prefix_caching=False, max_num_batched_tokens=8)
    first = driver.add("parent", PROMPT)
    key = driver.add("child", PROMPT, fork_of=first[1])
    driver.steps(3)
    assert driver.scheduler.waiting.peek() is driver.requests["child"]  # ready, but no row is free
    driver.scheduler._lifecycle.preempt(driver.requests["parent"], driver.now)
    driver.step()
    assert driver.scheduled == {"parent": 8}
    driver.abort(first)
    driver.run()
    assert driver.finished[key].num_cached_tokens == 0
    assert driver.received[key] == expected_output("child", 8)


def test_a_fork_of_a_rewound_request_waits_until_that_has_computed_again() -> None:
    driver = Driver(max_steps_in_flight=2)
    source = driver.add("source", PROMPT)
    parent = driver.add("parent", [*PROMPT, 77])
    child = driver.add("child", [*PROMPT, 77, 78], fork_of=parent[1])
    driver.plan()  # the parent finds the source's blocks within the step
    driver.plan()
    driver.answer(nan_rows=[0])
    assert driver.reason(source) is FinishReason.ERROR
    driver.plan()  # rewound, the parent computes everything itself
    assert driver.scheduled == {"parent": 15}
    driver.answer()
    assert driver.scheduler.waiting.peek() is None
    driver.answer()
    assert driver.scheduler.waiting.peek() is driver.requests["child"]
    driver.run()
    assert driver.finished[child].num_cached_tokens == 15
    assert driver.received[child] == expected_output("child", 8)


def test_numbers_that_are_not_finite_reach_no_fork() -> None:
    driver = Driver(max_steps_in_flight=2, enable_prefix_caching=False)
    first = driver.add("parent", PROMPT)
    key = driver.add("child", PROMPT, fork_of=first[1])
    driver.plan()
    driver.plan()
    driver.answer(nan_rows=[0])
    driver.run()
    assert driver.reason(first) is FinishReason.ERROR
    assert driver.received[key] == expected_output("child", 8)
    assert driver.finished[key].num_cached_tokens == 0


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"lora": LoRARequest("b", "/b")}, "adapter"),
        ({"cache_salt": "other"}, "cache_salt"),
        ({"pooling": PoolingParams()}, "pooling"),
        ({"keeps_blocks": True}, "resumable"),
    ],
)
def test_a_fork_that_cannot_share_blocks_is_rejected_with_a_reason(
    fields: dict[str, Any], text: str
) -> None:
    driver = Driver(max_loras=2)
    first = driver.add("parent", PROMPT, lora=LoRARequest("a", "/a"), cache_salt="salt")
    same = {"lora": LoRARequest("a", "/a"), "cache_salt": "salt"}
    key = driver.add("child", PROMPT, fork_of=first[1], **(same | fields))
    assert driver.reason(key) is FinishReason.ERROR
    assert text in (driver.finished[key].message or "")
    good = driver.add("good", PROMPT, fork_of=first[1], **same)
    driver.run()
    assert driver.finished[good].num_cached_tokens == 13


# Sessions that keep their blocks


@pytest.mark.req("FEA-05")
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_session_that_keeps_its_blocks_continues_after_them(
    caching: bool, in_flight: int
) -> None:
    driver = Driver(enable_prefix_caching=caching, max_steps_in_flight=in_flight)
    key = driver.add("s", PROMPT, max_tokens=3, resumable=True, keeps_blocks=True)
    while not driver.continued[key]:
        driver.step()
    driver.steps(in_flight)
    assert driver.num_free_blocks == driver.num_blocks - 1 - 4
    computed = total_computed(driver)
    driver.continue_session(key, [50, 51], max_tokens=2, resumable=False)
    driver.run()
    assert total_computed(driver) - computed == 1 + 2 + 1
    assert driver.num_free_blocks == driver.num_blocks - 1


def test_a_session_whose_next_input_is_to_be_scored_computes_everything() -> None:
    driver = Driver()
    key = driver.add("s", PROMPT, max_tokens=2, resumable=True, keeps_blocks=True)
    driver.steps(4)
    computed = total_computed(driver)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    chunk = ContinueSession(key[1], int32_array([50]), sampling, resumable=False)
    driver.scheduler.continue_session(key[0], chunk, driver.now)
    driver.run()
    assert total_computed(driver) - computed == 14 + 2 + 1
    assert [position for position, _ in driver.scored[key]] == list(range(1, 17))


def test_a_session_that_is_stopped_before_its_prompt_is_computed_keeps_nothing() -> None:
    driver = Driver(enable_prefix_caching=False, max_num_batched_tokens=4)
    key = driver.add("s", PROMPT, resumable=True, keeps_blocks=True)
    driver.step()
    driver.stop_found(key, 0)
    driver.steps(2)
    assert driver.num_free_blocks == driver.num_blocks - 1
    driver.continue_session(key, [50], max_tokens=2, resumable=False)
    driver.run()
    assert driver.reason(key) is FinishReason.LENGTH_CAPPED


def test_children_of_a_session_that_is_ended_with_them_queued_take_over_its_blocks() -> None:
    driver = Driver(enable_prefix_caching=False)
    parent = driver.add("s", PROMPT, max_tokens=1, resumable=True, keeps_blocks=True)
    driver.steps(2)
    assert len(driver.continued[parent]) == 1
    keys = [
        driver.add(f"c{i}", [*PROMPT, 60 + i], fork_of=parent[1], max_tokens=2) for i in range(3)
    ]
    driver.abort(parent)
    driver.run()
    assert driver.num_copies == 3
    assert [driver.finished[key].num_cached_tokens for key in keys] == [14] * 3
    assert total_computed(driver) == 14 + 3 * 2


def test_a_fork_of_a_session_computes_the_token_that_the_session_only_sampled() -> None:
    driver = Driver(enable_prefix_caching=False)
    parent = driver.add("s", PROMPT, max_tokens=1, resumable=True, keeps_blocks=True)
    driver.steps(2)
    key = driver.add("c", [*PROMPT, *driver.received[parent], 50], fork_of=parent[1])
    driver.abort(parent)
    driver.run()
    assert driver.finished[key].num_cached_tokens == 14
    assert driver.received[key] == expected_output("c", 8)


def test_holds_are_released_before_any_request_is_preempted() -> None:
    driver = Driver(num_blocks=9, enable_prefix_caching=False, max_model_len=32)
    idle = driver.add("idle", PROMPT, max_tokens=2, resumable=True, keeps_blocks=True)
    driver.steps(3)
    assert len(driver.continued[idle]) == 1
    driver.add("long", PROMPT, max_tokens=16)
    while "long" not in driver.running:
        driver.step()
    driver.steps(14)
    assert driver.requests["long"].num_preemptions == 0
    driver.continue_session(idle, [40], max_tokens=2, resumable=False)
    driver.run()
    assert driver.finished[0, 1].num_output_tokens == 16


def test_a_hold_makes_room_for_the_head_of_the_queue() -> None:
    driver = Driver(num_blocks=9, enable_prefix_caching=False, max_model_len=32)
    idle = driver.add("idle", PROMPT, max_tokens=2, resumable=True, keeps_blocks=True)
    driver.steps(3)
    key = driver.add("big", prompt_of(30), max_tokens=1)
    driver.steps(2)
    assert driver.reason(key) is FinishReason.LENGTH_CAPPED
    driver.abort(idle)
    driver.run()


def test_new_workers_know_no_holds_and_forks_wait_again() -> None:
    driver = Driver(enable_prefix_caching=False)
    idle = driver.add("idle", PROMPT, max_tokens=2, resumable=True, keeps_blocks=True)
    parent = driver.add("parent", PROMPT)
    driver.steps(3)
    child = driver.add("child", PROMPT, fork_of=parent[1])
    other = driver.add("other", [*PROMPT, 44], fork_of=idle[1])
    driver.restart_workers(2)
    driver.continue_session(idle, [45], max_tokens=2, resumable=False)
    driver.run()
    for key, request_id in ((child, "child"), (other, "other")):
        assert driver.received[key] == expected_output(request_id, 8)
    assert driver.finished[child].num_cached_tokens == 13
    assert driver.finished[other].num_cached_tokens == 14


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_families_of_forks_read_their_own_tokens(data: st.DataObject) -> None:
    """The driver's worker compares the KV at every position that a row attends to."""
    draw = data.draw
    groups = draw(st.sampled_from([[full()], [full(), state(3)], [state(1)], [full(8), state(2)]]))
    num_pages = sum(spec.num_pages for spec in groups if isinstance(spec, StateSpec))
    driver = Driver(
        *groups,
        num_blocks=draw(st.integers(9, 24)) + num_pages * draw(st.integers(1, 4)),
        cache={"hash_block_size": 4},
        max_model_len=32,
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.sampled_from([4, 9, 64])),
        max_steps_in_flight=draw(st.integers(1, 2)),
        enable_prefix_caching=draw(st.booleans()),
        verify_plan=True,
    )
    keys: list[tuple[int, int]] = []
    prompts: dict[tuple[int, int], list[int]] = {}
    sessions: set[tuple[int, int]] = set()
    epoch = 1
    for _ in range(draw(st.integers(5, 40))):
        action = draw(st.sampled_from("aaffffsspppppnkcxe"))
        live = [key for key in keys if key not in driver.finished]
        if action in "as":
            key = driver.add(
                f"r{len(keys)}",
                prompt_of(draw(st.integers(1, 18)), 10 * draw(st.integers(0, 1))),
                max_tokens=draw(st.integers(1, 8)),
                resumable=action == "s",
                keeps_blocks=action == "s" and draw(st.booleans()),
            )
            prompts[key] = driver.scheduler._lifecycle.get(*key).token_ids.tolist()
            keys.append(key)
            sessions |= {key} if action == "s" else set()
        elif action == "f" and keys:
            parent = draw(st.sampled_from(keys))
            tokens = [*prompts[parent], *driver.received[parent], 50]
            tokens = tokens[: draw(st.integers(1, min(len(tokens), 24)))]
            is_session = draw(st.booleans())
            key = driver.add(
                f"r{len(keys)}",
                tokens,
                max_tokens=draw(st.integers(1, 6)),
                fork_of=parent[1],
                resumable=is_session,
                keeps_blocks=is_session,
                skip_reading_prefix_cache=draw(st.integers(0, 9)) == 0,
            )
            prompts[key] = tokens
            keys.append(key)
            sessions |= {key} if is_session else set()
        elif action == "k" and live:
            driver.abort(draw(st.sampled_from(live)))
        elif action == "c" and live:
            key = draw(st.sampled_from(live))
            if key in sessions:
                driver.continue_session(key, [60, 61][: draw(st.integers(0, 2))], max_tokens=2)
        elif action == "x" and live:
            driver.stop_found(draw(st.sampled_from(live)), draw(st.integers(0, 3)))
        elif action == "e" and draw(st.integers(0, 3)) == 0:
            epoch += 1
            driver.restart_workers(epoch)
        elif action == "n" and driver.unanswered:
            rows = driver.scheduler._in_flight.steps[0].sampling.rows.tolist()
            driver.answer(nan_rows=[draw(st.sampled_from(rows))] if rows else [])
        else:
            driver.step()
        driver.scheduler.check()
    for key in sessions:
        if key not in driver.finished:
            driver.abort(key)
    driver.run()
    assert all(key in driver.finished for key in keys)
    assert driver.num_free_blocks == driver.num_blocks - 1
    assert not driver.scheduler._forks.waiting
    assert not list(driver.scheduler._holds)


def test_forks_come_and_go_without_a_trace() -> None:
    counts: Counter[int] = Counter()
    for seed in range(8):
        driver = Driver(num_blocks=17, max_num_seqs=3, max_steps_in_flight=2)
        first = driver.add("p", prompt_of(9, seed))
        for i in range(4):
            driver.add(f"c{i}", prompt_of(9, seed), fork_of=first[1])
        driver.run()
        counts[driver.num_free_blocks] += 1
    assert counts == {16: 8}


# States


HYBRID = (full(), state())


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("groups", [HYBRID, (state(1),)], ids=["hybrid", "states alone"])
@pytest.mark.parametrize("budget", [5, 64])
def test_samples_of_a_model_with_states_compute_their_prompt_once(
    caching: bool, in_flight: int, groups: Any, budget: int
) -> None:
    driver = Driver(
        *groups,
        enable_prefix_caching=caching,
        max_steps_in_flight=in_flight,
        max_num_batched_tokens=budget,
        verify_plan=True,
    )
    first = driver.add("a", PROMPT)
    keys = [first, *(driver.add(f"a{i}", PROMPT, fork_of=first[1]) for i in range(3))]
    driver.run()
    for key, request_id in zip(keys, ["a", "a0", "a1", "a2"], strict=True):
        assert driver.received[key] == expected_output(request_id, 8)
    assert [driver.finished[key].num_cached_tokens for key in keys] == [0, 13, 13, 13]
    (plan,) = (plan for plan in driver.plans if 13 in kept_by(plan))
    assert kept_by(plan) == ([12, 13] if caching else [13])
    assert driver.num_free_blocks == driver.num_blocks - 1


def kept_by(plan: SchedulerOutput) -> list[int]:
    return [kept.num_tokens for kept in plan.kept_states]


def test_a_fork_shares_the_state_that_is_kept_for_later_requests() -> None:
    driver = Driver(*HYBRID)
    prompt = prompt_of(13)
    first = driver.add("a", prompt)
    key = driver.add("b", prompt, fork_of=first[1])
    driver.run()
    assert [kept_by(plan) for plan in driver.plans if plan.kept_states] == [[12]]
    assert driver.finished[key].num_cached_tokens == 12


def test_a_decode_keeps_the_state_that_a_fork_waits_for() -> None:
    """Even if decodes are steady, and the blocks of tokens are not full."""
    driver = Driver(*HYBRID, max_steps_in_flight=1, enable_prefix_caching=False)
    first = driver.add("a", PROMPT)
    driver.steps(4)
    tokens = [*PROMPT, *driver.received[first]]
    key = driver.add("b", [*tokens, 60, 61], fork_of=first[1])
    driver.steps(1)
    (plan,) = (plan for plan in driver.plans if plan.kept_states)
    assert (kept_by(plan), plan.num_scheduled_tokens) == ([len(tokens)], 1)
    driver.run()
    assert driver.finished[key].num_cached_tokens == len(tokens)
    assert driver.received[key] == expected_output("b", 8)


@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_of_a_parent_that_is_further_begins_with_what_the_cache_has(caching: bool) -> None:
    driver = Driver(*HYBRID, enable_prefix_caching=caching)
    first = driver.add("a", PROMPT)
    driver.steps(3)
    key = driver.add("b", PROMPT, fork_of=first[1])
    driver.run()
    assert driver.finished[key].num_cached_tokens == (12 if caching else 0)
    assert driver.received[key] == expected_output("b", 8)


def test_a_rewound_parent_keeps_the_state_once_more() -> None:
    driver = Driver(*HYBRID, max_steps_in_flight=2)
    source = driver.add("source", PROMPT)
    driver.plan()
    parent = driver.add("parent", [*PROMPT, 77])
    child = driver.add("child", [*PROMPT, 77, 78], fork_of=parent[1])
    driver.plan()  # the parent begins with the source's state
    assert kept_by(driver.plans[-1]) == [15]
    driver.answer(nan_rows=[0])
    assert driver.reason(source) is FinishReason.ERROR
    driver.plan()
    assert driver.scheduled == {"parent": 15}
    assert kept_by(driver.plans[-1]) == [15]
    driver.run()
    assert driver.finished[child].num_cached_tokens == 15
    assert driver.received[child] == expected_output("child", 8)
    assert driver.num_free_blocks == driver.num_blocks - 1


def test_a_preempted_parent_keeps_the_state_once_more() -> None:
    driver = Driver(
        *HYBRID, enable_prefix_caching=False, max_num_batched_tokens=8, max_steps_in_flight=2
    )
    first = driver.add("parent", PROMPT)
    child = driver.add("child", PROMPT, fork_of=first[1])
    driver.plan()
    driver.plan()
    driver.scheduler._lifecycle.preempt(driver.requests["parent"], driver.now)
    assert driver.num_free_blocks == driver.num_blocks - 1
    driver.run()
    assert [kept_by(plan) for plan in driver.plans if plan.kept_states] == [[13], [13]]
    assert driver.finished[child].num_cached_tokens == 13


def test_states_of_one_plan_are_kept_in_different_blocks() -> None:
    """Also if there are no other free blocks."""
    driver = Driver(*HYBRID, num_blocks=1 + 4 + 3 + 3 + 2, max_model_len=20)
    first = driver.add("a", PROMPT, max_tokens=2)
    key = driver.add("b", PROMPT, fork_of=first[1], max_tokens=2)
    driver.plan()
    assert kept_by(driver.plans[0]) == [12]
    driver.run()
    assert driver.received[key] == expected_output("b", 2)


def test_no_load_goes_into_the_state_of_a_fork_before_the_plan_that_copies_it_is_answered() -> None:
    driver = Driver(*HYBRID, max_steps_in_flight=2, enable_prefix_caching=False)
    first = driver.add("a", PROMPT)
    driver.add("b", PROMPT, fork_of=first[1])
    while not len(driver.plans[-1].copy_source_ids if driver.plans else ()):
        driver.step()
    plan, pool = driver.plans[-1], driver.scheduler.kv_cache.pool
    (kept,) = (state for each in driver.plans for state in each.kept_states)
    assert set(kept.block_ids.tolist()) <= set(plan.copy_source_ids.tolist())
    settled = pool.get_settled_blocks(pool.num_free - 3, plan.step - 1, EMPTY_INT32)
    assert settled is not None
    assert not set(kept.block_ids.tolist()) & set(settled.tolist())
    assert pool.get_settled_blocks(1, plan.step - 1, EMPTY_INT32) is None


def test_a_state_that_no_fork_can_use_is_a_mistake() -> None:
    driver = Driver(*HYBRID)
    first = driver.add("a", PROMPT)
    driver.add("b", PROMPT, fork_of=first[1])
    driver.plan()
    driver.scheduler.check()
    (report,) = driver.scheduler.make_report(driver.now, "e").waiting
    assert report.waits_for == "request a to compute the 13 tokens that both begin with"
    (fork,) = driver.scheduler._forks.waiting.values()
    fork.step = None
    with pytest.raises(LongshoreError, match="b holds a state that it cannot use"):
        driver.scheduler.check()


def test_an_aborted_fork_leaves_its_state_to_the_others() -> None:
    driver = Driver(*HYBRID)
    first = driver.add("a", PROMPT)
    keys = [driver.add(f"b{i}", PROMPT, fork_of=first[1]) for i in range(2)]
    driver.plan()
    driver.abort(keys[0])
    driver.run()
    assert driver.finished[keys[1]].num_cached_tokens == 13
    assert driver.num_free_blocks == driver.num_blocks - 1


def test_the_last_fork_computes_on_the_state_itself() -> None:
    """The pages that the parent has left to it, once no other request refers to them."""
    driver = Driver(*HYBRID, max_num_seqs=1, enable_prefix_caching=False)
    first = driver.add("a", PROMPT, max_tokens=3)
    keys = [driver.add(f"b{i}", PROMPT, fork_of=first[1], max_tokens=3) for i in range(2)]
    driver.run()
    assert driver.num_copies == 1 + 3, "a partial block and a state, once each"
    assert [driver.finished[key].num_cached_tokens for key in keys] == [13, 13]


def test_a_request_that_needs_blocks_gets_those_of_states_that_forks_wait_for() -> None:
    """The pool holds two rows, and in addition no state."""
    driver = Driver(*HYBRID, num_blocks=1 + 2 * 8, max_model_len=20, enable_prefix_caching=False)
    first = driver.add("a", PROMPT, max_tokens=5)
    driver.add("other", prompt_of(4, 60), max_tokens=12)
    key = driver.add("b", PROMPT, fork_of=first[1], max_tokens=5)
    driver.steps(2)
    assert [kept_by(plan) for plan in driver.plans] == [[13], []]
    driver.run()
    assert driver.received[first] == expected_output("a", 5)
    assert driver.received[key] == expected_output("b", 5)
    assert not any(end.num_preemptions for end in driver.finished.values())


@pytest.mark.req("FEA-05")
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("stops", [False, True], ids=["at its length", "at a stop token"])
def test_a_session_of_a_model_with_states_goes_on_where_its_state_is(
    caching: bool, in_flight: int, stops: bool
) -> None:
    """With two steps in flight, the stop token is computed, and is a part of the state."""
    driver = Driver(*HYBRID, enable_prefix_caching=caching, max_steps_in_flight=in_flight)
    third = expected_output("s", 3)[2]
    sampling = {"stop_token_ids": (third,)} if stops else {}
    key = driver.add(
        "s",
        PROMPT,
        max_tokens=8 if stops else 3,
        resumable=True,
        keeps_blocks=True,
        sampling=sampling,
    )
    while not driver.continued[key]:
        driver.step()
    held = driver.requests["s"].num_computed_tokens
    assert held == len(PROMPT) + (3 if stops and in_flight == 2 else 2)
    driver.steps(in_flight)
    computed = total_computed(driver)
    driver.continue_session(key, [50, 51], max_tokens=2, resumable=False)
    driver.run()
    assert total_computed(driver) - computed == len(PROMPT) + 3 - held + 2 + 1
    assert driver.num_free_blocks == driver.num_blocks - 1


def test_a_session_whose_output_a_stop_string_has_cut_goes_on_from_the_cache() -> None:
    driver = Driver(*HYBRID)
    key = driver.add("s", PROMPT, resumable=True, keeps_blocks=True)
    driver.steps(5)
    driver.stop_found(key, 1)
    driver.steps(2)
    assert driver.requests["s"].hold is None
    driver.continue_session(key, [50], max_tokens=2, resumable=False)
    driver.run()
    assert driver.finished[key].num_cached_tokens == 12


def test_a_fork_that_has_less_than_a_paused_session_has_no_state() -> None:
    driver = Driver(*HYBRID)
    parent = driver.add("s", PROMPT, max_tokens=1, resumable=True, keeps_blocks=True)
    driver.steps(2)
    keys = [
        driver.add("c", [*PROMPT, 60], fork_of=parent[1]),
        driver.add("d", PROMPT, fork_of=parent[1]),
    ]
    driver.abort(parent)
    driver.run()
    assert [driver.finished[key].num_cached_tokens for key in keys] == [14, 12]
    for name, key in zip("cd", keys, strict=True):
        assert driver.received[key] == expected_output(name, 8)


def test_a_session_does_not_go_on_after_a_last_token_that_was_not_finite() -> None:
    driver = Driver(*HYBRID, max_steps_in_flight=2)
    third = expected_output("s", 3)[2]
    sampling = {"stop_token_ids": (third,)}
    key = driver.add("s", PROMPT, resumable=True, keeps_blocks=True, sampling=sampling)
    while not driver.continued[key]:
        driver.step()
    driver.continue_session(key, [50, 51], max_tokens=2, resumable=False)
    assert driver.plan() is None or "s" not in driver.scheduled, "its last step is not answered"
    driver.answer(nan_rows=[0])
    assert driver.requests["s"].hold is None
    driver.run()
    assert driver.reason(key) is FinishReason.LENGTH_CAPPED
