"""Workload files: what is read, and what is said about lines that are not valid."""

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest

from longshore.deploy.simulator.workloads import random_jobs, read_jobs
from longshore.protocol.errors import ConfigError
from tests.conftest import ROOT
from tests.deploy.simulator.workload_files import agent_job, request, write_lines


def test_prompts_are_equal_where_their_block_ids_are(tmp_path: Path) -> None:
    lines = [request(0, 1300, 1, [5, 6, 7]), request(1, 1300, 1, [5, 8, 9])]
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    first, second = (job.prompt(0) for job in read_jobs(path))
    assert len(first) == len(second) == 1300
    assert np.array_equal(first[:512], second[:512])
    assert not (first[512:] == second[512:]).any()


def test_jobs_come_in_order_of_arrival(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", [request(9, 1, 1, []), request(4, 2, 1, [])])
    assert [job.arrival_s for job in read_jobs(path)] == [0.004, 0.009]
    assert len(read_jobs(path, limit=1)) == 1


def test_requests_with_blocks_in_common_belong_to_one_session(tmp_path: Path) -> None:
    ids = [[0, 1, 2], [0, 3, 4], [0, 1, 2, 5]]
    path = write_lines(tmp_path / "t.jsonl", [request(0, 99, 1, each) for each in ids])
    first, second, third = (job.session_key for job in read_jobs(path))
    assert first == third != second


def test_one_of_several_sessions_is_kept_as_a_whole(tmp_path: Path) -> None:
    ids = [[0, 1], [0, 2], [0, 3], [0, 2, 5], [0, 4], [0, 3, 6]]
    lines = [request(n, 2048, 1, each) for n, each in enumerate(ids)]
    path = write_lines(tmp_path / "t.jsonl", lines)
    kept = read_jobs(path, thin=2)
    assert [job.arrival_s for job in kept] == [0.0, 0.002, 0.005]  # of sessions 1 and 3 of 4
    assert [job.number for job in kept] == [0, 1, 2]
    jobs = [agent_job(n, n * 1.0, [(1, 1, 0.0)] * 2) for n in range(5)]
    kept = read_jobs(write_lines(tmp_path / "jobs.jsonl", jobs), thin=2)
    assert [(job.job_id, job.number) for job in kept] == [("job-0", 0), ("job-2", 2), ("job-4", 4)]


def test_requests_that_arrive_together_are_spread(tmp_path: Path) -> None:
    lines = [request(at_ms, 1, 1, []) for at_ms in (0, 0, 0, 3000, 5000, 5000)]
    path = write_lines(tmp_path / "t.jsonl", lines)
    assert [job.arrival_s for job in read_jobs(path, spread_s=3.0)] == [0, 1, 2, 3, 5, 6.5]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2: Input data was truncated"),
        (json.dumps(request(0, 0, 1, [])), r"line 2: Expected `int` >= 1 - at `\$.input_length`"),
        (json.dumps(request(0, 1, 1, [-1])), r"line 2: Expected `int` >= 0"),
        (json.dumps(request(-1, 1, 1, [])), r"line 2: Expected `float` >= 0"),
        ('{"timestamp": 1}', r"line 2: Object missing required field `input_length`"),
        (json.dumps(agent_job(0, 0.0, [(1, 1, 0.0)])), "line 2: .*missing required field"),
        ("\udcff", "line 2: "),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_field(
    line: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    text = json.dumps(request(0, 1, 1, [])) + "\n" + line + "\n"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=message):
        read_jobs(path)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    empty, broken = tmp_path / "empty.jsonl", tmp_path / "broken.jsonl.gz"
    empty.write_text("\n")
    broken.write_text("not gzip")
    with pytest.raises(ConfigError, match=r"empty\.jsonl has no lines"):
        read_jobs(empty)
    with pytest.raises(ConfigError, match=r"broken\.jsonl\.gz cannot be read"):
        read_jobs(broken)
    jobs = write_lines(tmp_path / "jobs.jsonl", [agent_job(0, 0.0, [(1, 1, 0.0)])])
    with pytest.raises(ConfigError, match="shrink=2"):
        read_jobs(jobs, shrink=2)


def test_the_conversation_trace_has_its_published_means() -> None:
    jobs = read_jobs(ROOT / "benchmarks" / "traces" / "conversation_trace.jsonl.gz")
    assert len(jobs) == 12_031
    assert round(np.mean([job.num_prompt_tokens(0) for job in jobs])) == 12_035
    assert round(np.mean([job.turns[0].num_output_tokens for job in jobs])) == 343


def test_random_requests_have_the_means_that_were_asked_for() -> None:
    jobs = random_jobs(4000, rate=10, mean_input=500, mean_output=50, shared_prefix=100, seed=3)
    assert jobs[-1].arrival_s == pytest.approx(400, rel=0.05)
    assert np.mean([job.num_prompt_tokens(0) for job in jobs]) == pytest.approx(500, rel=0.05)
    assert np.mean([job.turns[0].num_output_tokens for job in jobs]) == pytest.approx(50, rel=0.05)
    at_once = random_jobs(3, rate=math.inf, mean_input=5, mean_output=5, shared_prefix=0, seed=0)
    assert {job.arrival_s for job in at_once} == {0.0}
