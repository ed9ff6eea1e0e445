"""The contract of a KV connector, scheduler half: where KV may come from, and where it goes.

A connector is two small classes: `SchedulerConnector` plans here, without torch and without I/O;
its worker half moves the bytes. Hooks see views, never the scheduler's own objects, and are called
from the scheduler's one thread; none may block. The names are those of vLLM's connectors, so what
people know carries over; answers with several shapes are closed types.

In a step the order is: `get_num_new_matched_tokens` and `update_state_after_alloc` per request that
is admitted, `request_finished` per request that ends, `build_connector_meta` once per plan,
`update_connector_output` once per answer and per transfer report, after what follows from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

from longshore.protocol.arrays import EMPTY_INT32, Int32Array


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """What a connector is built with.

    options:    from `--kv-connector-config`; the connector defines their keys.
    block_size: tokens per block of each KV cache group.
    num_ranks:  workers that must report a transfer before it has ended.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    block_size: int = 16
    num_blocks: int = 0
    num_groups: int = 1
    num_ranks: int = 1
    engine_id: str = ""


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request as a connector may see it.

    token_ids:   (num_tokens,) prompt and output so far; read-only.
    block_hashes: names of its full blocks as far as known, one per `hash_block_size` tokens; not to
                 be kept, it grows.
    """

    request_id: str
    token_ids: Int32Array
    num_prompt_tokens: int
    block_hashes: Sequence[bytes]
    kv_transfer_params: Mapping[str, Any] | None = None
    cache_salt: str | None = None
    lora_name: str | None = None
    job_id: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Matched:
    """So many tokens beyond the local ones can be loaded: into the step's blocks before the step
    computes, or in the background while the request waits (`is_async`)."""

    num_tokens: int
    is_async: bool = False


@dataclass(frozen=True, slots=True)
class AskLater:
    """Not known yet: the request is set aside, and asked about again in the next step."""


Match: TypeAlias = Matched | AskLater


@dataclass(frozen=True, slots=True)
class FinishAction:
    """What becomes of the blocks of a request that ends.

    delay_free: they stay until the workers report the request in `finished_sending`.
    params:     for the client, who hands them to whoever goes on with the request.
    """

    delay_free: bool = False
    params: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CachedBlocks:
    """Full blocks of one request and KV cache group that got their names with this plan: what a
    connector may store once the plan is answered. `names[i]` belongs to `block_ids[i]`."""

    request_id: str
    group: int
    block_ids: Sequence[int]
    block_hashes: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class StepView:
    """One plan as a connector may see it; the cost of reading it follows what changed.

    admitted:  requests that took a row, in order.
    unnamed:   block ids that lost a name that an earlier plan listed, because what they hold proved
               wrong (a failed load, logits that are not finite). Comes before `cached`.
    named:     see `CachedBlocks`; in the order in which they were named. Provisional: not to be
               stored before `step` is answered, nor if a later plan lists the block as unnamed.
    preempted, finished: request ids that left their rows since the plan before.
    answered_step: the newest answer that had been applied.
    """

    step: int
    answered_step: int
    admitted: Sequence[str] = ()
    uncached: Sequence[int] = ()
    cached: Sequence[CachedBlocks] = ()
    preempted: Sequence[str] = ()
    finished: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ConnectorOutput:
    """What the workers reported: with the answer to plan `step`, or unasked (`step` 0).

    finished_sending, finished_receiving: request ids for which all ranks are done.
    metadata: one opaque message per rank that sent one.
    """

    step: int = 0
    finished_sending: Sequence[str] = ()
    finished_receiving: Sequence[str] = ()
    failed_block_ids: Int32Array = field(default_factory=lambda: EMPTY_INT32)
    metadata: Sequence[bytes] = ()


class BlockHolder(Protocol):
    """Lets a connector keep blocks that it stores from while their request may leave them."""

    def hold(self, block_ids: Sequence[int]) -> int:
        """One reference more for each block; returns a number to release them by."""

    def release(self, hold_id: int) -> None:
        """The transfers from these blocks have ended. Raises KeyError for an unknown number."""


_DEFAULTS: Final = ConnectorConfig()


class SchedulerConnector:
    """Scheduler half. Every hook has a default that does nothing, so a connector overrides only
    what it is about.

    supports_hma: it reads every group of the block ids it is given. One that does not is refused
                  for a model with several KV cache groups.
    """

    supports_hma: bool = False

    def __init__(self, config: ConnectorConfig = _DEFAULTS) -> None:
        """Raises ConfigError for options it cannot serve."""
        self.config = config

    def bind_blocks(self, holder: BlockHolder) -> None:
        """Called once, before everything else."""

    def on_new_request(self, request: RequestView) -> None:
        """A request was queued. Each is reported once, and `request_finished` once."""

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        """How many tokens beyond the first `num_computed_tokens` (local prefix hits) this connector
        can bring. Reserves nothing; may be asked again in later steps for the same request. Not
        asked while an asynchronous load of this request id is under way, nor when it ended well."""
        return Matched(0)

    def update_state_after_alloc(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_external_tokens: int
    ) -> None:
        """The request got blocks: `block_ids[group]` from its first position on. Groups that forget
        (windows, chunks, states) have the null block (id 0) where they need no block any more:
        nothing is to be loaded there, and it must never be written. To be loaded are
        the `num_external_tokens` behind the local hits that the match was asked with. The blocks
        they lie in are the transfer's too from here on, until it is reported in
        `finished_receiving` (asynchronous), or until the step is answered (synchronous). No plan
        that is still unanswered names them, so a transfer need not wait for one. Not called if
        nothing is to be loaded."""

    def build_connector_meta(self, step: StepView) -> bytes:
        """What the worker half must do with this plan, in an encoding of its own."""
        return b""

    def update_connector_output(self, output: ConnectorOutput) -> None:
        """What the workers reported."""

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        """The request ends, for whatever reason; called exactly once. `block_ids` are empty if it
        held none; groups that forget have the null block (id 0) where blocks were given back."""
        return FinishAction()

    def load_abandoned(self, request_id: str) -> None:
        """Nobody waits for this request's asynchronous load any more (abort, deadline). Its blocks
        stay in quarantine until `finished_receiving`, which a confirmed cancel reports too."""

    @property
    def has_pending_work(self) -> bool:
        """An idle engine must make one more plan, because `build_connector_meta` has something to
        tell the workers."""
        return False

    def take_events(self) -> list[Any]:
        """Events of its tiers since the last call."""
        return []

    def reset_cache(self) -> bool:
        """Forget everything stored. False if it cannot now."""
        return True

    def on_new_epoch(self, epoch: int) -> None:
        """All workers are new: loads under way have failed, stores count as failed, and every hold
        is void (its number is unknown from here on)."""

    def shutdown(self) -> None:
        """The engine stops; no hook is called after this one."""
