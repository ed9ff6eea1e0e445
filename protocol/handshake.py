"""The handshake: compares versions, model, KV layout and hash seed before any other message.

Worker: WorkerHello -> WorkerAccepted | Rejected; the worker allocates its cache, then WorkerReady.
If the engine sleeps: WorkerHello -> BeginSleep, WorkerAsleep, EndSleep, and then again WorkerHello.
Client: ClientHello -> EngineReady | Rejected.

Hellos and `Rejected` allow unknown fields, unlike all other messages: a newer version must get an
answer that says so. At the end of the file: the union of messages per direction.
"""

import enum
import hashlib
from math import prod
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

import msgspec

from longshore.protocol.arrays import Int32Array
from longshore.protocol.errors import ConfigError, HandshakeRejected
from longshore.protocol.gguf_header import read_gguf_header
from longshore.protocol.kv_cache_spec import HeadShare, KVCacheConfig, KVCapacity
from longshore.protocol.model_files import open_regular, read_bytes
from longshore.protocol.outputs import (
    AdmissionChanged,
    EngineContinues,
    EngineFailed,
    EngineOutputs,
    EnginePaused,
    ModelRunnerOutput,
    TransferReport,
    WorkerFailed,
)
from longshore.protocol.plan import BeginSleep, EndSleep, SampleMask, SchedulerOutput, Shutdown
from longshore.protocol.requests import AbortRequests, AddRequest, ContinueSession, StopFound
from longshore.protocol.routed_experts import RoutedExpertsShape
from longshore.protocol.statistics import (
    BlockSnapshot,
    DescribeBlocks,
    DescribeEngine,
    EngineReport,
    WorkerStats,
)

PROTOCOL_VERSION: Final = 30
"""Increased by every change of a message; both sides must have the same version."""


MAX_HEADER_BYTES: Final = 100_000_000
"""Limit of the safetensors format for a file's header."""


class EngineIdentity(msgspec.Struct, frozen=True):
    """What all processes of one engine must agree on.

    model_fingerprint: `model_fingerprint()` of the model folder, with a suffix if it is computed in
                       a way that gives other keys and values.
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
    A POOLING_ONLY worker has no logits: requests for tokens are rejected. One with CLASSIFY has a
    classification head. The tokens of a BIDIRECTIONAL one attend to later ones, so each prompt must
    be computed in one step, without prefix hits."""

    PROMPT_EMBEDS = "prompt_embeds"
    LORA = "lora"
    MULTIMODAL = "multimodal"
    POOLING = "pooling"
    POOLING_ONLY = "pooling_only"
    CLASSIFY = "classify"
    BIDIRECTIONAL = "bidirectional"
    STRUCTURED_OUTPUT = "structured_output"
    DRAFTS = "drafts"
    KV_CONNECTOR = "kv_connector"
    EC_CONNECTOR = "ec_connector"


class WorkerHello(msgspec.Struct, tag="worker_hello", frozen=True):
    """A rank has loaded its weights; its memory can hold `kv_cache.num_blocks` blocks.

    kv_cache, heads: what the rank stores: its layers in each group, and its KV heads.
    routed_experts: what it writes into the memory of experts that it shares; None: nothing.
    """

    rank: int
    identity: EngineIdentity
    kv_cache: KVCacheConfig
    heads: HeadShare
    features: tuple[Feature, ...] = ()
    routed_experts: RoutedExpertsShape | None = None


class WorkerAccepted(msgspec.Struct, tag="accepted", frozen=True, forbid_unknown_fields=True):
    """The rank belongs to this engine. Plans will have this `epoch` and use `num_blocks` blocks.

    rank_block_bytes: bytes that a block needs on each rank, for connectors; empty without one.
    adopted_block_ids: blocks whose KV, computed by the process that had this rank before, is still
                       valid; None: none, the rank begins with an empty cache.
    """

    epoch: int
    num_blocks: int
    verify_plan: bool = False
    rank_block_bytes: tuple[int, ...] = ()
    adopted_block_ids: Int32Array | None = None


class WorkerReady(msgspec.Struct, tag="worker_ready", frozen=True, forbid_unknown_fields=True):
    """The cache is allocated and the model is warmed up; plans can be sent."""

    rank: int


class WorkerAsleep(msgspec.Struct, tag="worker_asleep", frozen=True, forbid_unknown_fields=True):
    """The rank has freed its device's memory, and waits for EndSleep."""

    rank: int


class ClientHello(msgspec.Struct, tag="client_hello", frozen=True):
    """A client, such as a gateway, wants to send requests."""

    name: str
    model_fingerprint: str
    protocol_version: int = PROTOCOL_VERSION


