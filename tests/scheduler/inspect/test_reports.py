"""Progress: in each step a request advances, or the report says what each request waits for."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import (
    LoRARequest,
    MultimodalFeature,
    PoolingParams,
)
from longshore.protocol.sampling import RepetitionDetection
from longshore.protocol.settings import MAX_TIMEOUT_S
from longshore.protocol.statistics import EngineReport
from longshore.scheduler.queue.queues import WaitingRequests
from longshore.scheduler.request import Request, RequestStatus
from longshore.scheduler.step.planner import PauseState
from tests.harness.connector import has_stored
from tests.harness.driver import Driver
from tests.harness.grammar import FakeCompiler, grammar_for
from tests.harness.shared_drivers import pressed
from tests.harness.tokens import expected_output, prompt_of, steady_token

BOTH = pytest.mark.parametrize("steps_in_flight", [1, 2])
OUTSIDE = ("its grammar", "its KV", "the next input of its session", "its connector")
"""How the reasons begin that no step of the scheduler can remove."""


def report_of(driver: Driver) -> EngineReport:
    return driver.scheduler.make_report(driver.now, "engine-0.1")


def reasons(driver: Driver) -> dict[str, str]:
    """By request id, in the order of the report."""
    return {waiting.request_id: waiting.waits_for for waiting in report_of(driver).waiting}


# What each request waits for


def test_a_request_that_only_came_too_late_waits_for_the_next_step() -> None:
    driver = Driver()
    driver.add("r", prompt_of(6))
    assert reasons(driver) == {"r": "the next step"}
    driver.run()
    assert reasons(driver) == {}


def test_requests_after_the_head_wait_for_their_turn() -> None:
    driver = Driver(max_num_seqs=1)
    for index in range(4):
        driver.add(f"r{index}", prompt_of(6, 9 * index))
    driver.step()
    assert reasons(driver) == {
        "r1": "a row: all max_num_seqs=1 are held",
        "r2": "its turn: 1 ahead of it could run first",
        "r3": "its turn: 2 ahead of it could run first",
    }
    driver.run()


def test_a_request_without_an_adapter_slot_says_so_and_delays_no_others() -> None:
    driver = Driver(max_loras=1, max_num_seqs=2)
    driver.add("a", prompt_of(6), lora=LoRARequest("a"))
    driver.add("b", prompt_of(6, 30), lora=LoRARequest("b"))
    driver.add("c", prompt_of(6, 60))
    driver.add("d", prompt_of(6, 70))
    driver.step()
    assert driver.running == ["a", "c"]
    reported = reasons(driver)
    assert reported["b"] == "a slot for its adapter 'b': max_loras=1 others run"
    assert reported["d"] == "a row: all max_num_seqs=2 are held"
    driver.run()


def test_a_shortage_of_blocks_is_reported_with_its_numbers() -> None:
    driver = Driver(num_blocks=39, cache={"watermark": 0.12}, max_num_batched_tokens=256)
    driver.add("old", prompt_of(60), max_tokens=4)
    driver.add("other", prompt_of(60, 50), max_tokens=4)
    driver.add("late", prompt_of(17, 80), max_tokens=4)
    driver.steps(2)
    assert driver.running == ["old", "other"]
    assert reasons(driver)["late"].startswith(
        "blocks: its next chunk needs 5, 6 are free, of which 4 are reserved"
    )
    driver.run()


def test_memory_pressure_is_reported() -> None:
    driver = Driver(
        num_blocks=21, cache={"preempt_threshold": 0.5, "admit_threshold": 0.1}, max_num_seqs=4
    )
    driver.add("old", prompt_of(44), max_tokens=9)
    driver.step()
    driver.add("late", prompt_of(5, 70), max_tokens=4)
    driver.step()
    assert reasons(driver)["late"].startswith("memory pressure to fall: 60% of the blocks are held")
    driver.run()


def test_a_preempted_request_waits_for_the_answer_that_brings_its_token() -> None:
    driver = pressed(enable_prefix_caching=False, max_steps_in_flight=2)
    driver.add("old", prompt_of(15, 0), max_tokens=10)
    driver.add("young", prompt_of(15, 40), max_tokens=10)
    driver.plan()
    driver.plan()
    driver.answer()
    driver.plan()
    assert driver.requests["young"].status is RequestStatus.PREEMPTED
    assert reasons(driver)["young"].startswith("the output of step 2")
    driver.run()


@pytest.mark.req("QUE-05")
@BOTH
def test_blocked_requests_say_what_they_wait_for_and_delay_no_others(
    steps_in_flight: int,
) -> None:
    compiler = FakeCompiler()
    driver = Driver(
        grammars=compiler,
        rules={"match": has_stored({"loads": 8})},
        max_steps_in_flight=steps_in_flight,
    )
    session = driver.add("session", prompt_of(6), max_tokens=1, resumable=True)
    for _ in range(4):
        driver.step()
    strict = driver.add("strict", prompt_of(6, 20), structured_output=grammar_for("strict"))
    loads = driver.add("loads", prompt_of(12, 30))
    plain = driver.add("plain", prompt_of(6, 50), max_tokens=30)
    driver.steps(3)
    assert driver.running == ["plain"]
    report = {waiting.request_id: waiting for waiting in report_of(driver).waiting}
    assert {name: waiting.status for name, waiting in report.items()} == {
        "session": "WAITING_FOR_STREAMING_REQ",
        "strict": "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
        "loads": "WAITING_FOR_REMOTE_KVS",
    }
    assert all(waiting.waits_for.startswith(OUTSIDE) for waiting in report.values())
    driver.continue_session(session, [70], max_tokens=2, resumable=False)
    assert driver.requests["session"].status is RequestStatus.WAITING
    driver.step()
    assert driver.running == ["plain", "session"]
    driver.steps(2)
    compiler.ready.add("strict")
    driver.step()
    assert driver.running[-1] == "strict"
    driver.ranks.end_load("loads")
    assert driver.requests["loads"].status is RequestStatus.WAITING
    driver.step()
    assert driver.running[-1] == "loads"
    driver.run()
    for key, name in ((strict, "strict"), (loads, "loads")):
        assert driver.received[key] == expected_output(name, 8)
    assert driver.received[plain] == expected_output("plain", 30)


def test_a_load_is_reported_with_the_time_that_is_left() -> None:
    driver = Driver(rules={"match": has_stored({"r": 8})}, load_timeout_s=20.0)
    driver.add("r", prompt_of(12))
    driver.step()
    driver.now += 5.0
    assert reasons(driver)["r"] == (
        "its KV, which the connector AdversarialConnector is loading; recomputed after 15.0 s at "
        "the latest"
    )


def test_a_request_whose_connector_does_not_know_yet_says_so() -> None:
    driver = Driver(rules={"match": has_stored({"r": None})})
    driver.add("r", prompt_of(12))
    for _ in range(3):
        assert driver.step() is None
    assert reasons(driver)["r"].startswith("its connector")


def test_a_request_that_would_load_too_much_at_once_says_so() -> None:
    driver = Driver(rules={"match": has_stored({"one": 11, "two": 11})}, max_loading_blocks=5)
    driver.add("one", prompt_of(12))
    driver.add("two", prompt_of(12, 40))
    driver.steps(2)
    assert list(driver.transfers.loading) == ["one"]
    assert "max_loading_blocks" in reasons(driver)["two"]


def test_a_load_that_finds_too_few_blocks_while_nothing_runs_is_not_waited_for() -> None:
    """16 blocks: the first load holds 8 of them and may never end, and the second needs 10. The
    first chunk of its request fits."""
    driver = Driver(
        num_blocks=17,
        rules={"match": has_stored({"one": 28, "two": 39})},
        max_loading_blocks=20,
        max_num_seqs=2,
        max_num_batched_tokens=8,
    )
    driver.add("one", prompt_of(30))
    driver.add("two", prompt_of(40, 40))
    driver.steps(2)
    assert (list(driver.transfers.loading), driver.running) == (["one"], ["two"])


def test_while_the_engine_is_paused_no_request_waits_for_what_has_come_since() -> None:
    driver = Driver(rules={"match": has_stored({"one": 11, "two": 11})}, max_loading_blocks=5)
    one = driver.add("one", prompt_of(12))
    driver.add("two", prompt_of(12, 40))
    driver.step()
    driver.scheduler.set_pause(PauseState.PAUSED_NEW)
    driver.abort(one)
    driver.ranks.end_load("one")
    driver.step()
    assert reasons(driver) == {"two": "the engine to be unpaused: it is paused_new"}


# The report


def test_the_report_says_how_much_runs_waits_and_is_held() -> None:
    driver = Driver(max_num_seqs=2, max_steps_in_flight=2)
    for index in range(3):
        driver.add(f"r{index}", prompt_of(8, 9 * index), max_tokens=30)
    driver.plan()
    report = report_of(driver)
    assert (report.engine_id, report.num_running, report.num_waiting) == ("engine-0.1", 2, 1)
    assert (report.num_blocks, report.num_free_blocks, report.steps_in_flight) == (40, 35, 1)
    assert report.kv_usage == pytest.approx(4 / 39)
    assert report.waiting[0].num_tokens == 8
    driver.run()


def test_the_report_counts_how_long_a_request_has_waited_since_it_last_ran() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add("runs", prompt_of(8), max_tokens=30)
    driver.add("waits", prompt_of(8, 40))
    driver.steps(3)
    queued = driver.requests["waits"].events[0][1]
    assert report_of(driver).waiting[0].waited_s == driver.now - queued
    driver.run()


def test_the_engine_is_idle_for_as_long_as_no_request_has_advanced() -> None:
    compiler = FakeCompiler()
    driver = Driver(grammars=compiler)
    assert report_of(driver).idle_s == 0.0
    driver.add("quick", prompt_of(6), max_tokens=2)
    driver.add("r", prompt_of(6), structured_output=grammar_for("r"))
    driver.steps(2)
    assert report_of(driver).idle_s == 0.0
    driver.steps(5)  # the first of them tells the workers of the end, which advances no request
    assert report_of(driver).idle_s == 5.0
    compiler.ready.add("r")
    driver.step()
    assert report_of(driver).idle_s == 0.0
    driver.run()
    driver.now += 100.0
    assert report_of(driver).idle_s == 0.0  # there is nothing to do


def test_an_engine_that_is_paused_is_not_idle() -> None:
    driver = Driver()
    driver.add("r", prompt_of(6), max_tokens=8)
    driver.steps(2)
    driver.scheduler.set_pause(PauseState.PAUSED_NEW)
    driver.add("waits", prompt_of(6), max_tokens=8)
    driver.now += 5.0
    assert report_of(driver).idle_s >= 5.0  # "r" runs, and does not advance
    driver.scheduler.set_pause(PauseState.PAUSED_ALL)
    driver.steps(2)
    driver.now += 50.0
    assert report_of(driver).idle_s == 0.0
    driver.scheduler.set_pause(PauseState.PAUSED_NEW)
    while "r" in driver.requests and driver.scheduler.running.num_rows:
        driver.step()
    driver.now += 50.0
    assert report_of(driver).idle_s == 0.0
    driver.scheduler.set_pause(PauseState.UNPAUSED, driver.now)
    driver.now += 5.0
    assert report_of(driver).idle_s == 5.0  # only since it was resumed
    driver.run()


@pytest.mark.parametrize("what", ["lookup", "load", "grammar"])
def test_the_clock_starts_when_the_first_request_waits(what: str) -> None:
    """Also if no step was ever planned, or the engine had nothing to do for long."""
    compiler = FakeCompiler()
    num_stored = {"lookup": None, "load": 8}
    rules = {"match": has_stored({"r": num_stored.get(what, 0)})}
    driver = Driver(grammars=compiler, rules=rules)
    driver.now += 1000.0
    settings = {"structured_output": grammar_for("r")} if what == "grammar" else {}
    driver.add("r", prompt_of(12), **settings)
    for _ in range(5):
        driver.step()
    assert driver.running == []
    assert report_of(driver).idle_s == 4.0  # since the first of them


def test_time_without_workers_is_no_idle_time() -> None:
    driver = Driver(rules={"match": has_stored({"r": None})})
    driver.add("r", prompt_of(12))
    driver.steps(2)
    driver.restart_workers()
    driver.now += 100.0
    driver.add("other", prompt_of(12, 40))
    assert report_of(driver).idle_s == 0.0
    driver.step()  # the workers serve again
    begin = driver.now
    driver.now += 5.0
    assert report_of(driver).idle_s == pytest.approx(driver.now - begin, abs=1.0)


def test_asking_whether_a_request_is_waited_for_looks_at_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked in every turn of the engine's loop."""
    driver = Driver()
    for index in range(20):
        driver.add(f"r{index}", prompt_of(6, index))

    def walk(waiting: WaitingRequests) -> Iterator[Request]:
        raise AssertionError("the waiting requests are walked")

    monkeypatch.setattr(WaitingRequests, "__iter__", walk)
    assert driver.scheduler.is_waited_for()
    assert driver.scheduler.idle_s(driver.now) == 0.0


