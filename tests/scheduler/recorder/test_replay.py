"""A replay repeats every plan of a record, and a record that cannot be replayed says why."""

import errno
import os
import random
import stat
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

import longshore
from longshore.connectors.base import SchedulerConnector
from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import LongshoreError
from longshore.protocol.handshake import PROTOCOL_VERSION
from longshore.protocol.outputs import ModelRunnerOutput
from longshore.protocol.requests import AddRequest
from longshore.scheduler.features.metrics import SampledBlockMetrics
from longshore.scheduler.inspect.trace import SchedulerTrace
from longshore.scheduler.lifecycle import Lifecycle
from longshore.scheduler.process import record_files
from longshore.scheduler.queue.policies import OrderedPolicy, PolicyRequest
from longshore.scheduler.recorder import entries
from longshore.scheduler.recorder import recorder as recorder_module
from longshore.scheduler.recorder.entries import Added, RecordError, Segment, segment_files
from longshore.scheduler.recorder.explain import Explainer
from longshore.scheduler.recorder.graph import GraphError, decode_graph, encode_graph
from longshore.scheduler.recorder.recorder import Recorder
from longshore.scheduler.recorder.replay import Replay, Result
from longshore.scheduler.recorder.structure import structure_digest, structure_of
from longshore.scheduler.recorder.surroundings import CONNECTOR_VALUES, Player
from longshore.scheduler.step.planner import StepPlanner
from tests.harness.connector import AdversarialConnector
from tests.harness.driver import Driver
from tests.harness.grammar import FakeCompiler, grammar_for
from tests.harness.tokens import prompt_of
from tests.oracle.workloads import ALL_FEATURES, Workload
from tests.scheduler.recorder.recorded_runs import (
    UNLIMITED,
    begin_files_often,
    record_workload,
    recorded_driver,
)

NUM_WORKLOADS = 10
NUM_SHARDS = 2


class Patient(OrderedPolicy):
    """Old requests first, but it changes its mind when it is told to."""

    answer = 0.0

    def order(self, request: PolicyRequest) -> float:
        return request.arrival_time + self.answer


def check_equal(path: Path) -> Result:
    result = Replay(path).run()
    assert result.difference is None, result
    return result


def fail(*_: object) -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def check_whole(recorder: Recorder, driver: Driver) -> int:
    """The record has all plans. Returns the number of its files."""
    recorder.flush(waits=True)
    assert check_equal(recorder.path).num_plans == len(driver.plans)
    return len(segment_files(recorder.path))


def run_requests(driver: Driver, num_requests: int = 12) -> None:
    """More than the pool can hold at once."""
    for number in range(num_requests):
        driver.add(f"r{number}", prompt_of(5 + number % 7, 20 + number), max_tokens=6 + number % 5)
        driver.step()
    driver.run()


@pytest.mark.timeout(1800)  # with --long, 50 times as many workloads
@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_the_replay_of_random_workloads_repeats_every_plan(
    shard: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_run: bool
) -> None:
    """From the start, and from each snapshot on its own: so snapshots are complete."""
    begin_files_often(monkeypatch)
    num_plans = num_segments = 0
    for seed in range(shard, NUM_WORKLOADS * (50 if long_run else 1), NUM_SHARDS):
        path = tmp_path / f"record-{seed}"
        workload = Workload.random(seed, (*ALL_FEATURES, "fair"))
        record_workload(workload, Recorder(path, UNLIMITED, forks=False), monkeypatch)
        num_plans += check_equal(path).num_plans
        for segment in segment_files(path):
            check_equal(segment)
            num_segments += 1
    assert num_plans > 100
    assert num_segments > 20


def test_metrics_of_blocks_are_measured_while_recording_and_not_in_the_replay(
    tmp_path: Path,
) -> None:
    metrics = SampledBlockMetrics(lambda: 0.0)
    driver, recorder = recorded_driver(tmp_path / "record", scheduler={"block_metrics": metrics})
    run_requests(driver, 3)
    recorder.close()
    num_allocated = metrics.num_allocated
    assert num_allocated
    check_equal(tmp_path / "record")
    assert metrics.num_allocated == num_allocated


