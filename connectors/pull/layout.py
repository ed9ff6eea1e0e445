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
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
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
    """What one owner rank has of one group of states of a reader rank."""

    owner_rank: int
    owner_group: int
    reader_group: int
    owner_spec: MambaSpec
    reader_spec: MambaSpec
    pattern: Pattern


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
    if not isinstance(spec, (*_PAGED, MLAAttentionSpec, MambaSpec)):
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
        case MambaSpec():
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
    num_owner_tokens: tokens that the owner has computed: a state is the one after these tokens, or
        after the last token of a block.

    The last blocks are copied as far as both sides have tokens of them, so a block can be copied
    whole; what is after `num_tokens` has no meaning.
    """
    pieces: list[Piece] = []
    missing: set[int] = set()
    for route in routes if first_token < num_tokens else ():
        owner_ids = owner_tables[route.owner_group].astype(np.int64)
        reader_ids = reader_tables[route.reader_group].astype(np.int64)
        if isinstance(route, StateRoute):
            blocks = _state_blocks(route, owner_ids, reader_ids, num_tokens, num_owner_tokens)
            groups = [(route.pattern, *blocks)]
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


def _state_blocks(
    route: StateRoute,
    owner_ids: Int64Array,
    reader_ids: Int64Array,
    num_tokens: int,
    num_owner_tokens: int,
) -> tuple[Int64Array, Int64Array]:
    """The block with the owner's state after `num_tokens` tokens, and the reader's."""
    size = route.owner_spec.block_size
    owner = _at(owner_ids, np.array([(num_tokens - 1) // size]))
    if num_tokens != num_owner_tokens and (num_tokens % size or num_tokens > num_owner_tokens):
        owner[:] = NULL_BLOCK  # it has been overwritten by the state after later tokens
    return owner, _at(reader_ids, np.array([(num_tokens - 1) // route.reader_spec.block_size]))


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
        if isinstance(own, MambaSpec) and isinstance(other, MambaSpec):
            for index, pattern in self._state_patterns(own, other):
                rank = self.owner_ranks[index]
                yield StateRoute(rank, owner_group, reader_group, other, own, pattern)
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

    def _state_patterns(self, own: MambaSpec, other: MambaSpec) -> Iterator[tuple[int, Pattern]]:
        """By shard of the owner. Raises LayoutMismatch."""
        runs: dict[int, list[tuple[int, int, int]]] = {}
        if own.shapes == other.shapes and self.num_shards == len(self.owner_ranks):
            self._check_equal(own, other, block_size=own.block_size)
            runs[self.shard] = [(0, 0, own.state_size_bytes)]
        else:
            self._check_equal(
                msgspec.structs.replace(own, shapes=other.shapes, padded_size_bytes=None),
                msgspec.structs.replace(other, padded_size_bytes=None),
                block_size=own.block_size,
            )
            ours, theirs = (_StateShape.of(spec, self.shared[0]) for spec in (own, other))
            ours.check_alike(theirs, self.shared[0])
            for index, pairs in self._holders(ours.num_heads, theirs.num_heads).items():
                for head, own_head in pairs:
                    runs.setdefault(index, []).extend(ours.head_runs(own_head, theirs, head))
            for index, pairs in self._holders(ours.num_groups, theirs.num_groups).items():
                for number, own_number in pairs:
                    runs.setdefault(index, []).extend(ours.map_runs(own_number, theirs, number))
        first_layers = self._layers(self.owner) * other.page_size_bytes
        own_layers = self._layers(self.reader) * own.page_size_bytes
        for index, found in runs.items():
            offsets, own_offsets, lengths = (np.array(each) for each in zip(*found, strict=True))
            yield (
                index,
                _merged(
                    (first_layers[:, None] + offsets).ravel(),
                    (own_layers[:, None] + own_offsets).ravel(),
                    np.tile(lengths, len(self.shared)),
                ),
            )


class _StateShape(NamedTuple):
    """The two tensors of a Mamba 2 layer's state, as MambaSpec.shapes has them: the recurrent state
    (num_heads, head_dim, state_size), and the last inputs of the convolution, num_rows rows with x
    of each head, B of each group and C of each group."""

    num_heads: int
    head_dim: int
    state_size: int
    num_rows: int
    num_channels: int
    state_bytes: int
    conv_bytes: int

    @classmethod
    def of(cls, spec: MambaSpec, about: str) -> "_StateShape":
        """Raises LayoutMismatch for states of another form, whose division is not known."""
        match spec.shapes, spec.dtype_bytes:
            case ((heads, head_dim, size), (rows, channels)), (state_bytes, conv_bytes):
                shape = cls(heads, head_dim, size, rows, channels, state_bytes, conv_bytes)
                maps = channels - heads * head_dim
                if maps > 0 and maps % (2 * size) == 0:
                    return shape
        raise LayoutMismatch(
            f"{about} has a state of shapes {spec.shapes}, which is not that of Mamba 2: how it is "
            "divided among ranks is not known. Use the same tensor parallel size on both engines."
        )

    @property
    def num_groups(self) -> int:
        return (self.num_channels - self.num_heads * self.head_dim) // (2 * self.state_size)

    def check_alike(self, other: "_StateShape", about: str) -> None:
        for name in ("head_dim", "state_size", "num_rows", "state_bytes", "conv_bytes"):
            if getattr(self, name) != getattr(other, name):
                raise LayoutMismatch(
                    f"{about} has a state with {name}={getattr(self, name)} here and "
                    f"{getattr(other, name)} on the owner. Start both engines with the same model."
                )

    def head_runs(
        self, head: int, owner: "_StateShape", owner_head: int
    ) -> Iterator[tuple[int, int, int]]:
        """(owner's offset, own offset, length) of what a head has in both tensors."""
        head_bytes = self.head_dim * self.state_size * self.state_bytes
        yield owner_head * head_bytes, head * head_bytes, head_bytes
        yield from self._conv_runs(
            head * self.head_dim, owner, owner_head * self.head_dim, self.head_dim
        )

    def map_runs(
        self, group: int, owner: "_StateShape", owner_group: int
    ) -> Iterator[tuple[int, int, int]]:
        """The same of B and C of a group."""
        size = self.state_size
        for which in range(2):
            own_first = self.num_heads * self.head_dim + (which * self.num_groups + group) * size
            first = owner.num_heads * owner.head_dim
            first += (which * owner.num_groups + owner_group) * size
            yield from self._conv_runs(own_first, owner, first, size)

    def _conv_runs(
        self, first: int, owner: "_StateShape", owner_first: int, count: int
    ) -> Iterator[tuple[int, int, int]]:
        for row in range(self.num_rows):
            yield (
                owner._conv_offset(row, owner_first),
                self._conv_offset(row, first),
                count * self.conv_bytes,
            )

    def _conv_offset(self, row: int, channel: int) -> int:
        state_bytes = self.num_heads * self.head_dim * self.state_size * self.state_bytes
        return state_bytes + (row * self.num_channels + channel) * self.conv_bytes


def _merged(owner: Int64Array, reader: Int64Array, lengths: Int64Array) -> Pattern:
    """The same runs, in order, with those that follow each other on both sides as one."""
    order = np.argsort(owner, kind="stable")
    owner, reader, lengths = owner[order], reader[order], lengths[order]
    follows = (owner[1:] == owner[:-1] + lengths[:-1]) & (reader[1:] == reader[:-1] + lengths[:-1])
    starts = np.flatnonzero(np.concatenate([[True], ~follows]))
    return Pattern(owner[starts], reader[starts], np.add.reduceat(lengths, starts))
