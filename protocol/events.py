"""KV events: which blocks are stored where, for routers and other subscribers outside the engine.

The scheduler and connectors report one event per block (`KVEvent`). On the wire, consecutive blocks
of a request are one event, and the events of a step are one `EventBatch`: msgpack with the field
order and the frames of vLLM's KV events, which its subscribers can decode. Fields that older
subscribers do not know are last. docs/kv-events.md describes the format for subscribers.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from longshore.protocol.arrays import Int32Array
from longshore.protocol.settings import Setting, Settings
from longshore.protocol.transport.channel import Endpoint

# Events of single blocks

Medium: TypeAlias = Literal["GPU", "CPU", "DISK", "STORAGE", "REMOTE"]
"""Where a block is: the block pool of the device (also if that is a CPU), host memory, files, an
object or key-value store, or the memory of another engine."""
Locality: TypeAlias = Literal["LOCAL", "REMOTE"]
"""Whether other hosts can have the same storage. None: not specified."""
MEDIUM_GPU: Final[Medium] = "GPU"


class BlockStored(msgspec.Struct, frozen=True):
    """The first block with this hash was stored in a group and medium.

    parent_hash: hash of the block before it; None for the first block of a prompt, or if unknown.
    token_ids:   (block_size,) int32; empty if unknown.
    """

    block_hash: bytes
    parent_hash: bytes | None
    token_ids: Int32Array
    group: int
    lora_name: str | None = None
    medium: Medium = MEDIUM_GPU
    locality: Locality | None = None


class BlockRemoved(msgspec.Struct, frozen=True):
    """The last block with this hash was evicted or uncached."""

    block_hash: bytes
    group: int
    medium: Medium = MEDIUM_GPU
    locality: Locality | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True):
    """Nothing is stored in this medium any more."""

    medium: Medium = MEDIUM_GPU


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared

# Settings

EventFormat: TypeAlias = Literal["arrays", "maps"]


@dataclass(frozen=True, kw_only=True)
class KVEventsSettings(Settings):
    """What users can set of the messages with KV events."""

    kv_events_topic: Annotated[str, Setting("KV events", "Topic of the messages.")] = "kv-events"
    kv_events_buffer: Annotated[
        int,
        Meta(ge=1, le=1 << 20),
        Setting("KV events", "Number of past batches of events that can be replayed."),
    ] = 10_000
    kv_events_format: Annotated[
        EventFormat,
        Setting(
            "KV events",
            "Whether each event is an array or a map. vLLM sent arrays before version 0.24, and "
            "sends maps since.",
        ),
    ] = "arrays"
    kv_events_hashes: Annotated[
        Literal["bytes", "int"],
        Setting(
            "KV events",
            "Whether block hashes are whole (bytes), or integers of their last 8 bytes, which "
            "some subscribers need.",
        ),
    ] = "bytes"


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig(KVEventsSettings):
    """What an engine publishes, and where.

    endpoint:   PUB socket. replay_endpoint: ROUTER socket for replays and snapshots.
    engine_number: `data_parallel_rank` of the batches.
    """

    endpoint: Endpoint
    replay_endpoint: Endpoint
    engine_number: int = 0


class EventSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an engine publishes; see KVEventsConfig."""

    endpoint: Endpoint
    replay_endpoint: Endpoint
    topic: str


# The wire format

WireHash: TypeAlias = bytes | int


class StoredBlocks(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="BlockStored"):
    """Consecutive blocks of one prefix. token_ids: of all blocks; empty if unknown."""

    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: str | None
    extra_keys: None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class RemovedBlocks(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="BlockRemoved"):
    """Blocks that are not stored any more."""

    block_hashes: list[WireHash]
    medium: str
    group_idx: int | None = None
    locality: str | None = None


class ClearedBlocks(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="AllBlocksCleared"):
    """Nothing is stored in any medium. What still is follows as `StoredBlocks`."""


WireEvent: TypeAlias = StoredBlocks | RemovedBlocks | ClearedBlocks


class EventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The payload of a message.

    ts: seconds since the epoch.
    publisher_id: 16 random bytes per start of an engine. The sequence starts again with a new one.
    """

    ts: float
    events: list[WireEvent]
    data_parallel_rank: int | None = None
    publisher_id: bytes | None = None


class BatchEncoder:
    """Encodes batches, with events as arrays or as maps."""

    def __init__(self, event_format: EventFormat) -> None:
        self._has_maps = event_format == "maps"
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, batch: EventBatch) -> bytes:
        if not self._has_maps:
            return self._encoder.encode(batch)
        events = [_as_map(event) for event in batch.events]
        return self._encoder.encode(
            [batch.ts, events, batch.data_parallel_rank, batch.publisher_id]
        )


def _as_map(event: WireEvent) -> dict[str, Any]:
    return {"type": event.__struct_config__.tag, **msgspec.structs.asdict(event)}


def readable_event(event: WireEvent) -> dict[str, Any]:
    """An event as a map, with hashes in hexadecimal, for JSON."""
    return {name: _readable(value) for name, value in _as_map(event).items()}


def _readable(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list) and value and isinstance(value[0], bytes):
        return [each.hex() for each in value]
    return value


# Frames. A message is (topic, sequence number, payload).

SEQUENCE_BYTES: Final = 8
END_OF_REPLAY: Final = b"\xff" * SEQUENCE_BYTES
"""In place of the sequence number in the last message of a replay, whose payload is empty."""
SNAPSHOT_REQUEST: Final = b"snapshot"


def sequence_frame(number: int) -> bytes:
    """A sequence number, big-endian. A replay request consists of the first number wanted."""
    return number.to_bytes(SEQUENCE_BYTES, "big")