def test_swaps_loads_and_stores_of_a_connector_are_replayed(tmp_path: Path) -> None:
    driver, recorder = recorded_driver(
        tmp_path / "record",
        rules={},
        preemption_mode="swap",
        num_blocks=21,
        max_tokens=24,
        cache={"preempt_threshold": 0.8, "admit_threshold": 0.6},
    )
    for number in range(6):
        driver.add(f"r{number}", prompt_of(9 + number, 20 * number))
    for _ in range(300):
        driver.step()
        driver.ranks.end_all()
    assert isinstance(driver.connector, AdversarialConnector)
    assert driver.connector.swaps_begun
    recorder.close()
    assert check_equal(tmp_path / "record").num_plans > 50


def test_every_attribute_of_a_connector_that_the_scheduler_reads_is_recorded() -> None:
    attributes = {
        name
        for name, value in vars(SchedulerConnector).items()
        if not (name.startswith("_") or callable(value) or isinstance(value, property))
    } - {"check_options"}
    read_before = {"is_combinable", "has_verify_kv", "uses_shared_memory", "worker_half"}
    read_before |= {"opens_nothing"}
    assert set(CONNECTOR_VALUES) == attributes - read_before


def test_pins_are_replayed_with_the_names_of_tools_and_a_trace_asks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_files_often(monkeypatch)
    asked: list[list[int]] = []
    lines: list[bytes] = []

    def decode(token_ids: list[int]) -> str:
        asked.append(token_ids)
        return f"<function=tool{token_ids[-1] % 2}>"

    driver, recorder = recorded_driver(
        tmp_path / "record",
        rules={},
        policy="continuum",
        num_blocks=30,
        scheduler={"decode": decode, "trace": SchedulerTrace(lines.append)},
    )
    for turn in range(8):
        for job in range(3):
            prompt = prompt_of(8 + 4 * turn, 50 * job)
            driver.add(
                f"{job}.{turn}", prompt, max_tokens=2, job_id=f"job{job}", is_last_step=False
            )
        driver.run()
    recorder.close()
    num_asked, num_lines = len(asked), len(lines)
    assert driver.scheduler.pins is not None
    assert driver.scheduler.pins.num_hits > 0
    assert num_asked == 24
    assert num_lines > 24
    check_equal(tmp_path / "record")
    for segment in segment_files(tmp_path / "record"):
        check_equal(segment)
    assert (len(asked), len(lines)) == (num_asked, num_lines)


def test_a_child_process_writes_snapshots_while_the_scheduler_goes_on(tmp_path: Path) -> None:
    driver, recorder = recorded_driver(
        tmp_path / "record", limit_bytes=10_000, forks=True, num_blocks=20
    )
    run_requests(driver, 60)
    recorder.close()
    files = segment_files(tmp_path / "record")
    assert files[0].name != "record.000000", "the oldest files are removed"
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert Segment(file).header.first_entry > 0
        check_equal(file)


def test_a_second_process_continues_the_ring_and_both_are_replayed(tmp_path: Path) -> None:
    for _ in range(2):
        driver, recorder = recorded_driver(tmp_path / "record")
        run_requests(driver)
        recorder.close()
    names = [file.name for file in segment_files(tmp_path / "record")]
    assert names == ["record.000000", "record.000001"]
    result = check_equal(tmp_path / "record")
    assert result.num_runs == 2
    assert result.num_plans == 2 * len(driver.plans)


def test_a_record_that_was_cut_is_replayed_up_to_its_last_whole_entry(tmp_path: Path) -> None:
    driver, recorder = recorded_driver(tmp_path / "record")
    for number in range(6):
        driver.add(f"r{number}", prompt_of(6), max_tokens=4)
        driver.step()
        recorder.flush(waits=True)
    recorder.close()
    (file,) = segment_files(tmp_path / "record")
    data = file.read_bytes()
    whole = check_equal(tmp_path / "record")
    assert not whole.is_cut
    file.write_bytes(data[:-5])
    result = check_equal(tmp_path / "record")
    assert result.is_cut
    assert 0 < result.num_plans < whole.num_plans


