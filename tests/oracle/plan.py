"""What a scheduler under comparison must do and say: the adapter, and plans in canonical form.

Rows, generations and deltas are left out: two schedulers agree when the same requests get the same
tokens on the same blocks, whatever rows hold them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from longshore.protocol.client import AddRequest, FinishReason


class Admission(NamedTuple):
    """A request that enters the running list; `num_cached_tokens` of it were prefix hits."""

    request_id: str
    resumed: bool
    num_cached_tokens: int


class ScheduledRequest(NamedTuple):
    """What one request gets in one step.

    samples:       the step ends at the request's last token, so it is answered with the next one.
    new_block_ids: taken from the free queue in this step, in order of position; no prefix hits.
    block_ids:     its whole block table, for the tokens up to the end of this step.
    """

    request_id: str
    num_tokens: int
    samples: bool
    new_block_ids: tuple[int, ...]
    block_ids: tuple[int, ...]


class OraclePlan(NamedTuple):
    """One step.

    scheduled: in scheduling order, which is admission order: running requests, then admitted ones.
    admitted:  in admission order; each of them is in `scheduled` too.
    preempted: ids, sorted; the order of victims shows when they are resumed.
    finished:  ids, sorted, of requests that ended while running since the plan before.
    """

    step: int
    scheduled: tuple[ScheduledRequest, ...]
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()

    @property
    def num_scheduled(self) -> dict[str, int]:
        """Tokens by request id, in scheduling order."""
        return {entry.request_id: entry.num_tokens for entry in self.scheduled}

    @property
    def block_tables(self) -> dict[str, tuple[int, ...]]:
        """Block ids by request id."""
        return {entry.request_id: entry.block_ids for entry in self.scheduled}

    @property
    def sampling(self) -> tuple[str, ...]:
        """Ids of the requests that sample, in admission order: the order of the plan's answer."""
        return tuple(entry.request_id for entry in self.scheduled if entry.samples)


class Delivery(NamedTuple):
    """The next output token of one request."""

    client: int
    handle: int
    token: int


class Finish(NamedTuple):
    """The end of one request; the fields are those of `FinishedRequest`."""

    client: int
    handle: int
    reason: FinishReason
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int


class Outputs(NamedTuple):
    """What clients were told since the last look, in the order it happened."""

    deliveries: tuple[Delivery, ...]
    finishes: tuple[Finish, ...]

    def canonical(self) -> "Outputs":
        """The same by handle: only the order of one request's own tokens means something."""
        return Outputs(
            tuple(sorted(self.deliveries, key=lambda delivery: delivery[:2])),
            tuple(sorted(self.finishes)),
        )


class SchedulerAdapter(Protocol):
    """What scenarios and workloads need of a scheduler; `TextbookScheduler` is one as it stands."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks in the free queue, cached ones included."""
        ...

    def add_request(self, request: AddRequest, *, client: int, now: float) -> None:
        """Queue a request, or refuse it with a Finish."""
        ...

    def abort(self, handles: Sequence[int], *, client: int) -> None:
        """End these requests; unknown handles are ignored."""
        ...

    def stop_found(self, handle: int, num_tokens: int, *, client: int) -> None:
        """End a request after its output token `num_tokens`; an unknown handle is ignored."""
        ...

    def schedule(self, now: float) -> OraclePlan | None:
        """Plan a step, or None."""
        ...

    def update_from_output(self, step: int, tokens: Mapping[str, int]) -> None:
        """Answer the oldest unanswered plan: one token for each id of its `sampling`."""
        ...

    def take_outputs(self) -> Outputs:
        """Deliveries and ends since the last call."""
        ...

    def check_invariants(self) -> None:
        """Raise AssertionError when the scheduler's own books contradict each other."""
        ...
