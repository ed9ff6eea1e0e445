"""The scheduler half of a connector."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from longshore.connectors.base.views import (
    CONTRACT_VERSION,
    BlockHolds,
    ConnectorConfig,
    ConnectorOutput,
    ConnectorStats,
    FinishAction,
    Match,
    Matched,
    RequestView,
    StepView,
    SwapSize,
)
from longshore.protocol.arrays import Int32Array
from longshore.protocol.events import KVEvent

_DEFAULTS: Final = ConnectorConfig()


class SchedulerConnector:
    """Scheduler half of a connector. The default of every hook does nothing.

    A lookup (`get_num_new_matched_tokens`) that raises is a miss: it is logged and counted, and the
    engine continues. If any other hook raises, the engine stops with a message that names it,
    because it is unknown which blocks the connector's transfers use.

    contract_version: the `CONTRACT_VERSION` that the class was written for.
    supports_hma: the connector handles block ids of several KV cache groups. Otherwise it is
                  rejected for a model that has several.
    can_swap: the connector has the hooks of `--preemption-mode` swap and auto. Otherwise these
                  modes are rejected.
    is_combinable: `multi` may combine it with other connectors.
    needs_every_step: `build_connector_meta` is called for every plan. Otherwise a steady decode
                  step, in which the running requests compute one token each, may be planned without
                  it: see `build_connector_meta`.
    has_verify_kv: the connector has the option `verify_kv`, which `--verify-kv` sets.
    reads_ahead:  `on_new_request` needs the block hashes of the prompt. Otherwise they are computed
                  when the request is at the head of the queue.
    opens_nothing: to build one has no effect outside it. A start with settings that do not fit is
                   then refused before its processes exist.
    uses_shared_memory: the worker halves of an engine get a descriptor of memory that they share.
    num_leasable_blocks: how many blocks it holds at most for other engines after the end of
                  requests. A client sends no request whose blocks would be more.
    names_answers: `take_answered` names the requests that are to be asked for again after AskLater.
                  Otherwise all of them are, in turn, a limited number in each step.
    chunk_blocks: it stores whole chunks of so many blocks, see `StorableBlocks.chunks`. 0: it
                  stores none, so `StepView.storable` is empty.
    min_wait_s:   how long a request waits for AskLater or a load in any case, if the engine's
                  `min_load_wait_s` is shorter: for connectors that need long for the first load.
    worker_half:  `package.module:Class` of its `WorkerConnector`; a name rather than the class, so
                  that the scheduler does not import what only workers need.
    """

    contract_version: ClassVar[int] = CONTRACT_VERSION
    supports_hma: bool = False
    can_swap: bool = False
    is_combinable: ClassVar[bool] = True
    needs_every_step: bool = False
    has_verify_kv: ClassVar[bool] = False
    reads_ahead: bool = False
    opens_nothing: ClassVar[bool] = False
    uses_shared_memory: ClassVar[bool] = False
    num_leasable_blocks: int = 0
    names_answers: bool = False
    chunk_blocks: int = 1
    min_wait_s: float = 0.0
    worker_half: ClassVar[str] = ""

    def __init__(self, config: ConnectorConfig = _DEFAULTS) -> None:
        """Raises ConfigError for invalid options."""
        self.config = config

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Raise ConfigError for options that are invalid whatever the model is. Called before
        anything is started, so that a mistake is found before the model is loaded; `__init__`
        checks all of them. Accepts everything by default."""

    def bind_blocks(self, holds: BlockHolds) -> None:
        """Called once, before any other hook."""

    def on_new_request(self, request: RequestView) -> None:
        """A request was queued. Called exactly once per request, as is `request_finished`."""

    def skips_prefix_cache(self, request: RequestView) -> bool:
        """Whether the request must not begin with cached blocks of other requests. Called once,
        after `on_new_request`. What this connector matches is loaded nevertheless."""
        return False

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        """Number of tokens after the first `num_computed_tokens` (local prefix hits) that this
        connector can load. Reserves nothing; may be called again for the same request in later
        steps. Not called during an asynchronous load for this request id, nor after a successful
        one."""
        return Matched(0)

    def take_answered(self, now: float) -> Sequence[str]:
        """Ids of requests for which `get_num_new_matched_tokens` has returned AskLater and is to be
        called again, since the last call. With `names_answers`, called before each plan, and some
        50 times per second where none can be made, while a request waits for it. now: seconds on
        the scheduler's clock. Unknown ids, and those that do not wait, are ignored."""
        return ()

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
        """Instructions for the worker half, sent with this plan in the connector's own encoding.
        Empty: there are none, and the workers call no hook for this plan.

        Not called for a steady decode step without `storable` and `uncached` blocks while
        `has_pending_work` is False, unless `needs_every_step`."""
        return b""

    def update_connector_output(self, output: ConnectorOutput) -> None:
        """The workers' report of an answered plan or of ended transfers. Not called for an answer
        without metadata and without failed blocks: `StepView.answered_step` tells of it."""

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        """The request ends, for any reason; called exactly once. `block_ids` is empty if it held no
        blocks. Freed entries of a block table are the null block (id 0)."""
        return FinishAction()

    def release_transfers(self, transfer_ids: Sequence[str]) -> None:
        """The client says that no other engine will pull what `request_finished` has offered with
        these values of `transfer_id` in its params. Unknown ones are to be ignored."""

    def load_abandoned(self, request_id: str) -> None:
        """The request no longer waits for its asynchronous load (abort, deadline). The blocks stay
        in quarantine until `finished_receiving`, by which workers also confirm a cancelled load."""

    def load_expired(self, request_id: str) -> None:
        """Called in place of `load_abandoned` if the request does not wait any longer because the
        load has taken too long."""
        self.load_abandoned(request_id)

    def swap_size(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_computed_tokens: int
    ) -> SwapSize:
        """What `swap_out` with the same arguments would move. Reserves nothing."""
        raise NotImplementedError

    def swap_out(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_computed_tokens: int
    ) -> bool:
        """Keep the KV of the request's first `num_computed_tokens` tokens, which is to be preempted
        to free its blocks: full blocks by hash, and a private copy of all others, which no other
        request finds. False, and nothing has changed, if there is no room for it; the request then
        keeps running.

        No plan in flight uses the request, so its blocks can be copied at once. It still owns them;
        hold those that are copied before you return, and release them when the copy has ended.

        The request continues by an asynchronous load: `get_num_new_matched_tokens` returns AskLater
        while the copy is in progress, then the number of tokens up to `num_computed_tokens`, which
        need not be a multiple of the block size. If some of it cannot be loaded any more, match
        what can. Each successful call is followed by one `release_swap` or `on_new_epoch`."""
        return False

    def release_swap(self, request_id: str) -> None:
        """The private copy of a swapped request is not needed any more: the request runs again, or
        it or its output ends. Loads of it may still be in progress."""

    @property
    def has_pending_work(self) -> bool:
        """Whether `build_connector_meta` has instructions for the workers, or waits for an answer:
        an idle engine sends another plan then, and no plan is built without the connector. It
        changes only in hooks; if not, set `needs_every_step`."""
        return False

    def take_events(self) -> list[KVEvent]:
        """What was stored in the connector's tiers and removed from them since the last call, in
        order; never a GPU medium. Called after each answer and transfer report if the engine
        publishes KV events (`config.publishes_events`), else never.

        A block is stored when it can be loaded: all ranks have written it. Of several copies in one
        medium, report the first one stored and the last one removed. What the tiers hold from
        earlier runs is reported as stored, too."""
        return []

    def get_kv_connector_stats(self) -> ConnectorStats:
        """Called about once a second while the engine works, for its metrics, and before each step
        if the engine writes a scheduler trace."""
        return ConnectorStats()

    def reset_cache(self) -> bool:
        """Evict everything stored. Returns False if that is not possible now."""
        return True

    def on_new_epoch(self, epoch: int) -> None:
        """All workers were replaced: loads and stores in progress have failed, and all holds are
        void (their ids are unknown from now on)."""

    def shutdown(self) -> None:
        """The engine stops. This is the last call."""