@pytest.mark.parametrize("part", ["magic", "header", "snapshot", "entries", "version", "length"])
def test_a_damaged_record_is_an_error_that_says_so(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, recorder = recorded_driver(tmp_path / "record")
    if part == "version":
        monkeypatch.setattr(entries, "FORMAT_VERSION", 99)
    run_requests(driver, 3)
    recorder.close()
    (file,) = segment_files(tmp_path / "record")
    data = bytearray(file.read_bytes())
    places = {"magic": 2, "header": 40, "snapshot": 2000, "entries": len(data) - 20, "length": 20}
    if part in places:
        data[places[part]] ^= 0xFF
    file.write_bytes(data)
    words = {"magic": "is not a record", "version": "Replay it with the version"}
    with pytest.raises(RecordError, match=words.get(part, "damaged|ends before")):
        Replay(tmp_path / "record").run()


def test_a_record_in_the_format_before_is_rejected_with_the_versions(tmp_path: Path) -> None:
    """Format 2 said nothing of the structure, and its other fields were the same."""
    header = {
        "run": "6f",
        "first_entry": 0,
        "policy": "fcfs",
        "is_outside": False,
        "format_version": 2,
        "protocol_version": PROTOCOL_VERSION,
        "version": longshore.__version__,
    }
    encoded = msgspec.msgpack.encode(header)
    path = tmp_path / "record"
    path.write_bytes(entries.MAGIC + entries.frame(encoded) + encoded)
    with pytest.raises(RecordError, match=r"record format 2,.* Replay it with the version that"):
        Replay(path).run()


def test_a_record_of_a_state_with_other_attributes_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as other:
        other.setattr(recorder_module, "structure_digest", lambda: "5" * 16)
        driver, recorder = recorded_driver(tmp_path / "record")
        run_requests(driver, 3)
        recorder.close()
    with pytest.raises(RecordError, match=r"structure of the state 5{16}\); this is Longshore"):
        Replay(tmp_path / "record").run()


def test_the_structure_is_that_of_the_attributes_whatever_the_code_does() -> None:
    source = "class Queue:\n    size: int\n    def __init__(self):\n        self.head = 0\n"
    structure = structure_of(source)
    assert structure == "Queue: head, size: int\n"
    assert structure_of(source + "        print(self.head)\n") == structure
    assert structure_of(source + "    def pop(self):\n        self.tail = 1\n") != structure
    assert structure_of(source.replace("int", "float")) != structure
    assert structure_of(source.replace("Queue", "Deque")) != structure
    assert len(structure_digest()) == 16


def test_a_record_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="there is no record"):
        Replay(tmp_path / "record")


@pytest.mark.req("SYS-05")
def test_an_error_is_recorded_and_raised_again_in_the_replay(tmp_path: Path) -> None:
    driver, recorder = recorded_driver(tmp_path / "record")
    driver.add("one", prompt_of(5))
    driver.step()
    with pytest.raises(LongshoreError):
        driver.scheduler.update_from_output(ModelRunnerOutput(1, 99), driver.now)
    recorder.close()
    result = check_equal(tmp_path / "record")
    assert result.raised == "InvalidOutput"


def test_the_first_plan_that_differs_is_named_with_its_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, recorder = recorded_driver(tmp_path / "record")
    run_requests(driver, 3)
    recorder.close()
    plan_step = StepPlanner.plan_step

    def other(self: StepPlanner, now: float) -> Any:
        plan = plan_step(self, now)
        if plan is None or plan.step != 2:
            return plan
        return msgspec.structs.replace(plan, num_rows=7)

    monkeypatch.setattr(StepPlanner, "plan_step", other)
    result = Replay(tmp_path / "record").run()
    assert result.difference is not None
    assert result.difference.startswith("step 2: num_rows was")
    assert result.num_plans == 1


