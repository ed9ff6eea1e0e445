"""The sequence of KV event batches that subscribers receive: numbers, replay buffer and index.

The index is what a subscriber knows that has received every batch, so it can be sent to one that
subscribes late or has missed too much. Unlike the block pool, it has the tokens of the blocks.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final, NamedTuple, TypeAlias, assert_never

import numpy as np

from longshore.protocol.events import (
    AllBlocksCleared,
    BatchEncoder,
    BlockRemoved,
    BlockStored,
    ClearedBlocks,
    EventBatch,
    KVEvent,
    KVEventsConfig,
    RemovedBlocks,
    StoredBlocks,
    WireEvent,
    WireHash,
)
from longshore.protocol.kv_cache_spec import KVCacheConfig, KVCacheSpec, SlidingWindowSpec

MAX_BATCH_BLOCKS: Final = 4096
# Encoding them takes a fraction of a millisecond, and other work runs between two payloads.
SNAPSHOT_PAYLOAD_BLOCKS: Final = 256
MAX_BUFFER_BYTES: Final = 256 << 20
_INT_HASH_BYTES: Final = 8

_Run: TypeAlias = list[KVEvent]
"""Events of one kind that are one event on the wire."""


class Place(NamedTuple):
    """Where a block is stored; a hash is in a place at most once."""

    medium: str
    locality: str | None
    group: int


class NumberedBatch(NamedTuple):
    """An encoded batch with its sequence number."""

    number: int
    payload: bytes


class EventStream:
    """Numbers and encodes batches, beginning with 0.

    publisher_id: 16 bytes, different at each start of the engine.
    context_parallel_size: ranks that share the tokens of a block.
    """

    def __init__(
        self,
        config: KVEventsConfig,
        kv_cache: KVCacheConfig,
        *,
        publisher_id: bytes,
        context_parallel_size: int = 1,
        max_buffer_bytes: int = MAX_BUFFER_BYTES,
    ) -> None:
        self.publisher_id = publisher_id
        self._engine_number = config.engine_number
        self._encoder = BatchEncoder(config.kv_events_format)
        self._has_int_hashes = config.kv_events_hashes == "int"
        self._context_parallel_size = context_parallel_size
        self._specs = [group.spec for group in kv_cache.groups]
        self._index: dict[Place, dict[bytes, BlockStored]] = {}
        self._buffer: deque[NumberedBatch] = deque()
        self._max_buffered, self._max_buffer_bytes = config.kv_events_buffer, max_buffer_bytes
        self._num_buffer_bytes = 0
        self._next_number = 0

    def append(self, events: Iterable[KVEvent], now_s: float) -> list[NumberedBatch]:
        """The batches with the next events: usually one; none if nothing changes. Events that
        change nothing are left out. now_s: seconds since the epoch."""
        batches = []
        for runs in _batches(_runs(self._apply(events), MAX_BATCH_BLOCKS), MAX_BATCH_BLOCKS):
            payload = self._encode(list(map(self._wire_event, runs)), now_s)
            batches.append(NumberedBatch(self._next_number, payload))
            self._next_number += 1
            self._keep(batches[-1])
        return batches

    def replay(self, first: int) -> list[NumberedBatch]:
        """The batches from number `first` on that are still in the buffer."""
        return [batch for batch in self._buffer if batch.number >= first]

    def snapshot(self, now_s: float) -> tuple[int, Iterator[bytes]]:
        """The number of the last batch, and the whole index after it, as payloads with
        `StoredBlocks`. A payload is encoded when it is taken; later batches do not change it."""
        number, batches = self.snapshot_events()
        return number, (self._encode(events, now_s) for events in batches)

    def snapshot_events(self) -> tuple[int, Iterator[list[WireEvent]]]:
        """The number of the last batch, and the index as lists of events that are not encoded
        yet."""
        blocks = list(chain.from_iterable(each.values() for each in self._index.values()))
        batches = _batches(_runs(blocks, SNAPSHOT_PAYLOAD_BLOCKS), SNAPSHOT_PAYLOAD_BLOCKS)
        return self._next_number - 1, (list(map(self._wire_event, runs)) for runs in batches)

    def _apply(self, events: Iterable[KVEvent]) -> Iterator[KVEvent]:
        """Apply events to the index; yields those that change it, and what follows from them."""
        for event in events:
            match event:
                case BlockStored():
                    if self._blocks_at(event).setdefault(event.block_hash, event) is event:
                        yield event
                case BlockRemoved():
                    if self._blocks_at(event).pop(event.block_hash, None) is not None:
                        yield event
                case AllBlocksCleared():
                    for place in [each for each in self._index if each.medium == event.medium]:
                        del self._index[place]
                    yield event
                    # On the wire it clears all media, so the blocks in other media are repeated.
                    yield from chain.from_iterable(each.values() for each in self._index.values())
                case _:
                    assert_never(event)

    def _blocks_at(self, event: BlockStored | BlockRemoved) -> dict[bytes, BlockStored]:
        place = Place(event.medium, event.locality, event.group)
        return self._index.setdefault(place, {})

    def _keep(self, batch: NumberedBatch) -> None:
        """Add a batch to the buffer, in place of the oldest ones if there is no room."""
        self._buffer.append(batch)
        self._num_buffer_bytes += len(batch.payload)
        while (
            len(self._buffer) > self._max_buffered
            or self._num_buffer_bytes > self._max_buffer_bytes
        ):
            self._num_buffer_bytes -= len(self._buffer.popleft().payload)

    def _encode(self, events: list[WireEvent], now_s: float) -> bytes:
        return self._encoder.encode(
            EventBatch(now_s, events, self._engine_number, self.publisher_id)
        )

    def _wire_event(self, run: _Run) -> WireEvent:
        first = run[0]
        if isinstance(first, AllBlocksCleared):
            return ClearedBlocks()
        hashes = [self._wire_hash(e.block_hash) for e in run if not isinstance(e, AllBlocksCleared)]
        if isinstance(first, BlockRemoved):
            return RemovedBlocks(hashes, first.medium, first.group, first.locality)
        tokens = np.concatenate(
            [event.token_ids for event in run if isinstance(event, BlockStored)]
        )
        spec = self._specs[first.group]
        return StoredBlocks(
            block_hashes=hashes,
            parent_block_hash=self._wire_hash(first.parent_hash) if first.parent_hash else None,
            token_ids=tokens.tolist(),
            block_size=len(first.token_ids) or spec.block_size * self._context_parallel_size,
            lora_id=None,
            medium=first.medium,
            lora_name=first.lora_name,
            group_idx=first.group,
            kv_cache_spec_kind=kind_of(spec),
            kv_cache_spec_sliding_window=(
                spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
            ),
            locality=first.locality,
        )

    def _wire_hash(self, block_hash: bytes) -> WireHash:
        if self._has_int_hashes:
            return int.from_bytes(block_hash[-_INT_HASH_BYTES:], "big")
        return block_hash


def kind_of(spec: KVCacheSpec) -> str:
    """The kind of a group in vLLM's words, such as `full_attention`."""
    tag = str(spec.__struct_config__.tag)
    if tag == "custom":
        return "unknown"
    if tag == "state":
        return "mamba"
    return tag if tag == "sliding_window" else f"{tag}_attention"


