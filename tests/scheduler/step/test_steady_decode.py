"""Steps like the one before cost nothing, and say what a step that looks at everything would."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longshore.protocol.handshake import ToWorker
from longshore.protocol.outputs import FinishReason
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.transport.codec import Encoder
from longshore.scheduler.step.in_flight import PlannedStep, SamplingRows
from longshore.scheduler.step.planner import PauseState
from longshore.scheduler.step.running import RunningTable
from longshore.scheduler.step.steady_decode import SteadyDecode
from tests.harness.driver import Driver
from tests.harness.tokens import EOS, prompt_of, steady_token
from tests.scheduler.features.test_encoder import items_of
from tests.scheduler.test_request import make_request

BOTH = pytest.mark.parametrize("steps_in_flight", [1, 2])


def encoded(plan: SchedulerOutput) -> list[bytes]:
    """What the workers get, without what only `verify_plan` adds, and without the connector's."""
    encoder: Encoder[ToWorker] = Encoder()
    frames = encoder.encode(msgspec.structs.replace(plan, full_state=None, connector_metadata=b""))
    return [bytes(frame) for frame in frames]


def may_end(request_id: str, position: int) -> int:
    """Now and then a stop id."""
    token = steady_token(request_id, position)
    return EOS if token % 13 == 0 else token


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[None]]:
    """Counts the calls of a method, which does what it always did."""

    def count(owner: Any, name: str) -> list[None]:
        made: list[None] = []
        method = getattr(owner, name)

        def counted(*arguments: Any, **cached: Any) -> Any:
            made.append(None)
            return method(*arguments, **cached)

        monkeypatch.setattr(owner, name, counted)
        return made

    return count


# The same plans

happenings = st.lists(
    st.one_of(
        st.integers(1, 20),  # steps
        st.sampled_from(["plan", "answer", "pause", "pause all", "go on", "restart", "stored"]),
        st.fixed_dictionaries(
            {
                "length": st.integers(1, 20),
                "start": st.sampled_from([0, 0, 30]),
                "max_tokens": st.integers(1, 25),
                "client": st.integers(0, 1),
            }
        ),
        st.tuples(st.sampled_from(["abort", "stop"]), st.integers(0, 9), st.integers(0, 9)),
    ),
    max_size=30,
)
engines = st.fixed_dictionaries(
    {
        "rules": st.sampled_from([None, {}, {"stores": lambda: True}]),
        "block_size": st.sampled_from([1, 4, 4, 16]),
        "num_groups": st.integers(1, 2),
        "max_num_seqs": st.integers(1, 4),
        "max_num_batched_tokens": st.sampled_from([2, 10, 60]),
        "num_lookahead_tokens": st.sampled_from([0, 0, 3]),
        "enable_prefix_caching": st.booleans(),
        "max_steps_in_flight": st.integers(1, 2),
    }
)


def play(driver: Driver, happening: Any, epoch: int) -> None:
    keys = list(driver.finished) + list(driver.received)
    match happening:
        case int():
            driver.steps(happening)
        case "plan":
            driver.plan()
        case "answer" if driver.unanswered:
            driver.answer()
        case "pause":
            driver.scheduler.set_pause(PauseState.PAUSED_NEW)
        case "pause all":
            driver.scheduler.set_pause(PauseState.PAUSED_ALL)
        case "go on":
            driver.scheduler.set_pause(PauseState.UNPAUSED)
        case "stored":
            driver.ranks.end_all()
        case "restart":
            driver.restart_workers(epoch)
        case dict():
            prompt = prompt_of(happening["length"], happening["start"])
            options = {key: happening[key] for key in ("max_tokens", "client")}
            driver.add(f"r{len(driver.requests)}", prompt, **options)
        case ("abort", index, _) if keys:
            driver.abort(keys[index % len(keys)])
        case ("stop", index, num_tokens) if keys:
            driver.stop_found(keys[index % len(keys)], num_tokens)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(engines, st.integers(0, 20), happenings)
