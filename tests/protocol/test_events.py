"""KV events on the wire, and the subscribers that can decode them."""

from typing import Any

import msgspec
import pytest

from longshore.protocol.events import (
    END_OF_REPLAY,
    BatchEncoder,
    ClearedBlocks,
    EventBatch,
    EventFormat,
    RemovedBlocks,
    StoredBlocks,
    sequence_frame,
)
from tests.harness.vllm_events import (
    ArrayAllBlocksCleared,
    ArrayBatch,
    ArrayBlockRemoved,
    ArrayBlockStored,
    MapAllBlocksCleared,
    MapBatch,
    MapBlockRemoved,
    MapBlockStored,
    OldAllBlocksCleared,
    OldBatch,
    OldBlockRemoved,
    OldBlockStored,
)

ID = bytes(range(16))


def batch_of(first: bytes | int, second: bytes | int, parent: bytes | int | None) -> EventBatch:
    return EventBatch(
        1.5,
        [
            ClearedBlocks(),
            StoredBlocks(
                block_hashes=[first, second],
                parent_block_hash=parent,
                token_ids=[5, 6, 7, 8],
                block_size=2,
                lora_id=None,
                medium="GPU",
                lora_name="an adapter",
                group_idx=1,
                kv_cache_spec_kind="sliding_window",
                kv_cache_spec_sliding_window=4,
            ),
            RemovedBlocks([first], "STORAGE", 0, "REMOTE"),
        ],
        data_parallel_rank=2,
        publisher_id=ID,
    )


def decoded(batch: EventBatch, event_format: EventFormat, as_type: type[Any]) -> Any:
    return msgspec.msgpack.decode(BatchEncoder(event_format).encode(batch), type=as_type)


def test_batch_survives_the_wire() -> None:
    batch = batch_of(b"1" * 32, b"2" * 32, None)
    assert decoded(batch, "arrays", EventBatch) == batch


@pytest.mark.parametrize(("first", "second", "parent"), [(b"a", b"b", b"p"), (1, 2**64 - 1, None)])
def test_arrays_can_be_read_with_the_classes_of_vllm(
    first: bytes | int, second: bytes | int, parent: bytes | int | None
) -> None:
    batch = decoded(batch_of(first, second, parent), "arrays", ArrayBatch)
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 2)
    assert batch.events == [
        ArrayAllBlocksCleared(),
        ArrayBlockStored(
            [first, second], parent, [5, 6, 7, 8], 2, None, "GPU", "an adapter", None, 1,
            "sliding_window", 4,
        ),
        ArrayBlockRemoved([first], "STORAGE", 0),
    ]  # fmt: skip


def test_arrays_with_integers_can_be_read_with_the_first_classes_of_vllm() -> None:
    batch = decoded(batch_of(1, 2**64 - 1, 3), "arrays", OldBatch)
    assert batch.events == [
        OldAllBlocksCleared(),
        OldBlockStored([1, 2**64 - 1], 3, [5, 6, 7, 8], 2, None),
        OldBlockRemoved([1]),
    ]


@pytest.mark.parametrize(("first", "second", "parent"), [(b"a", b"b", b"p"), (1, 2**64 - 1, None)])
def test_maps_can_be_read_with_the_classes_of_vllm(
    first: bytes | int, second: bytes | int, parent: bytes | int | None
) -> None:
    batch = decoded(batch_of(first, second, parent), "maps", MapBatch)
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 2)
    assert batch.events == [
        MapAllBlocksCleared(),
        MapBlockStored(
            [first, second], parent, [5, 6, 7, 8], 2, None, "GPU", "an adapter", None, 1,
            "sliding_window", 4,
        ),
        MapBlockRemoved([first], "STORAGE", 0, "REMOTE"),
    ]  # fmt: skip


def test_what_is_added_comes_last() -> None:
    """A subscriber that counts positions finds every field where vLLM has it."""
    ts, events, rank, *added = msgspec.msgpack.decode(
        BatchEncoder("arrays").encode(batch_of(b"a", b"b", None))
    )
    assert (ts, rank, added) == (1.5, 2, [ID])
    assert [event[0] for event in events] == ["AllBlocksCleared", "BlockStored", "BlockRemoved"]
    assert events[1] == [
        "BlockStored", [b"a", b"b"], None, [5, 6, 7, 8], 2, None, "GPU", "an adapter", None, 1,
        "sliding_window", 4, None,
    ]  # fmt: skip
    assert events[2] == ["BlockRemoved", [b"a"], "STORAGE", 0, "REMOTE"]


def test_sequence_numbers_are_big_endian_and_the_end_marker_is_none_of_them() -> None:
    assert sequence_frame(258) == b"\0\0\0\0\0\0\1\2"
    assert (-1).to_bytes(8, "big", signed=True) == END_OF_REPLAY
