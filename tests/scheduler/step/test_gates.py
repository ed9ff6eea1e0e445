"""What an admission must leave free, and that nothing of it stands in the way of an idle engine."""

from typing import Any

import pytest

from longshore.scheduler.config import CacheConfig
from longshore.scheduler.step.admission import AdmissionGates
from tests.harness.connector import has_stored
from tests.harness.driver import Driver
from tests.harness.tokens import expected_output, prompt_of

OFF = {"watermark": 0.0, "preempt_threshold": 1.0, "admit_threshold": 1.0}


def gated(num_blocks: int, *, cache: dict[str, Any] | None = None, **settings: Any) -> Driver:
    """Gates that are not named in `cache` are off; blocks hold four tokens, nothing is reused."""
    return Driver(
        num_blocks=num_blocks,
        enable_prefix_caching=False,
        cache=OFF | (cache or {}),
        **({"max_num_batched_tokens": 256, "max_model_len": 64} | settings),
    )


def fill(driver: Driver, num_blocks: int) -> None:
    """Run requests that hold `num_blocks` blocks for a while: all but the last token of each."""
    while num_blocks:
        size = min(num_blocks, 10)
        driver.add(f"fill{num_blocks}", prompt_of(4 * size - 3), max_tokens=4)
        num_blocks -= size
    while len(driver.scheduler.waiting):
        driver.step()


# Watermark


@pytest.mark.req("WMK-01")
@pytest.mark.parametrize(
    ("num_blocks", "watermark", "kept"),
    [(8206, 0.01, 82), (8207, 0.01, 82), (99, 0.01, 0), (100, 0.01, 1), (40, 0.1, 4), (9, 0, 0)],
)
def test_the_watermark_is_a_share_of_all_blocks_rounded_down(
    num_blocks: int, watermark: float, kept: int
) -> None:
    assert AdmissionGates(CacheConfig(watermark=watermark), num_blocks, 8).watermark_blocks == kept


@pytest.mark.req("WMK-01", "WMK-02")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize(("num_tokens", "is_admitted"), [(64, True), (65, False)])
def test_an_admission_leaves_the_watermark_free(
    steps_in_flight: int, num_tokens: int, is_admitted: bool
) -> None:
    """40 blocks, 39 usable, 4 kept back: 19 held and 16 needed leave 4, with 17 it were 3."""
    driver = gated(
        40, cache={"watermark": 0.1}, max_model_len=80, max_steps_in_flight=steps_in_flight
    )
    fill(driver, 19)
    assert driver.num_free_blocks == 20
    driver.add("new", prompt_of(num_tokens), max_tokens=2)
    driver.step()
    assert ("new" in driver.running) is is_admitted
    driver.run()
    assert len(driver.received[0, 2]) == 2


@pytest.mark.req("WMK-01")
def test_running_requests_may_use_the_blocks_that_admissions_leave() -> None:
    driver = gated(21, cache={"watermark": 0.4})
    driver.add("old", prompt_of(16), max_tokens=25)
    driver.add("young", prompt_of(16), max_tokens=25)
    driver.step()
    assert driver.running == ["old", "young"]
    assert driver.num_free_blocks == 12  # 8 are kept back
    while driver.num_free_blocks > 2:
        driver.step()
    assert driver.running == ["old", "young"]
    driver.run()
    assert driver.scheduler.make_stats().num_preemptions == 0


@pytest.mark.req("WMK-02")
@pytest.mark.parametrize(("is_held", "is_admitted"), [(True, True), (False, False)])
def test_a_cached_prefix_counts_as_needed_unless_another_request_holds_it(
    is_held: bool, is_admitted: bool
) -> None:
    """12 of 20 blocks are free, 11 are kept back. Of 8 blocks 7 are cached: if a request holds them
    1 is needed, otherwise the 7 are among the free ones and 8 are."""
    driver = Driver(num_blocks=21, cache=OFF | {"watermark": 0.53}, max_num_batched_tokens=256)
    if not is_held:
        driver.add("first", prompt_of(30), max_tokens=1)
        driver.step()
    driver.add("runs", prompt_of(30, 10 if is_held else 40), max_tokens=30)
    driver.step()
    assert driver.num_free_blocks == 12
    driver.add("new", prompt_of(30), max_tokens=2)
    driver.step()
    assert ("new" in driver.running) is is_admitted
    driver.run()