def test_steps_that_are_not_worked_out_anew_are_planned_as_if_they_were(
    engine: dict[str, Any], num_spare: int, script: list[Any]
) -> None:
    """The full state beside a plan can only come from looking at everything, so with `verify_plan`
    no step stands."""
    max_model_len = 48
    num_blocks = 1 + engine["num_groups"] * -(-max_model_len // engine["block_size"]) + num_spare
    quick, thorough = (
        Driver(
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            sample=may_end,
            verify_plan=verify_plan,
            cache={"enable_kv_cache_events": True},
            **engine,
        )
        for verify_plan in (False, True)
    )
    epoch = 1
    for happening in (*script, "go on"):
        epoch += happening == "restart"
        for driver in (quick, thorough):
            play(driver, happening, epoch)
        events = [driver.scheduler.take_kv_events() for driver in (quick, thorough)]
        assert repr(events[0]) == repr(events[1])
    for driver in (quick, thorough):
        driver.run()
    assert list(map(encoded, quick.plans)) == list(map(encoded, thorough.plans))
    commands = [list(map(driver.commands_of, driver.plans)) for driver in (quick, thorough)]
    assert commands[0] == commands[1]
    assert quick.received == thorough.received
    assert quick.finished == thorough.finished


# They cost nothing


@BOTH
def test_between_two_block_borders_no_row_and_no_block_is_looked_at(
    calls: Callable[[Any, str], list[None]], steps_in_flight: int
) -> None:
    driver = Driver(
        block_size=16, max_model_len=256, max_steps_in_flight=steps_in_flight, verify_plan=False
    )
    driver.add("r", prompt_of(20), max_tokens=220)
    driver.add("s", prompt_of(20, 40), max_tokens=220)
    driver.steps(8)
    worked_out = calls(driver.scheduler.running, "wanted")
    grown = calls(driver.scheduler.kv_cache, "grow")
    cached = calls(driver.scheduler.kv_cache.full_blocks, "rows_to_cache")
    driver.steps(160)
    assert len(worked_out) == 0
    # Per block: one needs it, one caches what is full (later, if its last token was on its way),
    # and one finds that there is nothing to do, and for how long.
    assert len(grown) == len(cached) <= 10 * (2 + steps_in_flight)


def test_requests_that_wait_for_a_row_do_not_make_the_others_be_looked_at(
    calls: Callable[[Any, str], list[None]],
) -> None:
    driver = Driver(max_num_seqs=2, verify_plan=False)
    for name in "abc":
        driver.add(name, prompt_of(5), max_tokens=40)
    driver.steps(3)
    worked_out = calls(driver.scheduler.running, "wanted")
    driver.steps(20)
    assert (worked_out, driver.scheduler.get_request_counts()) == ([], (2, 1))


def test_a_request_that_starts_or_ends_is_noticed_in_the_next_plan() -> None:
    driver = Driver(block_size=16, verify_plan=False)
    driver.add("a", prompt_of(17), max_tokens=30)
    driver.steps(5)
    b = driver.add("b", prompt_of(3, 40), max_tokens=30)
    plan = driver.step()
    assert plan is not None
    assert [start.request_id for start in plan.added] == ["b"]
    driver.steps(3)
    driver.abort(b)
    plan = driver.step()
    assert plan is not None
    assert plan.finished_rows.tolist() == [1]


@pytest.mark.parametrize(
    ("state", "goes_on"), [(PauseState.PAUSED_ALL, False), (PauseState.PAUSED_NEW, True)]
)
def test_a_pause_is_noticed_in_the_next_plan(state: PauseState, goes_on: bool) -> None:
    driver = Driver(block_size=16, verify_plan=False)
    driver.add("a", prompt_of(17), max_tokens=30)
    driver.steps(5)
    driver.scheduler.set_pause(state)
    assert (driver.step() is not None) is goes_on
    driver.add("b", prompt_of(3, 40), max_tokens=30)
    assert (driver.step() is not None) is goes_on
    assert driver.running == ["a"]
    driver.scheduler.set_pause(PauseState.UNPAUSED)
    driver.steps(2)
    assert driver.running == ["a", "b"]


def test_unneeded_encoder_outputs_are_evicted_in_a_steady_step() -> None:
    driver = Driver(block_size=16, verify_plan=False, max_num_encoder_input_tokens=8)
    driver.add("a", prompt_of(17), multimodal=items_of(("image", 2, 8)), max_tokens=30)
    driver.steps(5)
    assert driver.scheduler.reset_encoder_cache()
    freed = [plan.freed_encoder_hashes for plan in (driver.step(), driver.step()) if plan]
    assert freed == [("image",), ()]


@BOTH
def test_limits_and_stop_ids_end_requests_in_quiet_steps(steps_in_flight: int) -> None:
    driver = Driver(
        block_size=16,
        max_steps_in_flight=steps_in_flight,
        verify_plan=False,
        sample=lambda name, position: EOS if (name, position) == ("b", 6) else 50,
    )
    a = driver.add("a", prompt_of(17), max_tokens=9)
    b = driver.add("b", prompt_of(17, 40), max_tokens=20, client=1)
    c = driver.add("c", prompt_of(17, 60), max_tokens=20, sampling={"min_tokens": 8})
    driver.run()
    assert [len(driver.received[key]) for key in (a, b, c)] == [9, 7, 20]
    assert driver.reason(a) is FinishReason.LENGTH_CAPPED
    assert driver.reason(b) is FinishReason.STOPPED


# What stands, and until when


def decoding(*num_tokens: int, last: int = 60) -> RunningTable:
    """Rows that have computed all of their tokens but the last, in order."""
    running = RunningTable(len(num_tokens) + 1, 64)
    for index, count in enumerate(num_tokens):
        request = make_request(str(index), prompt=count, sampling={"max_tokens": last + 1 - count})
        running.admit(request, count - 1, ())
    return running


def standing_step(running: RunningTable, step: int) -> SteadyDecode:
    rows = running.order
    num_scheduled = np.zeros(running.max_num_seqs, np.int64)
    num_scheduled[rows] = 1
    return SteadyDecode(
        running, PlannedStep(step, SamplingRows(running, rows), num_scheduled), num_scheduled
    )


def test_decode_is_steady_until_a_row_reaches_its_last_token_or_membership_changes() -> None:
    running = decoding(58, 20)
    standing = standing_step(running, step=7)
    assert (standing.num_tokens, standing.num_scheduled.tolist()) == (2, [1, 1, 0])
    assert [standing.holds(running, step) for step in (8, 10, 11)] == [True, True, False]
    running.rewind_row(1, 4, newest_step=7)
    assert not standing.holds(running, 8)


@pytest.mark.parametrize(
    ("num_tokens", "block_sizes", "num_lookahead", "num_steps"),
    [
        ((18,), (16,), 0, 14),  # 17 computed: the step that computes the 32nd caches a block
        ((18, 30), (16,), 0, 2),
        ((17,), (16,), 0, 0),  # 16 computed: the next one needs a block
        ((18,), (16,), 13, 2),
        ((18,), (16, 4), 0, 2),
    ],
)
def test_quiet_steps_end_before_any_row_needs_or_fills_a_block(
    num_tokens: tuple[int, ...], block_sizes: tuple[int, ...], num_lookahead: int, num_steps: int
) -> None:
    running = decoding(*num_tokens)
    standing = standing_step(running, step=7)
    assert not standing.needs_no_block(8)
    standing.look_ahead(running, block_sizes, num_lookahead=num_lookahead, step=7)
    assert [step for step in range(8, 30) if standing.needs_no_block(step)] == list(
        range(8, 8 + num_steps)
    )


def test_a_full_block_whose_last_token_is_on_its_way_is_not_passed_over() -> None:
    running = decoding(16)
    running.num_computed[0] = 16  # two plans unanswered: the block is full, and not verified
    running.num_tokens[0] = 15
    standing = standing_step(running, step=7)
    standing.look_ahead(running, (16,), num_lookahead=3, step=7)  # the next block is there already
    assert not standing.needs_no_block(8)


def test_what_was_gathered_serves_the_same_rows_until_membership_changes() -> None:
    running = decoding(5, 6, 7)
    rows = np.array([0, 1, 2])
    sampling = SamplingRows(running, rows)
    assert (sampling.index, sampling.client, sampling.is_plain) == (slice(0, 3), 3, True)
    assert sampling.serves(running, rows.copy())
    assert not sampling.serves(running, rows[:2])
    assert not sampling.serves(running, np.array([0, 1, 3]))
    running.release([running.request_on(1)])
    assert not sampling.serves(running, rows)
    assert SamplingRows(running, np.array([0, 2])).index.tolist() == [0, 2]


def test_a_stop_id_is_seen_only_in_its_own_row() -> None:
    running = RunningTable(3, 64)
    for name, stop in (("a", (5,)), ("b", (6, 7))):
        request = make_request(name, sampling={"stop_token_ids": stop, "ignore_eos": True})
        running.admit(request, 0, ())
    sampling = SamplingRows(running, np.array([0, 1]))
    for tokens, has_stop_id in (([6, 5], False), ([5, 9], True), ([9, 7], True), ([9, 9], False)):
        assert sampling.has_stop_id(np.array(tokens, np.int32)) is has_stop_id
    part = sampling.part(np.array([False, True]))
    assert (part.rows.tolist(), part.handles.tolist(), part.clients.tolist()) == ([1], [7], [3])
    assert part.has_stop_id(np.array([6], np.int32))
    assert not part.has_stop_id(np.array([5], np.int32))
