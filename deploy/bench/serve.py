"""`longshore bench serve`: latency and throughput of a running server at a given request rate.

TTFT starts when a request is sent, so it excludes waiting at the client (`--max-concurrency`). ITL
is the gap between two events of a stream, TPOT the mean gap per token of a request.
"""

import asyncio
import json
import time
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import uvloop

from longshore.deploy.bench.error_message import error_message
from longshore.deploy.bench.options import JobsOptions, ServeBenchOptions
from longshore.deploy.bench.prompts import random_prompts
from longshore.deploy.bench.report import check_writable, conditions, percentiles_ms, write
from longshore.deploy.bench.sse_client import HttpAnswer, HttpEndpoint
from longshore.protocol.errors import LongshoreError

UNKNOWN_VOCAB_SIZE = 1000

OptionsT = TypeVar("OptionsT", ServeBenchOptions, JobsOptions)


class ServerFailed(LongshoreError):
    """The server cannot be measured: it rejects requests, or cannot be reached."""


@dataclass(frozen=True)
class Measured:
    """One answered request; times in seconds. sent_s: by `perf_counter`."""

    sent_s: float
    ttft_s: float
    e2e_s: float
    gaps_s: list[float]
    num_output_tokens: int
    num_cached_tokens: int

    @property
    def arrivals_s(self) -> list[float]:
        """When its events arrived, by `perf_counter`."""
        first_s = self.sent_s + self.ttft_s
        return [first_s, *(first_s + np.cumsum(self.gaps_s)).tolist()]

    @property
    def tpot_s(self) -> float | None:
        """Mean gap per token; None for an answer of one token."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)


def run(options: ServeBenchOptions) -> None:
    """Measure and write the result. Raises ServerFailed."""
    check_writable(options.json)
    write(uvloop.run(_run(options)), options.json)


async def _run(options: ServeBenchOptions) -> dict[str, Any]:
    endpoint = HttpEndpoint(options.url, api_key=options.api_key)
    options = await ask_server(endpoint, options)
    generator = np.random.default_rng(options.seed)
    prompts = random_prompts(
        options.num_prompts + options.num_warm_up,
        input_len=options.input_len,
        shared_prefix=options.shared_prefix,
        vocab_size=options.vocab_size or UNKNOWN_VOCAB_SIZE,
        generator=generator,
    )
    for prompt in prompts[options.num_prompts :]:
        await measure(endpoint, options, prompt)
    waits_s = generator.exponential(1 / options.request_rate, options.num_prompts)
    slots = asyncio.Semaphore(options.max_concurrency or options.num_prompts)
    begin_s = time.perf_counter()
    tasks = []
    for prompt, arrival_s in zip(prompts, np.cumsum(waits_s), strict=False):
        await asyncio.sleep(max(0.0, begin_s + float(arrival_s) - time.perf_counter()))
        tasks.append(asyncio.create_task(_measure_in_slot(slots, endpoint, options, prompt)))
    outcomes = await asyncio.gather(*tasks)
    duration_s = time.perf_counter() - begin_s
    measured = [outcome for outcome in outcomes if isinstance(outcome, Measured)]
    errors = [outcome for outcome in outcomes if isinstance(outcome, str)]
    return {**conditions(options), **_summary(measured, errors, duration_s)}


async def ask_server(endpoint: HttpEndpoint, options: OptionsT) -> OptionsT:
    """The options, with the server's model and vocabulary size filled in. Raises ServerFailed."""
    try:
        answer = await endpoint.request("GET", "/v1/models", timeout_s=10.0)
        if answer.status != 200:
            raise rejected(answer)
        model = json.loads(answer.body)["data"][0]
    except (OSError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise ServerFailed(
            f"{options.url} did not list its models ({error!r}). Is a server running there?"
        ) from error
    return replace(
        options,
        model=options.model or model["id"],
        vocab_size=options.vocab_size or model.get("vocab_size", UNKNOWN_VOCAB_SIZE),
    )


async def _measure_in_slot(
    slots: asyncio.Semaphore, endpoint: HttpEndpoint, options: ServeBenchOptions, prompt: list[int]
) -> Measured | str:
    async with slots:
        try:
            return await measure(endpoint, options, prompt)
        except (ServerFailed, OSError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"


async def measure(
    endpoint: HttpEndpoint, options: ServeBenchOptions, prompt: list[int]
) -> Measured:
    """Send a request of `options.output_len` tokens. Raises ServerFailed, OSError, TimeoutError."""
    body = json.dumps(
        {
            "model": options.model,
            "prompt": prompt,
            "max_tokens": options.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,  # a token without text is an event too
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    answer = await endpoint.request("POST", options.endpoint, body, timeout_s=options.timeout_s)
    if answer.status != 200:
        raise rejected(answer)
    return _timings(answer)


def rejected(answer: HttpAnswer) -> ServerFailed:
    """The error of an answer that is not 200."""
    message = error_message(answer) or answer.body.decode(errors="replace")
    return ServerFailed(f"HTTP {answer.status}: {message}")


def _timings(answer: HttpAnswer) -> Measured:
    arrivals_s: list[float] = []
    usage: dict[str, Any] = {}
    for arrived_s, data in answer.events:
        if data == b"[DONE]":
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise ServerFailed(chunk["error"]["message"])
        if chunk["choices"]:
            arrivals_s.append(arrived_s)
        usage = chunk.get("usage") or usage
    if not arrivals_s:
        raise ServerFailed("the stream ended without a token")
    return Measured(
        sent_s=answer.sent_s,
        ttft_s=arrivals_s[0] - answer.sent_s,
        e2e_s=arrivals_s[-1] - answer.sent_s,
        gaps_s=np.diff(arrivals_s).tolist(),
        num_output_tokens=usage.get("completion_tokens", len(arrivals_s)),
        num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
    )


def _summary(measured: list[Measured], errors: list[str], duration_s: float) -> dict[str, Any]:
    num_output_tokens = sum(each.num_output_tokens for each in measured)
    return {
        "completed": len(measured),
        "failed": len(errors),
        "first_error": errors[0] if errors else None,
        "duration_s": round(duration_s, 4),
        "requests_per_s": round(len(measured) / duration_s, 3),
        "output_tokens_per_s": round(num_output_tokens / duration_s, 1),
        "output_tokens": num_output_tokens,
        "cached_tokens": sum(each.num_cached_tokens for each in measured),
        "ttft_ms": percentiles_ms([each.ttft_s for each in measured]),
        "itl_ms": percentiles_ms([gap_s for each in measured for gap_s in each.gaps_s]),
        "tpot_ms": percentiles_ms([each.tpot_s for each in measured if each.tpot_s is not None]),
        "e2e_ms": percentiles_ms([each.e2e_s for each in measured]),
    }
