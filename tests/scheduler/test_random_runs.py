"""Whole runs of random requests: what must hold whatever happens.

The driver checks after every call that blocks are conserved and references are the holders, after
every plan that scheduler and worker hold the same rows, and in every step that each row reads its
own KV. These tests add what only a whole run can show.
"""

import gc
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longshore.protocol.arrays import int32_array
from longshore.protocol.outputs import FinishReason, ModelRunnerOutput
from longshore.protocol.requests import AddRequest, CacheHint
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.scheduler import Scheduler
from tests.harness.driver import Driver
from tests.harness.kv_groups import kv_cache_config
from tests.harness.tokens import EOS, expected_output, steady_token

requests = st.fixed_dictionaries(
    {
        "shared": st.integers(0, 14),
        "own": st.integers(1, 14),
        "max_tokens": st.integers(1, 12),
        "priority": st.integers(-1, 1),
        "client": st.integers(0, 1),
        "skip": st.booleans(),
        "salt": st.sampled_from([None, None, "salt"]),
        "hint": st.sampled_from([None, CacheHint(3.0), CacheHint(50.0, "session")]),
    }
)
events = st.lists(
    st.one_of(
        requests,
        st.just("plan"),
        st.just("answer"),
        st.just("step"),
        st.tuples(st.sampled_from(["abort", "stop"]), st.integers(0, 9), st.integers(0, 6)),
    ),
    max_size=60,
)
engines = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["fcfs", "priority"]),
        "max_steps_in_flight": st.integers(1, 2),
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.integers(1, 40),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 5]),
        "num_blocks": st.integers(11, 20),
        "enable_prefix_caching": st.booleans(),
    }
)


def play(driver: Driver, happenings: list[Any]) -> dict[tuple[int, int], tuple[str, int]]:
    """Let it happen; returns name and max_tokens of each request."""
    names: dict[tuple[int, int], tuple[str, int]] = {}
    for happening in happenings:
        match happening:
            case dict():
                name = f"r{len(names)}"
                prompt = [7] * happening["shared"] + [20 + len(names)] * happening["own"]
                key = driver.add(
                    name,
                    prompt,
                    max_tokens=happening["max_tokens"],
                    priority=happening["priority"],
                    client=happening["client"],
                    skip_reading_prefix_cache=happening["skip"],
                    cache_salt=happening["salt"],
                    cache_hint=happening["hint"],
                )
                names[key] = (name, happening["max_tokens"])
            case "plan":
                driver.plan()
            case "answer" if driver.unanswered:
                driver.answer()
            case "step":
                driver.step()
            case ("abort", index, _) if names:
                driver.abort(list(names)[index % len(names)])
            case ("stop", index, num_tokens) if names:
                driver.stop_found(list(names)[index % len(names)], num_tokens)
    return names


@settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(engines, events)
@pytest.mark.req("SYS-05", "SPD-07", "POO-11", "SCH-02", "SCH-08")
def test_whatever_happens_every_request_ends_once_with_its_own_tokens(
    engine: dict[str, Any], happenings: list[Any]
) -> None:
    driver = Driver(max_model_len=40, verify_plan=True, **engine)
    names = play(driver, happenings)
    driver.run()
    assert set(driver.finished) == set(names)
    for key, (name, max_tokens) in names.items():
        tokens, end = driver.received[key], driver.finished[key]
        assert tokens == expected_output(name, len(tokens))
        if end.reason is FinishReason.LENGTH_CAPPED:
            assert len(tokens) == end.num_output_tokens == max_tokens
        else:
            assert end.reason in (FinishReason.ABORTED, FinishReason.STOPPED)
            assert end.num_output_tokens <= len(tokens) <= max_tokens
    assert driver.num_free_blocks == engine["num_blocks"] - 1
    assert driver.scheduler.get_request_counts() == (0, 0)
    assert driver.scheduler.num_steps_in_flight == 0
    for plan in driver.plans:
        assert 0 <= plan.num_scheduled_tokens <= driver.config.token_budget
        assert plan.num_rows <= driver.config.max_num_seqs
        assert plan.full_state is not None
        assert len(plan.full_state) == plan.num_rows
        assert sum(state.num_scheduled_tokens > 0 for state in plan.full_state) <= plan.num_rows


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.req("POO-11", "SYS-05")
def test_a_long_run_under_pressure_keeps_every_token_in_its_place(
    policy: str, steps_in_flight: int
) -> None:
    chance = random.Random(steps_in_flight)
    driver = Driver(
        num_blocks=12,
        max_model_len=40,
        max_num_seqs=5,
        max_num_batched_tokens=24,
        policy=policy,
        max_steps_in_flight=steps_in_flight,
    )
    names = {}
    for number in range(150):
        prompt = [7] * chance.randrange(14) + [20 + number % 70] * chance.randrange(1, 12)
        name, max_tokens = f"r{number}", chance.randrange(1, 14)
        key = driver.add(name, prompt, max_tokens=max_tokens, priority=chance.randrange(3))
        names[key] = (name, max_tokens)
        for _ in range(chance.randrange(5)):
            driver.step()
        unfinished = [key for key in names if key not in driver.finished]
        if unfinished and chance.random() < 0.3:
            driver.abort(chance.choice(unfinished))
    driver.run()
    stats = driver.scheduler.make_stats()
    assert stats.num_preemptions > 20
    assert stats.num_prefix_hit_tokens > 100
    assert stats.num_preempted_hit_tokens > 20
    assert (stats.num_stale_tokens > 0) == (steps_in_flight == 2)
    for key, (name, max_tokens) in names.items():
        tokens = driver.received[key]
        assert tokens == expected_output(name, len(tokens))
        if driver.reason(key) is not FinishReason.ABORTED:
            assert len(tokens) == max_tokens
    assert driver.num_free_blocks == 11


