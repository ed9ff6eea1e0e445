"""Whole runs over groups of several kinds: every token is computed from its own prefix."""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longshore.connectors.base import Match, Matched, RequestView, SchedulerConnector
from longshore.protocol.arrays import Int32Array, int32_array
from longshore.protocol.kv_cache_spec import NULL_BLOCK, KVCacheSpec, LongestRequest
from longshore.protocol.outputs import FinishReason, TransferReport
from tests.scheduler.driver import expected_output, prompt_of
from tests.scheduler.hybrid_driver import (
    HybridDriver,
    chunked,
    fingerprint,
    first_seen,
    full,
    latent,
    state,
    window,
)
from tests.scheduler.loading_connector import LoadingConnector
from tests.scheduler.test_random_runs import events, play

specs = st.lists(
    st.one_of(
        st.builds(full, st.sampled_from([2, 4, 8])),
        st.builds(latent, st.sampled_from([4, 8])),
        st.builds(window, st.integers(1, 20), st.sampled_from([2, 4, 8])),
        st.builds(chunked, st.integers(1, 20), st.sampled_from([2, 4, 8])),
        st.builds(state, st.sampled_from([4, 8])),
    ),
    min_size=1,
    max_size=4,
)
engines = st.fixed_dictionaries(
    {
        "max_steps_in_flight": st.integers(1, 2),
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.integers(1, 40),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 5]),
        "num_blocks": st.integers(90, 130),
        "enable_prefix_caching": st.sampled_from([True, True, False]),
    }
)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(specs, engines, events)
@pytest.mark.req("SYS-05", "KVM-07", "SCH-24")
def test_whatever_groups_there_are_every_request_ends_once_with_its_own_tokens(
    groups: list[KVCacheSpec], engine: dict[str, Any], happenings: list[Any]
) -> None:
    driver = HybridDriver(*groups, max_model_len=40, cache={"hash_block_size": 2}, **engine)
    names = play(driver, happenings)
    driver.run()
    assert set(driver.finished) == set(names)
    for key, (name, max_tokens) in names.items():
        tokens, end = driver.received[key], driver.finished[key]
        assert tokens == expected_output(name, len(tokens))
        if end.reason is FinishReason.LENGTH_CAPPED:
            assert len(tokens) == end.num_output_tokens == max_tokens
    assert driver.num_free_blocks == engine["num_blocks"] - 1


MIXES: dict[str, list[KVCacheSpec]] = {
    "window": [window(6)],
    "chunked": [chunked(8)],
    "state": [state()],
    "full, window": [full(), window(6)],
    "full, windows of two sizes": [full(), window(6), window(9, 8)],
    "full, chunked": [full(8), chunked(8)],
    "full, state": [full(), state(8)],
    "states of two block sizes": [state(8), latent(), state(4)],
    "everything": [window(7), full(), state(8), chunked(6), latent(8)],
}


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.req("POO-11", "SYS-05", "PRE-05")
def test_a_long_run_under_pressure_keeps_every_token_in_its_place(
    mix: str, steps_in_flight: int
) -> None:
    chance = random.Random(mix)
    groups = MIXES[mix]
    driver = HybridDriver(
        *groups,
        num_blocks=12 * len(groups) + 1,
        max_model_len=40,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        max_steps_in_flight=steps_in_flight,
        cache={"hash_block_size": 4},
    )
    names = {}
    for number in range(80):
        prompt = [7] * chance.randrange(20) + [20 + number % 70] * chance.randrange(1, 10)
        name, max_tokens = f"r{number}", chance.randrange(1, 10)
        names[driver.add(name, prompt, max_tokens=max_tokens)] = name, max_tokens
        driver.steps(chance.randrange(3))
    driver.run()
    for key, (name, max_tokens) in names.items():
        assert driver.received[key] == expected_output(name, max_tokens)
    stats = driver.scheduler.kv_cache.stats
    assert stats.num_hit_tokens > 0
    driver.scheduler.check()
    assert driver.scheduler.kv_cache.reset_prefix_cache()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from([[window(3, 2)], [full(2), window(4, 2)], [chunked(4, 2), window(2, 2)]]),
    st.integers(1, 2),
    st.randoms(use_true_random=False),
)
@pytest.mark.req("KVM-07", "SPD-03")
def test_a_rejected_draft_needs_no_block_that_a_window_gave_back(
    groups: list[KVCacheSpec], steps_in_flight: int, chance: random.Random
) -> None:
    def draft(request_id: str, position: int) -> list[int]:
        """Right for a while, then wrong."""
        right = chance.randrange(6)
        return [*expected_output(request_id, position + right)[position:], *[3] * 5][:5]

    driver = HybridDriver(
        *groups,
        draft=draft,
        max_model_len=60,
        max_steps_in_flight=steps_in_flight,
        num_speculative_tokens=5,
        num_lookahead_tokens=chance.choice([0, 5]),
        cache={"hash_block_size": 2},
        num_blocks=130,
    )
    keys = {f"r{n}": driver.add(f"r{n}", [7] * 6 + [20 + n], max_tokens=40) for n in range(3)}
    driver.run()
    for name, key in keys.items():
        assert driver.received[key] == expected_output(name, 40)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("mix", MIXES)
