"""Pictures of a simulation, with matplotlib (the extra `research`)."""

from pathlib import Path
from typing import Any

import numpy as np

from longshore.deploy.simulator.records import SimulationResult
from longshore.protocol.errors import ConfigError
from longshore.protocol.install_command import install_command


def check_plots(folder: Path | None) -> None:
    """Raise ConfigError if pictures cannot be written there. Call it before simulating."""
    if folder is None:
        return
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError(
            f"plot={folder} needs matplotlib, which is not installed; run "
            f"{install_command('research')}"
        ) from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"plot={folder} cannot be created: {error.strerror}") from error


def plot(result: SimulationResult, folder: Path) -> list[Path]:
    """Write latency.png and load.png; returns their paths."""
    paths = [folder / "latency.png", folder / "load.png"]
    for path, draw in zip(paths, (_draw_latency, _draw_load), strict=True):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 4), layout="constrained")
        draw(figure, result)
        figure.savefig(path, dpi=120)
    return paths


def _draw_latency(figure: Any, result: SimulationResult) -> None:
    """Share of requests (or jobs) that took at most this long."""
    curves = {
        "TTFT": [each.ttft_s for each in result.requests],
        "time per output token": [each.tpot_s for each in result.requests],
        "end to end": [each.e2e_s for each in result.requests],
    }
    if result.jobs:
        curves["job"] = [each.end_s - each.arrival_s for each in result.jobs]
    for axes, (name, values) in zip(figure.subplots(1, len(curves)), curves.items(), strict=True):
        known = np.sort([each for each in values if each is not None])
        axes.step(known, np.arange(1, len(known) + 1) / max(1, len(known)), where="post")
        axes.set(title=name, xlabel="seconds", ylim=(0, 1.02))
        if len(known) and known[0] > 0:
            _use_log_scale(axes, known)
        axes.grid(visible=True, alpha=0.3)
    figure.suptitle(f"{result.options.policy}, {result.options.router}: share of requests")


def _use_log_scale(axes: Any, values: np.ndarray) -> None:
    """Seconds on a logarithmic scale, with as many labels as fit."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    is_wide = values[-1] > 100 * values[0]
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if is_wide else (1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def _draw_load(figure: Any, result: SimulationResult) -> None:
    """Running and waiting requests, and the use of the KV cache, over time."""
    times_s = [each.time_s for each in result.samples]
    counts, usage = figure.subplots(1, 2)
    for name in ("num_running", "num_waiting"):
        values = [sum(getattr(each, name)) for each in result.samples]
        counts.plot(times_s, values, label=name.removeprefix("num_"))
    counts.set(title="requests at all engines", xlabel="seconds")
    counts.legend()
    by_engine = np.array([each.kv_usage for each in result.samples])
    usage.plot(times_s, by_engine.mean(axis=1), label="mean")
    usage.fill_between(
        times_s, by_engine.min(axis=1), by_engine.max(axis=1), alpha=0.3, label="all engines"
    )
    usage.set(title="share of the KV cache in use", xlabel="seconds", ylim=(0, 1.02))
    usage.legend()
