"""Figures of a scheduler trace, and a table of them."""

from collections.abc import Iterable

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from longshore.deploy.trace.reading import BEGINS, Trace


class Spread(msgspec.Struct, frozen=True):
    """The spread of `count` values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Summary(msgspec.Struct, frozen=True):
    """The summary of a trace. Figures that do not occur are None.

    num_queried_tokens: of admitted requests; the hit tokens are a part of them.
    mean_occupancy: share of the blocks that requests hold, over the time in which steps run.
    step_s:     from the plan until the output arrives.
    occupancy:  before each step, like running and waiting.
    queue_s, first_token_s: from the queue until the first row and the first token.
    """

    engine: str | None
    policy: str | None
    connector: str | None
    num_records: int
    num_dropped_records: int
    num_truncated_lines: int
    duration_s: float
    num_steps: int
    num_requests: int
    num_finished: int
    finish_reasons: dict[str, int]
    num_preemptions: int
    num_tokens: int
    num_prefill_tokens: int
    num_queried_tokens: int
    num_local_hit_tokens: int
    num_external_hit_tokens: int
    mean_occupancy: float | None
    step_s: Spread | None
    tokens_per_step: Spread | None
    occupancy: Spread | None
    running: Spread | None
    waiting: Spread | None
    queue_s: Spread | None
    prefill_s: Spread | None
    first_token_s: Spread | None
    decode_s: Spread | None
    preempted_s: Spread | None
    token_interval_s: Spread | None


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return the spread, or None without values; a None among them does not count."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    p50, p90, p99 = np.percentile(known, [50, 90, 99]).tolist()
    return Spread(len(known), float(np.mean(known)), p50, p90, p99, float(max(known)))


def summarize(trace: Trace) -> Summary:
    begin, steps, lives = trace.begin, trace.steps, trace.requests
    used = [lookup for lookup in trace.lookups if lookup.result in BEGINS]
    ended = [life.end for life in lives if life.end is not None]
    reasons: dict[str, int] = {}
    for end in ended:
        reasons[end.reason] = reasons.get(end.reason, 0) + 1
    times = np.array([step.snapshot.now for step in steps])
    shares = np.array([1 - step.snapshot.gpu.free / step.snapshot.gpu.total for step in steps])
    mean_occupancy = None
    ends = np.minimum(
        np.append(times[1:], np.inf),
        [np.inf if step.output_s is None else step.output_s for step in steps],
    )
    lasting = np.where(np.isfinite(ends), ends - times, 0.0)
    if lasting.any():
        mean_occupancy = float(np.average(shares, weights=lasting))
    return Summary(
        engine=None if begin is None else begin.engine,
        policy=None if begin is None else begin.policy,
        connector=next((each.connector for each in used if each.connector is not None), None),
        num_records=trace.num_records,
        num_dropped_records=trace.num_dropped,
        num_truncated_lines=trace.num_truncated,
        duration_s=trace.last_s - trace.first_s,
        num_steps=len(steps),
        num_requests=len(lives),
        num_finished=len(ended),
        finish_reasons=reasons,
        num_preemptions=sum(life.num_preemptions for life in lives),
        num_tokens=sum(step.decision.tokens for step in steps),
        num_prefill_tokens=sum(step.decision.prefill_tokens for step in steps),
        num_queried_tokens=sum(lookup.total_tokens for lookup in used),
        num_local_hit_tokens=sum(lookup.local_hit_tokens for lookup in used),
        num_external_hit_tokens=sum(lookup.external_hit_tokens or 0 for lookup in used),
        mean_occupancy=mean_occupancy,
        step_s=spread(
            None if step.output_s is None else step.output_s - step.decision.now for step in steps
        ),
        tokens_per_step=spread(step.decision.tokens for step in steps),
        occupancy=spread(shares.tolist()),
        running=spread(step.snapshot.running for step in steps),
        waiting=spread(step.snapshot.waiting for step in steps),
        queue_s=spread(life.queue_s for life in lives),
        prefill_s=spread(life.seconds_in("prefill") for life in lives if life.first_output_s),
        first_token_s=spread(life.first_token_s for life in lives),
        decode_s=spread(life.seconds_in("decode") for life in lives if life.first_output_s),
        preempted_s=spread(life.seconds_in("preempted") for life in lives if life.num_preemptions),
        token_interval_s=spread(life.token_interval_s for life in lives),
    )


def print_summary(summary: Summary) -> None:
    """The figures as two tables."""
    console = Console()
    totals = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    totals.add_column()
    totals.add_column(overflow="fold")
    for name, value in _totals(summary):
        totals.add_row(name, value)
    console.print(totals)
    spreads = Table(box=None, padding=(0, 2, 0, 0))
    spreads.add_column("", no_wrap=True)
    for name in ("count", "mean", "p50", "p90", "p99", "max"):
        spreads.add_column(name, justify="right", no_wrap=True)
    for name, values, factor, digits in (
        ("tokens per step", summary.tokens_per_step, 1, 1),
        ("running requests", summary.running, 1, 1),
        ("waiting requests", summary.waiting, 1, 1),
        ("blocks held, %", summary.occupancy, 100, 1),
        ("step, ms", summary.step_s, 1e3, 2),
        ("queued, ms", summary.queue_s, 1e3, 1),
        ("prefill, ms", summary.prefill_s, 1e3, 1),
        ("first token, ms", summary.first_token_s, 1e3, 1),
        ("decode, ms", summary.decode_s, 1e3, 1),
        ("between tokens, ms", summary.token_interval_s, 1e3, 2),
        ("preempted, ms", summary.preempted_s, 1e3, 1),
    ):
        if values is not None:
            figures = (values.mean, values.p50, values.p90, values.p99, values.max)
            cells = [f"{figure * factor:,.{digits}f}" for figure in figures]
            spreads.add_row(name, f"{values.count:,}", *cells)
    console.print()
    console.print(spreads)


def _totals(summary: Summary) -> list[tuple[str, str]]:
    queried = summary.num_queried_tokens
    reasons = ", ".join(f"{count:,} {name}" for name, count in summary.finish_reasons.items())
    rows = [
        ("engine", f"{summary.engine or '?'}, policy {summary.policy or '?'}"),
        ("duration", f"{summary.duration_s:,.3f} s"),
        ("steps", _per_second(summary.num_steps, summary.duration_s)),
        ("tokens", _per_second(summary.num_tokens, summary.duration_s)),
        ("of them prefill", f"{summary.num_prefill_tokens:,}"),
        ("requests", f"{summary.num_requests:,}, ended: {reasons or 'none'}"),
        ("preemptions", f"{summary.num_preemptions:,}"),
        ("prefix cache hits", _share(summary.num_local_hit_tokens, queried)),
    ]
    if summary.connector is not None:
        hits = _share(summary.num_external_hit_tokens, queried)
        rows.append((f"hits in {summary.connector}", hits))
    if summary.mean_occupancy is not None:
        rows.append(("blocks held", f"{summary.mean_occupancy:.1%} on average while steps run"))
    if summary.num_dropped_records:
        rows.append(("missing", f"{summary.num_dropped_records:,} records, the disk was too slow"))
    if summary.num_truncated_lines:
        rows.append(("truncated", "the last line is not whole: the process was killed"))
    return rows


def _per_second(count: int, duration_s: float) -> str:
    return f"{count:,}" + (f" ({count / duration_s:,.1f} per second)" if duration_s > 0 else "")


def _share(count: int, total: int) -> str:
    if not total:
        return "no lookups"
    return f"{count / total:.1%} ({count:,} of {total:,} tokens of admitted requests)"


def print_json(summary: Summary) -> None:
    """The figures as one JSON object."""
    print(msgspec.json.format(msgspec.json.encode(summary)).decode())
