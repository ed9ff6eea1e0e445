"""Runs the parts of a request on an engine, a limited number of them at a time: its beam searches,
or its inputs for vectors. The caller waits, and says when the next part starts or advances."""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar


class Part(Protocol):
    """One of the parts, which is submitted once."""

    @property
    def is_over(self) -> bool: ...

    def start(self, on_change: Callable[[], None]) -> None:
        """Submit it. on_change: called when `advance` may have something to do. Raises
        EngineDead."""

    def advance(self) -> bool:
        """Take what the engine has answered; returns whether this submitted or ended requests.
        Raises RequestError, EngineDead."""


PartT = TypeVar("PartT", bound=Part)


def _ignore() -> None:
    pass


class EngineRun(Generic[PartT]):
    """on_change: called when `take_changed` has a part.

    started: the parts that were submitted, in order.
    """

    def __init__(
        self, parts: Sequence[PartT], *, max_live: int, on_change: Callable[[], None] = _ignore
    ) -> None:
        self._waiting = deque(parts)
        self._max_live = max_live
        self._on_change = on_change
        self._live: set[PartT] = set()
        self._changed: OrderedDict[PartT, None] = OrderedDict()
        self.started: list[PartT] = []

    @property
    def is_over(self) -> bool:
        """All parts have ended."""
        return not self._waiting and not self._live

    @property
    def can_start(self) -> bool:
        return bool(self._waiting) and len(self._live) < self._max_live

    def start_next(self) -> None:
        """Start the next part. Raises EngineDead."""
        part = self._waiting.popleft()
        part.start(partial(self._note_change, part))
        self._live.add(part)
        self.started.append(part)

    def _note_change(self, part: PartT) -> None:
        self._changed[part] = None
        self._on_change()

    def take_changed(self) -> PartT | None:
        """The next part to advance, in the order of the changes; None if none has changed."""
        while self._changed:
            part, _ = self._changed.popitem(last=False)
            if part in self._live:
                return part
        return None

    def advance(self, part: PartT) -> bool:
        """As `Part.advance`. The part has ended if it is over, or if this raises."""
        has_failed = True
        try:
            has_advanced = part.advance()
            has_failed = False
            return has_advanced
        finally:
            if has_failed or part.is_over:
                self._live.discard(part)
