"""The scheduler trace, of schedulers that are driven by hand."""

import json
import logging
from typing import Any

import msgspec
import pytest

from longshore.connectors.base import AskLater, ConnectorStats, Match, Matched, RequestView
from longshore.protocol.handshake import ToWorker
from longshore.protocol.statistics import TierStats
from longshore.protocol.transport.codec import Encoder
from longshore.scheduler.inspect.trace import SchedulerTrace
from longshore.scheduler.inspect.trace_records import TraceRecord
from tests.harness.connector import AdversarialConnector
from tests.harness.driver import Driver
from tests.harness.tokens import prompt_of

SHORT = {"num_blocks": 14, "max_model_len": 32}  # so that requests are preempted


def traced(trace: SchedulerTrace | None = None, **options: Any) -> tuple[Driver, list[bytes]]:
    """A driver, and what its scheduler's trace is given."""
    written: list[bytes] = []
    trace = SchedulerTrace(written.append) if trace is None else trace
    return Driver(scheduler={"trace": trace}, **options), written


def records_of(written: list[bytes], kind: str | None = None) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in b"".join(written).splitlines()]
    return [record for record in records if kind in (None, record["record"])]


@pytest.mark.req("TRC-02")
def test_the_records_of_a_step_share_its_number_and_are_written_at_once() -> None:
    driver, written = traced()
    driver.add("r", prompt_of(5), max_tokens=3)
    driver.plan()
    snapshot, lookup, decision = records_of(written[-1:])
    kinds = [record["record"] for record in (snapshot, lookup, decision)]
    assert kinds == ["step_snapshot", "prefix_cache_event", "step_decision"]
    for record in (snapshot, lookup, decision):
        assert (record["epoch"], record["step"], record["now"]) == (1, 1, driver.now)
    driver.answer()
    driver.run()
    steps = [plan.step for plan in driver.plans]
    for kind in ("step_snapshot", "step_decision", "step_output"):
        assert [record["step"] for record in records_of(written, kind)] == steps


@pytest.mark.req("TRC-03")
def test_a_snapshot_has_the_queues_blocks_tiers_and_limits_at_the_start_of_the_step() -> None:
    class WithTier(AdversarialConnector):
        def get_kv_connector_stats(self) -> ConnectorStats:
            disk = TierStats("DISK", num_blocks=9, capacity_blocks=90)
            return ConnectorStats([TierStats("CPU", num_blocks=3, capacity_blocks=8), disk])

    written: list[bytes] = []
    trace = SchedulerTrace(written.append)
    driver, _ = traced(trace, connector=WithTier(), max_num_seqs=1, max_model_len=32, num_blocks=11)
    driver.add("first", prompt_of(9), max_tokens=3)
    driver.add("second", prompt_of(9, 1), max_tokens=3)
    driver.plan()
    driver.answer()
    driver.plan()
    before, after = records_of(written, "step_snapshot")
    assert (before["running"], before["waiting"]) == (0, 2)
    assert before["gpu"] == {"free": 10, "total": 10, "cached": 0}
    assert (after["running"], after["waiting"]) == (1, 1)
    assert after["gpu"] == {"free": 7, "total": 10, "cached": 2}
    assert after["cpu"] == {"free": 5, "total": 8, "cached": 3}
    assert after["pins"] == {"count": 0, "blocks": 0, "jobs": []}
    assert after["limits"] == {"requests": 1, "tokens": 64}


@pytest.mark.req("TRC-03")
def test_a_snapshot_has_the_pins() -> None:
    driver, written = traced(policy="continuum")
    for name in ("first", "second"):
        driver.add(name, prompt_of(9), max_tokens=1, job_id="job", is_last_step=False)
        driver.run()
    first, *_, last = (record["pins"] for record in records_of(written, "step_snapshot"))
    assert first == {"count": 0, "blocks": 0, "jobs": []}
    assert last == {"count": 1, "blocks": 2, "jobs": ["job"]}


