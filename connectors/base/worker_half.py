"""The worker half of a connector, and what a worker gives to it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

from longshore.connectors.base.views import CONTRACT_VERSION, ConnectorConfig
from longshore.protocol.kv_cache_spec import KVCacheSpec
from longshore.protocol.statistics import TransferOperation

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class WorkerConnectorConfig(ConnectorConfig):
    """Configuration of the worker half.

    rank:        of this worker, 0..num_ranks - 1.
    shared_memory_fd: memory that the workers of an engine share, with `uses_shared_memory`; None in
                 an engine of one process. Its size is the connector's to set.
    hidden_size: elements of a hidden state of the model.
    state_dir:   directory that outlives the engine, for measurements of this machine; None: there
                 is none. Other workers and engines may use it at the same time.
    """

    rank: int = 0
    shared_memory_fd: int | None = None
    hidden_size: int = 0
    state_dir: str | None = None


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """The blocks of one KV cache group in the memory of this rank.

    blocks: (num_blocks, size_bytes) uint8 on the device. Row i is block i: the bytes of this rank's
            layers and KV heads, contiguous, without the padding after them. Equal prefixes have
            equal bytes only within one namespace. The null block (row 0) must stay zero.
    layers: by layer name, the blocks of one layer: (num_blocks, …) with the spec's dimensions.
    """

    spec: KVCacheSpec
    layer_names: tuple[str, ...]
    blocks: "torch.Tensor"
    layers: Mapping[str, "torch.Tensor | tuple[torch.Tensor, ...]"]

    @property
    def size_bytes(self) -> int:
        return self.blocks.shape[1]


@dataclass(frozen=True, slots=True)
class KVCaches:
    """The KV cache of this rank, by group. A pipeline stage may have no layer of a group: its
    blocks have 0 bytes."""

    groups: tuple[GroupBlocks, ...]
    device: "torch.device"


class QueueEvent(Protocol):
    """The end of one operation on a queue."""

    @property
    def error(self) -> Exception | None:
        """Why the operation failed; valid once it is done."""

    @property
    def elapsed_s(self) -> float:
        """Seconds that the operation took on its queue, without waiting for its turn; valid once it
        is done. 0 for `TransferQueues.computed`."""

    def is_done(self) -> bool:
        """Whether the operation has ended. Never blocks."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the operation has ended, at most `timeout_s`; returns `is_done`."""

    def wait_on_queue(self) -> None:
        """Called within an operation of another queue: what this operation does next happens after
        the event. On CUDA this does not block the host."""


class TransferQueue(Protocol):
    """Operations in order of submission, in parallel with the steps: on a CPU a thread, on CUDA a
    stream of low priority."""

    def submit(
        self,
        operation: Callable[[], object],
        on_done: Callable[[QueueEvent], None] | None = None,
        *,
        after: Sequence[QueueEvent] = (),
    ) -> QueueEvent:
        """Execute `operation` after everything submitted before and after the events `after`. If it
        fails, only this operation has failed.

        on_done: called once on a thread of the queue, in order, when the operation has ended. Must
                 be short. What it raises is logged.
        """


class TransferQueues(Protocol):
    """What a worker gives to its connector. All of it may be used on any thread."""

    def open(self, name: str, *, on_host: bool = False) -> TransferQueue:
        """A new queue, which the worker closes after `shutdown`. A load must not wait for a store
        that waits for a step, so each direction needs its own queue.

        on_host: a thread also on CUDA, for operations that block it, such as I/O."""

    def computed(self) -> QueueEvent:
        """The end of all steps that have been submitted so far. Blocks that those steps write must
        not be read before."""

    def wake(self) -> None:
        """Have `get_finished` and `build_connector_worker_meta` called soon, also if the engine is
        idle."""


@dataclass(frozen=True, slots=True)
class FinishedTransfers:
    """Transfers of this rank that have ended since the last report.

    sent:     requests whose blocks (`FinishAction.delay_free`) will not be read any more.
    received: requests whose asynchronous load has succeeded, failed or was cancelled: nothing will
              write their blocks any more.
    failed_block_ids: blocks that those loads did not fill.
    """

    sent: Sequence[str] = ()
    received: Sequence[str] = ()
    failed_block_ids: Sequence[int] = ()


MetadataT = TypeVar("MetadataT")


