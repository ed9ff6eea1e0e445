"""Whole runs over groups of several kinds: every token is computed from its own prefix."""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longshore.protocol.kv_cache_spec import NULL_BLOCK, KVCacheSpec, LongestRequest
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import CacheHint, CachePrefix
from tests.harness.connector import AdversarialConnector, has_leading, has_stored
from tests.harness.driver import Driver
from tests.harness.kv_groups import chunked, first_seen, full, latent, state, window
from tests.harness.tokens import expected_output, prompt_of
from tests.scheduler.test_random_runs import events, play

specs = st.lists(
    st.one_of(
        st.builds(full, st.sampled_from([2, 4, 8])),
        st.builds(latent, st.sampled_from([4, 8])),
        st.builds(window, st.integers(1, 20), st.sampled_from([2, 4, 8])),
        st.builds(chunked, st.integers(1, 20), st.sampled_from([2, 4, 8])),
    ),
    min_size=1,
    max_size=4,
)
with_state = st.builds(
    lambda others, num_pages: [*others[1:], state(num_pages, 2)], specs, st.integers(1, 5)
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
@given(st.one_of(specs, with_state), engines, events)
@pytest.mark.req("SYS-05", "KVM-07", "SCH-24")
def test_whatever_groups_there_are_every_request_ends_once_with_its_own_tokens(
    groups: list[KVCacheSpec], engine: dict[str, Any], happenings: list[Any]
) -> None:
    driver = Driver(*groups, max_model_len=40, cache={"hash_block_size": 2}, **engine)
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
    "full, window": [full(), window(6)],
    "full, windows of two sizes": [full(), window(6), window(9, 8)],
    "full, chunked": [full(8), chunked(8)],
    "full, state": [full(), state()],
    "state alone": [state(1)],
    "windows, state": [window(6), full(8), state(2)],
    "everything": [window(7), full(), chunked(6), latent(8), state(4)],
}


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.req("POO-11", "SYS-05", "PRE-05")
def test_a_long_run_under_pressure_keeps_every_token_in_its_place(
    mix: str, steps_in_flight: int
) -> None:
    chance = random.Random(mix)
    groups = MIXES[mix]
    driver = Driver(
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
def test_a_rejected_draft_needs_no_block_that_a_window_freed(
    groups: list[KVCacheSpec], steps_in_flight: int, chance: random.Random
) -> None:
    def draft(request_id: str, position: int) -> list[int]:
        """Right for a while, then wrong."""
        right = chance.randrange(6)
        return [*expected_output(request_id, position + right)[position:], *[3] * 5][:5]

    driver = Driver(
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
def test_after_numbers_that_are_not_finite_others_continue_from_where_every_group_has_kv(
    mix: str, steps_in_flight: int
) -> None:
    chance = random.Random(mix)
    driver = Driver(
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
            if len(driver.unanswered) >= steps_in_flight or chance.random() < 0.5:
                rows = driver.unanswered[0].samples if driver.unanswered else []
                is_bad = rows and driver.unanswered and chance.random() < 0.3
                if driver.unanswered:
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
    driver = Driver(
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
        driver = Driver(
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
def test_a_prefix_hit_begins_with_a_copy_of_the_state_at_the_end_of_an_earlier_prompt(
    steps_in_flight: int,
) -> None:
    driver = Driver(full(), state(), max_steps_in_flight=steps_in_flight)
    first = driver.add("first", prompt_of(22), max_tokens=2)
    driver.run()
    assert driver.plans[0].num_scheduled_tokens == 22, "the prompt is one chunk"
    assert kept(driver) == [20]
    again = driver.add("again", prompt_of(22), max_tokens=2)
    longer = driver.add("longer", [*prompt_of(22), 70, 71, 72], max_tokens=2)
    driver.run()
    for name, key in {"first": first, "again": again, "longer": longer}.items():
        assert driver.received[key] == expected_output(name, 2)
    assert [driver.finished[key].num_cached_tokens for key in (again, longer)] == [20, 20]
    assert kept(driver) == [20, 24], "what is kept already is not kept again"


def kept(driver: Driver) -> list[int]:
    """The numbers of tokens after which states were kept, in order."""
    return [state.num_tokens for plan in driver.plans for state in plan.kept_states]


def test_a_state_is_not_found_in_the_step_that_computes_it_while_kv_is() -> None:
    for groups, num_cached in (([full()], 16), ([full(), state()], 0)):
        driver = Driver(*groups)
        driver.add("one", prompt_of(17), max_tokens=2)
        twin = driver.add("two", prompt_of(17), max_tokens=2)
        driver.run()
        assert driver.finished[twin].num_cached_tokens == num_cached


@pytest.mark.req("SCH-24")
def test_states_are_kept_at_the_prefixes_that_a_request_names() -> None:
    driver = Driver(full(), state())
    hint = CacheHint(60.0, prefixes=(CachePrefix(9, 60.0), CachePrefix(18, 60.0)))
    driver.add("first", prompt_of(30), max_tokens=1, cache_hint=hint)
    driver.run()
    assert kept(driver) == [8, 16, 28]
    other = driver.add("other", [*prompt_of(30)[:19], *[70] * 9], max_tokens=1)
    driver.run()
    assert driver.finished[other].num_cached_tokens == 16


@pytest.mark.req("SCH-24")
def test_states_are_kept_where_the_next_turns_depart_instead_of_at_the_end() -> None:
    driver = Driver(full(), state())
    driver.add("first", prompt_of(30), max_tokens=1, turn_ends=(13, 26))
    driver.run()
    assert kept(driver) == [12, 24]
    driver.add("beyond", prompt_of(30, 50), max_tokens=1, turn_ends=(99,))
    driver.run()
    assert kept(driver) == [12, 24], "no such token"


def test_a_state_of_which_a_page_was_evicted_is_not_found() -> None:
    driver = Driver(full(), state())
    driver.add("first", prompt_of(22), max_tokens=1)
    driver.run()
    (plan,) = (plan for plan in driver.plans if plan.kept_states)
    driver.scheduler.kv_cache.uncache_blocks(plan.kept_states[0].block_ids[1:2])
    again = driver.add("again", prompt_of(22), max_tokens=1)
    driver.run()
    assert driver.finished[again].num_cached_tokens == 0
    assert kept(driver) == [20, 20], "it is kept once more"


def test_where_blocks_are_short_no_state_is_kept_and_none_is_lost() -> None:
    """The pool holds one row, and nothing else."""
    driver = Driver(full(), state(9), num_blocks=1 + 6 + 9, max_model_len=24)
    key = driver.add("r", prompt_of(22), max_tokens=2)
    driver.run()
    assert driver.received[key] == expected_output("r", 2)
    assert kept(driver) == []


def check_a_row_after_a_wrong_state(driver: Driver) -> None:
    """A row that began with the state of another one, which turns out to be wrong, computes again
    from its start."""
    bad = driver.add("bad", prompt_of(22), max_tokens=4)
    driver.plan()
    late = driver.add("late", [*prompt_of(22), 70, 71], max_tokens=4)
    driver.plan()
    assert [start.num_computed_tokens for start in driver.plans[-1].added] == [20]
    driver.answer(nan_rows=[0])
    driver.plan()
    assert [rewind.num_computed_tokens for rewind in driver.plans[-1].rewound] == [0]
    driver.run()
    assert driver.reason(bad) is FinishReason.ERROR
    assert driver.received[late] == expected_output("late", 4)


def test_a_state_that_turns_out_to_be_wrong_is_found_no_more() -> None:
    driver = Driver(full(), state(), max_steps_in_flight=2)
    check_a_row_after_a_wrong_state(driver)


def test_a_wrong_state_is_followed_to_a_row_whose_prefix_hits_are_right() -> None:
    """They are blocks that an earlier request has computed, whose state is not kept any more."""
    driver = Driver(full(), state(), max_steps_in_flight=2)
    driver.add("first", [*prompt_of(21), 9], max_tokens=1)
    driver.run()
    (plan,) = (plan for plan in driver.plans if plan.kept_states)
    driver.scheduler.kv_cache.uncache_blocks(plan.kept_states[0].block_ids)
    check_a_row_after_a_wrong_state(driver)


def test_a_window_frees_no_block_that_an_unanswered_step_computes() -> None:
    """Otherwise the block would be found by its hash if the step fails."""
    driver = Driver(window(6), max_steps_in_flight=2)
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
    connector = AdversarialConnector(match=has_stored({"loads": stored}))
    driver = Driver(*groups, num_blocks=60, connector=connector, cache={"hash_block_size": 4})
    driver.add("first", prompt_of(9), max_tokens=1)
    driver.run()
    key = driver.add("loads", prompt_of(30), max_tokens=9)
    driver.step()
    load = driver.transfers.loading["loads"]
    num_computed = min(stored, 29)
    for spec, table in zip(groups, load.block_ids, strict=True):
        entry = first_seen(spec, num_computed) // spec.block_size
        entry = max(entry - load.first // spec.block_size, 0)
        assert all(table[entry:])
        assert not any(table[:entry])
    loaded = [block_id for table in load.block_ids for block_id in table if block_id]
    driver.ranks.end_load("loads", failing=[] if failed is None else [loaded[failed % len(loaded)]])
    driver.run()
    assert driver.received[key] == expected_output("loads", 9)
    driver.scheduler.check()
    assert driver.scheduler.kv_cache.reset_prefix_cache()


@pytest.mark.parametrize("stored", [5, 16, 23, 30])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_what_a_connector_brings_within_a_step_takes_blocks_only_where_they_are_needed(
    stored: int, steps_in_flight: int
) -> None:
    connector = AdversarialConnector(match=has_leading(stored, is_async=False))
    driver = Driver(
        window(6),
        full(8),
        max_steps_in_flight=steps_in_flight,
        connector=connector,
        cache={"hash_block_size": 4},
    )
    keys = {name: driver.add(name, prompt_of(30), max_tokens=9) for name in ("one", "two")}
    driver.plan()
    held = driver.num_held("one")[0]
    assert held <= window(6).max_blocks(LongestRequest(64, 30 - min(stored, 29)))
    has_null_blocks = any(
        NULL_BLOCK in ids for load in connector.loads_begun for ids in load.block_ids
    )
    assert has_null_blocks == (stored > 8)  # a block and the window
    driver.run()
    for name, key in keys.items():
        assert driver.received[key] == expected_output(name, 9)
    driver.scheduler.check()


def test_bad_blocks_spread_through_a_request_that_has_ended_to_one_that_found_its_blocks() -> None:
    """Within a window a hit holds only the last blocks, so `late` holds none of `bad`'s blocks."""
    driver = Driver(window(5), max_steps_in_flight=2)
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


# Where prefixes that several requests share end


def junction_driver(*groups: KVCacheSpec, **settings: Any) -> Driver:
    """`first` has computed 40 tokens, and left the state after 36."""
    driver = Driver(*(groups or (full(), state())), **settings)
    driver.add("first", prompt_of(40), max_tokens=1)
    driver.run()
    return driver


def num_cached(driver: Driver, name: str, prompt: list[int], **fields: Any) -> int:
    """Run a request; returns its cached tokens."""
    key = driver.add(name, prompt, max_tokens=1, **fields)
    driver.run()
    driver.check_complete(key)
    return driver.finished[key].num_cached_tokens


@pytest.mark.req("SCH-24")
@pytest.mark.parametrize("budget", [7, 28, 100])
def test_a_state_is_kept_where_a_prefix_that_another_request_computed_ends(budget: int) -> None:
    driver = junction_driver(max_num_batched_tokens=budget)
    assert kept(driver) == [36]
    shared = prompt_of(40)[:22]
    assert num_cached(driver, "second", shared + [60] * 20) == 0
    assert kept(driver)[1:] == [20, 40]
    assert num_cached(driver, "third", shared + [61] * 20) == 20
    assert num_cached(driver, "other", [62] * 42) == 0


@pytest.mark.parametrize("groups", [(full(),), (state(),), (full(), window(6))])
def test_without_both_states_and_groups_that_keep_every_block_there_is_no_junction(
    groups: tuple[KVCacheSpec, ...],
) -> None:
    driver = junction_driver(*groups)
    before = kept(driver)
    assert num_cached(driver, "second", prompt_of(40)[:22] + [60] * 20) == (
        0 if state() in groups else 20
    )
    assert kept(driver) == [*before, *([40] if state() in groups else [])]


def test_a_request_that_reads_no_cache_leaves_no_state() -> None:
    driver = junction_driver()
    prompt = prompt_of(40)[:22] + [60] * 20
    assert num_cached(driver, "r", prompt, skip_reading_prefix_cache=True) == 0
    assert kept(driver) == [36]


def test_requests_that_arrive_together_leave_a_state_at_their_junction() -> None:
    driver = Driver(full(), state(), max_num_batched_tokens=200)
    shared = prompt_of(24)
    for index, name in enumerate("ab"):
        driver.add(name, shared + [60 + index] * 20, max_tokens=1)
    driver.step()
    assert driver.scheduled == {"a": 44, "b": 44}
    driver.run()
    assert kept(driver) == [40, 24, 40]
    assert num_cached(driver, "c", shared + [70] * 20) == 24


def test_a_new_occupant_of_a_row_keeps_no_state_of_the_one_before() -> None:
    driver = junction_driver(max_num_seqs=1, max_num_batched_tokens=16)
    key = driver.add("second", prompt_of(40)[:34] + [60] * 20, max_tokens=1)
    driver.step()
    driver.abort(key)
    assert num_cached(driver, "other", [63] * 42) == 0
    assert kept(driver) == [36, 40]
