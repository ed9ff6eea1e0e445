"""Virtual time: events in the order of their times."""

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """Events at equal times happen in the order in which they were added. now_s: the time of the
    latest event."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_events = 0

    @property
    def is_empty(self) -> bool:
        """Whether no event is left."""
        return not self._events

    def at(self, time_s: float, event: Callable[..., None], *arguments: Any) -> None:
        """Call `event(*arguments)` at this time, which must not be in the past."""
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, event, arguments))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Until `is_over`, or until there are no events."""
        events = self._events
        while events and not is_over():
            self.now_s, _, event, arguments = heapq.heappop(events)
            event(*arguments)
