"""Who may talk to whom: versions, model, KV layout and hash seed are compared before anything else.

Worker:  WorkerHello -> Welcome | Refused; then the worker allocates its cache and says WorkerReady.
Client:  ClientHello -> EngineReady | Refused.

Hellos and refusals take fields they do not know, unlike all other messages: a newer version must be
told that it is too new, not be dropped.
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
from longshore.protocol.requests import (
    AbortRequests,
    AddRequest,
    ContinueSession,
    StopFound,
)
from longshore.protocol.statistics import (
    BlockSnapshot,
    DescribeBlocks,
    DescribeEngine,
    EngineReport,
    WorkerStats,
)

PROTOCOL_VERSION: Final = 8
"""Raised by every change of a message; both sides must run the same one."""


class EngineIdentity(msgspec.Struct, frozen=True):
    """What all processes of one engine must agree on.

    model_fingerprint: `model_fingerprint()` of the model folder.
    kv_cache_dtype:    "auto" is `dtype`.
    hash_seed_digest:  digest of the block hash seed; the seed itself never travels.
    block_size:        of one rank; decode_context_parallel_size ranks share a block, each of which
                       keeps cp_kv_cache_interleave_size neighbouring tokens.
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
    """Raise HandshakeRejected naming the first field in which `peer` differs, and both values."""
    fields = EngineIdentity.__struct_fields__
    for field in ("protocol_version", *fields):  # another version may mean anything by the rest
        wanted, got = getattr(ours, field), getattr(theirs, field)
        if wanted != got:
            raise HandshakeRejected(
                f"{peer} has {field}={got!r}, this engine has {wanted!r}; they cannot share a "
                f"KV cache. Start both from the same configuration and version."
            )


class Feature(enum.Enum):
    """What a worker may be able to do beyond plain text; requests for the rest are refused.
    With POOLING_ONLY there are no logits, and requests for tokens are."""

    PROMPT_EMBEDS = "prompt_embeds"
    LORA = "lora"
    MULTIMODAL = "multimodal"
    POOLING = "pooling"
    POOLING_ONLY = "pooling_only"
    STRUCTURED_OUTPUT = "structured_output"
    DRAFTS = "drafts"
    KV_CONNECTOR = "kv_connector"


class WorkerHello(msgspec.Struct, tag="worker_hello", frozen=True):
    """A rank with its weights loaded; `kv_cache.num_blocks` is what its memory can hold."""

    rank: int
    identity: EngineIdentity
    kv_cache: KVCacheConfig
    features: tuple[Feature, ...] = ()


class WorkerAccepted(msgspec.Struct, tag="accepted", frozen=True, forbid_unknown_fields=True):
    """The rank belongs to this engine: plans will carry `epoch` and use `num_blocks` blocks."""

    epoch: int
    num_blocks: int
    verify_plan: bool = False


class WorkerReady(msgspec.Struct, tag="worker_ready", frozen=True, forbid_unknown_fields=True):
    """The cache is allocated and the model warmed up; plans may come."""

    rank: int


class ClientHello(msgspec.Struct, tag="client_hello", frozen=True):
    """A gateway asks to send requests."""

    name: str
    model_fingerprint: str
    protocol_version: int = PROTOCOL_VERSION


class EngineReady(msgspec.Struct, tag="engine_ready", frozen=True, forbid_unknown_fields=True):
    """The engine takes this client's requests."""

    engine_id: str
    identity: EngineIdentity
    num_blocks: int


class Rejected(msgspec.Struct, tag="rejected", frozen=True):
    """The two do not fit; `reason` names the field and both values."""

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

    Cheap on purpose (no weight is read): it tells different models apart, not different values.
    """
    state = hashlib.sha256((model_dir / "config.json").read_bytes())
    for path in sorted(model_dir.glob("*.safetensors")):
        state.update(f"{path.name}:{path.stat().st_size};".encode())
    return state.hexdigest()[:32]


def hash_seed_digest(seed: bytes) -> str:
    """Compares two seeds without telling either."""
    return hashlib.sha256(b"longshore hash seed\0" + seed).hexdigest()[:16]