class EngineReady(msgspec.Struct, tag="engine_ready", frozen=True, forbid_unknown_fields=True):
    """The engine accepts requests of this client.

    num_blocks: of the pool, with the reserved ones.
    capacity:   what requests can use of it.
    """

    engine_id: str
    identity: EngineIdentity
    num_blocks: int
    capacity: KVCapacity


class Rejected(msgspec.Struct, tag="rejected", frozen=True):
    """The hello is not accepted, for `reason`."""

    reason: str


ToWorker: TypeAlias = (
    SchedulerOutput | SampleMask | BeginSleep | EndSleep | Shutdown | WorkerAccepted | Rejected
)
FromWorker: TypeAlias = (
    ModelRunnerOutput
    | TransferReport
    | WorkerStats
    | WorkerFailed
    | WorkerHello
    | WorkerReady
    | WorkerAsleep
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
    EngineOutputs
    | AdmissionChanged
    | EngineReport
    | BlockSnapshot
    | EnginePaused
    | EngineContinues
    | EngineFailed
    | EngineReady
    | Rejected
)


SAMPLES_PER_FILE: Final = 256
SAMPLE_BYTES: Final = 512
SMALL_TENSOR_BYTES: Final = 16_384
"""Tensors up to this size, such as scales, biases and norms, are read whole: samples at equal
distances would miss them."""


def model_fingerprint(model_dir: Path) -> str:
    """Identifies a model folder by its config and by the names, sizes and headers of its weight
    files, their small tensors, and `SAMPLES_PER_FILE` samples of their content at equal distances.

    Not all weights are read, so it is cheap. Two sets of weights that differ in fewer places than
    are sampled can have the same one; sets that were trained differently have not.

    Raises ConfigError if a file cannot be read.
    """
    try:
        return _fingerprint(model_dir)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{model_dir} has a file that cannot be read: {error}") from error


def _fingerprint(model_dir: Path) -> str:
    state = hashlib.sha256(read_bytes(model_dir / "config.json"))
    safetensors = sorted(model_dir.glob("*.safetensors"))
    for path in safetensors or sorted(model_dir.glob("*.gguf")):
        size_bytes = path.stat().st_size
        state.update(f"{path.name}:{size_bytes};".encode())
        with open_regular(path) as file:
            small = _add_header(state, file) if safetensors else _add_gguf_header(state, file, path)
            for first, end in small:
                file.seek(first)
                state.update(file.read(end - first))
            for number in range(SAMPLES_PER_FILE):
                file.seek(size_bytes * number // SAMPLES_PER_FILE)
                state.update(file.read(SAMPLE_BYTES))
    return state.hexdigest()[:32]


def _add_header(state: "hashlib._Hash", file: BinaryIO) -> list[tuple[int, int]]:
    """Of a safetensors file. Returns where small tensors begin and end in the file."""
    header_bytes = int.from_bytes(file.read(8), "little")
    header = file.read(min(header_bytes, MAX_HEADER_BYTES))
    state.update(header)
    small = _small_tensors(header) if len(header) == header_bytes else []
    return [(8 + header_bytes + first, 8 + header_bytes + end) for first, end in small]


def _add_gguf_header(state: "hashlib._Hash", file: BinaryIO, path: Path) -> list[tuple[int, int]]:
    """Likewise. No element of a small tensor has more than 4 bytes."""
    try:
        header = read_gguf_header(path, with_texts=False)
    except ValueError:  # the loader rejects it
        return []
    state.update(file.read(header.data_begin))
    sizes = ((tensor.begin, 4 * prod(tensor.shape)) for tensor in header.tensors)
    return [(begin, begin + size) for begin, size in sizes if size <= SMALL_TENSOR_BYTES]


class _TensorEntry(msgspec.Struct):
    """An entry of the header of a safetensors file; that of the metadata has no offsets."""

    data_offsets: tuple[int, int] = (0, 0)


def _small_tensors(header: bytes) -> list[tuple[int, int]]:
    """Where the small tensors begin and end after the header, in order. Empty for a header that is
    not valid: the loader rejects such a file."""
    try:
        tensors = msgspec.json.decode(header, type=dict[str, _TensorEntry])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    offsets = (entry.data_offsets for entry in tensors.values())
    return sorted(
        (first, end) for first, end in offsets if 0 <= first < end <= first + SMALL_TENSOR_BYTES
    )


def hash_seed_digest(seed: bytes) -> str:
    """A digest by which two processes compare their seeds without revealing them."""
    return hashlib.sha256(b"longshore hash seed\0" + seed).hexdigest()[:16]
