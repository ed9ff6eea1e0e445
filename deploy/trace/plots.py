"""Plots of a scheduler trace, as PNG files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from longshore.deploy.trace.reading import BEGINS, Trace
from longshore.protocol.errors import ConfigError
from longshore.protocol.install_command import install_command

MAX_POINTS: Final = 2000
"""Of a line: more cannot be told apart in a picture."""

GAP_SHARE: Final = 0.01
"""Of the duration: a time without steps that is longer interrupts a line."""

_INK, _MUTED = "#37474f", "#90a4ae"
_TEAL, _ORANGE, _RED = "#00897b", "#ef6c00", "#c62828"


def plot_trace(trace: Trace, folder: Path) -> list[Path]:
    """Write the plots for which the trace has data; returns the files. Raises ConfigError without
    matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"plots need matplotlib; run {install_command('research')}") from None
    folder.mkdir(parents=True, exist_ok=True)
    style: dict[Any, Any] = {
        "axes.edgecolor": _MUTED,
        "axes.grid": True,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "font.size": 9,
        "grid.color": "#eceff1",
        "legend.frameon": False,
        "text.color": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
    }
    plots: dict[str, tuple[Callable[[Any, Trace], None], bool]] = {
        "occupancy": (_occupancy, bool(trace.steps)),
        "tokens": (_tokens, bool(trace.steps)),
        "hits": (_hits, any(lookup.result in BEGINS for lookup in trace.lookups)),
        "queue_time": (_queue_time, any(life.queue_s is not None for life in trace.requests)),
    }
    files = []
    for name, (draw, has_data) in plots.items():
        if has_data:
            with matplotlib.rc_context(style):
                figure = Figure(figsize=(9, 5), layout="constrained")
                draw(figure, trace)
                path = folder / f"{name}.png"
                figure.savefig(path, dpi=110)
            files.append(path)
    return files


def _occupancy(figure: Any, trace: Trace) -> None:
    snapshots = [step.snapshot for step in trace.steps]
    blocks, queues = figure.subplots(2, 1, sharex=True)
    total = np.array([snapshot.gpu.total for snapshot in snapshots])
    held = total - [snapshot.gpu.free for snapshot in snapshots]
    cached = np.array([snapshot.gpu.cached for snapshot in snapshots])
    _line(blocks, trace, 100 * held / total, "held by requests", _TEAL, fill=True)
    _line(blocks, trace, 100 * cached / total, "in the prefix cache, held or free", _ORANGE)
    host = np.array([snapshot.cpu.total for snapshot in snapshots])
    if host.any():
        share = 100 * np.array([each.cpu.cached for each in snapshots]) / np.maximum(host, 1)
        _line(blocks, trace, share, "host memory in use", _INK)
    preempted = [each.decision.now for each in trace.steps if each.decision.preempted]
    if preempted:
        marks = np.array(preempted) - trace.first_s
        blocks.plot(marks, np.full(len(marks), 104), "|", color=_RED, label="preemption", ms=6)
    blocks.set(title="KV blocks", ylabel="% of the blocks", ylim=(0, 108))
    _line(queues, trace, [snapshot.running for snapshot in snapshots], "running", _TEAL)
    _line(queues, trace, [snapshot.waiting for snapshot in snapshots], "waiting", _ORANGE)
    queues.set(title="Requests", xlabel="seconds", ylabel="requests")
    queues.set_ylim(bottom=0)
    for axes in (blocks, queues):
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _tokens(figure: Any, trace: Trace) -> None:
    axes = figure.subplots()
    times, decisions = _times(trace), [step.decision for step in trace.steps]
    prefill = np.array([decision.prefill_tokens for decision in decisions])
    decode = np.array([decision.tokens for decision in decisions]) - prefill
    for label, tokens, color in (("prefill", prefill, _ORANGE), ("decode", decode, _TEAL)):
        axes.plot(times[tokens > 0], tokens[tokens > 0], ".", color=color, label=label, ms=3)
    limit = max(step.snapshot.limits.tokens for step in trace.steps)
    axes.axhline(limit, color=_MUTED, ls="--", lw=1, label="limit of a step")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, position: f"{value:,.0f}")
    axes.set(title="Tokens per step", xlabel="seconds", ylabel="tokens, logarithmic")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _hits(figure: Any, trace: Trace) -> None:
    axes = figure.subplots()
    used = [lookup for lookup in trace.lookups if lookup.result in BEGINS]
    times = np.array([lookup.now for lookup in used]) - trace.first_s
    looked_up = np.cumsum([lookup.total_tokens for lookup in used])
    local = np.cumsum([lookup.local_hit_tokens for lookup in used])
    external = np.cumsum([lookup.external_hit_tokens or 0 for lookup in used])
    share = [100 * each.local_hit_tokens / each.total_tokens for each in used]
    axes.plot(times, share, ".", color=_MUTED, label="a request, prefix cache", ms=3)
    axes.step(
        times, 100 * local / looked_up, where="post", color=_TEAL, label="prefix cache so far"
    )
    if external[-1]:
        both = 100 * (local + external) / looked_up
        axes.step(times, both, where="post", color=_ORANGE, label="with the connector so far")
    axes.set(title="Prompt tokens found", xlabel="seconds", ylabel="% of the tokens looked up")
    axes.set_ylim(-2, 102)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _queue_time(figure: Any, trace: Trace) -> None:
    axes = figure.subplots()
    for label, values, color in (
        ("until it is admitted", [life.queue_s for life in trace.requests], _ORANGE),
        ("until its first token", [life.first_token_s for life in trace.requests], _TEAL),
    ):
        known = np.sort([1e3 * value for value in values if value is not None])
        if len(known):
            share = 100 * np.arange(1, len(known) + 1) / len(known)
            axes.step(np.maximum(known, 0.01), share, where="post", color=color, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, position: f"{value:,g}")
    axes.set(title="Waiting of requests", xlabel="milliseconds since it was queued, logarithmic")
    axes.set(ylabel="% of the requests", ylim=(0, 102))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _times(trace: Trace) -> Any:
    return np.array([step.snapshot.now for step in trace.steps]) - trace.first_s


def _line(
    axes: Any, trace: Trace, values: Any, label: str, color: str, *, fill: bool = False
) -> None:
    """A line of values at the starts of the steps, interrupted where no step runs for long. At most
    MAX_POINTS points: the largest value of each stretch, so that no peak is lost."""
    times, values = _times(trace), np.asarray(values, np.float64)
    ends = np.array(
        [step.decision.now if step.output_s is None else step.output_s for step in trace.steps]
    )
    idle = times[1:] - (ends - trace.first_s)[:-1]
    gaps = np.flatnonzero(idle > GAP_SHARE * (trace.last_s - trace.first_s)) + 1
    times = np.insert(times, gaps, (ends - trace.first_s)[gaps - 1])
    values = np.insert(values, gaps, np.nan)
    starts = np.unique(np.linspace(0, len(values) - 1, min(len(values), MAX_POINTS)).astype(int))
    times, values = times[starts], np.maximum.reduceat(values, starts)
    axes.step(times, values, where="post", color=color, label=label, lw=1.2)
    if fill:
        axes.fill_between(times, values, step="post", color=color, alpha=0.15, lw=0)
