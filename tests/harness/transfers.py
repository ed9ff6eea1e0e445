"""Which transfers are in progress, and which blocks each of them and each unanswered plan owns.

`Transfers` knows each transfer from the moment the connector may begin it until every rank has
reported its end. It relies on nothing that the scheduler says about ownership: a block that two of
them want is an AssertionError.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from longshore.protocol.kv_cache_spec import NULL_BLOCK
from longshore.protocol.plan import SchedulerOutput

OF_STATES: Final = 1 << 30
"""The tokens of a page of a state, which belongs to all of them: its content is one prefix."""


class Load(msgspec.Struct, frozen=True):
    """A command to the workers: write `prefixes`, the KV of the positions from `first` on, into
    `block_ids[group]`, the first of which has position `first`. Null blocks are left out."""

    request_id: str
    is_async: bool
    first: int
    block_ids: tuple[list[int], ...]
    prefixes: list[int]

    def __str__(self) -> str:
        return f"the load of {self.request_id} into blocks {sorted(self.targets)}"

    @property
    def last(self) -> int:
        """The position after the last one."""
        return self.first + len(self.prefixes)

    @property
    def targets(self) -> set[int]:
        """The blocks that it writes."""
        return {block_id for ids in self.block_ids for block_id in ids} - {NULL_BLOCK}

    def slots(self, block_sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """(block id, offset, prefix) of everything that it writes."""
        for ids, size in zip(self.block_ids, block_sizes, strict=True):
            if size == OF_STATES:
                yield from ((block_id, 0, self.prefixes[-1]) for block_id in ids)
                continue
            for position, prefix in enumerate(self.prefixes, self.first):
                block_id = ids[position // size - self.first // size]
                if block_id != NULL_BLOCK:
                    yield block_id, position % size, prefix


class Store(msgspec.Struct, frozen=True):
    """A command to the workers: read these blocks of one group; each hash promises the content."""

    hold_id: int
    group: int
    block_ids: list[int]
    block_hashes: list[bytes]


class SwapCopy(msgspec.Struct, frozen=True):
    """A command to the workers: read the KV of a swapped request, which is `prefixes`, from its
    block tables."""

    hold_id: int
    request_id: str
    block_ids: tuple[list[int], ...]
    prefixes: list[int]

    @property
    def sources(self) -> set[int]:
        """The blocks that it reads."""
        return {block_id for ids in self.block_ids for block_id in ids} - {NULL_BLOCK}

    def slots(self, block_sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """(block id, offset, prefix) of everything that it reads."""
        for ids, size in zip(self.block_ids, block_sizes, strict=True):
            if size == OF_STATES:
                yield from ((block_id, 0, self.prefixes[-1]) for block_id in ids)
                continue
            for position, prefix in enumerate(self.prefixes):
                if ids[position // size] != NULL_BLOCK:
                    yield ids[position // size], position % size, prefix


class Commands(msgspec.Struct, frozen=True):
    """Metadata of one plan."""

    loads: list[Load] = []
    stores: list[Store] = []
    swaps: list[SwapCopy] = []


@dataclass
class Transfers:
    """Who may touch which block right now.

    loading:    asynchronous loads that some rank has not reported, by request id.
    syncing:    synchronous loads whose step is not answered.
    sending:    blocks of ended requests that are still read, by request id.
    holding:    blocks that stores read, by hold id.
    unanswered: blocks that each unanswered plan computes on, by step.
    reported:   ranks that have reported a transfer, by (kind, request id).
    """

    num_ranks: int
    loading: dict[str, Load] = field(default_factory=dict)
    syncing: list[Load] = field(default_factory=list)
    sending: dict[str, set[int]] = field(default_factory=dict)
    holding: dict[int, set[int]] = field(default_factory=dict)
    unanswered: dict[int, set[int]] = field(default_factory=dict)
    reported: dict[tuple[str, str], set[int]] = field(default_factory=dict)

    def owned(self) -> Iterator[tuple[str, set[int]]]:
        """(owner, blocks) of all transfers outside the steps."""
        yield from ((f"load {id_}", load.targets) for id_, load in self.loading.items())
        yield from ((f"send {id_}", ids) for id_, ids in self.sending.items())
        yield from ((f"store {id_}", ids) for id_, ids in self.holding.items())

    def owned_ids(self) -> set[int]:
        """All blocks that a transfer outside the steps owns."""
        return {block_id for _, ids in self.owned() for block_id in ids}

    def begin(self, load: Load, rest: set[int] | None = None) -> None:
        """The scheduler gave these blocks to a load. rest: with the blocks of the request that
        follow, into which nothing is loaded."""
        for owner, block_ids in self.owned():
            assert not load.targets & block_ids, f"{load} overwrites blocks of {owner}"
        for other in self.syncing:
            assert not load.targets & other.targets, f"{load} overwrites what {other} loads"
        for step, block_ids in self.unanswered.items():
            reserved = load.targets | (rest or set())
            assert not reserved & block_ids, f"{load} overwrites blocks of step {step}"
        if load.is_async:
            assert load.request_id not in self.loading, "two loads of one request id"
            self.loading[load.request_id] = load
        else:
            self.syncing.append(load)

    def begin_send(self, request_id: str, block_ids: set[int]) -> None:
        """The blocks of a request that has ended are read until all ranks have reported it."""
        self.sending[request_id] = block_ids - {NULL_BLOCK}

    def check_plan(self, plan: SchedulerOutput, used: set[int]) -> None:
        """A plan that has blocks `used` in its tables computes on none that a background load may
        write."""
        copied = {*plan.copy_source_ids.tolist(), *plan.copy_target_ids.tolist()}
        cleared = set(plan.zero_block_ids.tolist())
        for load in self.loading.values():
            assert not load.targets & used, f"step {plan.step} computes on blocks of {load}"
            assert not load.targets & copied, f"step {plan.step} copies blocks of {load}"
            assert not load.targets & cleared, f"step {plan.step} clears blocks of {load}"

    def ranks_left(self, kind: str, request_id: str) -> list[int]:
        """Ranks that have not reported a transfer ("load" or "send")."""
        reported = self.reported.get((kind, request_id), set())
        return [rank for rank in range(self.num_ranks) if rank not in reported]

    def report(self, kind: str, request_id: str, rank: int) -> None:
        """A rank is done with its part."""
        self.reported.setdefault((kind, request_id), set()).add(rank)
        if not self.ranks_left(kind, request_id):
            del self.reported[kind, request_id]
            (self.loading if kind == "load" else self.sending).pop(request_id)

    def clear(self) -> None:
        """All workers were replaced, so nothing is in progress."""
        for each in (self.loading, self.sending, self.holding, self.unanswered, self.reported):
            each.clear()
        self.syncing.clear()

    @property
    def is_idle(self) -> bool:
        return not (self.loading or self.sending or self.holding)
