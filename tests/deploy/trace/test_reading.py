"""Reading a scheduler trace."""

from itertools import pairwise
from pathlib import Path

import pytest

from longshore.deploy.trace.reading import BadTrace, read_trace
from tests.deploy.trace.traces import driven, short_of_blocks
from tests.harness.tokens import prompt_of


def test_the_phases_of_a_request_are_those_of_its_life(tmp_path: Path) -> None:
    driver = driven(tmp_path / "t", max_num_batched_tokens=8)
    driver.add("r", prompt_of(13), max_tokens=3, job_id="job")  # queued at 1 s
    driver.run()  # one step per second: the prompt takes two
    (life,) = read_trace(tmp_path / "t").requests
    phases = [(phase.name, phase.start_s, phase.end_s) for phase in life.phases]
    assert phases == [("queued", 1.0, 2.0), ("prefill", 2.0, 3.0), ("decode", 3.0, 5.0)]
    assert (life.job, life.prompt_tokens) == ("job", 13)
    assert (life.queue_s, life.first_token_s, life.token_interval_s) == (1.0, 2.0, 1.0)


def test_a_preempted_request_is_prefilled_again(tmp_path: Path) -> None:
    driver = short_of_blocks(tmp_path / "t")
    trace = read_trace(tmp_path / "t")
    assert [life.request for life in trace.requests] == ["r0", "r1", "r2", "r3"]
    ends = {key: end.num_preemptions for key, end in driver.finished.items()}
    assert [life.num_preemptions for life in trace.requests] == list(ends.values())
    preempted = [life for life in trace.requests if life.num_preemptions]
    assert preempted
    for life in trace.requests:
        for before, after in pairwise(life.phases):
            assert before.end_s == after.start_s
    for life in preempted:
        names = [phase.name for phase in life.phases]
        assert names[names.index("preempted") + 1] == "prefill"
        assert life.seconds_in("preempted") > 0


def test_each_step_has_its_output(tmp_path: Path) -> None:
    driver = short_of_blocks(tmp_path / "t")
    steps = read_trace(tmp_path / "t").steps
    assert [step.decision.step for step in steps] == [plan.step for plan in driver.plans]
    for step in steps:
        assert step.output_s is not None
        assert step.output_s >= step.decision.now


def test_a_truncated_last_line_is_left_out_and_counted(tmp_path: Path) -> None:
    short_of_blocks(tmp_path / "t")
    content = (tmp_path / "t").read_bytes()
    whole = read_trace(tmp_path / "t")
    (tmp_path / "cut").write_bytes(content[:-7])
    cut = read_trace(tmp_path / "cut")
    assert (cut.num_truncated, whole.num_truncated) == (1, 0)
    assert cut.num_records == whole.num_records - 1


@pytest.mark.parametrize("bad", [b"not JSON", b'{"record": "other"}', b'{"record": "step_output"}'])
def test_a_bad_line_is_named(bad: bytes, tmp_path: Path) -> None:
    short_of_blocks(tmp_path / "t")
    lines = (tmp_path / "t").read_bytes().splitlines()
    lines[6] = bad
    (tmp_path / "t").write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(BadTrace, match="line 7: "):
        read_trace(tmp_path / "t")


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("some text")
    with pytest.raises(BadTrace, match=r"line 1: .* Is this a scheduler trace\?"):
        read_trace(tmp_path / "t")
    with pytest.raises(BadTrace, match="cannot be read: No such file"):
        read_trace(tmp_path / "missing")


@pytest.mark.parametrize("also", [b"", b'"new":[1],"policy":{"name":"fcfs"},"other":'])
def test_a_trace_of_another_format_is_rejected(also: bytes, tmp_path: Path) -> None:
    """Also if its first record has other fields."""
    short_of_blocks(tmp_path / "t")
    content = (tmp_path / "t").read_bytes()
    content = content.replace(b'"format":1', b'"format":2').replace(
        b'"policy":', also or b'"policy":'
    )
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(BadTrace, match="line 1: the trace has format 2"):
        read_trace(tmp_path / "t")


def test_two_traces_in_one_file_are_rejected(tmp_path: Path) -> None:
    short_of_blocks(tmp_path / "t")
    content = (tmp_path / "t").read_bytes()
    (tmp_path / "t").write_bytes(content * 2)
    with pytest.raises(BadTrace, match="a second trace begins"):
        read_trace(tmp_path / "t")


def test_missing_records_are_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    short_of_blocks(tmp_path / "t")
    lines = (tmp_path / "t").read_bytes().splitlines()
    begin = next(index for index, line in enumerate(lines) if b"step_snapshot" in line)
    lines[begin : begin + 12] = [b'{"record":"records_dropped","count":12}']
    (tmp_path / "t").write_bytes(b"\n".join(lines) + b"\n")
    trace = read_trace(tmp_path / "t")
    assert trace.num_dropped == 12
    assert len(trace.requests) == 4
    assert trace.steps


def test_outputs_of_a_session_are_lives_of_their_own(tmp_path: Path) -> None:
    driver = driven(tmp_path / "t")
    key = driver.add("r", prompt_of(5), max_tokens=3, resumable=True)
    driver.run_until_idle()
    driver.continue_session(key, prompt_of(3), max_tokens=2, resumable=False)
    driver.run()
    first, second = read_trace(tmp_path / "t").requests
    assert (first.prompt_tokens, second.prompt_tokens) == (5, 11)
    assert first.end is not None
    assert first.end.continues
    assert [phase.name for phase in second.phases] == ["queued", "prefill", "decode"]