@pytest.mark.req("TRC-04")
@pytest.mark.parametrize(
    ("match", "external", "is_async", "result"),
    [
        (Matched(4), 4, False, "admitted"),
        (Matched(4, is_async=True), 4, True, "parked"),
        (AskLater(), None, False, "parked"),
    ],
)
def test_a_lookup_has_local_and_external_hits(
    match: Match, external: int | None, is_async: bool, result: str
) -> None:
    def answer(request: RequestView, num_computed_tokens: int) -> Match:
        return match if request.request_id == "second" else Matched(0)

    driver, written = traced(rules={"match": answer})
    driver.add("first", prompt_of(9), max_tokens=1)
    driver.run()
    driver.add("second", prompt_of(14), outputs=[5], job_id="job", max_tokens=3)
    driver.plan()
    lookups = records_of(written, "prefix_cache_event")
    if match == AskLater():
        assert len(lookups) == 1, "there is no plan, so no step"
        return
    assert lookups[-1] == {
        "record": "prefix_cache_event",
        "epoch": 1,
        "step": driver.plans[-1].step,
        "now": driver.now,
        "request": "second",
        "job": "job",
        "local_hit_tokens": 8,
        "external_hit_tokens": external,
        "prompt_tokens": 14,
        "total_tokens": 15,
        "connector": "AdversarialConnector",
        "is_async": is_async,
        "result": result,
    }


@pytest.mark.req("TRC-04")
def test_a_connector_that_does_not_know_yet_leaves_the_external_hits_open() -> None:
    def answer(request: RequestView, num_computed_tokens: int) -> Match:
        return AskLater() if request.request_id == "second" else Matched(0)

    driver, written = traced(rules={"match": answer})
    driver.add("first", prompt_of(9), max_tokens=8)
    driver.plan()
    driver.answer()
    driver.add("second", prompt_of(14), max_tokens=3)
    driver.plan()
    lookup = records_of(written, "prefix_cache_event")[-1]
    assert lookup["request"] == "second"
    assert (lookup["external_hit_tokens"], lookup["result"]) == (None, "parked")


@pytest.mark.req("TRC-05")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_decisions_have_the_tokens_of_all_requests_of_the_plans(steps_in_flight: int) -> None:
    driver, written = traced(
        **SHORT, max_num_batched_tokens=16, max_steps_in_flight=steps_in_flight
    )
    scheduled = []
    for number in range(3):
        driver.add(f"r{number}", prompt_of(9, number), max_tokens=20)
    for _ in range(200):
        if driver.step() is not None:
            scheduled.append(driver.scheduled)
    decisions = records_of(written, "step_decision")
    assert len(decisions) == len(scheduled)
    known: set[str] = set()
    lost: set[str] = set()
    for decision, tokens in zip(decisions, scheduled, strict=True):
        assert decision["new"] | decision["resumed"] | decision["running"] == tokens
        assert decision["tokens"] == sum(tokens.values())
        lost.update(decision["preempted"])
        assert not known & decision["new"].keys()
        known.update(decision["new"])
        assert decision["resumed"].keys() <= lost
        lost.difference_update(decision["resumed"])
    num_preempted = sum(len(decision["preempted"]) for decision in decisions)
    ends = records_of(written, "request_finished")
    assert num_preempted == sum(end["preemptions"] for end in ends) > 0
    assert known == {"r0", "r1", "r2"}


def test_decisions_say_what_is_prefill_and_where_it_ends() -> None:
    driver, written = traced(max_num_batched_tokens=8)
    driver.add("r", prompt_of(13), max_tokens=3)
    driver.run()
    decisions = records_of(written, "step_decision")
    assert [each["prefill_tokens"] for each in decisions] == [8, 5, 0, 0, 0]
    assert [each["prefilled"] for each in decisions] == [[], ["r"], [], [], []]
    assert [each["tokens"] for each in decisions] == [8, 5, 1, 1, 0], "the last plan drops the row"


def test_the_life_of_a_request_is_in_the_trace() -> None:
    driver, written = traced()
    driver.add("r", prompt_of(5), max_tokens=3, job_id="job")
    queued_at = driver.now
    driver.run_until_idle()
    (queued,) = records_of(written, "request_queued")
    (finished,) = records_of(written, "request_finished")
    assert (queued["now"], queued["request"], queued["job"]) == (queued_at, "r", "job")
    assert (queued["prompt_tokens"], queued["max_total_tokens"]) == (5, 8)
    assert (finished["reason"], finished["output_tokens"]) == ("length_capped", 3)
    outputs = records_of(written, "step_output")
    assert finished["now"] == outputs[2]["now"] > queued_at
    assert [each["sampled_tokens"] for each in outputs] == [1, 1, 1, 0], "the last drops the row"


