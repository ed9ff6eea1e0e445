"""`longshore bench fit-cost`: fits a cost model for the simulator to what a client of a running
server measures.

Three kinds of points: the time to first token of a single request, by prompt length (the steps of
its chunks, and once the cost of a request), the time per token while B requests decode together
(one step), and the time of the step that computes another prompt beside them. All are linear in the
unknown terms, which are fitted by non-negative least squares of the relative errors.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any, Final

import msgspec
import numpy as np
import uvloop

from longshore.deploy.bench.options import FitCostOptions, ServeBenchOptions
from longshore.deploy.bench.prompts import random_prompts
from longshore.deploy.bench.report import check_writable, conditions, write
from longshore.deploy.bench.serve import Measured, ServerFailed, ask_server, measure
from longshore.deploy.bench.sse_client import HttpEndpoint
from longshore.deploy.simulator.cost_model import CostModel, HostTimes, StepTerms, StepWork
from longshore.protocol.errors import ConfigError

TERMS: Final = ("per_step_s", "per_token_s", "per_attended_s", "per_context_s", "per_row_s")
"""Fitted terms of a step. `per_sample_s` can hardly be told from `per_row_s`, so it is left out."""


@dataclass(frozen=True)
class Point:
    """A measured time: of `work`, in this number of steps, and of `num_requests` requests.

    work: of all steps together.
    """

    name: str
    seconds: float
    work: StepWork
    num_steps: float
    num_requests: int

    @property
    def features(self) -> list[float]:
        """What each of TERMS, and the time per request, is multiplied by."""
        work = self.work
        of_steps = (work.num_tokens, work.num_attended, work.num_context, work.num_rows)
        return [self.num_steps, *of_steps, self.num_requests]


def run(options: FitCostOptions) -> None:
    """Measure, fit, and write the cost model. Raises ServerFailed, ConfigError."""
    check_writable(options.output)
    points = uvloop.run(_measure_points(options))
    model, report = fit(points, options)
    document = {
        **msgspec.to_builtins(model),
        "fit": {**report, "conditions": conditions(options)},
    }
    write(document, options.output)
    print(
        f"{len(points)} points; relative error of the fit: mean {report['mean_error']:.1%}, "
        f"largest {report['largest_error']:.1%}"
    )


def fit(points: Sequence[Point], options: FitCostOptions) -> tuple[CostModel, dict[str, Any]]:
    """The cost model, and how well it describes the points."""
    features = np.array([point.features for point in points])
    measured = np.array([point.seconds for point in points])
    terms = nonnegative_least_squares(features / measured[:, None], np.ones(len(points)))
    predicted = features @ terms
    errors = np.abs(predicted / measured - 1)
    per_request_s = float(terms[-1])
    model = CostModel(
        name=f"fit of {options.model or options.url}",
        description="fitted by longshore bench fit-cost",
        kv_bytes_per_token=options.kv_bytes_per_token,
        overhead=StepTerms(**dict(zip(TERMS, map(float, terms), strict=False))),
        # A client cannot tell the way there from the way back.
        host=HostTimes(arrival_s=per_request_s / 2, output_s=per_request_s / 2),
    )
    report = {
        "mean_error": float(errors.mean()),
        "largest_error": float(errors.max()),
        "points": [
            {"name": point.name, "measured_s": point.seconds, "fitted_s": float(value)}
            for point, value in zip(points, predicted, strict=True)
        ],
    }
    return model, report


def nonnegative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x with no negative element for which |matrix @ x - target| is smallest. Tries every set
    of elements that are not 0, so it is meant for few columns."""
    num_columns = matrix.shape[1]
    best, best_error = np.zeros(num_columns), float(target @ target)
    columns = range(num_columns)
    for chosen in chain.from_iterable(combinations(columns, n + 1) for n in columns):
        # Columns differ by many orders of magnitude, and lstsq ignores what is small beside others.
        part = matrix[:, chosen]
        scale = np.linalg.norm(part, axis=0)
        if not scale.all():
            continue
        values = np.linalg.lstsq(part / scale, target, rcond=None)[0] / scale
        error = float(((part @ values - target) ** 2).sum())
        if (values >= 0).all() and error < best_error:
            best, best_error = np.zeros(num_columns), error
            best[list(chosen)] = values
    return best


# Measurements


async def _measure_points(options: FitCostOptions) -> list[Point]:
    endpoint = HttpEndpoint(options.url, api_key=options.api_key)
    asked = await ask_server(
        endpoint,
        ServeBenchOptions(
            url=options.url,
            api_key=options.api_key,
            model=options.model,
            vocab_size=options.vocab_size,
            timeout_s=options.timeout_s,
        ),
    )
    client = _Client(endpoint, asked, np.random.default_rng(options.seed))
    await client.ask(2, options.prompt_lens[0], options.output_len)  # warm-up
    points = []
    for num_prompt in options.prompt_lens:
        times_s = [(await client.ask(1, num_prompt, 1))[0].ttft_s for _ in range(options.repeats)]
        points.append(prefill_point(num_prompt, times_s, options.max_num_batched_tokens))
    longest, shortest = max(options.prompt_lens) // 2, min(options.prompt_lens)
    for batch_size in options.batch_sizes:
        for num_prompt in (longest, shortest):
            runs = [
                await client.ask(batch_size, num_prompt, options.output_len)
                for _ in range(options.repeats)
            ]
            points.append(decode_point(num_prompt, runs))
        begin_s, end_s = _together(runs[-1])  # of the shortest
        delay_s = begin_s - runs[-1][0].sent_s + 0.3 * (end_s - begin_s)
        for num_new in _mixed_lens(options, batch_size):
            mixed = [
                await client.ask_beside(num_new, delay_s, batch_size, shortest, options.output_len)
                for _ in range(options.repeats)
            ]
            points += mixed_point(num_new, shortest, mixed)
    return points


