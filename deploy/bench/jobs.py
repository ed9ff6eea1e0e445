"""`longshore bench jobs`: completion times of a workload's jobs on a running server.

Closed loop: a turn is sent when the one before has ended and its tool has taken its time. Prompts
are random token ids; the outputs of former turns are part of them as the server has sent them.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvloop

from longshore.deploy.bench.agents import AgentJob, read_jobs
from longshore.deploy.bench.options import JobsOptions
from longshore.deploy.bench.prompts import FIRST_ORDINARY_ID
from longshore.deploy.bench.report import check_writable, conditions, write
from longshore.deploy.bench.serve import ServerFailed, ask_server, rejected
from longshore.deploy.bench.sse_client import HttpEndpoint


@dataclass(frozen=True)
class JobResult:
    """seconds: from the arrival of the first turn to the end of the last one."""

    seconds: float
    turn_seconds: list[float]
    num_prompt_tokens: int
    num_cached_tokens: int


class JobRunner:
    """Runs jobs on one server."""

    def __init__(self, endpoint: HttpEndpoint, options: JobsOptions) -> None:
        self._endpoint = endpoint
        self._options = options
        assert options.vocab_size is not None
        self._vocab_size = options.vocab_size

    async def run_job(self, job: AgentJob, number: int) -> JobResult:
        """Run the turns of a job, one after the other. Raises ServerFailed, ConnectionError or
        TimeoutError."""
        generator = np.random.default_rng((self._options.seed, 1, number))
        conversation: list[int] = []
        if job.shared_prefix is not None:
            prefix = job.shared_prefix
            of_prefix = np.random.default_rng((self._options.seed, 0, prefix.id))
            conversation += self._ids(of_prefix, prefix.num_tokens)
        begin_s = time.perf_counter()
        turn_seconds, num_prompt, num_cached = [], 0, 0
        for index, turn in enumerate(job.turns):
            conversation += self._ids(generator, turn.num_new_tokens)
            sent_s = time.perf_counter()
            answer = await self._ask(
                job, conversation, turn.num_output_tokens, is_last=index == len(job.turns) - 1
            )
            turn_seconds.append(time.perf_counter() - sent_s)
            conversation += answer["choices"][0]["token_ids"]
            usage = answer["usage"]
            num_prompt += usage["prompt_tokens"]
            num_cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            await asyncio.sleep(turn.gap_s * self._options.time_scale)
        return JobResult(time.perf_counter() - begin_s, turn_seconds, num_prompt, num_cached)

    def _ids(self, generator: np.random.Generator, count: int) -> list[int]:
        low = min(FIRST_ORDINARY_ID, self._vocab_size - 1)
        ids: list[int] = generator.integers(low, self._vocab_size, count).tolist()
        return ids

    async def _ask(
        self, job: AgentJob, prompt: Sequence[int], num_tokens: int, *, is_last: bool
    ) -> Any:
        body = {
            "model": self._options.model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "job_id": job.job_id,
            "is_last_step": is_last,
        }
        answer = await self._endpoint.request(
            "POST",
            "/v1/completions",
            json.dumps(body).encode(),
            timeout_s=self._options.timeout_s,
        )
        if answer.status != 200:
            raise rejected(answer)
        return json.loads(answer.body)


def run(options: JobsOptions) -> None:
    """Run the workload and write the result. Raises ConfigError, ServerFailed."""
    check_writable(options.json)
    jobs = read_jobs(options.file)
    write(uvloop.run(_run(options, jobs)), options.json)


async def _run(options: JobsOptions, jobs: Sequence[AgentJob]) -> dict[str, Any]:
    endpoint = HttpEndpoint(options.url, api_key=options.api_key)
    options = await ask_server(endpoint, options)
    runner = JobRunner(endpoint, options)
    begin_s = time.perf_counter()

    async def run_job(number: int, job: AgentJob) -> JobResult | str:
        due_s = begin_s + job.arrival_s * options.time_scale
        await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
        try:
            return await runner.run_job(job, number)
        except (ServerFailed, OSError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"

    outcomes = await asyncio.gather(*(run_job(number, job) for number, job in enumerate(jobs)))
    duration_s = time.perf_counter() - begin_s
    return {**conditions(options), **_summary(outcomes, duration_s)}


def _summary(outcomes: Sequence[JobResult | str], duration_s: float) -> dict[str, Any]:
    results = [outcome for outcome in outcomes if isinstance(outcome, JobResult)]
    errors = [outcome for outcome in outcomes if isinstance(outcome, str)]
    turn_seconds = [seconds for result in results for seconds in result.turn_seconds]
    return {
        "completed": len(results),
        "failed": len(errors),
        "first_error": errors[0] if errors else None,
        "duration_s": round(duration_s, 3),
        "turns": len(turn_seconds),
        "prompt_tokens": sum(result.num_prompt_tokens for result in results),
        "cached_tokens": sum(result.num_cached_tokens for result in results),
        "job_s": _percentiles([result.seconds for result in results]),
        "turn_s": _percentiles(turn_seconds),
    }


def _percentiles(samples: Sequence[float]) -> dict[str, float | None]:
    if not samples:
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    p50, p90, p99 = np.percentile(samples, (50, 90, 99))
    values = {"mean": np.mean(samples), "p50": p50, "p90": p90, "p99": p99}
    return {name: round(float(value), 4) for name, value in values.items()}
