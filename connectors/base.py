"""The scheduler half of the KV connector contract: loads KV from, and stores it to, other memory.

A connector is two small classes: `SchedulerConnector` plans, without torch and without I/O; its
worker half moves the bytes. All hooks run in the scheduler's only thread and must not block. They
get views, never the scheduler's own objects. Hooks have the names of vLLM's connectors; results
with several forms are closed types.

Order in a step: `get_num_new_matched_tokens` and `update_state_after_alloc` per admitted request,
`request_finished` per request that ends, `build_connector_meta` once per plan, and
`update_connector_output` after each answer and each transfer report has been applied.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

from longshore.protocol.arrays import EMPTY_INT32, Int32Array


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """Configuration of a connector.

    options:    from `--kv-connector-config`; the connector defines their keys.
    block_size: tokens per block of each KV cache group.
    num_ranks:  number of workers; a transfer has ended when all of them have reported it.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    block_size: int = 16
    num_blocks: int = 0
    num_groups: int = 1
    num_ranks: int = 1
    engine_id: str = ""


@dataclass(frozen=True, slots=True)
class RequestView:
    """A connector's view of one request.

    token_ids:    (num_tokens,) prompt and output so far; read-only.
    block_hashes: hashes of its full blocks known so far, one per `hash_block_size` tokens. Do not
                  keep it: it grows.
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
    """`num_tokens` tokens after the local ones can be loaded: within the step, before it computes,
    or in the background while the request waits (`is_async`)."""

    num_tokens: int
    is_async: bool = False


@dataclass(frozen=True, slots=True)
class AskLater:
    """The number is not known yet. The request is skipped in this step, and the connector is asked
    again in the next one."""


Match: TypeAlias = Matched | AskLater


@dataclass(frozen=True, slots=True)
class FinishAction:
    """What to do with the blocks of a request that ends.

    delay_free: free them only when the workers report the request in `finished_sending`.
    params:     `kv_transfer_params` for the client, which passes them to the engine that continues
                the request.
    """

    delay_free: bool = False
    params: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CachedBlocks:
    """Full blocks of one request and KV cache group that this plan adds to the prefix cache. A
    connector may store them once the plan is answered. `block_hashes[i]` is the hash of
    `block_ids[i]`."""

    request_id: str
    group: int
    block_ids: Sequence[int]
    block_hashes: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class StepView:
    """A connector's view of one plan: only what changed since the previous one.

    answered_step: the latest answer that has been applied.
    admitted:  requests that got a row, in order.
    uncached:  block ids of earlier plans' `cached` that were uncached because their content is
               invalid (failed load, logits not finite). Applies before `cached`.
    cached:    see `CachedBlocks`; in the order in which they were cached. Provisional: do not store
               a block before `step` is answered, or if a later plan lists it in `uncached`.
    preempted, finished: requests that lost their row since the previous plan.
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
    """What the workers reported with the answer to plan `step`, or in a transfer report (`step` 0).

    finished_sending, finished_receiving: request ids whose transfer has ended on all ranks.
    metadata: one opaque message per rank that sent one.
    """

    step: int = 0
    finished_sending: Sequence[str] = ()
    finished_receiving: Sequence[str] = ()
    failed_block_ids: Int32Array = field(default_factory=lambda: EMPTY_INT32)
    metadata: Sequence[bytes] = ()


class BlockHolds(Protocol):
    """Lets a connector hold blocks while it stores them, even if their request frees them."""

    def hold(self, block_ids: Sequence[int]) -> int:
        """Add a reference to each block; returns an id for `release`."""

    def release(self, hold_id: int) -> None:
        """End a hold, after all transfers from its blocks. Raises KeyError for an unknown id."""


_DEFAULTS: Final = ConnectorConfig()


class SchedulerConnector:
    """Scheduler half of a connector. The default of every hook does nothing.

    supports_hma: the connector handles block ids of several KV cache groups. Otherwise it is
                  rejected for a model that has several.
    """

    supports_hma: bool = False

    def __init__(self, config: ConnectorConfig = _DEFAULTS) -> None:
        """Raises ConfigError for invalid options."""
        self.config = config

    def bind_blocks(self, holds: BlockHolds) -> None:
        """Called once, before any other hook."""

    def on_new_request(self, request: RequestView) -> None:
        """A request was queued. Called exactly once per request, as is `request_finished`."""

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        """Number of tokens after the first `num_computed_tokens` (local prefix hits) that this
        connector can load. Reserves nothing; may be called again for the same request in later
        steps. Not called during an asynchronous load for this request id, nor after a successful
        one."""
        return Matched(0)

    def update_state_after_alloc(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_external_tokens: int
    ) -> None:
        """Blocks were allocated for the request: `block_ids[group]` is its whole block table. Load
        the `num_external_tokens` tokens after the `num_computed_tokens` of the match. Not called if
        there is nothing to load.

        The load owns a share of its target blocks until it is reported in `finished_receiving`
        (asynchronous), or until the step is answered (synchronous). It can start at once, because
        no unanswered plan uses these blocks. Groups that free skipped blocks (windows, chunks,
        states) have the null block (id 0) in the freed entries of the block table: never load into
        it."""

    def build_connector_meta(self, step: StepView) -> bytes:
        """Instructions for the worker half, sent with this plan in the connector's own encoding."""
        return b""

    def update_connector_output(self, output: ConnectorOutput) -> None:
        """The workers' report of an answered plan or of ended transfers."""

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        """The request ends, for any reason; called exactly once. `block_ids` is empty if it held no
        blocks. Freed entries of a block table are the null block (id 0)."""
        return FinishAction()

    def load_abandoned(self, request_id: str) -> None:
        """The request no longer waits for its asynchronous load (abort, deadline). The blocks stay
        in quarantine until `finished_receiving`, by which workers also confirm a cancelled load."""

    @property
    def has_pending_work(self) -> bool:
        """Whether an idle engine must send another plan, because `build_connector_meta` has
        instructions for the workers."""
        return False

    def take_events(self) -> list[Any]:
        """Events of the connector's tiers since the last call."""
        return []

    def reset_cache(self) -> bool:
        """Evict everything stored. Returns False if that is not possible now."""
        return True

    def on_new_epoch(self, epoch: int) -> None:
        """All workers were replaced: loads and stores in progress have failed, and all holds are
        void (their ids are unknown from now on)."""

    def shutdown(self) -> None:
        """The engine stops. This is the last call."""
