"""The screen of `longshore top`: for 80 columns by 24 lines, with more side by side if wider."""

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.styled import Styled
from rich.table import Table
from rich.text import Text

from longshore.deploy.gateway.overview import (
    EngineView,
    Overview,
    TierView,
    WorkerView,
)

WIDE_COLUMNS = 110
"""From this width on, latencies are placed next to requests and blocks."""


class TopScreen:
    """Renders one update of `longshore top`. trouble: why the server cannot be reached; the figures
    are then those of `view`.

    fills_terminal: omit worker rows that do not fit, and show how many were omitted.
    """

    def __init__(
        self, view: Overview, url: str, *, trouble: str | None = None, fills_terminal: bool = True
    ) -> None:
        self._view = view
        self._url = url
        self._trouble = trouble
        self._fills_terminal = fills_terminal

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        view = self._view
        head, latencies = self._head(options.max_width), _panel("latency", _latencies(view))
        counts = _side_by_side(
            _panel("requests", _requests(view)), _panel("tokens per second", _tokens(view))
        )
        blocks = _panel("KV blocks", _blocks(view))
        if options.max_width >= WIDE_COLUMNS:
            parts = [head, _side_by_side(Group(counts, blocks), latencies)]
        else:
            parts = [head, counts, blocks, latencies]
        if len(view.engines) > 1:
            parts.append(_panel("engines", _engines(view.engines)))
        tiers = view.engines[0].tiers if len(view.engines) == 1 else []
        num_lines = len(console.render_lines(Group(*parts), options.update(height=None)))
        num_others = len(tiers) + 3 + len(view.workers)
        if tiers and (not self._fills_terminal or num_lines + 2 + num_others < options.max_height):
            parts.append(_panel("offloaded KV", _tiers(tiers)))
            num_lines += 2 + len(tiers)
        if view.workers:
            num_rows = options.max_height - num_lines - 3 if self._fills_terminal else None
            if num_rows is None or num_rows > 0:
                parts.append(_workers_panel(view.workers, num_rows))
        yield Group(*parts) if self._trouble is None else Styled(Group(*parts), "dim")

    def _head(self, width: int) -> RenderableType:
        """The header line. If it is too long, the URL is truncated, not the state."""
        if self._trouble is not None:
            return Text(self._trouble, style="bold red", no_wrap=True, overflow="ellipsis")
        state = ("ready", "green") if self._view.is_ready else ("not ready", "bold red")
        head = Table.grid(expand=True)
        head.add_column(no_wrap=True)
        head.add_column(justify="right", no_wrap=True)
        window = _window(self._view)
        available = width - len(window) - len(state[0]) - 4
        where = Text.assemble((f"longshore {self._view.version}", "bold"), f" at {self._url}")
        if len(where) > available:
            where = Text(self._url)
            where.truncate(max(available, 1), overflow="ellipsis")
        head.add_row(Text.assemble(where, "  ", state), Text(window, style="dim"))
        return head


def _window(view: Overview) -> str:
    return "since start" if view.window_s is None else f"last {view.window_s:.0f} s, q ends"


def _panel(title: str, content: RenderableType) -> Panel:
    return Panel(content, title=title, title_align="left", border_style="dim")


def _side_by_side(*parts: RenderableType) -> Table:
    grid = Table.grid(expand=True)
    for _ in parts:
        grid.add_column(ratio=1)
    grid.add_row(*parts)
    return grid