def _mixed_lens(options: FitCostOptions, batch_size: int) -> list[int]:
    """Prompts that fit into one step beside the decodes: one of middle length and the longest."""
    largest = options.max_num_batched_tokens - batch_size
    fit = sorted(length for length in set(options.prompt_lens) if length <= largest)
    return sorted({fit[len(fit) // 2], fit[-1]}) if fit else []


class _Client:
    def __init__(
        self, endpoint: HttpEndpoint, options: ServeBenchOptions, generator: np.random.Generator
    ) -> None:
        self._endpoint, self._options, self._generator = endpoint, options, generator

    async def ask(self, num_requests: int, num_prompt: int, num_output: int) -> list[Measured]:
        """Send requests with new prompts at once. Raises ServerFailed."""
        assert self._options.vocab_size is not None
        prompts = random_prompts(
            num_requests,
            input_len=num_prompt,
            shared_prefix=0,
            vocab_size=self._options.vocab_size,
            generator=self._generator,
        )
        options = replace(self._options, output_len=num_output)
        try:
            return await asyncio.gather(
                *(measure(self._endpoint, options, prompt) for prompt in prompts)
            )
        except (OSError, TimeoutError) as error:
            raise ServerFailed(f"{options.url}: a request failed: {error!r}") from error

    async def ask_beside(
        self, num_new: int, delay_s: float, num_requests: int, num_prompt: int, num_output: int
    ) -> tuple[list[Measured], Measured]:
        """Ask as `ask` does, and after `delay_s` another request of `num_new` tokens for one
        more."""

        async def ask_later() -> list[Measured]:
            await asyncio.sleep(delay_s)
            return await self.ask(1, num_new, 1)

        decodes, (new,) = await asyncio.gather(
            self.ask(num_requests, num_prompt, num_output), ask_later()
        )
        return decodes, new


def prefill_point(num_prompt: int, times_s: Sequence[float], max_step_tokens: int) -> Point:
    """times_s: to the first token of one request."""
    ends = [*range(max_step_tokens, num_prompt, max_step_tokens), num_prompt]
    work = StepWork(
        num_tokens=num_prompt,
        num_attended=num_prompt * (num_prompt + 1) // 2,
        num_context=sum(ends),
        num_rows=len(ends),
        num_samples=1,
    )
    name = f"first token after a prompt of {num_prompt}"
    return Point(name, float(np.median(times_s)), work, len(ends), 1)


def decode_point(num_prompt: int, runs: Sequence[Sequence[Measured]]) -> Point:
    """runs: requests that were sent together. Only the time counts in which all of them decode.
    Raises ConfigError if there is none."""
    times_s, num_before = [], []
    for requests in runs:
        begin_s, end_s = _together(requests)
        for each in requests:
            inside = [at_s for at_s in each.arrivals_s if begin_s <= at_s <= end_s]
            if len(inside) >= 2:
                per_event = each.num_output_tokens / len(each.arrivals_s)
                times_s.append((inside[-1] - inside[0]) / (len(inside) - 1) / per_event)
                num_before.append(each.num_output_tokens - per_event * len(inside) / 2)
    if not times_s:
        raise ConfigError(
            f"{len(runs[0])} requests with prompts of {num_prompt} tokens never decoded together. "
            "Raise output_len, or lower batch_sizes."
        )
    batch_size = len(runs[0])
    context = round(batch_size * (num_prompt + float(np.mean(num_before))))
    work = StepWork(batch_size, context, context, batch_size, batch_size)
    name = f"token of {batch_size} requests with prompts of {num_prompt}"
    return Point(name, float(np.median(times_s)), work, 1, 0)


def mixed_point(
    num_new: int, num_prompt: int, runs: Sequence[tuple[Sequence[Measured], Measured]]
) -> list[Point]:
    """A point, or none if the new requests came too late.

    num_new, num_prompt: tokens of the prompts of the new request and of those that decode.
    runs: requests that decode together, and a new one, whose only token they get the next one with.
    The first token of a stream may arrive after one that was sent later, so of the two steps that
    ended nearest before it, the longer one counts.
    """
    times_s, num_before = [], []
    for requests, new in runs:
        at_s = new.arrivals_s[0]
        begin_s, end_s = _together(requests)
        if not begin_s < at_s < end_s:
            continue
        for each in requests:
            arrivals_s = np.array(each.arrivals_s)
            nearest = int(np.abs(arrivals_s[1:] - at_s).argmin())
            index = max((nearest, max(nearest - 1, 0)), key=each.gaps_s.__getitem__)
            times_s.append(each.gaps_s[index])
            num_before.append(index + 1)
    if not times_s:
        return []
    batch_size = len(runs[0][0])
    context = round(batch_size * (num_prompt + float(np.mean(num_before))))
    work = StepWork(
        num_tokens=num_new + batch_size,
        num_attended=num_new * (num_new + 1) // 2 + context,
        num_context=num_new + context,
        num_rows=batch_size + 1,
        num_samples=batch_size + 1,
    )
    name = f"step with a prompt of {num_new} beside {batch_size} decodes"
    return [Point(name, float(np.median(times_s)), work, 1, 0)]


def _together(requests: Sequence[Measured]) -> tuple[float, float]:
    """From when until when all of them decode, by `perf_counter`."""
    begin_s = max(each.arrivals_s[0] for each in requests)
    return begin_s, min(each.arrivals_s[-1] for each in requests)
