"""The classes with which subscribers for vLLM decode KV events, field by field as vLLM declares
them: before version 0.11, before 0.24, and since. Its source code is not used."""

from typing import Any

import msgspec

Hash = bytes | int


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


# Arrays with integers, as in version 0.9


class OldEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class OldBlockStored(OldEvent, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class OldBlockRemoved(OldEvent, tag="BlockRemoved"):
    block_hashes: list[int]


class OldAllBlocksCleared(OldEvent, tag="AllBlocksCleared"):
    pass


class OldBatch(EventBatch):
    events: list[OldBlockStored | OldBlockRemoved | OldAllBlocksCleared]


# Since version 0.11: the fields of both encodings


class StoredFields(msgspec.Struct, omit_defaults=True, gc=False):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class RemovedFields(msgspec.Struct, omit_defaults=True, gc=False):
    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None


# Arrays, as in version 0.20


class ArrayBlockStored(StoredFields, array_like=True, tag="BlockStored"):
    pass


class ArrayBlockRemoved(RemovedFields, array_like=True, tag="BlockRemoved"):
    pass


class ArrayAllBlocksCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class ArrayBatch(EventBatch):
    events: list[ArrayBlockStored | ArrayBlockRemoved | ArrayAllBlocksCleared]


# Maps, as since version 0.24


class MapBlockStored(StoredFields, tag="BlockStored"):
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class MapBlockRemoved(RemovedFields, tag="BlockRemoved"):
    locality: str | None = None
    ownership: str | None = None


class MapAllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class MapBatch(EventBatch):
    events: list[MapBlockStored | MapBlockRemoved | MapAllBlocksCleared]