@settings(max_examples=25, deadline=None, derandomize=True)
@given(engines, events)
def test_the_same_calls_give_the_same_plans(engine: dict[str, Any], happenings: list[Any]) -> None:
    digests = []
    for _ in range(2):
        driver = Driver(max_model_len=40, verify_plan=True, **engine)
        play(driver, happenings)
        driver.run()
        digests.append([plan.digest for plan in driver.plans])
    assert digests[0] == digests[1]


@pytest.mark.req("SYS-05")
def test_a_rows_table_only_grows_between_its_start_and_its_end() -> None:
    driver = Driver(num_blocks=17, max_steps_in_flight=2, max_num_batched_tokens=12)
    for index in range(12):
        driver.add(f"r{index}", [7] * (index % 9) + [20 + index] * 5, max_tokens=3 + index)
    tables: dict[int, list[int]] = {}
    grown = 0
    while driver.scheduler.has_unfinished_requests():
        driver.step()
        running = driver.scheduler.running
        now = {
            int(running.generation[row]): driver.scheduler.kv_cache.block_ids(row)[0].tolist()
            for row in running.order.tolist()
        }
        for generation, table in now.items():
            before = tables.get(generation, [])
            assert table[: len(before)] == before
            grown += bool(before) and len(table) > len(before)
        tables = now
    assert grown > 10
    assert driver.scheduler.make_stats().num_preemptions > 0


def test_a_stop_token_ends_requests_under_pressure_as_it_does_without() -> None:
    def sample(request_id: str, position: int) -> int:
        token = steady_token(request_id, position)
        return EOS if token % 11 == 0 else token

    results = []
    for num_blocks, in_flight in ((9, 1), (9, 2), (100, 1)):
        driver = Driver(
            num_blocks=num_blocks, max_model_len=32, max_steps_in_flight=in_flight, sample=sample
        )
        for index in range(10):
            driver.add(f"r{index}", [20 + index] * (3 + index), max_tokens=15)
        driver.run()
        results.append((dict(driver.received), {k: e.reason for k, e in driver.finished.items()}))
    assert results[0] == results[1] == results[2]
    assert set(results[0][1].values()) == {FinishReason.STOPPED, FinishReason.LENGTH_CAPPED}


@pytest.mark.req("SYS-07")
def test_a_steady_decode_that_takes_blocks_creates_nothing_for_the_collector() -> None:
    num_rows, num_steps = 32, 64
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=512, max_num_seqs=num_rows, max_steps_in_flight=1),
        CacheConfig(block_size=4),
        kv_cache=kv_cache_config(4000),
        hash_seed=b"seed",
        vocab_size=100,
    )
    for index in range(num_rows):
        prompt = int32_array([index] * (5 + index % 4))
        message = AddRequest(f"r{index}", index, prompt, SamplingParams(max_tokens=400))
        scheduler.add_request(message, client=0, now=0.0)

    def run(steps: int) -> None:
        for _ in range(steps):
            plan = scheduler.schedule(0.0)
            assert plan is not None
            tokens = np.full(num_rows, 9, np.int32)
            answer = ModelRunnerOutput(1, plan.step, sampled_tokens=tokens)
            scheduler.update_from_output(answer, 0.0)
            scheduler.take_outputs()

    run(20)
    gc.collect()
    gc.disable()
    try:
        free_before, tracked_before = scheduler.kv_cache.num_free_blocks, len(gc.get_objects())
        run(num_steps)
        blocks_taken = free_before - scheduler.kv_cache.num_free_blocks
        tracked = len(gc.get_objects()) - tracked_before
    finally:
        gc.enable()
    assert blocks_taken == num_rows * num_steps // 4 == 512
    assert tracked < 20  # not one per block, nor one per step
