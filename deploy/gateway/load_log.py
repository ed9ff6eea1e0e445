"""A log line every 10 s while the server is busy: what it computes, for how many requests.

The figures are those of `longshore top`, from the same metrics.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from longshore.deploy.gateway.metric_samples import Sample, Window
from longshore.deploy.gateway.overview import Overview, overview
from longshore.deploy.gateway.rejection_log import REJECTED

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 10.0
_RESPONSES: Final = "longshore_http_responses_total"


class LoadLog:
    """take_sample: returns the metrics, given the time."""

    def __init__(self, take_sample: Callable[[float], Sample]) -> None:
        self._take_sample = take_sample
        self._before = take_sample(time.perf_counter())

    async def run(self) -> None:
        """Log until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            line = self.line(time.perf_counter())
            if line is not None:
                logger.info("%s", line)

    def line(self, now_s: float) -> str | None:
        """The load since the last call; None if there was none."""
        now = self._take_sample(now_s)
        window, self._before = Window(now, self._before), now
        rejected = {
            status: int(number)
            for status in map(str, sorted(REJECTED))
            if (number := _num_rejected(window, status))
        }
        view = overview(window)
        rates = (view.prompt_tokens_per_s, view.generated_tokens_per_s, view.requests_per_s)
        if not (any(rates) or rejected or view.num_running or view.num_waiting):
            return None
        return _text(view, rejected)


def _num_rejected(window: Window, status: str) -> float:
    """/ready is not counted: its 503 is an answer."""
    probes = window.added(_RESPONSES, {"status": status, "endpoint": "/ready"})
    return window.added(_RESPONSES, {"status": status}) - probes


def _text(view: Overview, rejected: dict[str, int]) -> str:
    each = ", ".join(f"{number:,} with {status}" for status, number in rejected.items())
    hits = "-" if view.prefix_hit_share is None else f"{view.prefix_hit_share:.1%}"
    pins = ""
    if view.num_pins:
        pins = f" ({view.num_pinned_blocks:,} blocks pinned for {view.num_pins:,} jobs)"
    return (
        f"last {view.window_s or 0.0:.0f} s: "
        f"{view.prompt_tokens_per_s or 0.0:,.1f} prompt tokens/s, "
        f"{view.generated_tokens_per_s or 0.0:,.1f} output tokens/s; "
        f"{view.num_running:,} running, {view.num_waiting:,} waiting; "
        f"KV cache {view.kv_usage:.1%} in use{pins}, prefix cache hits {hits}; "
        f"{sum(rejected.values()):,} rejected{f' ({each})' if each else ''}"
    )