def _runs(events: Iterable[KVEvent], longest: int) -> Iterator[_Run]:
    """Divide events into runs of at most `longest`."""
    run: _Run = []
    for event in events:
        if run and (len(run) == longest or not _continues(run[-1], event)):
            yield run
            run = []
        run.append(event)
    if run:
        yield run


def _continues(last: KVEvent, event: KVEvent) -> bool:
    """Whether both can be in one run: removed from the same place, or stored there as consecutive
    blocks."""
    match last, event:
        case (BlockStored(), BlockStored()):
            return (
                event.parent_hash == last.block_hash
                and event.group == last.group
                and event.medium == last.medium
                and event.locality == last.locality
                and event.lora_name == last.lora_name
                and len(event.token_ids) == len(last.token_ids)
            )
        case (BlockRemoved(), BlockRemoved()):
            return (
                event.group == last.group
                and event.medium == last.medium
                and event.locality == last.locality
            )
        case _:
            return False


def _batches(runs: Iterable[_Run], max_blocks: int) -> Iterator[list[_Run]]:
    """Divide runs into batches of at most `max_blocks` blocks."""
    batch: list[_Run] = []
    num_blocks = 0
    for run in runs:
        if batch and num_blocks + len(run) > max_blocks:
            yield batch
            batch, num_blocks = [], 0
        batch.append(run)
        num_blocks += len(run)
    if batch:
        yield batch
