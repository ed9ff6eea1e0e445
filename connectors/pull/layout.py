"""Which bytes of an owner's blocks fill a reader's blocks. Pure functions: no I/O, no torch.

The two engines serve the same model, but may have other tensor parallel sizes, pipeline stages,
block sizes, and divisions of layers into groups. A reader rank computes once per owner, from both
layouts, its `Route`s: which runs of bytes within an owner's block belong to which place in a block
of its own. Per pull, `plan_pull` applies them to the block tables of both sides. The layout of a
block is described in docs/kv_cache.md; KV heads are outermost, so that a share of the heads is one
run of bytes if both sides have the same block size.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

import msgspec
import numpy as np

from longshore.protocol.arrays import BoolArray, Int32Array, Int64Array
from longshore.protocol.errors import LongshoreError
from longshore.protocol.kv_cache_spec import (
    NULL_BLOCK,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    StateSpec,
)

MAX_REGION_BYTES: Final = 1 << 56
"""Limit of what a rank says about its memory: offsets are computed in 64 bits."""

MAX_LAYERS: Final = 1024
"""Limit of the groups of a rank, and of the layers in all of them."""

_PAGED: Final = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
"""Kinds with a key and a value per token and head."""


class LayoutMismatch(LongshoreError):
    """The KV cache of one engine cannot be filled from that of the other; the message says why."""


class RankLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The blocks of one rank: block i begins at byte `i * block_bytes`.

    groups: of the engine, in order, each with the layers of this rank only.
    """

    groups: tuple[KVCacheGroup, ...]
    block_bytes: int
    num_blocks: int

    def __post_init__(self) -> None:
        num_layers = sum(len(group.layer_names) for group in self.groups)
        if max(num_layers, len(self.groups)) > MAX_LAYERS:
            raise ValueError(f"{len(self.groups)} groups with {num_layers} layers are too many")
        used = max((group.block_size_bytes for group in self.groups), default=0)
        is_bounded = self.num_blocks > 0 and self.block_bytes * self.num_blocks <= MAX_REGION_BYTES
        if not (is_bounded and used <= self.block_bytes):
            raise ValueError(
                f"{self.num_blocks} blocks of {self.block_bytes} bytes cannot hold groups of {used}"
            )


@dataclass(frozen=True)
class EngineLayout:
    """The blocks of all ranks of an engine. Ranks with the same layers are the tensor parallel
    shards of one pipeline stage. Raises LayoutMismatch."""

    ranks: tuple[RankLayout, ...]

    def __post_init__(self) -> None:
        if len({len(rank.groups) for rank in self.ranks}) != 1:
            raise LayoutMismatch("the ranks of an engine must have the same KV cache groups")
        for number, (_, ranks) in enumerate(self.stages):
            if len(ranks) != len(self.stages[0][1]):
                raise LayoutMismatch(
                    f"pipeline stage {number} has {len(ranks)} ranks, and stage 0 has "
                    f"{len(self.stages[0][1])}"
                )

    @cached_property
    def stages(self) -> tuple[tuple[tuple[KVCacheGroup, ...], tuple[int, ...]], ...]:
        """Groups and ranks of each pipeline stage."""
        ranks_of: dict[tuple[tuple[str, ...], ...], list[int]] = {}
        for rank, layout in enumerate(self.ranks):
            names = tuple(group.layer_names for group in layout.groups)
            ranks_of.setdefault(names, []).append(rank)
        return tuple((self.ranks[ranks[0]].groups, tuple(ranks)) for ranks in ranks_of.values())

    def shard_of(self, rank: int) -> tuple[int, int]:
        """The shard of a rank, and the number of shards."""
        ranks = next(ranks for _, ranks in self.stages if rank in ranks)
        return ranks.index(rank), len(ranks)


class Pattern(NamedTuple):
    """Runs of bytes to copy from one block to another: (n,) int64 each. Offsets are from the start
    of the block."""

    owner_offsets: Int64Array
    reader_offsets: Int64Array
    lengths: Int64Array