def test_after_numbers_that_are_not_finite_others_go_on_from_where_every_group_has_kv(
    mix: str, steps_in_flight: int
) -> None:
    chance = random.Random(mix)
    driver = HybridDriver(
        *MIXES[mix],
        num_blocks=150,
        max_model_len=40,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        max_steps_in_flight=steps_in_flight,
        cache={"hash_block_size": 4},
    )
    names = {}
    for number in range(60):
        prompt = [7] * chance.randrange(8, 24) + [20 + number % 3] * chance.randrange(1, 5)
        name, max_tokens = f"r{number}", chance.randrange(1, 10)
        names[driver.add(name, prompt, max_tokens=max_tokens)] = name, max_tokens
        for _ in range(chance.randrange(3)):
            driver.plan()
            if len(driver.pending) >= steps_in_flight or chance.random() < 0.5:
                rows = sampled_rows(driver)
                is_bad = rows and driver.pending and chance.random() < 0.3
                if driver.pending:
                    driver.answer([chance.choice(rows)] if is_bad else [])
    driver.run()
    num_failed = 0
    for key, (name, max_tokens) in names.items():
        if driver.finished[key].reason is FinishReason.ERROR:
            num_failed += 1
        else:
            assert driver.received[key] == expected_output(name, max_tokens)
    assert num_failed > 0
    driver.scheduler.check()


def sampled_rows(driver: HybridDriver) -> list[int]:
    """Rows that the oldest unanswered plan samples."""
    planned = driver.scheduler._in_flight.oldest()
    return [] if planned is None else planned.rows.tolist()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.one_of(
        st.builds(window, st.integers(1, 40), st.sampled_from([2, 4, 8])),
        st.builds(chunked, st.integers(1, 40), st.sampled_from([2, 4, 8])),
        st.builds(state, st.sampled_from([4, 8])),
    ),
    st.integers(1, 2),
    st.integers(1, 50),
    st.integers(1, 180),
    st.booleans(),
)
@pytest.mark.req("STM-03", "STM-09", "STM-10")
def test_what_a_request_holds_stays_within_its_spec_for_any_prompt(
    spec: KVCacheSpec, steps_in_flight: int, budget: int, num_prompt: int, is_caching: bool
) -> None:
    """With two steps in flight the window's tokens and those of both steps are held. A pool of so
    many blocks is enough."""
    at_most = spec.max_blocks(LongestRequest(200, steps_in_flight * budget))
    driver = HybridDriver(
        spec,
        max_model_len=200,
        num_blocks=1 + at_most,
        max_num_batched_tokens=budget,
        max_steps_in_flight=steps_in_flight,
        enable_prefix_caching=is_caching,
        cache={"hash_block_size": 2},
    )
    key = driver.add("r", prompt_of(num_prompt), max_tokens=20)
    while key not in driver.finished:
        driver.plan()
        if driver.running:
            assert driver.num_held("r")[0] <= at_most
        driver.answer()
    assert driver.received[key] == expected_output("r", 20)