def test_each_output_of_a_session_has_a_beginning_and_an_end() -> None:
    driver, written = traced()
    key = driver.add("r", prompt_of(5), max_tokens=3, resumable=True)
    driver.run_until_idle()
    driver.continue_session(key, prompt_of(3), max_tokens=2, resumable=False)
    driver.run()
    assert [each["prompt_tokens"] for each in records_of(written, "request_queued")] == [5, 11]
    ends = records_of(written, "request_finished")
    assert [(end["continues"], end["output_tokens"]) for end in ends] == [(True, 3), (False, 2)]


def test_every_line_is_a_record_of_the_format() -> None:
    driver, written = traced(**SHORT)
    for number in range(3):
        driver.add(f"r{number}", prompt_of(9, number), max_tokens=20)
    driver.run()
    decoder = msgspec.json.Decoder(TraceRecord)
    lines = b"".join(written).splitlines()
    assert [msgspec.json.encode(decoder.decode(line)) for line in lines] == lines
    begin = records_of(written)[0]
    assert (begin["record"], begin["policy"], begin["block_size"]) == ("trace_begin", "fcfs", 4)


def test_requests_that_lose_their_rows_with_the_workers_are_preempted_in_the_next_decision() -> (
    None
):
    driver, written = traced()
    driver.add("r", prompt_of(5), max_tokens=5)
    driver.steps(2)
    driver.restart_workers()
    driver.run()
    decision = next(each for each in records_of(written, "step_decision") if each["epoch"] == 2)
    assert (decision["step"], decision["preempted"]) == (1, ["r"])
    assert decision["resumed"].keys() == {"r"}


@pytest.mark.req("TRC-01")
def test_a_trace_changes_no_plan() -> None:
    def run(**options: Any) -> Driver:
        driver = Driver(**SHORT, max_steps_in_flight=2, rules={}, **options)
        for number in range(4):
            driver.add(f"r{number}", prompt_of(9, number % 2), max_tokens=20)
        driver.run()
        return driver

    with_one = run(scheduler={"trace": SchedulerTrace(lambda lines: None)})
    without = run()
    assert not without.scheduler._hooks.tried
    encoder: Encoder[ToWorker] = Encoder()
    assert [list(map(bytes, encoder.encode(plan))) for plan in with_one.plans] == [
        list(map(bytes, encoder.encode(plan))) for plan in without.plans
    ]


@pytest.mark.req("TRC-06")
@pytest.mark.parametrize("first_failure", [1, 2, 5, 9])
@pytest.mark.parametrize("error", [OSError("No space left on device"), ValueError("closed file")])
def test_a_failing_sink_ends_the_trace_and_nothing_else(
    first_failure: int, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def sink(lines: bytes) -> None:
        calls.append(lines)
        if len(calls) >= first_failure:
            raise error

    driver, _ = traced(SchedulerTrace(sink))
    keys = [driver.add(f"r{number}", prompt_of(9, number), max_tokens=9) for number in range(3)]
    driver.run()
    driver.check_complete(*keys)
    assert len(calls) == first_failure, "the sink is not called again"
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert str(error) in record.getMessage()
    assert "scheduling goes on" in record.getMessage()


def broken_statistics(driver: Driver) -> None:
    def stats() -> ConnectorStats:
        raise RuntimeError("broken")

    driver.adversary.get_kv_connector_stats = stats  # type: ignore[method-assign]


@pytest.mark.req("TRC-06")
def test_a_record_that_cannot_be_made_ends_the_trace_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trace = SchedulerTrace(lambda lines: None)
    driver, _ = traced(trace, rules={})
    broken_statistics(driver)
    key = driver.add("r", prompt_of(9), max_tokens=9)
    driver.run()
    driver.check_complete(key)
    assert trace.is_over
    assert "scheduling goes on: broken" in caplog.text