class Piece(NamedTuple):
    """Copy `pattern` from each block of `owner_blocks` on a rank to the block of `reader_blocks` at
    the same index. The same `Pattern` object is used by all pulls from an engine, so that what a
    transport prepares for it can be kept."""

    owner_rank: int
    pattern: Pattern
    owner_blocks: Int64Array
    reader_blocks: Int64Array


class PullPlan(NamedTuple):
    """missing: blocks of the reader that the owner cannot fill, because it has freed blocks."""

    pieces: list[Piece]
    missing: list[int]


@dataclass(frozen=True, eq=False)
class Route:
    """What one owner rank has of one group of a reader rank.

    owner_starts, reader_starts: where the run of bytes of each shared layer, head and plane (keys,
        values) begins in a block. Its tokens follow each other.
    token_bytes: bytes of a token in a run.
    """

    owner_rank: int
    owner_group: int
    reader_group: int
    owner_spec: KVCacheSpec
    reader_spec: KVCacheSpec
    owner_starts: Int64Array
    reader_starts: Int64Array
    token_bytes: int
    _patterns: dict[tuple[int, int, int], Pattern] = field(default_factory=dict)

    def pattern(self, owner_token: int, reader_token: int, num_tokens: int) -> Pattern:
        """`num_tokens` tokens, from these tokens of both blocks on."""
        key = owner_token, reader_token, num_tokens
        if key not in self._patterns:
            size = self.token_bytes
            self._patterns[key] = _merged(
                self.owner_starts + owner_token * size,
                self.reader_starts + reader_token * size,
                np.full(len(self.owner_starts), num_tokens * size, np.int64),
            )
        return self._patterns[key]


@dataclass(frozen=True, eq=False)
class StateRoute:
    """What one owner rank has of the states of a reader rank.

    parts: runs of bytes with the pages of a state that they are copied between: (n,) int64, indices
           of pages of the owner, and of the reader.
    """

    owner_rank: int
    owner_group: int
    reader_group: int
    parts: tuple[tuple[Pattern, Int64Array, Int64Array], ...]


Routes: TypeAlias = tuple[Route | StateRoute, ...]


def find_routes(reader: EngineLayout, reader_rank: int, owner: EngineLayout) -> Routes:
    """How a rank of the reader gets its layers and heads from the owner's ranks. Raises
    LayoutMismatch."""
    shard, num_shards = reader.shard_of(reader_rank)
    routes: list[Route | StateRoute] = []
    for reader_group, group in enumerate(reader.ranks[reader_rank].groups):
        found: set[str] = set()
        for owner_groups, owner_ranks in owner.stages:
            for owner_group, other in enumerate(owner_groups):
                names = set(other.layer_names)
                shared = [name for name in group.layer_names if name in names]
                if not shared:
                    continue
                check_kind(group.spec, shared[0])
                found.update(shared)
                pair = _Pair(group, other, shared, shard, num_shards, owner_ranks)
                routes += pair.routes(reader_group, owner_group)
        lacking = [name for name in group.layer_names if name not in found]
        if lacking:
            raise LayoutMismatch(f"the owner has no KV of layer {lacking[0]}")
    return tuple(routes)


def check_layouts(reader: EngineLayout, owner: EngineLayout) -> None:
    """Raise LayoutMismatch unless every rank of the reader can be filled from the owner."""
    for rank in range(len(reader.ranks)):
        find_routes(reader, rank, owner)


def check_kind(spec: KVCacheSpec, about: str) -> None:
    """Raise LayoutMismatch for a kind of attention whose blocks cannot be pulled."""
    if not isinstance(spec, (*_PAGED, MLAAttentionSpec, StateSpec)):
        raise LayoutMismatch(
            f"{about} has a {type(spec).__name__}, whose blocks cannot be pulled from another "
            "engine. Serve this model with one engine."
        )


