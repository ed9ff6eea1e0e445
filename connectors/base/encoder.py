"""The encoder connector contract: how the outputs of a multimodal encoder are handed to other
engines, beside the KV that a KV connector moves.

Two small classes as for KV: `EncoderConnector` plans in the scheduler, without torch and without
I/O, and `EncoderWorker` moves the outputs in each worker process. Hooks have the names of vLLM's
encoder cache (EC) connectors. An output is identified by the content hash of its item, so an engine
needs no parameter of the request to find what another one has encoded.

In a step of the scheduler: `has_caches` per waiting request, `update_state_after_alloc` per request
that gets a row, and `build_connector_meta` once. In a step of a worker: `bind_connector_metadata`
and `start_load_caches` as soon as the plan arrives; on the compute queue, per row that starts,
`load_cache`, and `save_caches` if there was nothing to load; `step_ended` after the step.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

import msgspec

from longshore.connectors.base.views import CONTRACT_VERSION
from longshore.protocol.handshake import EngineIdentity
from longshore.protocol.requests import MultimodalFeature

if TYPE_CHECKING:
    import torch

ECRole: TypeAlias = Literal["ec_both", "ec_producer", "ec_consumer"]


class ECTransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a scheduler or worker process.

    connector: name of an encoder connector, or package.module:Class.
    options:   JSON with options that the connector defines.
    """

    connector: str
    role: ECRole = "ec_both"
    options: str = "{}"


@dataclass(frozen=True, slots=True)
class EncoderConnectorConfig:
    """Configuration of an encoder connector, the same for both halves.

    options:   from `--ec-connector-config`; the connector defines their keys.
    role:      ec_producer: other engines may load what this one encodes; ec_consumer: this one
               loads what others have encoded.
    num_ranks: number of workers; each needs every output.
    engine_id: identifies the engine and its epoch.
    """

    options: Mapping[str, Any]
    role: ECRole
    num_ranks: int
    engine_id: str
    identity: EngineIdentity

    @property
    def is_producer(self) -> bool:
        return self.role != "ec_consumer"

    @property
    def is_consumer(self) -> bool:
        return self.role != "ec_producer"


@dataclass(frozen=True, slots=True)
class EncoderWorkerConfig(EncoderConnectorConfig):
    """Configuration of the worker half.

    rank:       of this worker, 0..num_ranks - 1.
    max_tokens: maximum tokens of an output. hidden_size: elements of a token.
    """

    rank: int
    max_tokens: int
    hidden_size: int
    dtype: "torch.dtype"
    device: "torch.device"


class CacheLookup(enum.Enum):
    """LOADABLE: a step can load the output. PENDING: not known yet; ask again in the next step.
    MISSING: the item must be encoded."""

    LOADABLE = enum.auto()
    PENDING = enum.auto()
    MISSING = enum.auto()


class EncoderConnector:
    """Scheduler half of an encoder connector. If a hook raises, the engine stops.

    contract_version: the `CONTRACT_VERSION` that the class was written for.
    worker_half: `package.module:Class` of its `EncoderWorker`.
    num_missed:  lookups whose answer was that no other engine has the output, or can hand it over.
    """

    contract_version: ClassVar[int] = CONTRACT_VERSION
    worker_half: ClassVar[str] = ""
    num_missed: int = 0

    def __init__(self, config: EncoderConnectorConfig) -> None:
        """Raises ConfigError for invalid options."""
        self.config = config

    @classmethod
    def check_options(cls, options: Mapping[str, Any], role: ECRole) -> None:
        """Raise ConfigError for options that are invalid whatever the model is."""

    def has_caches(self, item: MultimodalFeature) -> CacheLookup:
        """Whether the output of this item can be loaded. Never blocks; may be called again for the
        same item, in the same step and in later ones. PENDING only for a limited time."""
        return CacheLookup.MISSING

    def update_state_after_alloc(self, item: MultimodalFeature, row: int) -> None:
        """A request with this item gets this row in the plan that is being built. Its output is
        loaded if `has_caches` has just returned LOADABLE, else encoded."""

    def build_connector_meta(self, step: int, answered_step: int) -> bytes:
        """Instructions for the worker half, sent with this plan; empty: there are none. Not called
        for steady decode steps. answered_step: the latest answer that has been applied."""
        return b""

    @property
    def has_pending_work(self) -> bool:
        """Whether an idle engine must send a plan, for `build_connector_meta`."""
        return False

    def update_connector_output(self, rank: int, metadata: bytes) -> None:
        """A message of a worker half."""

    def reset_cache(self) -> bool:
        """Drop all outputs; False if that is not possible now."""
        return True

    def on_new_epoch(self) -> None:
        """All workers were replaced, and what they held is lost."""


MetadataT = TypeVar("MetadataT")


class EncoderWorker(Generic[MetadataT]):
    """Worker half of an encoder connector: one object per rank. A hook that raises stops the
    worker; a transfer that fails is no such error.

    poll_interval_s: call `build_connector_worker_meta` at least this often while the engine is
                     idle; None: only after steps and `wake`.
    """

    contract_version: ClassVar[int] = CONTRACT_VERSION
    poll_interval_s: float | None = None

    def __init__(self, config: EncoderWorkerConfig) -> None:
        """Raises ConfigError for invalid options."""
        self.config = config

    def register_caches(self, wake: Callable[[], None]) -> None:
        """Called once, before the first plan. wake: may be called on any thread, when
        `build_connector_worker_meta` has something new. Raises ConfigError."""

    # On the loop thread; must not block

    def bind_connector_metadata(self, data: bytes) -> MetadataT:
        """Decode the metadata of one plan. The result is passed to the other hooks of this plan."""
        raise NotImplementedError(f"{type(self).__name__} does not decode its metadata")

    def start_load_caches(self, metadata: MetadataT) -> None:
        """Begin the transfers of this plan, which may have no tokens."""

    def build_connector_worker_meta(self) -> bytes:
        """A message for `update_connector_output` of the scheduler half; empty: none."""
        return b""

    def shutdown(self) -> None:
        """The worker stops. End all transfers. This is the last call."""

    # On the compute queue, as part of the step

    def load_cache(self, metadata: MetadataT, row: int) -> "torch.Tensor | None":
        """The output for a row that starts, (num_tokens, hidden_size) on any device; None if it is
        to be encoded. It is read before the next operation of the compute queue."""
        return None

    def save_caches(self, metadata: MetadataT, row: int, encoded: "torch.Tensor") -> None:
        """The item of this row was encoded. encoded: (num_tokens, hidden_size) on the device."""

    # On a thread of the compute queue

    def step_ended(self, metadata: MetadataT) -> None:
        """The step was computed, and what it saved is complete. Called before it is answered."""