class WorkerConnector(Generic[MetadataT]):
    """Worker half of a connector: one object per rank. The default of every hook does nothing.

    The hooks of a step are only called if its plan has metadata: an idle connector costs nothing.

    Hooks run on the worker's loop thread, which prepares plans and must not be blocked, or on the
    compute queue, as part of a step. Two steps overlap: while one computes, the plan of the next
    one has already arrived. So the metadata of a plan is an argument, not state.

    A hook that raises stops the worker with a message that names the hook, because blocks may then
    hold anything. A transfer that fails is no such error: report its blocks.

    contract_version: the `CONTRACT_VERSION` that the class was written for.
    has_layer_hooks:  call `wait_for_layer_load` and `save_kv_layer` around the attention of every
                      layer. Steps then run layer by layer instead of replaying a graph.
    has_hidden_states_hook: call `save_hidden_states` after the last layer.
    stores_within_step: `save_kv_layer` or `wait_for_save` stores what the step computes before the
                      step is answered. A step for which the device has no memory is computed again
                      if this is False; otherwise the worker is replaced.
    poll_interval_s:  call `get_finished` at least this often while the engine is idle; None: only
                      after steps and `wake`.
    """

    contract_version: ClassVar[int] = CONTRACT_VERSION
    has_layer_hooks: bool = False
    has_hidden_states_hook: bool = False
    stores_within_step: bool = True
    poll_interval_s: float | None = None

    def __init__(self, config: WorkerConnectorConfig) -> None:
        """Raises ConfigError for invalid options."""
        self.config = config

    def register_kv_caches(self, kv_caches: KVCaches, queues: TransferQueues) -> None:
        """Called once, before the first plan. The memory of the blocks stays where it is."""

    # On the loop thread; must not block

    def bind_connector_metadata(self, data: bytes) -> MetadataT:
        """Decode the metadata of one plan, made by `build_connector_meta`. Called once per plan
        with metadata, in order. The result is passed to the other hooks of this plan."""
        raise NotImplementedError(f"{type(self).__name__} does not decode its metadata")

    def handle_preemptions(self, metadata: MetadataT) -> None:
        """Requests were preempted by this plan, and their blocks may be written by its step. Only
        for connectors that transfer blocks without holding them: return when no transfer reads
        those blocks any more."""

    def start_load_kv(self, metadata: MetadataT) -> None:
        """Begin the loads and stores of this plan. Called once per plan with metadata, also for one
        without tokens, before its step is submitted.

        Target blocks of loads are used by no step in progress, so loads can begin at once. The
        blocks of a store must have been computed: they are, if the scheduler half waited for the
        answer of their step, else submit the store `after` `queues.computed()`, in
        `wait_for_save`."""

    def get_finished(self, finished_request_ids: Sequence[str]) -> FinishedTransfers:
        """What has ended on this rank since the last call. Every transfer is reported exactly once.
        Called after each plan, each answer and each `wake`.

        finished_request_ids: requests that lost their row for good since the last call."""
        return FinishedTransfers()

    def build_connector_worker_meta(self) -> bytes:
        """A message for `update_connector_output` of the scheduler half; empty: none. Called after
        each `get_finished`."""
        return b""

    def get_kv_connector_stats(self) -> Sequence[TransferOperation]:
        """What this rank has moved since the last call, for metrics. Called after each
        `build_connector_worker_meta`; whatever it returns is sent, so return nothing if there was
        nothing to move."""
        return ()

    # On the compute queue, as part of the step. On CUDA its stream is the current one: make the
    # stream wait instead of the host.

    def wait_for_load(self, metadata: MetadataT) -> None:
        """Called before the step reads or writes any block: return when the synchronous loads of
        this plan have ended, or (on CUDA) after making the stream wait for them. Must not wait for
        a later plan, nor for ever: a load that takes too long has failed."""

    def wait_for_layer_load(self, metadata: MetadataT, layer_name: str) -> None:
        """With `has_layer_hooks`: called before the attention of a layer. Return when the layer's
        part of the loads has ended."""

    def save_kv_layer(
        self,
        metadata: MetadataT,
        layer_name: str,
        kv_layer: "torch.Tensor | tuple[torch.Tensor, ...]",
    ) -> None:
        """With `has_layer_hooks`: called after the attention of a layer, whose KV of this step is
        in the cache now. kv_layer: `GroupBlocks.layers[layer_name]`."""

    def save_hidden_states(
        self, metadata: MetadataT, tokens: "StepTokens", hidden_states: "torch.Tensor"
    ) -> None:
        """With `has_hidden_states_hook`: called on the rank that samples (of the last pipeline
        stage, whose ranks all have the same hidden states), before logits are computed.
        hidden_states: (num_tokens, hidden_size) after the last layer, before the final norm; they
        are overwritten by the next step, so copy what is kept."""

    def wait_for_save(self, metadata: MetadataT) -> None:
        """Called at the end of the step: begin the stores of blocks that this step has computed,
        and return when the connector no longer needs the step to wait for them."""

    def get_block_ids_with_load_errors(self, metadata: MetadataT) -> Sequence[int]:
        """Called when the step has ended: blocks that the synchronous loads of this plan did not
        fill. Everything computed from them is discarded."""
        return ()

    def shutdown(self) -> None:
        """The worker stops, or its scheduler has died; called on the loop thread. End all
        transfers: the blocks are used again after it. This is the last call. If it raises, a
        transfer may still read or write blocks, so the process ends, and is replaced."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of one step, request by request.

    request_ids: requests with tokens in this step, in the order of the tokens.
    num_tokens:  tokens of each.
    positions:   position of the first of them in its request.
    """

    request_ids: Sequence[str]
    num_tokens: Sequence[int]
    positions: Sequence[int]