def first_needed_token(spec: KVCacheSpec, num_tokens: int) -> int:
    """The first token whose KV a request needs to continue after `num_tokens` tokens."""
    match spec:
        case SlidingWindowSpec(sliding_window=window):
            return max(num_tokens - window + 1, 0)
        case ChunkedLocalAttentionSpec(attention_chunk_size=size):
            return num_tokens // size * size
        case StateSpec():
            return max(num_tokens - 1, 0)
    return 0


def plan_pull(
    routes: Routes,
    owner_tables: Sequence[Int32Array],
    reader_tables: Sequence[Int32Array],
    *,
    first_token: int,
    num_tokens: int,
    num_owner_tokens: int,
) -> PullPlan:
    """What fills the reader's blocks with the KV of tokens [first_token, num_tokens).

    owner_tables, reader_tables: block ids of each group; null where a block was freed or is not
        needed.
    first_token: a multiple of the reader's block sizes.
    num_owner_tokens: tokens that the owner has computed: a state is the one after these tokens.

    The last blocks are copied as far as both sides have tokens of them, so a block can be copied
    whole; what is after `num_tokens` has no meaning.
    """
    pieces: list[Piece] = []
    missing: set[int] = set()
    for route in routes if first_token < num_tokens else ():
        owner_ids = owner_tables[route.owner_group].astype(np.int64)
        reader_ids = reader_tables[route.reader_group].astype(np.int64)
        if isinstance(route, StateRoute):
            if num_tokens != num_owner_tokens:
                owner_ids = np.full_like(owner_ids, NULL_BLOCK)  # of the state after other tokens
            groups = [(pattern, owner_ids[p], reader_ids[q]) for pattern, p, q in route.parts]
        else:
            groups = list(_token_blocks(route, owner_ids, reader_ids, first_token, num_tokens))
        for pattern, owner_blocks, reader_blocks in groups:
            has_target = reader_blocks != NULL_BLOCK
            has_source = owner_blocks != NULL_BLOCK
            missing.update(reader_blocks[has_target & ~has_source].tolist())
            is_read = has_target & has_source
            if is_read.any():
                owner_blocks, reader_blocks = owner_blocks[is_read], reader_blocks[is_read]
                pieces.append(Piece(route.owner_rank, pattern, owner_blocks, reader_blocks))
    return PullPlan(pieces, sorted(missing))


