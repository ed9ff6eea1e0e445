"""The queue of one role: requests that wait until an engine of that role has capacity for them;
without I/O.

Capacity is counted in units that the caller chooses, such as tokens. A request has capacity at an
engine from its assignment to it until it is released, so a prefill can be started with the capacity
of its decode reserved. Requests are assigned in the order in which they came: a large one is not
overtaken by small ones, which could make it wait for ever.
"""

import enum
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

MAX_ATTEMPTS: Final = 3
"""Engines that a request may fail on."""

RequestT = TypeVar("RequestT", bound=Hashable)


class Refusal(enum.Enum):
    """Why a request is rejected."""

    FULL = "too many requests wait for an engine"
    TOO_LARGE = "it needs more capacity than any engine has"
    FAILED = f"it has failed on {MAX_ATTEMPTS} engines"


class Assignment(NamedTuple, Generic[RequestT]):
    """A request has capacity at an engine."""

    request: RequestT
    engine: int


@dataclass(eq=False)
class _Entry(Generic[RequestT]):
    request: RequestT
    num_units: int
    failed_on: list[int] = field(default_factory=list)
    engine: int | None = None


class RoleQueue(Generic[RequestT]):
    """Requests of one gateway for one role.

    choose:      chooses among engines with capacity for a request; called with both.
    max_waiting: further requests are rejected.
    """

    def __init__(
        self, choose: Callable[[RequestT, Sequence[int]], int], *, max_waiting: int
    ) -> None:
        self._choose = choose
        self._max_waiting = max_waiting
        self._capacity: dict[int, int] = {}
        self._num_used: dict[int, int] = {}
        self._entries: dict[RequestT, _Entry[RequestT]] = {}
        self._waiting: OrderedDict[_Entry[RequestT], None] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: RequestT) -> bool:
        return request in self._entries

    def engine_of(self, request: RequestT) -> int | None:
        """Return the engine to which a request is assigned; None if it waits, or is not in the
        queue."""
        entry = self._entries.get(request)
        return None if entry is None else entry.engine

    def num_used(self, engine: int) -> int:
        """Units of an engine that requests have."""
        return self._num_used.get(engine, 0)

    def set_capacity(self, engine: int, num_units: int) -> list[Assignment[RequestT]]:
        """A new engine of this role, or a new capacity of one; 0: no further request is assigned to
        it. Returns the requests that are assigned now."""
        self._capacity[engine] = num_units
        return self._assign_waiting()

    def add(self, request: RequestT, num_units: int) -> list[Assignment[RequestT]] | Refusal:
        """A request, which must be a new one, needs capacity. Returns its assignment, nothing if it
        waits, or why it is rejected."""
        if request in self._entries:
            raise ValueError(f"{request!r} is in the queue already")
        if not self._fits_somewhere(num_units):
            return Refusal.TOO_LARGE
        entry = _Entry(request, num_units)
        self._waiting[entry] = None
        self._entries[request] = entry
        assigned = self._assign_waiting()
        if entry.engine is None and len(self._waiting) > self._max_waiting:
            del self._waiting[entry]
            del self._entries[request]
            return Refusal.FULL
        return assigned

    def release(self, *requests: RequestT) -> list[Assignment[RequestT]]:
        """These requests have ended, or do not wait any more; may be called repeatedly. Returns the
        requests that are assigned now."""
        entries = [entry for each in requests if (entry := self._entries.pop(each, None))]
        for entry in entries:
            self._take_back(entry)
        return self._assign_waiting() if entries else []

    def retry(
        self, request: RequestT, *, has_failed: bool = True
    ) -> list[Assignment[RequestT]] | Refusal:
        """A request has failed at its engine, or the engine was closed before it came. It is
        assigned to an engine on which it has not failed, or else to any, before all that wait.
        Returns as `add`; if it is rejected, it is not in the queue any more."""
        entry = self._entries[request]
        if entry.engine is not None and has_failed:
            entry.failed_on.append(entry.engine)
        self._take_back(entry)
        if len(entry.failed_on) >= MAX_ATTEMPTS:
            del self._entries[request]
            return Refusal.FAILED
        self._waiting[entry] = None
        self._waiting.move_to_end(entry, last=False)
        return self._assign_waiting()

    def remove_engine(self, engine: int) -> list[RequestT]:
        """An engine is lost. Returns the requests that were assigned to it, for `retry`."""
        self._capacity.pop(engine, None)
        return [entry.request for entry in self._entries.values() if entry.engine == engine]

    def _take_back(self, entry: _Entry[RequestT]) -> None:
        if entry.engine is None:
            self._waiting.pop(entry, None)
            return
        self._num_used[entry.engine] -= entry.num_units
        entry.engine = None

    def _fits_somewhere(self, num_units: int) -> bool:
        """Also while no engine has any capacity: then it waits for one."""
        largest = max(self._capacity.values(), default=0)
        return largest == 0 or num_units <= largest

    def _assign_waiting(self) -> list[Assignment[RequestT]]:
        assigned: list[Assignment[RequestT]] = []
        while self._waiting:
            entry = next(iter(self._waiting))
            # An engine that has nothing takes any request: capacities may have become smaller.
            engines = [
                engine
                for engine, capacity in self._capacity.items()
                if (num_used := self.num_used(engine)) + entry.num_units <= capacity
                or (capacity and not num_used)
            ]
            fresh = [engine for engine in engines if engine not in entry.failed_on]
            if not engines:
                break
            entry.engine = self._choose(entry.request, fresh or engines)
            del self._waiting[entry]
            self._num_used[entry.engine] = self.num_used(entry.engine) + entry.num_units
            assigned.append(Assignment(entry.request, entry.engine))
        return assigned
