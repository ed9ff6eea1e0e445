"""The last hour of the dashboard's charts, for a page that is opened now."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

from longshore.deploy.gateway.metric_samples import Sample, Window
from longshore.deploy.gateway.rejection_log import REJECTED

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 5.0
"""What rates and quantiles cover, as in the page."""
MAX_POINTS: Final = 720
"""An hour."""

Values: TypeAlias = list[list[float | None]]
"""Of one engine: a list per chart of the page, with a value per line of it."""
_SCHEDULER: Final = "longshore_scheduler_"
_FINISHED: Final = "longshore_requests_finished_total"
_RESPONSES: Final = "longshore_http_responses_total"


class History:
    """take_sample: returns the metrics of all gateways. engines: returns the engines' numbers."""

    def __init__(
        self,
        take_sample: Callable[[], Awaitable[Sample]],
        engines: Callable[[], Sequence[int]],
    ) -> None:
        self._take_sample = take_sample
        self._engines = engines
        self._points: dict[int, deque[tuple[float, Values]]] = {}
        self._before: Sample | None = None

    async def run(self) -> None:
        """Add points until cancelled."""
        while True:
            try:
                self.add(await self._take_sample(), time.time())
            except (OSError, ValueError) as error:
                logger.debug("no point of the dashboard's history: %s", error)
            await asyncio.sleep(INTERVAL_S)

    def add(self, sample: Sample, unix_s: float) -> None:
        """The next point of each engine; those of engines that are gone are dropped."""
        if self._before is not None:
            window = Window(sample, self._before)
            self._points = {
                engine: self._points.get(engine, deque(maxlen=MAX_POINTS))
                for engine in self._engines()
            }
            for engine, points in self._points.items():
                points.append((round(unix_s, 1), chart_values(window, str(engine))))
        self._before = sample

    def of(self, engine: int) -> list[tuple[float, Values]]:
        """Unix times in seconds and values, oldest first."""
        return list(self._points.get(engine, ()))


def chart_values(window: Window, engine: str) -> Values:
    """In the order of the page's charts."""
    labels = {"engine": engine}

    def now(name: str) -> float:
        return window.now.total(f"{_SCHEDULER}{name}", labels)

    def latency(name: str) -> list[float | None]:
        return [window.quantile(f"longshore_{name}_seconds", share) for share in (0.5, 0.99)]

    def finished(*reasons: str) -> float | None:
        rates = (window.rate(_FINISHED, {"reason": reason}) for reason in reasons)
        return sum(rate or 0.0 for rate in rates)

    statuses = {
        int(status): (
            (window.rate(_RESPONSES, {"status": status}) or 0.0)
            - (window.rate(_RESPONSES, {"status": status, "endpoint": "/ready"}) or 0.0)
        )
        for (status,) in window.now.label_values(_RESPONSES, "status")
        if status.isdigit()
    }

    def answered(chosen: Callable[[int], bool]) -> float:
        return sum(rate for status, rate in statuses.items() if chosen(status))

    values: Values = [
        [now("kv_usage_ratio")],
        [now("running_requests"), now("waiting_requests")],
        [window.rate("longshore_generated_tokens_total")],
        [window.rate(f"{_SCHEDULER}prompt_tokens_total", labels)],
        latency("time_to_first_token"),
        latency("inter_token_latency"),
        [window.rate(f"{_SCHEDULER}steps_total", labels)],
        [
            window.share(
                f"{_SCHEDULER}prefix_hit_tokens_total",
                f"{_SCHEDULER}prefix_queried_tokens_total",
                labels,
            )
        ],
        [finished("stop", "repetition"), finished("length")],
        [finished("abort"), finished("error")],
        [
            answered(lambda status: status == 429),
            answered(lambda status: status in REJECTED and status != 429),
        ],
        [
            answered(lambda status: 400 <= status < 500 and status not in REJECTED),
            answered(lambda status: status >= 500 and status not in REJECTED),
        ],
    ]
    return [[None if value is None else float(f"{value:.4g}") for value in line] for line in values]
