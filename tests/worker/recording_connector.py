"""A worker half that records its calls, and does what a test says."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from longshore.connectors.base import (
    FinishedTransfers,
    KVCaches,
    StepTokens,
    TransferQueues,
    WorkerConnector,
    WorkerConnectorConfig,
)


@dataclass(frozen=True)
class Call:
    """hook: with the layer's name if it is one of a layer. metadata: decoded, of a hook of a plan.
    is_on_compute_queue: whether its thread is that of the compute queue."""

    hook: str
    metadata: str | None
    is_on_compute_queue: bool


class RecordingConnector(WorkerConnector[str]):
    """failing: hooks that raise. ended: reports for the next calls of `get_finished`; messages: for
    those of `build_connector_worker_meta`. finished: request ids that `get_finished` got. failed:
    blocks that synchronous loads do not fill. on_get_finished: called by it."""

    def __init__(self, *, layers: bool = False, hidden_states: bool = False) -> None:
        super().__init__(WorkerConnectorConfig())
        self.has_layer_hooks = layers
        self.has_hidden_states_hook = hidden_states
        self.calls: list[Call] = []
        self.failing: set[str] = set()
        self.ended: list[FinishedTransfers] = []
        self.messages: list[bytes] = []
        self.finished: list[str] = []
        self.failed: Sequence[int] = ()
        self.tokens: list[StepTokens] = []
        self.hidden_shapes: list[tuple[int, ...]] = []
        self.saved_layers: dict[str, Any] = {}
        self.kv_caches: KVCaches | None = None
        self.queues: TransferQueues | None = None
        self.on_get_finished: Callable[[], None] = lambda: None

    def _note(self, hook: str, metadata: str | None = None, layer: str = "") -> None:
        name = f"{hook} {layer}".strip()
        is_on_compute_queue = threading.current_thread().name == "compute"
        self.calls.append(Call(name, metadata, is_on_compute_queue))
        if hook in self.failing:
            raise RuntimeError("it does not work")

    def hooks(self) -> list[str]:
        """Names of the hooks of plans, in the order of their calls."""
        return [call.hook for call in self.calls if call.metadata is not None]

    def register_kv_caches(self, kv_caches: KVCaches, queues: TransferQueues) -> None:
        self.kv_caches, self.queues = kv_caches, queues
        self._note("register_kv_caches")

    def bind_connector_metadata(self, data: bytes) -> str:
        self._note("bind_connector_metadata", data.decode())
        return data.decode()

    def handle_preemptions(self, metadata: str) -> None:
        self._note("handle_preemptions", metadata)

    def start_load_kv(self, metadata: str) -> None:
        self._note("start_load_kv", metadata)

    def get_finished(self, finished_request_ids: Sequence[str]) -> FinishedTransfers:
        self._note("get_finished")
        self.finished += finished_request_ids
        self.on_get_finished()
        return self.ended.pop(0) if self.ended else FinishedTransfers()

    def build_connector_worker_meta(self) -> bytes:
        self._note("build_connector_worker_meta")
        return self.messages.pop(0) if self.messages else b""

    def wait_for_load(self, metadata: str) -> None:
        self._note("wait_for_load", metadata)

    def wait_for_layer_load(self, metadata: str, layer_name: str) -> None:
        self._note("wait_for_layer_load", metadata, layer_name)

    def save_kv_layer(self, metadata: str, layer_name: str, kv_layer: Any) -> None:
        self.saved_layers[layer_name] = kv_layer
        self._note("save_kv_layer", metadata, layer_name)

    def save_hidden_states(self, metadata: str, tokens: StepTokens, hidden_states: Any) -> None:
        self.tokens.append(tokens)
        self.hidden_shapes.append(tuple(hidden_states.shape))
        self._note("save_hidden_states", metadata)

    def wait_for_save(self, metadata: str) -> None:
        self._note("wait_for_save", metadata)

    def get_block_ids_with_load_errors(self, metadata: str) -> Sequence[int]:
        self._note("get_block_ids_with_load_errors", metadata)
        return self.failed

    def shutdown(self) -> None:
        self._note("shutdown")