def _token_blocks(
    route: Route, owner_ids: Int64Array, reader_ids: Int64Array, first_token: int, num_tokens: int
) -> Iterator[tuple[Pattern, Int64Array, Int64Array]]:
    """Pairs of blocks that have tokens in common, by the part of the blocks that they have."""
    owner_size, reader_size = route.owner_spec.block_size, route.reader_spec.block_size
    first = first_needed_token(route.reader_spec, num_tokens) // reader_size * reader_size
    first = max(first, first_token)
    if first >= num_tokens:
        return
    # Between two borders, the tokens are in one block on each side.
    last = min(-(-num_tokens // size) * size for size in (owner_size, reader_size))
    borders = [
        np.arange(-(-first // size) * size, last, size) for size in (owner_size, reader_size)
    ]
    starts = np.sort(np.concatenate([[first], *borders]), kind="stable")  # merges sorted runs
    starts = starts[np.diff(starts, prepend=-1) > 0]
    counts = np.diff(starts, append=last)
    # A number for each shape: np.unique of rows takes ten times as long.
    shapes = (starts % owner_size * reader_size + starts % reader_size) * (reader_size + 1) + counts
    for shape in np.unique(shapes):
        is_shape = shapes == shape
        some = starts[is_shape]
        owner_token, reader_token = int(some[0]) % owner_size, int(some[0]) % reader_size
        count = int(counts[np.argmax(is_shape)])
        yield (
            route.pattern(owner_token, reader_token, count),
            _at(owner_ids, some // owner_size),
            _at(reader_ids, some // reader_size),
        )


def _at(table: Int64Array, positions: Int64Array) -> Int64Array:
    """Block ids at these positions; null after the end of the table."""
    is_inside: BoolArray = positions < len(table)
    found = np.full(len(positions), NULL_BLOCK, np.int64)
    found[is_inside] = table[positions[is_inside]]
    return found


@dataclass(frozen=True)
class _Pair:
    """The layers that a group of a reader rank shares with a group of an owner stage."""

    reader: KVCacheGroup
    owner: KVCacheGroup
    shared: list[str]
    shard: int
    num_shards: int
    owner_ranks: tuple[int, ...]

    def routes(self, reader_group: int, owner_group: int) -> Iterator[Route | StateRoute]:
        """Raises LayoutMismatch."""
        own, other = self.reader.spec, self.owner.spec
        if type(own) is not type(other):
            raise LayoutMismatch(
                f"{self.shared[0]} is a {type(own).__name__} here and a {type(other).__name__} on "
                "the owner. Start both engines with the same model and settings."
            )
        if isinstance(own, StateSpec) and isinstance(other, StateSpec):
            for index, parts in self._state_parts(own, other):
                yield StateRoute(self.owner_ranks[index], owner_group, reader_group, parts)
        else:
            yield from self._token_routes(own, other, reader_group, owner_group)

    def _token_routes(
        self, own: KVCacheSpec, other: KVCacheSpec, reader_group: int, owner_group: int
    ) -> Iterator[Route]:
        assert isinstance(own, (*_PAGED, MLAAttentionSpec))
        assert isinstance(other, (*_PAGED, MLAAttentionSpec))
        if isinstance(own, MLAAttentionSpec):
            self._check_equal(own, other, block_size=own.block_size)
            num_planes, total = 1, 1
        else:
            self._check_equal(own, other, block_size=own.block_size, num_kv_heads=own.num_kv_heads)
            if own.head_size_v not in (None, own.head_size):
                raise LayoutMismatch(f"{self.shared[0]} has values of another size than its keys")
            num_planes, total = 2, None
        token_bytes = own.head_size * own.dtype_bytes
        for index, pairs in self._holders(own.num_kv_heads, other.num_kv_heads, total).items():
            theirs, ours = (np.array(each) for each in zip(*pairs, strict=True))
            yield Route(
                self.owner_ranks[index],
                owner_group,
                reader_group,
                other,
                own,
                self._starts(self.owner, theirs, num_planes, other.block_size * token_bytes),
                self._starts(self.reader, ours, num_planes, own.block_size * token_bytes),
                token_bytes,
            )

    def _check_equal(self, own: KVCacheSpec, other: KVCacheSpec, **fields: int) -> None:
        alike = msgspec.structs.replace(other, **fields)
        for name in own.__struct_fields__:
            if getattr(alike, name) != getattr(own, name):
                raise LayoutMismatch(
                    f"{self.shared[0]} has {name}={getattr(own, name)} here and "
                    f"{getattr(alike, name)} on the owner. Start both engines with the same model "
                    "and settings."
                )

    def _holders(
        self, num_own: int, num_theirs: int, total: int | None = None
    ) -> dict[int, list[tuple[int, int]]]:
        """By shard of the owner, which of its units (KV heads, groups of states) are which units of
        this rank. Several shards may have copies of a unit.

        num_own, num_theirs: units on each shard.
        total: of the model; None: not known.
        """
        num_shards, num_owners = self.num_shards, len(self.owner_ranks)
        totals = {
            count * shards
            for count, shards in ((num_own, num_shards), (num_theirs, num_owners))
            if count > 1 or shards == 1
        }
        if total is None:
            # With one unit per shard on both sides, the model may have any number that divides both
            # sizes. All of them lead to the same shards, so take the largest.
            total = totals.pop() if totals else math.gcd(num_shards, num_owners)
        for count, shards in ((num_own, num_shards), (num_theirs, num_owners)):
            is_divided = total % shards == 0 or shards % total == 0
            if not is_divided or count != max(1, total // shards):
                raise LayoutMismatch(
                    f"{self.shared[0]} has {num_own} KV heads or groups on each of {num_shards} "
                    f"tensor parallel ranks here, but {num_theirs} on each of {num_owners} ranks "
                    "of the owner, which is no division of the same model"
                )
        nearest = self.shard * num_owners // num_shards
        firsts = [shard * total // num_owners for shard in range(num_owners)]
        pairs: dict[int, list[tuple[int, int]]] = {}
        for ours in range(num_own):
            unit = self.shard * total // num_shards + ours
            holders = [at for at, first in enumerate(firsts) if first <= unit < first + num_theirs]
            # Copies are spread over the readers.
            holder = nearest if nearest in holders else holders[self.shard % len(holders)]
            pairs.setdefault(holder, []).append((unit - firsts[holder], ours))
        return pairs

    def _layers(self, group: KVCacheGroup) -> Int64Array:
        places = {name: place for place, name in enumerate(group.layer_names)}
        return np.array([places[name] for name in self.shared], np.int64)

    def _starts(
        self, group: KVCacheGroup, heads: Int64Array, num_planes: int, plane_bytes: int
    ) -> Int64Array:
        """Where each plane of each shared layer of `heads` begins in a block of the group."""
        planes = np.arange(num_planes)
        rows = heads[:, None] * len(group.layer_names) + self._layers(group)
        starts: Int64Array = (rows[:, :, None] * num_planes + planes) * plane_bytes
        return starts.ravel()

    def _state_parts(
        self, own: StateSpec, other: StateSpec
    ) -> Iterator[tuple[int, tuple[tuple[Pattern, Int64Array, Int64Array], ...]]]:
        """`StateRoute.parts` by shard of the owner. Raises LayoutMismatch."""
        alike = msgspec.structs.replace(other, shapes=own.shapes)
        self._check_equal(
            own,
            alike,
            block_size=own.block_size,
            num_pages=own.num_pages,
            unit_bytes=own.unit_bytes,
        )
        runs: dict[int, list[_Run]] = {}
        if own.shapes == other.shapes and self.num_shards == len(self.owner_ranks):
            sizes = [
                math.prod(shape) * n for shape, n in zip(own.shapes, own.dtype_bytes, strict=True)
            ]
            runs[self.shard] = [_Run(tensor, 0, 0, size) for tensor, size in enumerate(sizes)]
        else:
            ours, theirs = _Division.of(own, self.shared[0]), _Division.of(other, self.shared[0])
            ours.check_alike(theirs, self.shared[0])
            for kind in filter(ours.num_of, ("head", "group")):
                holders = self._holders(ours.num_of(kind), theirs.num_of(kind))
                for index, copies in holders.items():
                    for their_number, number in copies:
                        of_unit = ours.runs(kind, number, theirs, their_number)
                        runs.setdefault(index, []).extend(of_unit)
        for index, found in runs.items():
            yield index, self._pages(own, other, found)

    def _pages(
        self, own: StateSpec, other: StateSpec, runs: Sequence["_Run"]
    ) -> tuple[tuple[Pattern, Int64Array, Int64Array], ...]:
        """Runs of bytes of every shared layer, cut where a page of either side ends."""
        sides = [
            (self.owner, other, [run.owner_byte for run in runs]),
            (self.reader, own, [run.reader_byte for run in runs]),
        ]
        firsts = [
            (self._layers(group)[:, None] * sum(spec.tensor_units) * spec.unit_bytes)
            + np.array([spec.first_units[run.tensor] * spec.unit_bytes for run in runs])
            + np.array(first_bytes, np.int64)
            for group, spec, first_bytes in sides
        ]
        lengths = np.tile(np.array([run.length for run in runs], np.int64), len(self.shared))
        merged = _merged(firsts[0].ravel(), firsts[1].ravel(), lengths)
        sizes = [spec.page_bytes(len(group.layer_names)) for group, spec, _ in sides]
        return _cut_at_pages(merged, *sizes)


class _Run(NamedTuple):
    """Bytes of one tensor of a layer's state, from these bytes of it on, on both sides."""

    tensor: int
    owner_byte: int
    reader_byte: int
    length: int


@dataclass(frozen=True)
class _Division:
    """How a state is divided among tensor parallel ranks: its first tensor by heads, and each line
    of the second into the `channels` of heads and groups."""

    spec: StateSpec

    @classmethod
    def of(cls, spec: StateSpec, about: str) -> "_Division":
        """Raises LayoutMismatch for states of another form, whose division is not known."""
        division = cls(spec)
        if len(spec.shapes) == 2 and len(spec.shapes[1]) == 2 and spec.channels:
            widths = sum(width * division.num_of(kind) for kind, width in spec.channels)
            if widths == spec.shapes[1][1]:
                return division
        raise LayoutMismatch(
            f"{about} has a state of shapes {spec.shapes}, and how it is divided among ranks is "
            "not known. Use the same tensor parallel size on both engines."
        )

    def num_of(self, kind: str) -> int:
        return self.spec.shapes[0][0] if kind == "head" else self.spec.num_groups

    def check_alike(self, other: "_Division", about: str) -> None:
        """Raises LayoutMismatch."""
        own, theirs = self.spec.shapes, other.spec.shapes
        if own[0][1:] != theirs[0][1:] or own[1][0] != theirs[1][0]:
            raise LayoutMismatch(
                f"{about} has a state of shapes {own} here and {theirs} on the owner. Start both "
                "engines with the same model."
            )

    def runs(self, kind: str, index: int, owner: "_Division", owner_index: int) -> Iterator[_Run]:
        """What a head or group has in both tensors."""
        state_bytes, line_bytes = self.spec.dtype_bytes
        if kind == "head":
            size = math.prod(self.spec.shapes[0][1:]) * state_bytes
            yield _Run(0, owner_index * size, index * size, size)
        for number, (of, width) in enumerate(self.spec.channels):
            if of == kind:
                first, owner_first = (
                    division._channel(number) + at * width
                    for division, at in ((self, index), (owner, owner_index))
                )
                for line in range(self.spec.shapes[1][0]):
                    yield _Run(
                        1,
                        (line * owner.spec.shapes[1][1] + owner_first) * line_bytes,
                        (line * self.spec.shapes[1][1] + first) * line_bytes,
                        width * line_bytes,
                    )

    def _channel(self, number: int) -> int:
        """The first channel of an entry of `channels`."""
        return sum(width * self.num_of(kind) for kind, width in self.spec.channels[:number])


def _cut_at_pages(
    runs: Pattern, owner_size: int, reader_size: int
) -> tuple[tuple[Pattern, Int64Array, Int64Array], ...]:
    """Runs between states, whose pages have room for so many bytes, as runs between pages. Pairs of
    pages with equal runs are together."""
    by_pair: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for owner, reader, length in zip(*(each.tolist() for each in runs), strict=True):
        while length:
            owner_page, owner_at = divmod(owner, owner_size)
            page, at = divmod(reader, reader_size)
            fits = min(length, owner_size - owner_at, reader_size - at)
            by_pair.setdefault((owner_page, page), []).append((owner_at, at, fits))
            owner, reader, length = owner + fits, reader + fits, length - fits
    by_runs: dict[tuple[tuple[int, int, int], ...], list[tuple[int, int]]] = {}
    for pair, found in by_pair.items():
        by_runs.setdefault(tuple(found), []).append(pair)
    parts = []
    for equal, pairs in by_runs.items():
        starts, own_starts, lengths = (np.array(each) for each in zip(*equal, strict=True))
        owner_pages, pages = (np.array(each) for each in zip(*pairs, strict=True))
        parts.append((Pattern(starts, own_starts, lengths), owner_pages, pages))
    return tuple(parts)


def _merged(owner: Int64Array, reader: Int64Array, lengths: Int64Array) -> Pattern:
    """The same runs, in order, with those that follow each other on both sides as one."""
    order = np.argsort(owner, kind="stable")
    owner, reader, lengths = owner[order], reader[order], lengths[order]
    follows = (owner[1:] == owner[:-1] + lengths[:-1]) & (reader[1:] == reader[:-1] + lengths[:-1])
    starts = np.flatnonzero(np.concatenate([[True], ~follows]))
    return Pattern(owner[starts], reader[starts], np.add.reduceat(lengths, starts))
