"""The result of a simulation as JSON, as CSV and as a summary. The same inputs give the same bytes:
nothing depends on the machine or the time. docs/simulator.md describes the fields."""

import csv
import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from longshore.deploy.simulator.records import EngineRecord, RequestRecord, SimulationResult

FORMAT: Final = 1
QUANTILES: Final = (50, 90, 99)
CSV_FIELDS: Final = (
    "request_id",
    "job_id",
    "turn",
    "engine",
    "prefill_engine",
    "finish_reason",
    "arrival_s",
    "num_prompt_tokens",
    "num_output_tokens",
    "num_cached_tokens",
    "num_preemptions",
    "queue_s",
    "ttft_s",
    "tpot_s",
    "e2e_s",
)
_OUTPUTS: Final = ("json", "csv", "plot")
_DIGITS: Final = 9


def summarize(result: SimulationResult) -> dict[str, Any]:
    """The content of the JSON file."""
    requests = result.requests
    completed = [each for each in requests if each.finish_reason != "rejected"]
    begin_s = min(each.arrival_s for each in requests)  # a trace need not be sorted by time
    duration_s = max(each.end_s or 0.0 for each in requests) - begin_s
    num_input = sum(each.num_prompt_tokens for each in completed)
    num_output = sum(each.num_output_tokens for each in completed)
    per_s = 1 / duration_s if duration_s else 0.0
    summary = {
        "format": FORMAT,
        "settings": _settings(result),
        "cost_model": msgspec.to_builtins(result.cost),
        "num_blocks": result.num_blocks,
        "duration_s": duration_s,
        "requests": {
            "completed": len(completed),
            "rejected": len(requests) - len(completed),
            "input_tokens": num_input,
            "output_tokens": num_output,
            "preemptions": sum(each.num_preemptions for each in requests),
        },
        "throughput": {
            "requests_per_s": len(completed) * per_s,
            "input_tokens_per_s": num_input * per_s,
            "output_tokens_per_s": num_output * per_s,
        },
        "ttft_s": _distribution(each.ttft_s for each in completed),
        "tpot_s": _distribution(each.tpot_s for each in completed),
        "e2e_s": _distribution(each.e2e_s for each in completed),
        "queue_s": _distribution(each.queue_s for each in completed),
        "hits": _hits(result.engines) if result.split is None else _split_hits(requests),
        "jobs": _jobs(result),
        "routing": result.route_counts,
        "split": _split(result),
        "engines": [
            {"role": role, **_engine(number, each, requests, duration_s)}
            for number, (role, each) in enumerate(
                zip(result.options.roles, result.engines, strict=True)
            )
        ],
        "samples": [each._asdict() for each in result.samples],
    }
    return _rounded(summary)


def _settings(result: SimulationResult) -> dict[str, Any]:
    """The settings, without the files that the result is written to."""
    return {
        name: str(value) if isinstance(value, Path) or value == math.inf else value
        for name, value in dataclasses.asdict(result.options).items()
        if name not in _OUTPUTS
    }


def _distribution(values: Iterable[float | None]) -> dict[str, float | None]:
    known = [each for each in values if each is not None]
    if not known:
        return dict.fromkeys(("mean", *(f"p{each}" for each in QUANTILES)))
    quantiles = np.percentile(known, QUANTILES).tolist()
    return {"mean": float(np.mean(known))} | {
        f"p{each}": value for each, value in zip(QUANTILES, quantiles, strict=True)
    }


def _hits(engines: Sequence[EngineRecord]) -> dict[str, Any]:
    """Shares of the prompt tokens of all admissions that were found, by tier."""
    num_prompt = sum(each.stats.num_prompt_tokens for each in engines)
    found = {"GPU": sum(each.stats.num_prefix_hit_tokens for each in engines)}
    for engine in engines:
        for tier in engine.stats.tiers:
            found[tier.medium] = found.get(tier.medium, 0) + tier.num_hit_tokens
    return {
        "prompt_tokens": num_prompt,
        "hit_tokens": found,
        "hit_rates": {tier: num / max(1, num_prompt) for tier, num in found.items()},
    }


def _split_hits(requests: Sequence[RequestRecord]) -> dict[str, Any]:
    """The same of split engines, by request: a prompt is found, or computed, once, though two
    engines admit it."""
    num_prompt = sum(each.num_prompt_tokens for each in requests)
    num_found = sum(each.num_cached_tokens for each in requests)
    return {
        "prompt_tokens": num_prompt,
        "hit_tokens": {"GPU": num_found},
        "hit_rates": {"GPU": num_found / max(1, num_prompt)},
    }