def test_a_long_prompt_holds_no_more_of_a_window_than_a_short_one() -> None:
    held = {}
    for num_prompt in (500, 1000):
        driver = HybridDriver(
            full(16),
            window(64, 16),
            max_model_len=1100,
            num_blocks=300,
            max_num_batched_tokens=128,
        )
        key = driver.add("r", prompt_of(num_prompt), max_tokens=30)
        most = [0, 0]
        while key not in driver.finished:
            driver.plan()
            if driver.running:
                most = [max(pair) for pair in zip(most, driver.num_held("r"), strict=True)]
            driver.answer()
        held[num_prompt] = most
    assert held[1000][1] == held[500][1] <= window(64, 16).max_blocks(LongestRequest(1100, 128))
    assert held[1000][0] == 65


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.req("SCH-24")
def test_a_prefix_hit_restores_the_state_at_a_block_border(steps_in_flight: int) -> None:
    driver = HybridDriver(
        full(), state(8), max_steps_in_flight=steps_in_flight, cache={"hash_block_size": 4}
    )
    first = driver.add("first", prompt_of(21), max_tokens=2)
    driver.run()
    chunks = [plan.num_scheduled_tokens for plan in driver.plans]
    assert chunks[:2] == [16, 5]
    again = driver.add("again", prompt_of(21), max_tokens=2)
    driver.run()
    assert driver.received[first] == expected_output("first", 2)
    assert driver.received[again] == expected_output("again", 2)
    assert driver.finished[again].num_cached_tokens == 16


def test_a_state_is_not_found_in_the_step_that_computes_it_while_kv_is() -> None:
    for groups, num_cached in (([full()], 16), ([full(), state()], 0)):
        driver = HybridDriver(*groups)
        driver.add("one", prompt_of(17), max_tokens=2)
        twin = driver.add("two", prompt_of(17), max_tokens=2)
        driver.run()
        assert driver.finished[twin].num_cached_tokens == num_cached


def test_a_window_gives_no_block_back_that_an_unanswered_step_computes() -> None:
    """Otherwise the block would be found by its hash if the step fails."""
    driver = HybridDriver(window(6), max_steps_in_flight=2)
    failing = driver.add("failing", prompt_of(20), max_tokens=9)
    driver.plan()
    driver.plan()
    driver.answer(nan_rows=[0])
    again = driver.add("again", prompt_of(20), max_tokens=2)
    driver.run()
    assert driver.reason(failing) is FinishReason.ERROR
    assert driver.finished[again].num_cached_tokens == 0