def _pairs(rows: Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column()
    grid.add_column(justify="right")
    for row in rows:
        grid.add_row(*row)
    return grid


def _requests(view: Overview) -> Table:
    return _pairs(
        [
            ("running", f"{view.num_running:,}"),
            ("waiting", f"{view.num_waiting:,}"),
            ("finished per second", _number(view.requests_per_s)),
            ("rejected per second", _number(view.refused_per_s)),
        ]
    )


def _tokens(view: Overview) -> Table:
    steps = [engine.steps_per_s for engine in view.engines if engine.steps_per_s is not None]
    return _pairs(
        [
            ("prompt", _number(view.prompt_tokens_per_s)),
            ("prompt, cached", _number(view.cached_tokens_per_s)),
            ("output", _number(view.generated_tokens_per_s)),
            ("steps per second", _number(sum(steps) if steps else None)),
        ]
    )


def _blocks(view: Overview) -> Table:
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    num_usable = sum(engine.num_blocks - 1 for engine in view.engines)
    num_free = sum(engine.num_free_blocks for engine in view.engines)
    used = view.kv_usage
    grid.add_row(_bar(used), f"{used:.1%} of {num_usable:,}, {num_free:,} free")
    if view.num_pins:
        share = view.num_pinned_blocks / max(num_usable, 1)
        blocks = f"{share:.1%}, {view.num_pinned_blocks:,} blocks of {view.num_pins:,} jobs"
        grid.add_row("pinned for next turns", blocks)
    if len(view.engines) == 1:
        (engine,) = view.engines
        hits = f"prefix cache hits {_share(engine.prefix_hit_share)}"
        if engine.external_hit_share is not None:
            hits += f"   connector hits {_share(engine.external_hit_share)}"
        if engine.draft_acceptance is not None:
            by_position = "  ".join(map(_share, engine.acceptance_by_position[:MAX_POSITIONS]))
            grid.add_row(f"drafts accepted {_share(engine.draft_acceptance)}", by_position)
        preempted = f"preemptions per second {_number(engine.preemptions_per_s)}"
        grid.add_row(hits, preempted)
    return grid


def _tiers(tiers: Sequence[TierView]) -> Table:
    rows = []
    for tier in tiers:
        hits = f"hit tokens per second {_number(tier.hit_tokens_per_s)}"
        used = f"{tier.num_blocks:,} of {tier.capacity_blocks:,} blocks   {hits}"
        rows.append((_MEDIA.get(tier.medium, tier.medium), used))
    return _pairs(rows)


MAX_POSITIONS = 5
"""Of drafts; the shares of later ones do not fit a narrow terminal."""

_MEDIA = {"CPU": "host memory", "DISK": "disk", "STORAGE": "store"}


def _latencies(view: Overview) -> Table:
    table = _table("", "p50", "p99")
    for name, latency in view.latencies.items():
        table.add_row(name, _seconds(latency.p50_s), _seconds(latency.p99_s))
    return table


def _engines(engines: Sequence[EngineView]) -> Table:
    table = _table("engine", "running", "waiting", "blocks", "prefix", "preempt/s", "steps/s")
    for engine in engines:
        table.add_row(
            engine.engine,
            f"{engine.num_running:,}",
            f"{engine.num_waiting:,}",
            f"{engine.kv_usage:.1%}",
            _share(engine.prefix_hit_share),
            _number(engine.preemptions_per_s),
            _number(engine.steps_per_s),
        )
    return table


def _workers_panel(workers: Sequence[WorkerView], num_rows: int | None) -> Panel:
    shown = workers[:num_rows]
    title = "workers" if len(shown) == len(workers) else f"workers, {len(shown)} of {len(workers)}"
    return _panel(title, _workers(shown))


def _workers(workers: Sequence[WorkerView]) -> Table:
    table = _table("worker", "busy", "mean step", "p99 step", "longest", "tokens/s", "memory")
    for worker in workers:
        table.add_row(
            f"{worker.engine}.{worker.worker}",
            _share(worker.busy_share),
            _seconds(worker.mean_step_s),
            _seconds(worker.p99_step_s),
            _seconds(worker.longest_step_s),
            _number(worker.tokens_per_s),
            f"{(worker.device_bytes or worker.resident_bytes) / 2**30:.2f} GiB",
        )
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(
        box=None,
        expand=True,
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
        header_style="dim",
    )
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _bar(share: float) -> ProgressBar:
    style = "red" if share > 0.95 else "green"
    return ProgressBar(total=1.0, completed=share, complete_style=style, finished_style="red")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:,.3g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.3g} s" if value >= 1 else f"{value * 1e3:,.3g} ms"