def _split(result: SimulationResult) -> dict[str, Any] | None:
    """None without prefill engines."""
    if result.split is None:
        return None
    return {
        "outcomes": result.split.outcomes,
        "skips": result.split.skips,
        "gap_s": _distribution(result.split.gaps_s),
        "pulled_bytes": sum(
            each.num_bytes for engine in result.engines for each in engine.stats.transfers
        ),
    }


def _jobs(result: SimulationResult) -> dict[str, Any] | None:
    """None for a workload without jobs."""
    jobs = [each for each in result.jobs if each.is_complete]
    if not result.jobs:
        return None
    return {
        "completed": len(jobs),
        "failed": len(result.jobs) - len(jobs),
        "completion_s": _distribution(each.end_s - each.arrival_s for each in jobs),
        "turns": sum(each.num_turns for each in result.jobs),
    }


def _engine(
    number: int, engine: EngineRecord, requests: Sequence[RequestRecord], duration_s: float
) -> dict[str, Any]:
    ended = [each for each in requests if each.engine == number]
    begun = [each for each in requests if each.prefill_engine == number]
    num_output = sum(
        each.num_output_tokens - (each.prefill_engine is not None) for each in ended
    ) + len(begun)
    stats = engine.stats
    return {
        "requests": len(ended) + len(begun),
        "output_tokens": num_output,
        "steps": engine.num_steps,
        "busy_s": engine.busy_s,
        "utilization": engine.busy_s / duration_s if duration_s else 0.0,
        "prompt_tokens": stats.num_prompt_tokens,
        "hit_tokens": stats.num_prefix_hit_tokens,
        "external_hit_tokens": stats.num_external_hit_tokens,
        "preemptions": stats.num_preemptions,
        "swapped_out": stats.num_swapped_out,
    }


def _rounded(value: Any) -> Any:
    """Floats with nine digits after the point, in which two sums of the same numbers agree."""
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return value


def write_json(summary: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def write_csv(requests: Sequence[RequestRecord], path: Path) -> None:
    """A line per request, in the order of their numbers; empty fields are unknown."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(CSV_FIELDS)
        for each in requests:
            writer.writerow([_rounded(getattr(each, name)) for name in CSV_FIELDS])


def describe(summary: dict[str, Any]) -> str:
    """A few lines for people."""
    requests, throughput, hits = summary["requests"], summary["throughput"], summary["hits"]
    lines = [
        f"requests      {requests['completed']:,} completed, {requests['rejected']:,} rejected, "
        f"{requests['preemptions']:,} preemptions, in {summary['duration_s']:,.1f} s",
        f"throughput    {throughput['requests_per_s']:,.2f} requests/s, "
        f"{throughput['input_tokens_per_s']:,.0f} input tokens/s, "
        f"{throughput['output_tokens_per_s']:,.0f} output tokens/s",
    ]
    for name, title in (
        ("ttft_s", "TTFT"),
        ("tpot_s", "TPOT"),
        ("e2e_s", "end to end"),
        ("queue_s", "queue"),
    ):
        lines.append(f"{title:<13} {_times(summary[name])}")
    rates = ", ".join(f"{tier} {rate:.1%}" for tier, rate in hits["hit_rates"].items())
    lines.append(f"prefix hits   {rates} of prompt tokens")
    if (jobs := summary["jobs"]) is not None:
        times = _times(jobs["completion_s"])
        lines.append(
            f"jobs          {jobs['completed']:,} completed, {jobs['failed']:,} failed; {times}"
        )
    if (split := summary["split"]) is not None:
        num_offered = split["outcomes"].get("offered", 0)
        lines.append(
            f"split         {num_offered:,} of {requests['completed']:,} requests; from the first "
            f"token to the second {_times(split['gap_s'])}"
        )
    shares = [engine["utilization"] for engine in summary["engines"]]
    lines.append(
        f"engines       {len(shares)}, busy {min(shares):.0%} to {max(shares):.0%} of the time"
    )
    return "\n".join(lines)


def _times(values: dict[str, float | None]) -> str:
    parts = [
        f"{name} {value * 1e3:,.1f} ms" if value < 10 else f"{name} {value:,.1f} s"
        for name, value in values.items()
        if value is not None
    ]
    return ", ".join(parts) or "none"