def test_idle_time_never_runs_backwards() -> None:
    driver = Driver(num_blocks=18)
    scheduler = driver.scheduler
    assert scheduler.idle_s(5.0) == 0.0
    driver.add("r", prompt_of(4), max_tokens=8)
    assert scheduler.schedule(7.0) is not None
    assert [scheduler.idle_s(now) for now in (6.0, 7.0, 9.5)] == [0.0, 0.0, 2.5]


# Every request finishes under any finite load

VALUES = {
    "size": st.integers(1, 24),
    "start": st.sampled_from([0, 0, 30, 60]),
    "max_tokens": st.integers(1, 12),
    "priority": st.integers(-1, 1),
    "job_id": st.sampled_from([None, "job"]),
    "adapter": st.sampled_from([None, None, "a", "b", "c"]),
    "kind": st.sampled_from(["text", "text", "grammar", "pooling", "session", "items", "circles"]),
    "stored": st.sampled_from([0, 0, 4, 9, 30, None]),
    "steps": st.integers(0, 4),
    "also": st.sampled_from(["", "", "", "abort", "restart", "pause", "help"]),
}
ENGINES = {
    "policy": st.sampled_from(["fcfs", "priority", "continuum"]),
    "max_steps_in_flight": st.integers(1, 2),
    "max_num_seqs": st.integers(1, 4),
    "max_num_scheduled_tokens": st.integers(1, 48),
    "long_prefill_token_threshold": st.sampled_from([0, 0, 5]),
    "scheduler_reserve_full_isl": st.booleans(),
    "num_speculative_tokens": st.integers(0, 3),
    "num_lookahead_tokens": st.integers(0, 3),
    "max_loras": st.integers(1, 2),
    "encoder_cache_size": st.sampled_from([4, 6, 9]),
    "max_loading_blocks": st.sampled_from([None, 3]),
    "num_blocks": st.integers(11, 18),
    "enable_prefix_caching": st.booleans(),
}
CACHES = {
    "watermark": st.sampled_from([0.0, 0.01, 0.3]),
    "preempt_threshold": st.sampled_from([0.5, 0.95, 1.0]),
    "admit_threshold": st.sampled_from([0.2, 0.5]),
}


