"""The handshake: compares versions, model, KV layout and hash seed before any other message.

Worker: WorkerHello -> WorkerAccepted | Rejected; the worker allocates its cache, then WorkerReady.
Client: ClientHello -> EngineReady | Rejected.

Hellos and `Rejected` allow unknown fields, unlike all other messages: a newer version must get an
answer that says so. At the end of the file: the union of messages per direction.
"""

import enum
import hashlib
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from longshore.protocol.errors import HandshakeRejected
from longshore.protocol.kv_cache_spec import KVCacheConfig
from longshore.protocol.outputs import (
    EngineFailed,
    EngineOutputs,
    ModelRunnerOutput,
    TransferReport,
    WorkerFailed,
)
from longshore.protocol.plan import SampleMask, SchedulerOutput, Shutdown
from longshore.protocol.requests import AbortRequests, AddRequest, ContinueSession, StopFound
from longshore.protocol.statistics import (
    BlockSnapshot,
    DescribeBlocks,
    DescribeEngine,
    EngineReport,
    WorkerStats,
)

PROTOCOL_VERSION: Final = 8
"""Increased by every change of a message; both sides must have the same version."""


class EngineIdentity(msgspec.Struct, frozen=True):
    """What all processes of one engine must agree on.

    model_fingerprint: `model_fingerprint()` of the model folder.
    kv_cache_dtype:    "auto" is `dtype`.
    hash_seed_digest:  digest of the block hash seed; the seed itself is never sent.
    block_size:        tokens per block on one rank. `decode_context_parallel_size` ranks share each
                       block, in turns of `cp_kv_cache_interleave_size` consecutive tokens.
    """

    model_fingerprint: str
    dtype: str
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    hash_seed_digest: str
    kv_cache_dtype: str = "auto"
    decode_context_parallel_size: int = 1
    cp_kv_cache_interleave_size: int = 1
    protocol_version: int = PROTOCOL_VERSION


def check_identity(ours: EngineIdentity, theirs: EngineIdentity, *, peer: str) -> None:
    """Raise HandshakeRejected with the first field in which `peer` differs, and both values."""
    fields = EngineIdentity.__struct_fields__
    # The version first: in another version the other fields may have another meaning.
    for field in ("protocol_version", *fields):
        wanted, got = getattr(ours, field), getattr(theirs, field)
        if wanted != got:
            raise HandshakeRejected(
                f"{peer} has {field}={got!r}, this engine has {wanted!r}; they cannot share a "
                f"KV cache. Start both from the same configuration and version."
            )


class Feature(enum.Enum):
    """Optional abilities of a worker. Requests that need an ability it lacks are rejected.
    A POOLING_ONLY worker has no logits: requests for tokens are rejected."""

    PROMPT_EMBEDS = "prompt_embeds"
    LORA = "lora"
    MULTIMODAL = "multimodal"
    POOLING = "pooling"
    POOLING_ONLY = "pooling_only"
    STRUCTURED_OUTPUT = "structured_output"
    DRAFTS = "drafts"
    KV_CONNECTOR = "kv_connector"


class WorkerHello(msgspec.Struct, tag="worker_hello", frozen=True):
    """A rank has loaded its weights; its memory can hold `kv_cache.num_blocks` blocks."""

    rank: int
    identity: EngineIdentity
    kv_cache: KVCacheConfig
    features: tuple[Feature, ...] = ()


class WorkerAccepted(msgspec.Struct, tag="accepted", frozen=True, forbid_unknown_fields=True):
    """The rank belongs to this engine. Plans will have this `epoch` and use `num_blocks` blocks."""

    epoch: int
    num_blocks: int
    verify_plan: bool = False


class WorkerReady(msgspec.Struct, tag="worker_ready", frozen=True, forbid_unknown_fields=True):
    """The cache is allocated and the model is warmed up; plans can be sent."""

    rank: int


class ClientHello(msgspec.Struct, tag="client_hello", frozen=True):
    """A client, such as a gateway, wants to send requests."""

    name: str
    model_fingerprint: str
    protocol_version: int = PROTOCOL_VERSION


class EngineReady(msgspec.Struct, tag="engine_ready", frozen=True, forbid_unknown_fields=True):
    """The engine accepts requests of this client."""

    engine_id: str
    identity: EngineIdentity
    num_blocks: int


class Rejected(msgspec.Struct, tag="rejected", frozen=True):
    """The hello is not accepted, for `reason`."""

    reason: str


ToWorker: TypeAlias = SchedulerOutput | SampleMask | Shutdown | WorkerAccepted | Rejected
FromWorker: TypeAlias = (
    ModelRunnerOutput | TransferReport | WorkerStats | WorkerFailed | WorkerHello | WorkerReady
)
ToEngine: TypeAlias = (
    AddRequest
    | ContinueSession
    | AbortRequests
    | StopFound
    | DescribeEngine
    | DescribeBlocks
    | ClientHello
)
ToClient: TypeAlias = (
    EngineOutputs | EngineReport | BlockSnapshot | EngineFailed | EngineReady | Rejected
)


def model_fingerprint(model_dir: Path) -> str:
    """Identifies a model folder by its config and the names and sizes of its weight files.

    No weight is read, so it is cheap, but two sets of weights of one model have the same one.
    """
    state = hashlib.sha256((model_dir / "config.json").read_bytes())
    for path in sorted(model_dir.glob("*.safetensors")):
        state.update(f"{path.name}:{path.stat().st_size};".encode())
    return state.hexdigest()[:32]


def hash_seed_digest(seed: bytes) -> str:
    """A digest by which two processes compare their seeds without revealing them."""
    return hashlib.sha256(b"longshore hash seed\0" + seed).hexdigest()[:16]
