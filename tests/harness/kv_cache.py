"""The KV cache of all ranks as the layers of a model use it in one step."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from longshore.protocol.arrays import Int64Array
from longshore.protocol.kv_cache_spec import (
    NULL_BLOCK,
    CrossAttentionSpec,
    KVCacheSpec,
    StateSpec,
)
from tests.harness.kv_groups import first_seen
from tests.harness.memory import RankMemory
from tests.harness.transfers import OF_STATES, Load

Key = TypeVar("Key", bound=Hashable)
Place: TypeAlias = tuple[int, int, int]
"""Block id, offset, and the position whose KV is there."""


def tokens_per_entry(spec: KVCacheSpec) -> int:
    """Tokens of an entry of a block table; no entry of a state's belongs to some of its tokens."""
    return OF_STATES if isinstance(spec, StateSpec) else spec.block_size


@dataclass(frozen=True)
class RowWork:
    """What one row computes in a step: positions [first, end). tables: block ids by group.
    prefixes: the KV of its positions, `end` at least. kept: numbers of tokens, and the blocks to
    which the states after them are written."""

    request_id: str
    first: int
    end: int
    tables: Sequence[Sequence[int]]
    prefixes: Sequence[int]
    kept: Sequence[tuple[int, Sequence[int]]] = ()


class FakeKVCache:
    """Every slot has the identity of its token and of everything before it, on each rank.

    specs:  one per KV cache group.
    memory: by rank.
    """

    def __init__(self, specs: Sequence[KVCacheSpec], num_ranks: int) -> None:
        self.specs = tuple(specs)
        self.block_sizes = tuple(tokens_per_entry(spec) for spec in specs)
        self.memory = [RankMemory() for _ in range(num_ranks)]

    def begin(self, step: int) -> None:
        """What follows is of this plan, until `begin(0)`."""
        for memory in self.memory:
            memory.step = step

    def tear(self, answered_step: int) -> None:
        """See `RankMemory.tear`."""
        for memory in self.memory:
            memory.tear(answered_step)

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """See `RankMemory.copy`."""
        for memory in self.memory:
            memory.copy(copies)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Nothing may be read from these blocks before it is written."""
        for memory in self.memory:
            for block_id in block_ids:
                memory.clear(block_id)

    def load(self, load: Load, failing: set[int], junk: int | None) -> None:
        """All ranks write what a load brings; see `RankMemory.write_load`."""
        for memory in self.memory:
            memory.write_load(load, self.block_sizes, failing, junk)

    def compute(
        self,
        rows: Mapping[Key, RowWork],
        *,
        step: int,
        answered_step: int,
        nan_rows: set[Key],
        references: Int64Array | None = None,
    ) -> set[Key]:
        """Run the layers. All KV of the step is written before any is read; only states are read
        first. Returns the rows that read invalid KV, and `nan_rows`, whose logits are not finite:
        what they wrote is invalid too.

        answered_step: latest step whose output the scheduler had applied. It knew of what that and
                       earlier steps made invalid.
        references:    by block id; a block without one is neither read nor written.
        """
        run = _Run(self, step, answered_step, references)
        since = dict.fromkeys(nan_rows, step)  # by row: the step that made its KV invalid
        for key, row in rows.items():
            run.read(row, self._states_read(row), key, since)
        for row in rows.values():
            for block_id, offset, position in self._written(row):
                run.write(block_id, offset, row.prefixes[position])
            for block_id, position in self._kept(row):
                run.write(block_id, 0, row.prefixes[position], is_held=False)
        before: dict[Key, int] | None = None
        while since != before:
            before = dict(since)
            for key in since.keys() & rows.keys():
                for block_id, offset, _ in self._written(rows[key]):
                    run.write(block_id, offset, -since[key])
                for block_id, _ in self._kept(rows[key]):
                    run.write(block_id, 0, -since[key], is_held=False)
            for key, row in rows.items():
                run.read(row, self._read(row), key, since)
        return set(since)

    def _states_read(self, row: RowWork) -> Iterator[Place]:
        """The states that the row continues from."""
        for spec, table in zip(self.specs, row.tables, strict=True):
            if isinstance(spec, StateSpec) and row.first:
                for block_id in table:
                    yield block_id, 0, row.first - 1

    def _kept(self, row: RowWork) -> Iterator[tuple[int, int]]:
        """Blocks to which states are written, and the position after which each is the state."""
        for num_tokens, block_ids in row.kept:
            (spec,) = (spec for spec in self.specs if isinstance(spec, StateSpec))
            assert len(block_ids) == spec.num_pages
            assert row.first < num_tokens <= row.end
            for block_id in block_ids:
                yield block_id, num_tokens - 1

    def _written(self, row: RowWork) -> Iterator[Place]:
        first, end = row.first, row.end
        for spec, table in zip(self.specs, row.tables, strict=True):
            size = spec.block_size
            if isinstance(spec, StateSpec):
                assert len(table) == spec.num_pages
                for block_id in table:
                    yield block_id, 0, end - 1
            elif not isinstance(spec, CrossAttentionSpec):
                for position in range(first, end):
                    yield table[position // size], position % size, position

    def _read(self, row: RowWork) -> Iterator[Place]:
        for spec, table in zip(self.specs, row.tables, strict=True):
            size = spec.block_size
            if not isinstance(spec, StateSpec | CrossAttentionSpec):
                for position in range(first_seen(spec, row.first), row.end):
                    yield table[position // size], position % size, position


@dataclass(frozen=True)
class _Run:
    """One step over the memory of all ranks."""

    kv_cache: FakeKVCache
    step: int
    answered_step: int
    references: Int64Array | None

    def write(self, block_id: int, offset: int, content: int, *, is_held: bool = True) -> None:
        if is_held:
            self._check_held(block_id, "written")
        for memory in self.kv_cache.memory:
            memory.write(block_id, offset, content)

    def read(self, row: RowWork, places: Iterator[Place], key: Key, since: dict[Key, int]) -> None:
        """Each place holds the row's KV. Where it is invalid, `since` gets the step that made it
        so: the earliest one."""
        for block_id, offset, position in places:
            self._check_held(block_id, "read")
            for memory in self.kv_cache.memory:
                content = memory.read(block_id, offset)
                if content is not None and content < 0:
                    since[key] = min(since.get(key, -content), -content)
                    assert self.answered_step < -content, (
                        f"step {self.step} reads at position {position} of {row.request_id} "
                        f"what step {-content} made invalid"
                    )
                else:
                    assert content == row.prefixes[position], (
                        f"step {self.step}: position {position} of {row.request_id}, in block "
                        f"{block_id} at offset {offset}, has the KV of other tokens"
                    )

    def _check_held(self, block_id: int, verb: str) -> None:
        assert block_id != NULL_BLOCK, f"the null block is {verb}"
        if self.references is not None:
            assert self.references[block_id], f"block {block_id} is {verb}, but it is free"