@pytest.mark.parametrize("runs", [False, True])
def test_a_policy_of_another_package_that_changes_its_mind_is_named(
    *, runs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{Patient.__module__}:Patient"
    driver, recorder = recorded_driver(tmp_path / "record", policy=name)
    run_requests(driver)
    recorder.close()
    result = Replay(tmp_path / "record", policy=name if runs else None).run()
    assert result.is_equal
    assert result.policy_differs is None
    monkeypatch.setattr(Patient, "answer", 0.5)
    result = Replay(tmp_path / "record", policy=name if runs else None).run()
    if runs:
        assert result.policy_differs is not None
        assert result.policy_differs.startswith("order returned")
    else:
        assert result.policy_differs is None, "its code does not run unless it is asked for"


def test_a_policy_or_step_that_the_record_cannot_have_is_rejected(tmp_path: Path) -> None:
    driver, recorder = recorded_driver(tmp_path / "record", policy="priority")
    run_requests(driver)
    recorder.close()
    assert Replay(tmp_path / "record", policy="priority").run().is_equal
    with pytest.raises(RecordError, match="was made with policy 'priority', not 'fcfs'"):
        Replay(tmp_path / "record", policy="fcfs").run()
    with pytest.raises(RecordError, match="until=0 must be at least 1"):
        Replay(tmp_path / "record", until=0)


def test_explain_says_why_a_request_waited_and_who_preempted_it(tmp_path: Path) -> None:
    driver, recorder = recorded_driver(tmp_path / "record", num_blocks=17, max_num_seqs=3)
    for number in range(5):
        driver.add(f"r{number}", prompt_of(8, 20 * number), max_tokens=24)
    driver.run()
    recorder.close()
    explainer = Explainer("r2")
    result = Replay(tmp_path / "record", before=explainer.before, after=explainer.after).run()
    assert result.is_equal
    texts = [happening.text for happening in explainer.timeline]
    assert texts[0] == "r2 arrived with 8 prompt tokens"
    assert any(text.startswith("admitted to row") for text in texts)
    assert any("preempted" in text and "took" in text for text in texts)
    assert any(text.startswith("waits for ") for text in texts)
    assert texts[-1] == "ended: FINISHED_LENGTH_CAPPED, 24 output tokens"


def explained(path: Path, request_id: str) -> list[str]:
    explainer = Explainer(request_id)
    assert Replay(path, before=explainer.before, after=explainer.after).run().is_equal
    return [happening.text for happening in explainer.timeline]


LOST = "interrupted: the scheduler restarted, or calls are not recorded"


def test_explain_goes_on_with_the_request_that_is_sent_again_after_a_restart(
    tmp_path: Path,
) -> None:
    path = tmp_path / "record"
    for num_steps, max_tokens in ((4, 20), (30, 5)):
        driver, recorder = recorded_driver(path)
        driver.add("r1", prompt_of(8), max_tokens=max_tokens)
        driver.steps(num_steps)
        recorder.close()
    begin = ["r1 arrived with 8 prompt tokens", "admitted to row 0; 0 of its 8 tokens were cached"]
    end = "ended: FINISHED_LENGTH_CAPPED, 5 output tokens"
    assert explained(path, "r1") == [*begin, LOST, *begin, end]


def test_explain_goes_on_after_a_gap_in_the_record(tmp_path: Path) -> None:
    path = tmp_path / "record"
    driver, recorder = recorded_driver(path)
    driver.add("r1", prompt_of(8), max_tokens=20)
    for _ in range(2):
        driver.steps(4)
        recorder.begin_file()
    driver.run()
    recorder.close()
    whole = explained(path, "r1")
    segment_files(path)[1].unlink()
    known = "r1 is known, with 8 prompt tokens"
    assert explained(path, "r1") == [*whole[:-1], LOST, known, whole[-1]]


def test_the_replay_ends_at_the_step_that_was_asked_for(tmp_path: Path) -> None:
    driver, recorder = recorded_driver(tmp_path / "record")
    run_requests(driver)
    recorder.close()
    result = Replay(tmp_path / "record", until=7).run()
    assert (result.num_plans, result.last_step) == (7, 7)


def test_random_bytes_in_a_snapshot_never_raise_anything_but_an_error_of_the_record(
    tmp_path: Path,
) -> None:
    driver, recorder = recorded_driver(tmp_path / "record")
    driver.add("one", prompt_of(5))
    recorder.close()
    snapshot = Segment(segment_files(tmp_path / "record")[0]).snapshot
    chance, num_errors = random.Random(1), 0
    for _ in range(150):
        data = bytearray(snapshot)
        for _ in range(3):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            decode_graph(bytes(data), Player().find_given)
        except (GraphError, RecordError):
            num_errors += 1
    assert num_errors > 20


def test_a_prompt_is_recorded_once(tmp_path: Path) -> None:
    driver, recorder = recorded_driver(tmp_path / "record")
    prompt = prompt_of(12, 30)[::-1]
    driver.add("one", prompt)
    driver.run()
    recorder.close()
    (file,) = segment_files(tmp_path / "record")
    assert file.read_bytes().count(int32_array(prompt).tobytes()) == 1
    check_equal(file)


def test_a_file_begins_when_the_workers_have_all_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_FULLNESS", float("inf"))
    driver, recorder = recorded_driver(tmp_path / "record", limit_bytes=1)
    driver.add("one", prompt_of(12, 30))
    driver.plan()
    driver.answer()
    assert driver.plan() is not None
    assert segment_files(tmp_path / "record")[-1].name == "record.000000"
    assert driver.plan() is None
    assert segment_files(tmp_path / "record")[-1].name == "record.000001"
    recorder.close()


def test_no_snapshot_is_made_in_the_process_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would give every object a dict, and make each access to its attributes slower."""
    here: list[int] = []
    snapshot = Recorder._snapshot
    monkeypatch.setattr(Recorder, "_snapshot", lambda self: here.append(1) or snapshot(self))
    driver, recorder = recorded_driver(tmp_path / "record", forks=True)
    run_requests(driver, 2)
    recorder.begin_file()
    run_requests(driver, 2)
    recorder.close()
    assert not here
    assert check_equal(tmp_path / "record").num_plans == len(driver.plans)
    assert len(segment_files(tmp_path / "record")) == 2


@pytest.mark.parametrize("forks", [False, True])
def test_the_former_file_continues_if_a_snapshot_cannot_be_written(
    *,
    forks: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver, recorder = recorded_driver(tmp_path / "record", forks=forks)
    run_requests(driver, 2)
    recorder.flush(waits=True)
    num_descriptors = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", fail) if forks else patch.setattr(record_files, "_write", fail)
        recorder.begin_file()
    assert "Cannot allocate memory" in caplog.text
    assert len(os.listdir("/proc/self/fd")) == num_descriptors
    assert [file.name for file in segment_files(tmp_path / "record")] == ["record.000000"]
    run_requests(driver, 2)
    assert check_whole(recorder, driver) == 1
    recorder.begin_file()
    run_requests(driver, 2)
    assert check_whole(recorder, driver) == 2
    recorder.close()


@pytest.mark.parametrize("forks", [False, True])
def test_a_scheduler_that_cannot_be_encoded_is_an_error_at_the_start(
    *, forks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = Recorder._snapshot
    monkeypatch.setattr(
        Recorder, "_snapshot", lambda self: encode_graph([snapshot(self), iter([])])
    )
    with pytest.raises(GraphError, match="list_iterator"):
        recorded_driver(tmp_path / "record", forks=forks)
    assert not segment_files(tmp_path / "record")


def test_a_slow_disk_leaves_a_gap_which_the_replay_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver, recorder = recorded_driver(tmp_path / "record")
    run_requests(driver, 2)
    recorder.flush(waits=True)
    num_before = len(driver.plans)
    is_ready = threading.Event()
    write = record_files._write

    def wait_and_write(descriptor: int, data: bytes) -> None:
        is_ready.wait(30)
        write(descriptor, data)

    monkeypatch.setattr(record_files, "MAX_WAITING", 2)
    with monkeypatch.context() as patch:
        patch.setattr(record_files, "_write", wait_and_write)
        while "too slow" not in caplog.text:
            driver.add(f"s{len(driver.plans)}", prompt_of(6), max_tokens=3)
            driver.run()
            recorder.flush()
        is_ready.set()
        recorder.flush(waits=True)
    with monkeypatch.context() as patch:
        patch.setattr(record_files, "_write", fail)
        recorder.begin_file()
    driver.add("lost", prompt_of(7))
    driver.run()
    recorder.flush(waits=True)
    recorder.begin_file()
    first = len(driver.plans)
    driver.add("last", prompt_of(7))
    driver.run()
    recorder.close()
    result = check_equal(tmp_path / "record")
    assert num_before <= result.num_plans < len(driver.plans)
    assert any("are not recorded" in note for note in result.notes)
    last = check_equal(segment_files(tmp_path / "record")[-1])
    assert last.num_plans == len(driver.plans) - first


def test_a_replay_ends_by_name_where_something_could_not_be_recorded(tmp_path: Path) -> None:
    driver, recorder = recorded_driver(tmp_path / "record")
    run_requests(driver, 2)
    driver.scheduler.release_transfers(iter([]))  # type: ignore[arg-type]
    run_requests(driver, 1)
    recorder.close()
    result = check_equal(tmp_path / "record")
    assert 0 < result.num_plans < len(driver.plans)
    (note,) = result.notes
    assert "the replay ends before release_transfers" in note
    assert "list_iterator" in note


def test_params_that_a_connector_changes_are_recorded_as_they_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, recorder = recorded_driver(tmp_path / "record", rules={})
    params = {"remote": True}
    add = Lifecycle.add

    def add_and_change(self: Lifecycle, message: AddRequest, **named: Any) -> None:
        add(self, message, **named)
        params["remote"] = False

    monkeypatch.setattr(Lifecycle, "add", add_and_change)
    driver.add("one", prompt_of(5), kv_transfer_params=params)
    recorder.close()
    (file,) = segment_files(tmp_path / "record")
    (entry,) = (each for each in Segment(file).entries() if isinstance(each, Added))
    assert entry.message.options.kv_transfer_params == {"remote": True}


def test_a_replay_says_that_masks_are_not_in_the_record(tmp_path: Path) -> None:
    driver, recorder = recorded_driver(tmp_path / "record", grammars=FakeCompiler(["all"]))
    driver.add("one", prompt_of(5), structured_output=grammar_for("one"))
    driver.run()
    assert driver.plans[0].has_structured_output
    recorder.close()
    (note,) = check_equal(tmp_path / "record").notes
    assert note.startswith("masks of structured output are not in the record")


def test_grammars_that_are_lost_or_fail_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_files_often(monkeypatch)
    compiler = FakeCompiler(["kept", "lost"])
    driver, recorder = recorded_driver(
        tmp_path / "record", grammars=compiler, max_steps_in_flight=2
    )
    for index, name in enumerate(("kept", "lost", "fails", "waits")):
        driver.add(name, prompt_of(5, 10 * index), structured_output=grammar_for(name))
    driver.steps(3)
    compiler.lost.add("lost")
    driver.steps(3)
    assert driver.scheduler.make_stats().num_preemptions == 1
    compiler.broken |= {"fails", "kept"}  # the latter while it runs
    driver.steps(2)
    compiler.lost.clear()
    compiler.ready.add("waits")
    driver.run()
    assert len(driver.finished) == 4
    recorder.close()
    assert check_equal(tmp_path / "record").num_plans == driver.plans[-1].step
    for segment in segment_files(tmp_path / "record"):
        check_equal(segment)