@pytest.mark.parametrize("stored", [13, 24, 30])
@pytest.mark.parametrize("failed", [None, *range(12)])
@pytest.mark.parametrize("groups", [[full(), window(6)], [window(9), full(8), chunked(12)]])
def test_a_load_brings_a_window_only_what_it_needs_and_may_fail_in_any_block(
    groups: list[KVCacheSpec], failed: int | None, stored: int
) -> None:
    connector = LoadingConnector({"loads": stored})
    driver = HybridDriver(*groups, world={"connector": connector}, cache={"hash_block_size": 4})
    driver.add("first", prompt_of(9), max_tokens=1)
    driver.run()
    key = driver.add("loads", prompt_of(30), max_tokens=9)
    driver.step()
    load = connector.loading.pop("loads")
    num_computed = min(stored, 29)
    for spec, table in zip(groups, load.tables, strict=True):
        entry = first_seen(spec, num_computed) // spec.block_size
        assert all(table[max(entry, load.first // spec.block_size) :])
        assert not any(table[load.first // spec.block_size : entry])
    loaded = [
        block_id
        for spec, table in zip(groups, load.tables, strict=True)
        for block_id in table[load.first // spec.block_size :]
        if block_id
    ]
    lost = [] if failed is None else [loaded[failed % len(loaded)]]
    for spec, table in zip(groups, load.tables, strict=True):
        for position in range(load.first, load.last):
            slot = table[position // spec.block_size], position % spec.block_size
            if slot[0] not in (0, *lost):
                driver._kv[slot] = fingerprint(load.token_ids[: position + 1])
    report = TransferReport(1, 0, finished_receiving=("loads",), failed_block_ids=int32_array(lost))
    driver.scheduler.update_from_transfers(report, driver.now)
    driver.run()
    assert driver.received[key] == expected_output("loads", 9)
    driver.scheduler.check()
    assert driver.scheduler.kv_cache.reset_prefix_cache()


class InstantConnector(SchedulerConnector):
    """Has the first `stored` tokens of every prompt, and brings them within the step."""

    def __init__(self, stored: int) -> None:
        super().__init__()
        self.stored, self.first, self.num_null_blocks = stored, 0, 0
        self.driver: HybridDriver | None = None

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        self.first = num_computed_tokens
        return Matched(max(self.stored - num_computed_tokens, 0), is_async=False)

    def update_state_after_alloc(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_external_tokens: int
    ) -> None:
        assert self.driver is not None
        for spec, table in zip(self.driver.specs, block_ids, strict=True):
            self.num_null_blocks += table.tolist().count(NULL_BLOCK)
            for position in range(self.first, self.first + num_external_tokens):
                block_id = int(table[position // spec.block_size])
                if block_id != NULL_BLOCK:
                    prefix = fingerprint(request.token_ids[: position + 1].tolist())
                    self.driver._kv[block_id, position % spec.block_size] = prefix


@pytest.mark.parametrize("stored", [5, 16, 23, 30])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_what_a_connector_brings_within_a_step_takes_blocks_only_where_they_are_needed(
    stored: int, steps_in_flight: int
) -> None:
    connector = InstantConnector(stored)
    driver = HybridDriver(
        window(6),
        full(8),
        max_steps_in_flight=steps_in_flight,
        world={"connector": connector},
        cache={"hash_block_size": 4},
    )
    connector.driver = driver
    keys = {name: driver.add(name, prompt_of(30), max_tokens=9) for name in ("one", "two")}
    driver.plan()
    held = driver.num_held("one")[0]
    assert held <= window(6).max_blocks(LongestRequest(64, 30 - min(stored, 29)))
    assert (connector.num_null_blocks > 0) == (stored > 8)  # a block and the window
    driver.run()
    for name, key in keys.items():
        assert driver.received[key] == expected_output(name, 9)
    driver.scheduler.check()


def test_bad_blocks_spread_through_a_request_that_has_ended_to_one_that_found_its_blocks() -> None:
    """Within a window a hit holds only the last blocks, so `late` holds none of `bad`'s blocks."""
    driver = HybridDriver(window(5), max_steps_in_flight=2)
    bad = driver.add("bad", prompt_of(9), max_tokens=4)
    between = driver.add("between", prompt_of(21), max_tokens=4)
    driver.plan()
    assert [start.num_computed_tokens for start in driver.plans[-1].added] == [0, 8]
    driver.abort(between)
    late = driver.add("late", prompt_of(22), max_tokens=4)
    driver.plan()
    assert [start.num_computed_tokens for start in driver.plans[-1].added] == [20]
    driver.answer(nan_rows=[0])
    driver.plan()
    assert [rewind.num_computed_tokens for rewind in driver.plans[-1].rewound] == [0]
    driver.run()
    assert driver.reason(bad) is FinishReason.ERROR
    assert driver.received[late] == expected_output("late", 4)