# Memory pressure


def has_room(gates: AdmissionGates, usage: float) -> bool:
    """Whether a request that needs no block is admitted at this share of 1000 blocks."""
    num_free = 1000 - round(1000 * usage)
    return gates.has_room(0, num_free=num_free, nothing_runs=False)


@pytest.mark.req("WMK-03")
def test_pressure_closes_above_one_threshold_opens_below_the_other_and_stays_between() -> None:
    cache = CacheConfig(watermark=0.0, preempt_threshold=0.95, admit_threshold=0.80)
    gates = AdmissionGates(cache, 1001, 1000)
    usages = [0.0, 0.80, 0.949, 0.95, 0.951, 0.95, 0.81, 0.80, 0.799, 0.80, 0.95, 1.0, 0.0]
    closed = [False, False, False, False, True, True, True, True, False, False, False, True, False]
    assert [not has_room(gates, usage) for usage in usages] == closed


@pytest.mark.req("WMK-03")
def test_the_thresholds_in_force_are_those_of_the_settings() -> None:
    gates = AdmissionGates(CacheConfig(watermark=0.0), 1001, 1000)
    assert has_room(gates, 0.94)
    assert has_room(gates, 0.95)
    assert not has_room(gates, 0.96)
    assert not has_room(gates, 0.80)
    assert has_room(gates, 0.79)


@pytest.mark.req("WMK-03")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_under_pressure_no_request_is_admitted_until_enough_blocks_are_free(
    steps_in_flight: int,
) -> None:
    """20 usable blocks: 16 held is 0.8, not above it; 17 is. Open again below 0.5."""
    driver = gated(
        21,
        cache={"preempt_threshold": 0.8, "admit_threshold": 0.5},
        max_steps_in_flight=steps_in_flight,
    )
    keys = [driver.add(f"r{index}", prompt_of(13), max_tokens=16) for index in range(4)]
    driver.step()
    assert driver.scheduler.kv_cache.usage == pytest.approx(0.8)
    driver.add("fits", prompt_of(2), max_tokens=16)
    driver.step()  # 16 of 20 held: admitted, 17 are now
    assert "fits" in driver.running
    driver.add("late", prompt_of(2), max_tokens=2)
    driver.step()
    assert "late" not in driver.running
    driver.abort(keys[0])
    driver.step()
    assert 0.5 <= driver.scheduler.kv_cache.usage < 0.8
    assert "late" not in driver.running  # between the thresholds it stays closed
    driver.abort(keys[1], keys[2])
    driver.step()
    assert "late" in driver.running
    driver.run()


@pytest.mark.req("NUM-28", "WMK-03")
def test_cached_blocks_without_references_are_no_pressure() -> None:
    """6,200 running, 1,500 cached, 82 kept back and 424 more: 0.756, not 0.938."""
    driver = Driver(
        num_blocks=8207,
        block_size=1,
        max_model_len=8000,
        max_num_batched_tokens=8192,
        cache={"preempt_threshold": 0.93},
    )
    driver.add("base", prompt_of(6200), max_tokens=9)
    cached = driver.add("cached", prompt_of(1500, 7), max_tokens=9)
    driver.plan()
    assert driver.num_free_blocks == 82 + 424
    assert driver.scheduler.kv_cache.usage == pytest.approx(0.938, abs=5e-4)
    driver.answer()
    driver.add("new", prompt_of(5, 50), max_tokens=1)
    driver.step()
    assert driver.running == ["base", "cached"]
    driver.abort(cached)
    assert driver.scheduler.kv_cache.usage == pytest.approx(0.756, abs=5e-4)
    driver.plan()
    assert driver.running == ["base", "new"]


