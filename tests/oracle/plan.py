"""What a scheduler under comparison must do and say: the adapter, and plans in canonical form.

Rows, generations and deltas are left out: two schedulers agree when the same requests get the same
tokens on the same blocks, whatever rows hold them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from longshore.protocol.outputs import FinishReason, TransferReport
from longshore.protocol.requests import AddRequest, ContinueSession
from longshore.scheduler.step.planner import PauseState


class Admission(NamedTuple):
    """A request that enters the running list; `num_cached_tokens` of it are computed already:
    prefix hits, and what a connector brought or is to bring before the step."""

    request_id: str
    resumed: bool
    num_cached_tokens: int


class ScheduledRequest(NamedTuple):
    """What one request gets in one step.

    samples:       the step ends at the request's last token, so it is answered with the next one.
    new_block_ids: appended to its table in this step; on admission, the blocks after the computed
                   tokens.
    block_ids:     its whole block table, for the tokens up to the end of this step at least.
    drafts:        ids to verify, its last tokens in this step; -1 is what the worker proposed.
    """

    request_id: str
    num_tokens: int
    samples: bool
    new_block_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    drafts: tuple[int, ...] = ()


class OraclePlan(NamedTuple):
    """One step.

    scheduled: in scheduling order, which is admission order: running requests, then admitted ones.
    admitted:  in admission order; each of them is in `scheduled` too.
    preempted: ids, sorted; the order of victims shows when they are resumed.
    finished:  ids, sorted, of requests that ended while running since the plan before, and of
               sessions whose output did.
    rewound:   (id, tokens it falls back to), sorted, since the plan before.
    encoder_inputs: (id, index of the multimodal item) to encode, sorted.
    encoder_tables: (id, blocks of its encoder output) of those admitted to a model with cross
               attention, in admission order.
    freed_hashes: encoder outputs to evict, sorted.
    num_invalid_drafts: that a grammar rejected since the plan before.
    has_structured_output: a grammar masks some token of this step.
    """

    step: int
    scheduled: tuple[ScheduledRequest, ...]
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    rewound: tuple[tuple[str, int], ...] = ()
    encoder_inputs: tuple[tuple[str, int], ...] = ()
    encoder_tables: tuple[tuple[str, tuple[int, ...]], ...] = ()
    freed_hashes: tuple[str, ...] = ()
    num_invalid_drafts: int = 0
    has_structured_output: bool = False

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


class Answer(NamedTuple):
    """What the worker says of one step.

    tokens:  the ids that each sampling request got; empty for one that asks for a vector.
    drafts:  proposed for the next step, by request.
    pooled:  the vectors of the requests that asked for one.
    failed_block_ids: blocks that the step's own loads were to fill and did not.
    """

    step: int
    tokens: Mapping[str, tuple[int, ...]]
    drafts: Mapping[str, tuple[int, ...]] = {}
    pooled: Mapping[str, tuple[float, ...]] = {}
    failed_block_ids: tuple[int, ...] = ()


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
    pooled: tuple[float, ...] = ()
    session_continues: bool = False


class Outputs(NamedTuple):
    """What clients received since the last look, in the order it happened."""

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
        """Queue a request, or reject it with a Finish."""
        ...

    def continue_session(self, message: ContinueSession, *, client: int, now: float) -> None:
        """The next input of a session; an unknown handle is ignored."""
        ...

    def abort(self, handles: Sequence[int], *, client: int) -> None:
        """End these requests; unknown handles are ignored."""
        ...

    def stop_found(self, handle: int, num_tokens: int, *, client: int) -> None:
        """End a request after its output token `num_tokens`; an unknown handle is ignored."""
        ...

    def set_pause(self, state: PauseState) -> None:
        """How much of its work the scheduler does from now on."""
        ...

    def begin_epoch(self, epoch: int, now: float) -> None:
        """All workers are new: nothing that was computed exists, unanswered plans are void."""
        ...

    def schedule(self, now: float) -> OraclePlan | None:
        """Plan a step, or None. Steps count from 1, through all epochs."""
        ...

    def take_masks(self) -> tuple[int, ...]:
        """Steps whose grammar masks have become known since the last call."""
        ...

    def update_from_output(self, answer: Answer) -> None:
        """The oldest unanswered plan is answered."""
        ...

    def update_from_transfers(self, report: TransferReport, now: float) -> None:
        """A rank's transfers have ended."""
        ...

    def take_outputs(self) -> Outputs:
        """Deliveries and ends since the last call."""
        ...

    def check_invariants(self) -> None:
        """Raise AssertionError when the scheduler's own books contradict each other."""
        ...
