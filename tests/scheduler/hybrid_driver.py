"""A driver whose worker has several kinds of layers, each of which reads what it is to look at."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from longshore.protocol.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from longshore.protocol.plan import SchedulerOutput
from tests.scheduler.driver import Driver


def full(block_size: int = 4) -> FullAttentionSpec:
    return FullAttentionSpec(block_size, 1, 8, 4)


def latent(block_size: int = 4) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size, 16, 4)


def window(size: int, block_size: int = 4) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size, 1, 8, 4, sliding_window=size)


def chunked(size: int, block_size: int = 4) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(block_size, 1, 8, 4, attention_chunk_size=size)


def state(block_size: int = 4) -> MambaSpec:
    return MambaSpec(block_size, ((2, 8), (8, 4)), (4, 4))


def config_of(num_blocks: int, *specs: KVCacheSpec) -> KVCacheConfig:
    """One layer per group."""
    groups = tuple(KVCacheGroup((f"layer.{index}",), spec) for index, spec in enumerate(specs))
    return KVCacheConfig(num_blocks, groups, "float32")


def first_seen(spec: KVCacheSpec, position: int) -> int:
    """The first token that the token at `position` attends to, itself at the latest. Written from
    what the layers are, not from how blocks are kept."""
    match spec:
        case SlidingWindowSpec():
            return max(position + 1 - spec.sliding_window, 0)
        case ChunkedLocalAttentionSpec():
            return position - position % spec.attention_chunk_size
        case _:
            return 0


def fingerprint(ids: Sequence[int]) -> int:
    return zlib.crc32(np.array(ids, np.int32))


class HybridDriver(Driver):
    """Every group's memory holds, per token or per block of a state, the fingerprint of the whole
    prefix: what is read must be what the row's own prefix would have put there."""

    def __init__(self, *specs: KVCacheSpec, num_blocks: int = 60, **settings: Any) -> None:
        self.specs = specs
        self._chunk_start: dict[int, int] = {}
        super().__init__(num_blocks=num_blocks, kv_cache=config_of(num_blocks, *specs), **settings)

    def _apply_changes(self, plan: SchedulerOutput) -> np.ndarray:
        num_scheduled = super()._apply_changes(plan)
        self._references = self.scheduler.kv_cache.pool.references()
        for row in np.flatnonzero(num_scheduled).tolist():
            held = self._held[row]
            # A layer reads the states of all rows before it writes any.
            for spec, table in zip(self.specs, held.tables, strict=True):
                if isinstance(spec, MambaSpec) and held.num_computed:
                    block_id = table[(held.num_computed - 1) // spec.block_size]
                    assert self._references[block_id], "the state to go on from is gone"
                    self._check_kv((block_id, 0), fingerprint(held.tokens[: held.num_computed]))
        return num_scheduled

    def write_kv(
        self, tables: Sequence[Sequence[int]], ids: Sequence[int], first: int, last: int
    ) -> None:
        self._chunk_start[id(tables)] = first
        for spec, table in zip(self.specs, tables, strict=True):
            size = spec.block_size
            if isinstance(spec, CrossAttentionSpec):
                continue
            if isinstance(spec, MambaSpec):
                is_within = first // size == (last - 1) // size
                assert is_within or (first % size == 0 and last % size == 0)
                self._put(table, (last - 1) // size, 0, fingerprint(ids[:last]))
                continue
            for position in range(first, last):
                value = fingerprint(ids[: position + 1])
                self._put(table, position // size, position % size, value)

    def _put(self, table: Sequence[int], entry: int, offset: int, value: int) -> None:
        assert self._references[table[entry]], "written to a block that nobody holds"
        self._kv[table[entry], offset] = value

    def _visit_kv(
        self,
        tables: Sequence[Sequence[int]],
        ids: Sequence[int],
        first: int,
        last: int,
        visit: Callable[[tuple[int, int], int], None],
    ) -> None:
        start = self._chunk_start.pop(id(tables))
        for spec, table in zip(self.specs, tables, strict=True):
            if isinstance(spec, MambaSpec | CrossAttentionSpec):
                continue
            for position in range(first_seen(spec, start), last):
                block_id = table[position // spec.block_size]
                assert self._references[block_id], "read from a block that nobody holds"
                visit((block_id, position % spec.block_size), fingerprint(ids[: position + 1]))

    def _check_rows(self) -> None:
        """Tables agree but for blocks that the scheduler has taken back since."""
        for row, held in self._held.items():
            ours = self.scheduler.kv_cache.block_ids(row)
            for theirs, table in zip(held.tables, ours, strict=True):
                assert len(theirs) == len(table)
                kept = np.flatnonzero(table)
                np.testing.assert_array_equal(np.array(theirs)[kept], table[kept])

    def check_blocks(self) -> None:
        self.scheduler.check()

    def num_held(self, request_id: str) -> list[int]:
        """Blocks per group that a running request holds."""
        tables = self.scheduler.kv_cache.block_ids(self.requests[request_id].row)
        return [int(np.count_nonzero(table)) for table in tables]