# Room for the whole input


@pytest.mark.req("SCH-15", "ERR-32")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize(
    ("reserve", "num_tokens", "is_admitted"),
    [(True, 40, True), (True, 41, False), (False, 41, True)],
)
def test_with_reserve_full_isl_blocks_for_the_whole_input_must_be_free(
    steps_in_flight: int, reserve: bool, num_tokens: int, is_admitted: bool
) -> None:
    """10 free blocks: 40 tokens fit them, whatever output follows; 41 do not."""
    driver = gated(
        20,
        max_num_batched_tokens=48,
        long_prefill_token_threshold=37,
        scheduler_reserve_full_isl=reserve,
        max_steps_in_flight=steps_in_flight,
    )
    fill(driver, 9)
    assert driver.num_free_blocks == 10
    driver.add("new", prompt_of(num_tokens), max_tokens=20)
    driver.step()
    assert ("new" in driver.running) is is_admitted
    if is_admitted:
        assert driver.scheduled["new"] == 37
    driver.run()
    assert driver.received[0, 1] == expected_output("new", 20)


@pytest.mark.req("SCH-15")
def test_reserve_full_isl_takes_only_the_first_chunks_blocks() -> None:
    driver = gated(40, max_num_batched_tokens=8, scheduler_reserve_full_isl=True)
    driver.add("r", prompt_of(60), max_tokens=2)
    driver.step()
    assert len(driver.table("r")) == 2
    driver.run()


# Idle


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize(
    "gate",
    [
        {"cache": {"watermark": 0.99}},
        {"cache": {"preempt_threshold": 0.01, "admit_threshold": 0.01}},
        {"scheduler_reserve_full_isl": True, "cache": {"watermark": 0.5}},
    ],
)
def test_no_gate_keeps_a_request_out_of_an_engine_in_which_nothing_runs(
    steps_in_flight: int, gate: dict[str, Any]
) -> None:
    driver = gated(17, max_num_batched_tokens=16, max_steps_in_flight=steps_in_flight, **gate)
    keys = [driver.add(f"r{index}", prompt_of(50), max_tokens=14) for index in range(3)]
    driver.run()
    assert [driver.received[key] for key in keys] == [
        expected_output(f"r{index}", 14) for index in range(3)
    ]


def test_a_closed_gate_does_not_stop_a_request_in_an_idle_engine() -> None:
    driver = gated(11, cache={"preempt_threshold": 0.5, "admit_threshold": 0.1}, max_model_len=40)
    for index in range(5):
        driver.add(f"r{index}", prompt_of(30), max_tokens=8)
    driver.run()
    assert len(driver.finished) == 5
    assert max(plan.num_rows for plan in driver.plans) == 1


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize(
    "gate",
    [
        {"scheduler_reserve_full_isl": True},
        {"cache": {"watermark": 0.9}},
        {"cache": {"preempt_threshold": 0.1, "admit_threshold": 0.1}},
    ],
)
def test_no_gate_keeps_a_request_out_while_only_loads_hold_blocks(
    steps_in_flight: int, gate: dict[str, Any]
) -> None:
    """The load may never end, and 40 tokens do not fit beside it; the first 16 do."""
    driver = gated(
        17,
        max_num_batched_tokens=16,
        max_steps_in_flight=steps_in_flight,
        rules={"match": has_stored({"loads": 28})},
        **gate,
    )
    driver.add("loads", prompt_of(30), max_tokens=2)
    driver.step()
    assert driver.num_free_blocks == 8
    driver.add("big", prompt_of(40, 50), max_tokens=2)
    driver.step()
    assert driver.scheduled == {"big": 16}