def sampled(name: str, position: int) -> int:
    """Requests that ask for it go round in circles from their third token on."""
    return 60 if name.startswith("circles") and position > 1 else steady_token(name, position)


class World:
    """A driver with everything in it, and what the world owes its requests."""

    def __init__(self, engine: dict[str, Any], cache: dict[str, Any], num_right: int) -> None:
        self.compiler = FakeCompiler()
        self.stored: dict[str, int | None] = {}
        num_drafts = engine["num_speculative_tokens"]
        self.driver = Driver(
            max_model_len=40,
            max_num_encoder_input_tokens=4,
            sample=sampled,
            draft=lambda name, position: [
                sampled(name, position + index) if index < num_right else 5
                for index in range(num_drafts)
            ],
            cache=cache,
            grammars=self.compiler,
            rules={"match": has_stored(self.stored)},
            load_timeout_s=MAX_TIMEOUT_S,
            **engine,
        )
        self.epoch = 1
        self.sessions: list[tuple[int, int]] = []
        self.names: dict[tuple[int, int], str] = {}

    def add(self, values: dict[str, Any]) -> None:
        """One more request."""
        kind, size = values["kind"], values["size"]
        name = f"{kind}{len(self.names)}"
        fields: dict[str, Any] = {"priority": values["priority"], "job_id": values["job_id"]}
        fields["is_last_step"] = True
        if values["adapter"]:
            fields["lora"] = LoRARequest(values["adapter"])
        match kind:
            case "grammar":
                fields["structured_output"] = grammar_for(name)
            case "pooling":
                fields["pooling"] = PoolingParams()
            case "session":
                fields["resumable"] = True
            case "items":
                fields["multimodal"] = tuple(
                    MultimodalFeature("abc"[(size + offset) % 3], offset, 3)
                    for offset in range(0, size - 3, 5)
                )
            case "circles":
                fields["sampling"] = {"repetition": RepetitionDetection(2, 1, 3)}
        self.stored[name] = values["stored"]
        key = self.driver.add(
            name, prompt_of(size, values["start"]), max_tokens=values["max_tokens"], **fields
        )
        self.names[key] = name
        if kind == "session":
            self.sessions.append(key)

    def happen(self, what: str) -> None:
        """Something from outside."""
        match what:
            case "abort":
                self.driver.abort(list(self.names)[len(self.names) // 2])
            case "restart":
                self.epoch += 1
                self.driver.restart_workers(self.epoch)
            case "pause":
                self.driver.scheduler.set_pause(PauseState.PAUSED_NEW)
            case "help":
                self.help()

    def help(self) -> None:
        """Everything that requests wait for outside the scheduler comes."""
        self.compiler.ready.add("all")
        for name, stored in self.stored.items():
            if stored is None:
                self.stored[name] = 0
        self.driver.ranks.end_all()
        for key in self.sessions:
            self.driver.continue_session(key, [70], max_tokens=2, resumable=False)
        self.sessions = []
        self.driver.scheduler.set_pause(PauseState.UNPAUSED)

    def step(self) -> None:
        """In each step a request advances, or the report says what each waits for."""
        was_busy = bool(self.driver.unanswered)
        plan = self.driver.step()
        if was_busy or (plan is not None):
            return
        reported = reasons(self.driver)
        loads, running = self.driver.transfers.loading, self.driver.running
        assert not running or (loads and len(running) == 1)
        assert len(reported) == self.driver.scheduler.get_request_counts()[1]
        for name, reason in reported.items():
            is_outside = reason.startswith((*OUTSIDE, "the engine to be unpaused", "its turn"))
            waits_for_running = bool(running) and reason.startswith("transfers to end: the running")
            waits_for_loads = bool(loads) and self.waits_for_loads(reason)
            assert is_outside or waits_for_running or waits_for_loads, (name, reason)

    def waits_for_loads(self, reason: str) -> bool:
        """With loads under way a request may wait for their blocks, or to begin its own."""
        needed = re.match(r"blocks: its next chunk needs (\d+), (\d+) are free", reason)
        if needed is None:
            return "max_loading_blocks" in reason
        return int(needed[1]) > int(needed[2])

    def finish(self) -> None:
        """With all the help it needs, everything ends."""
        for _ in range(3000):
            if not self.driver.scheduler.has_unfinished_requests():
                return
            self.help()
            self.step()
        raise AssertionError(f"no end: {reasons(self.driver)}, {self.driver.running}")


def text(size: int, *, stored: int = 0, steps: int = 0) -> dict[str, Any]:
    """A request without features, after whose arrival `steps` steps are made."""
    plain = {"start": 0, "max_tokens": 1, "priority": 0, "job_id": None, "adapter": None}
    return {**plain, "kind": "text", "also": "", "size": size, "stored": stored, "steps": steps}


# The last request is preempted by itself: its third chunk, with the lookahead, needs more blocks
# than the load under way leaves free.
PREEMPTED_BY_A_LOAD = {
    "policy": "fcfs",
    "max_steps_in_flight": 1,
    "max_num_seqs": 1,
    "max_num_scheduled_tokens": 6,
    "long_prefill_token_threshold": 0,
    "scheduler_reserve_full_isl": False,
    "num_speculative_tokens": 0,
    "num_lookahead_tokens": 3,
    "max_loras": 1,
    "encoder_cache_size": 4,
    "max_loading_blocks": None,
    "num_blocks": 12,
    "enable_prefix_caching": True,
}


@settings(max_examples=60)
@example(
    engine=PREEMPTED_BY_A_LOAD,
    cache={"watermark": 0.0, "preempt_threshold": 0.5, "admit_threshold": 0.2},
    requests=[text(1, steps=1), text(21, stored=30), text(18, steps=4)],
    num_right=0,
)
@given(
    engine=st.fixed_dictionaries(ENGINES),
    cache=st.fixed_dictionaries(CACHES),
    requests=st.lists(st.fixed_dictionaries(VALUES), min_size=1, max_size=9),
    num_right=st.integers(0, 3),
)
def test_in_each_step_a_request_advances_or_says_what_it_waits_for_and_all_finish(
    engine: dict[str, Any],
    cache: dict[str, Any],
    requests: list[dict[str, Any]],
    num_right: int,
) -> None:
    world = World(engine, cache, num_right)
    for values in requests:
        world.add(values)
        for _ in range(values["steps"]):
            world.step()
        world.happen(values["also"])
    world.finish()
    world.help()  # loads that no request waits for any more end, too
    driver = world.driver
    driver.run()
    for key, name in world.names.items():
        tokens, end = driver.received[key], driver.finished[key]
        if end.reason is FinishReason.ABORTED:
            continue
        assert end.reason is not FinishReason.ERROR, end.message
        kind = name.rstrip("0123456789")
        if kind == "session":
            assert tokens[-2:] == expected_output(name, 2)
        else:
            assert tokens == [sampled(name, position) for position in range(len(tokens))]
            assert (end.reason is FinishReason.STOPPED) is (kind == "pooling")
    driver.scheduler.check()
    assert driver.num_free_blocks == engine["num_blocks"] - 1
