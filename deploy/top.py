"""`longshore top`: what a running server does, in the terminal, as it changes.

Everything shown comes from `/metrics`: gauges as they are, counters and histograms as what has been
added since the look before.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from longshore.deploy.bench.sse_client import HttpEndpoint
from longshore.deploy.client_options import TopOptions
from longshore.protocol.errors import LongshoreError

TIMES: Final = (
    ("time to first token", "longshore_time_to_first_token_seconds"),
    ("between tokens", "longshore_inter_token_latency_seconds"),
    ("whole request", "longshore_request_seconds"),
)
RATES: Final = (
    ("answer tokens", "longshore_generated_tokens_total"),
    ("prompt tokens", "longshore_prompt_tokens_total"),
    ("steps", "longshore_scheduler_steps_total"),
    ("preemptions", "longshore_scheduler_preemptions_total"),
)
# Of several engines or gateways the sum is shown, but of these.
MEANS: Final = ("longshore_scheduler_kv_usage_ratio", "longshore_scheduler_steps_in_flight")


class TopFailed(LongshoreError):
    """The server cannot be asked."""


@dataclass(frozen=True)
class Sample:
    """One look.

    taken_s: on the clock of `perf_counter`.
    values:  by name, summed over labels.
    buckets: of histograms: observations of at most so many seconds, by bound.
    """

    taken_s: float
    values: Mapping[str, float]
    buckets: Mapping[str, Mapping[float, float]]

    def __getitem__(self, name: str) -> float:
        return self.values.get(name, 0.0)


@dataclass
class Window:
    """The last look, and the one before it to compare with."""

    now: Sample
    before: Sample = field(default_factory=lambda: Sample(0.0, {}, {}))

    def added(self, name: str) -> float:
        """A smaller count is another process's, which began again."""
        difference = self.now[name] - self.before[name]
        return difference if difference >= 0 else self.now[name]

    def rate(self, name: str) -> float:
        """Per second, since the look before."""
        elapsed_s = self.now.taken_s - self.before.taken_s
        return self.added(name) / elapsed_s if self.before.values and elapsed_s > 0 else 0.0

    def share(self, part: str, whole: str) -> float | None:
        """Of what was added; None if nothing was."""
        total = self.added(whole)
        return self.added(part) / total if total else None

    def quantile(self, name: str, q: float) -> float | None:
        """Of what a histogram observed meanwhile: the upper bound of its bucket, in seconds."""
        earlier, now = self.before.buckets.get(name, {}), self.now.buckets.get(name, {})
        if any(count < earlier.get(bound, 0.0) for bound, count in now.items()):
            earlier = {}  # another process's, which ended
        counts = {bound: count - earlier.get(bound, 0.0) for bound, count in now.items()}
        total = max(counts.values(), default=0.0)
        if total <= 0:
            return None
        return min(bound for bound, count in counts.items() if count >= q * total)


def read_metrics(text: str, taken_s: float) -> Sample:
    """text: in Prometheus' format."""
    values: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                of_family = buckets.setdefault(family.name, {})
                bound = float(sample.labels["le"])
                of_family[bound] = of_family.get(bound, 0.0) + sample.value
            else:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        if family.name in MEANS and family.samples:
            values[family.name] /= len(family.samples)
    return Sample(taken_s, values, buckets)


def screen(window: Window, url: str) -> RenderableType:
    """What is shown."""
    now = window.now
    queues = Table.grid(padding=(0, 2))
    for name, metric in (
        ("running", "longshore_scheduler_running_requests"),
        ("waiting", "longshore_scheduler_waiting_requests"),
        ("answers under way", "longshore_live_requests"),
        ("steps in flight", "longshore_scheduler_steps_in_flight"),
    ):
        queues.add_row(name, f"{now[metric]:,.4g}")
    for name, metric in RATES:
        queues.add_row(f"{name} per second", f"{window.rate(metric):,.1f}")
    times = Table.grid(padding=(0, 2))
    times.add_row("", "half of them within", "99 of 100 within")
    for name, metric in TIMES:
        times.add_row(name, *(_seconds(window.quantile(metric, q)) for q in (0.5, 0.99)))
    return Group(
        Text(f"longshore at {url}", style="bold"),
        Panel(queues, title="requests", title_align="left"),
        Panel(_pool(window), title="KV blocks", title_align="left"),
        Panel(times, title="times since the look before", title_align="left"),
    )


def _pool(window: Window) -> RenderableType:
    now, used = window.now, window.now["longshore_scheduler_kv_usage_ratio"]
    num_blocks = now["longshore_scheduler_blocks"]
    num_free = now["longshore_scheduler_free_blocks"]
    hits = window.share(
        "longshore_scheduler_prefix_hit_tokens_total",
        "longshore_scheduler_prefix_queried_tokens_total",
    )
    rows = Table.grid(padding=(0, 2))
    rows.add_row("in use", ProgressBar(total=1.0, completed=used, width=40), f"{used:.1%}")
    rows.add_row("blocks", f"{num_blocks:,.0f}", f"{num_free:,.0f} free")
    rows.add_row(
        "prefix tokens found", "-" if hits is None else f"{hits:.1%}", "since the look before"
    )
    return rows


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.3g} s" if value >= 1 else f"{value * 1e3:,.3g} ms"


def top(options: TopOptions) -> None:
    """Show until Ctrl-C, or `num_looks` times. Raises TopFailed if the server cannot be asked."""
    endpoint = HttpEndpoint(options.url, api_key=options.api_key)
    window = Window(_look(endpoint, options))
    if options.num_looks == 1:
        Console().print(screen(window, options.url))
        return
    with Live(
        screen(window, options.url), auto_refresh=False, screen=options.num_looks is None
    ) as live:
        num_looks = 1
        while options.num_looks is None or num_looks < options.num_looks:
            time.sleep(options.interval_s)
            window = Window(_look(endpoint, options), window.now)
            live.update(screen(window, options.url), refresh=True)
            num_looks += 1


def _look(endpoint: HttpEndpoint, options: TopOptions) -> Sample:
    try:
        answer = asyncio.run(endpoint.request("GET", "/metrics", timeout_s=options.timeout_s))
    except (OSError, TimeoutError) as error:
        raise TopFailed(
            f"{options.url} does not answer: {error or type(error).__name__}. Is `longshore serve` "
            "running there?"
        ) from error
    if answer.status != 200:
        raise TopFailed(f"{options.url}/metrics answers HTTP {answer.status}; is it Longshore's?")
    try:
        return read_metrics(answer.body.decode(), time.perf_counter())
    except ValueError as error:
        raise TopFailed(f"{options.url}/metrics holds no metrics: {error}") from error
