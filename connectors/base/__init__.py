"""The KV connector contract: how KV is loaded from, and stored to, memory beyond the device.

A connector is two small classes. `SchedulerConnector` plans, without torch and without I/O: its
hooks run in the scheduler's only thread and must not block. `WorkerConnector` moves the bytes, in
each worker process. They get views, never the engine's own objects, and talk to each other in
bytes of their own: metadata in plans and in reports. Hooks have the names of vLLM's connectors;
results with several forms are closed types.

Order in a step of the scheduler: `get_num_new_matched_tokens` and `update_state_after_alloc` per
admitted request, `request_finished` per request that ends, `build_connector_meta` once per plan
that may concern the connector, and `update_connector_output` after each answer with news and each
transfer report has been applied.

Order in a step of a worker: `bind_connector_metadata`, `handle_preemptions` and `start_load_kv` as
soon as the plan arrives; then, on the compute queue, `wait_for_load`, the layers, and
`wait_for_save`.
"""

from typing import TYPE_CHECKING

from longshore.connectors.base.encoder import (
    CacheLookup,
    ECRole,
    ECTransferConfig,
    EncoderConnector,
    EncoderConnectorConfig,
    EncoderWorker,
    EncoderWorkerConfig,
)
from longshore.connectors.base.scheduler_half import SchedulerConnector
from longshore.connectors.base.views import (
    CONTRACT_VERSION,
    SUPPORTED_VERSIONS,
    AdmittedRequest,
    AskLater,
    BlockHolds,
    Chunk,
    ConnectorConfig,
    ConnectorOutput,
    ConnectorStats,
    FinishAction,
    Match,
    Matched,
    RequestView,
    StepView,
    StorableBlocks,
    SwapSize,
)
from longshore.connectors.base.worker_half import (
    FinishedTransfers,
    GroupBlocks,
    KVCaches,
    QueueEvent,
    StepTokens,
    TransferQueue,
    TransferQueues,
    WorkerConnector,
    WorkerConnectorConfig,
)
from longshore.protocol.moved import moved_names

if not TYPE_CHECKING:
    __getattr__ = moved_names(__name__)

__all__ = [
    "CONTRACT_VERSION",
    "SUPPORTED_VERSIONS",
    "AdmittedRequest",
    "AskLater",
    "BlockHolds",
    "CacheLookup",
    "Chunk",
    "ConnectorConfig",
    "ConnectorOutput",
    "ConnectorStats",
    "ECRole",
    "ECTransferConfig",
    "EncoderConnector",
    "EncoderConnectorConfig",
    "EncoderWorker",
    "EncoderWorkerConfig",
    "FinishAction",
    "FinishedTransfers",
    "GroupBlocks",
    "KVCaches",
    "Match",
    "Matched",
    "QueueEvent",
    "RequestView",
    "SchedulerConnector",
    "StepTokens",
    "StepView",
    "StorableBlocks",
    "SwapSize",
    "TransferQueue",
    "TransferQueues",
    "WorkerConnector",
    "WorkerConnectorConfig",
]
