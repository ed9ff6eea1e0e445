"""Workloads of agents: the file, and that each turn follows the end of the one before."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from longshore.deploy.bench.agents import (
    AgentJob,
    AgentTurn,
    SharedPrefix,
    make_jobs,
    read_jobs,
    run,
)
from longshore.deploy.bench.jobs import JobRunner
from longshore.deploy.bench.options import AgentsOptions, JobsOptions
from longshore.deploy.bench.sse_client import HttpAnswer, HttpEndpoint
from longshore.protocol.errors import ConfigError


def test_the_workload_is_that_of_its_seed_and_like_the_published_statistics(tmp_path: Path) -> None:
    options = AgentsOptions(out=tmp_path / "jobs.jsonl", num_jobs=300, max_tokens=10**9)
    run(options)
    jobs = read_jobs(options.out)
    assert list(jobs) == list(make_jobs(options))
    turns = [len(job.turns) for job in jobs]
    assert np.mean(turns) == pytest.approx(33, rel=0.1)
    assert np.percentile(turns, (50, 90)) == pytest.approx((30, 57), rel=0.12)
    assert np.mean([job.num_tokens for job in jobs]) == pytest.approx(84_482, rel=0.12)
    outputs = [sum(turn.num_output_tokens for turn in job.turns) for job in jobs]
    assert np.mean(outputs) == pytest.approx(17_239, rel=0.12)
    arrivals = [job.arrival_s for job in jobs]
    assert arrivals == sorted(arrivals)
    assert np.mean(np.diff(arrivals)) == pytest.approx(10.0, rel=0.2)
    for job in jobs:
        assert (job.turns[-1].tool, job.turns[-1].gap_s) == (None, 0.0)
        assert all(turn.tool and turn.gap_s > 0 for turn in job.turns[:-1])


def test_a_job_ends_before_it_is_too_long_for_the_model() -> None:
    jobs = list(make_jobs(AgentsOptions(out=Path(), token_scale=0.02, max_tokens=1900)))
    assert max(job.num_tokens for job in jobs) <= 1900
    assert all(len(job.turns) == 1 for job in make_jobs(AgentsOptions(out=Path(), turns=1)))
    with pytest.raises(
        ConfigError, match="max_tokens=1000 are too few for the first turn of job 0"
    ):
        list(make_jobs(AgentsOptions(out=Path(), max_tokens=1000)))
    with pytest.raises(ConfigError, match="seed=-1 must be at least 0"):
        AgentsOptions(out=Path(), seed=-1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no jobs"),
        ('{"job_id": "a", "arrival_s": 0, "turns": []}', "line 1"),
        ('{"job_id": "a", "arrival_s": 0, "turns": [{"num_new_tokens": 0}]}', "line 1"),
    ],
)
def test_a_file_that_is_no_workload_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_jobs(path)


class FakeServer(HttpEndpoint):
    """Answers with tokens 7, and keeps the bodies."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.bodies: list[Any] = []

    async def request(  # type: ignore[override]
        self, method: str, path: str, body: bytes = b"", **_: Any
    ) -> HttpAnswer:
        asked = msgspec.json.decode(body)
        self.bodies.append(asked)
        answer = {
            "choices": [{"token_ids": [7] * asked["max_tokens"]}],
            "usage": {
                "prompt_tokens": len(asked["prompt"]),
                "prompt_tokens_details": {"cached_tokens": 1},
            },
        }
        return HttpAnswer(0.0, status=200, body=msgspec.json.encode(answer))


async def test_a_turns_prompt_is_the_conversation_so_far_and_new_tokens() -> None:
    turns = (AgentTurn(4, 2, "read", 0.001), AgentTurn(3, 5, "bash", 0.001), AgentTurn(1, 1))
    job = AgentJob("job-1", 0.0, turns, SharedPrefix(9, 6))
    server = FakeServer()
    runner = JobRunner(server, JobsOptions(file=Path(), vocab_size=100, model="m"))
    result = await runner.run_job(job, 0)
    prompts = [body["prompt"] for body in server.bodies]
    assert [len(prompt) for prompt in prompts] == [10, 15, 21]
    assert prompts[1][:12] == [*prompts[0], 7, 7]
    assert prompts[2][:20] == [*prompts[1], *[7] * 5]
    assert [body["is_last_step"] for body in server.bodies] == [False, False, True]
    assert {body["job_id"] for body in server.bodies} == {"job-1"}
    assert (result.num_prompt_tokens, result.num_cached_tokens) == (46, 3)
    other = FakeServer()
    await JobRunner(other, JobsOptions(file=Path(), vocab_size=100, model="m")).run_job(job, 1)
    assert other.bodies[0]["prompt"][:6] == prompts[0][:6]
    assert other.bodies[0]["prompt"][6:] != prompts[0][6:]
