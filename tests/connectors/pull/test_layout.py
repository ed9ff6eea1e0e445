"""Which bytes are pulled: every kind of KV cache group, with every difference of the two engines.

The buffers of the owner's ranks hold a number that is unique per layer, plane, head, token and
element. After the pull each rank of the reader must hold the numbers that it would have computed.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import pytest
import torch

from longshore.connectors.pull.layout import (
    EngineLayout,
    LayoutMismatch,
    RankLayout,
    check_layouts,
    find_routes,
    first_needed_token,
    plan_pull,
)
from longshore.protocol.arrays import Int32Array, int32_array
from longshore.protocol.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    CustomSpec,
    FullAttentionSpec,
    HeadShare,
    KVCacheGroup,
    KVCacheSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    StateSpec,
)
from longshore.worker.kv_cache.buffer import PagedKV, PagedLatents, view_blocks
from longshore.worker.kv_cache.plan import CacheSizes, block_bytes
from longshore.worker.kv_cache.state_pages import StatePages
from longshore.worker.models.delta_shape import DeltaShape
from longshore.worker.models.lfm2_config import ConvShape
from longshore.worker.models.mamba2_config import MambaShape

HEAD_SIZE: Final = 3
NUM_TOKENS: Final = 77

Shape: TypeAlias = MambaShape | DeltaShape | ConvShape
SpecOf: TypeAlias = Callable[[int, int], KVCacheSpec]
"""The spec of a layer on a rank, of a tensor parallel size and a block size."""


def heads_on(num_shards: int, total: int = 4) -> int:
    return HeadShare.of_shard(0, num_shards, total).count


def mamba(num_heads: int, num_groups: int) -> MambaShape:
    return MambaShape(
        num_heads=num_heads,
        head_dim=2,
        num_groups=num_groups,
        state_size=3,
        conv_width=4,
        conv_bias=True,
        proj_bias=False,
        out_bias=False,
    )


def delta(num_heads: int, num_key_heads: int) -> DeltaShape:
    return DeltaShape(
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        key_dim=3,
        value_dim=2,
        conv_width=4,
        is_fused=False,
    )


PAGES: Final = {16: (3, 8), 32: (2, 16), 8: (5, 8), 24: (1, 32)}
"""Pages of a state and bytes of a unit, by block size."""


def state_spec(shape: Shape, num_shards: int, block_size: int) -> KVCacheSpec:
    num_pages, unit_bytes = PAGES[block_size]
    sizes = CacheSizes(block_size=block_size, dtype_bytes=4, num_shards=num_shards)
    return msgspec.structs.replace(shape.spec(sizes), num_pages=num_pages, unit_bytes=unit_bytes)


KINDS: Final[dict[str, SpecOf]] = {
    "full": lambda tp, size: FullAttentionSpec(size, heads_on(tp), HEAD_SIZE, 4),
    "one head": lambda tp, size: FullAttentionSpec(size, heads_on(tp, 1), HEAD_SIZE, 4),
    "two heads": lambda tp, size: FullAttentionSpec(size, heads_on(tp, 2), HEAD_SIZE, 4),
    "window": lambda tp, size: SlidingWindowSpec(
        size, heads_on(tp), HEAD_SIZE, 4, sliding_window=20
    ),
    "chunks": lambda tp, size: ChunkedLocalAttentionSpec(
        size, heads_on(tp), HEAD_SIZE, 4, attention_chunk_size=32
    ),
    "latents": lambda tp, size: MLAAttentionSpec(size, HEAD_SIZE, 4),
    "states": lambda tp, size: state_spec(mamba(8, 4), tp, size),
    "states of one group": lambda tp, size: state_spec(mamba(8, 1), tp, size),
    "states of two groups": lambda tp, size: state_spec(mamba(4, 2), tp, size),
    "delta rule": lambda tp, size: state_spec(delta(8, 4), tp, size),
    "delta rule of two keys": lambda tp, size: state_spec(delta(4, 2), tp, size),
    "convolution": lambda tp, size: state_spec(CONVOLUTION, tp, size),
}

CONVOLUTION: Final = ConvShape(num_channels=20, width=4, bias=False)
STATES: Final[dict[str, Shape]] = {
    "convolution": CONVOLUTION,
    "delta rule": delta(8, 4),
    "delta rule of two keys": delta(4, 2),
    "states": mamba(8, 4),
    "states of one group": mamba(8, 1),
    "states of two groups": mamba(4, 2),
}
HEADS: Final = {"full": 4, "one head": 1, "two heads": 2, "window": 4, "chunks": 4, "latents": 1}


@dataclass
class FakeEngine:
    """layers: kind of each layer. split: number of groups into which the layers of a kind are
    divided."""

    layers: Sequence[str]
    num_shards: int = 1
    block_size: int = 16
    num_stages: int = 1
    split: int = 1

    def __post_init__(self) -> None:
        self.kinds = list(dict.fromkeys(self.layers))
        groups = []
        for kind in self.kinds:
            names = [name for name, of in enumerate(self.layers) if of == kind]
            for part in range(self.split):
                spec = KINDS[kind](self.num_shards, self.block_size)
                groups.append((kind, names[part :: self.split], spec))
        self.groups = groups
        per_stage = math.ceil(len(self.layers) / self.num_stages)
        self.ranks = [
            tuple(
                KVCacheGroup(
                    tuple(f"layer.{each}" for each in names if each // per_stage == stage), spec
                )
                for _, names, spec in groups
            )
            for stage in range(self.num_stages)
            for _ in range(self.num_shards)
        ]
        self.num_blocks = 1 + len(groups) * math.ceil(NUM_TOKENS / self.block_size) * 2
        self.bytes = max(block_bytes(rank) for rank in self.ranks)
        self.layout = EngineLayout(
            tuple(RankLayout(rank, self.bytes, self.num_blocks) for rank in self.ranks)
        )

    def tables(self, seed: int, num_tokens: int, first_token: int = 0) -> list[Int32Array]:
        """Blocks of one request, without those that no later token reads."""
        chance = random.Random(seed)
        ids = list(range(1, self.num_blocks))
        chance.shuffle(ids)
        tables = []
        for _, _, spec in self.groups:
            first = first_needed_token(spec, num_tokens) // spec.block_size
            size = math.ceil((num_tokens + 1) / spec.block_size)
            if isinstance(spec, StateSpec):
                first, size = 0, spec.num_pages
            table = [ids.pop() if at >= first else 0 for at in range(size)]
            tables.append(int32_array(table))
        return tables

    def buffers(self) -> list[torch.Tensor]:
        return [torch.zeros(self.num_blocks, self.bytes, dtype=torch.uint8) for _ in self.ranks]

    def fill(self, tables: list[Int32Array], num_tokens: int) -> list[torch.Tensor]:
        buffers = self.buffers()
        for rank, buffer in enumerate(buffers):
            for group, table in enumerate(tables):
                self.write(buffer, rank, group, table, num_tokens)
        return buffers

    def write(
        self, buffer: torch.Tensor, rank: int, number: int, table: Int32Array, num_tokens: int
    ) -> None:
        """What this rank computes of a request."""
        kind, shard = self.groups[number][0], rank % self.num_shards
        group = self.ranks[rank][number]
        if not group.layer_names:
            return
        view, size = view_blocks(buffer, group, torch.float32), group.spec.block_size
        for place, name in enumerate(group.layer_names):
            layer = int(name.removeprefix("layer."))
            if isinstance(view, StatePages):
                pages = torch.from_numpy(table.astype(np.int64))[None]
                values_of = states_of(STATES[kind], layer, shard, self.num_shards)
                for tensor, value in enumerate(values_of):
                    view.write(tensor, place, pages, value[None])
                continue
            values = tokens_of(kind, layer, shard, self.num_shards)
            for token in range(num_tokens):
                block_id, at = table[token // size], token % size
                if block_id == 0:
                    continue
                if isinstance(view, PagedLatents):
                    view.latents[block_id, place, at] = values[0, 0, token]
                else:
                    assert isinstance(view, PagedKV)
                    view.planes[block_id, :, place, :, at] = values[:, :, token]


def tokens_of(kind: str, layer: int, shard: int, num_shards: int) -> torch.Tensor:
    """(heads, 2, NUM_TOKENS, HEAD_SIZE), of the heads of a shard."""
    share = HeadShare.of_shard(shard, num_shards, HEADS[kind])
    shape = HEADS[kind], 2, NUM_TOKENS, HEAD_SIZE
    values = torch.arange(1, math.prod(shape) + 1, dtype=torch.float32).reshape(shape)
    return (values + layer * math.prod(shape))[share.first : share.first + share.count]


def states_of(
    shape: Shape, layer: int, shard: int, num_shards: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensors of a shard; every element of the model's has a value of its own."""
    whole = shape.spec(CacheSizes(block_size=16, dtype_bytes=4))
    assert isinstance(whole, StateSpec)
    states, conv = (
        torch.arange(1, math.prod(of) + 1).float().reshape(of) + layer * 1000 for of in whole.shapes
    )
    num_heads, num_groups = states.shape[0], num_groups_of(shape)
    own_heads, own_groups = num_heads // num_shards, num_groups_of(shape.shard(num_shards))
    first, group = shard * own_heads, shard * num_groups // num_shards
    columns, parts = 0, []
    for kind, width in whole.channels:
        begin, count, total = (
            (first, own_heads, num_heads) if kind == "head" else (group, own_groups, num_groups)
        )
        parts.append(-conv[:, columns + begin * width : columns + (begin + count) * width])
        columns += total * width
    return states[first : first + own_heads], torch.cat(parts, dim=1)


def num_groups_of(shape: Shape) -> int:
    if isinstance(shape, ConvShape):
        return 0
    return shape.num_groups if isinstance(shape, MambaShape) else shape.num_key_heads


def pull(
    reader: FakeEngine,
    owner: FakeEngine,
    *,
    num_tokens: int = NUM_TOKENS,
    first_token: int = 0,
    num_owner_tokens: int = NUM_TOKENS,
) -> None:
    """Pull between the two, and compare every token that the reader needs."""
    owner_tables = owner.tables(1, num_owner_tokens)
    reader_tables = reader.tables(2, num_tokens, first_token)
    sources = owner.fill(owner_tables, num_owner_tokens)
    targets, wanted = reader.buffers(), reader.buffers()
    for rank, target in enumerate(targets):
        plan = plan_pull(
            find_routes(reader.layout, rank, owner.layout),
            owner_tables,
            reader_tables,
            first_token=first_token,
            num_tokens=num_tokens,
            num_owner_tokens=num_owner_tokens,
        )
        assert not plan.missing or reader.block_size > owner.block_size
        for owner_rank, pattern, owner_blocks, reader_blocks in plan.pieces:
            source = sources[owner_rank].numpy()
            for owner_block, reader_block in zip(owner_blocks, reader_blocks, strict=True):
                for first, own_first, length in zip(*pattern, strict=True):
                    target[reader_block, own_first : own_first + length] = torch.from_numpy(
                        source[owner_block, first : first + length].copy()
                    )
        for number, table in enumerate(reader_tables):
            reader.write(wanted[rank], rank, number, table, num_tokens)
            group = reader.ranks[rank][number]
            if group.layer_names:
                compare(target, wanted[rank], group, table, first_token, num_tokens)
        assert not target[0].any()  # the null block


def compare(
    target: torch.Tensor,
    wanted: torch.Tensor,
    group: KVCacheGroup,
    table: Int32Array,
    first_token: int,
    num_tokens: int,
) -> None:
    views = [view_blocks(buffer, group, torch.float32) for buffer in (target, wanted)]
    size = group.spec.block_size
    if isinstance(group.spec, StateSpec):
        pages = torch.from_numpy(table.astype(np.int64))[None]
        for tensor in range(2):
            for layer in range(len(group.layer_names)):
                found, state = (view.read(tensor, layer, pages) for view in views)  # type: ignore[union-attr]
                assert torch.equal(found, state)
                assert state.all()
        return
    first = max(first_needed_token(group.spec, num_tokens), first_token)
    for token in range(first, num_tokens):
        block_id, at = table[token // size], token % size
        if isinstance(views[0], PagedLatents):
            found, value = (view.latents[block_id, :, at] for view in views)  # type: ignore[union-attr]
        else:
            found, value = (view.planes[block_id, :, :, :, at] for view in views)  # type: ignore[union-attr]
        assert value.all()
        assert torch.equal(found, value), (group.spec, token)


@pytest.mark.req("CRG-06")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sizes", list(product((1, 2, 4), repeat=2)), ids=lambda sizes: f"tp{sizes[1]}to{sizes[0]}"
)
def test_each_rank_gets_its_heads_whatever_the_tensor_parallel_sizes(
    kind: str, sizes: tuple[int, int]
) -> None:
    for sizes_of_blocks in ((16, 16), (32, 16), (8, 16), (16, 24)):
        reader, owner = (
            FakeEngine([kind] * 3, tp, block_size)
            for tp, block_size in zip(sizes, sizes_of_blocks, strict=True)
        )
        pull(reader, owner)


@pytest.mark.req("CRG-06")
@pytest.mark.parametrize("stages", [(1, 2), (2, 1), (3, 2)], ids=str)
def test_layers_are_found_whatever_the_stages_and_groups(stages: tuple[int, int]) -> None:
    layers = ["window", "full", "window", "states", "latents", "window", "full", "chunks", "full"]
    for split, tp in product((1, 3), (1, 2)):
        reader = FakeEngine(layers, tp, 16, stages[0], split)
        owner = FakeEngine(layers, 2, 16, stages[1])
        pull(reader, owner)
        pull(owner, reader)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in HEADS])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_only_tokens_after_local_hits_are_pulled(kind: str, block_size: int) -> None:
    reader, owner = FakeEngine([kind] * 2, 2, block_size), FakeEngine([kind] * 2, 1)
    for first_token in (32, 64):
        for num_tokens in (first_token + 1, 76, 77):
            pull(
                reader,
                owner,
                first_token=first_token,
                num_tokens=num_tokens,
                num_owner_tokens=num_tokens,
            )
    tables = reader.tables(2, NUM_TOKENS)
    routes = find_routes(reader.layout, 0, owner.layout)
    sizes = {"first_token": 64, "num_tokens": NUM_TOKENS, "num_owner_tokens": NUM_TOKENS}
    plan = plan_pull(routes, owner.tables(1, NUM_TOKENS), tables, **sizes)
    targets = {int(block) for piece in plan.pieces for block in piece.reader_blocks}
    assert targets <= set(tables[0][64 // block_size :].tolist())
    sizes["num_tokens"] = 64
    assert plan_pull(routes, owner.tables(1, NUM_TOKENS), tables, **sizes) == ([], [])


def test_blocks_that_the_owner_has_freed_are_missing() -> None:
    """A reader's block must be filled from its first token: it can be found by later requests."""
    reader, owner = FakeEngine(["window"], 1, 32), FakeEngine(["window"], 1, 8)
    tables, owner_tables = reader.tables(2, 77), owner.tables(1, 77)
    assert first_needed_token(reader.groups[0][2], 77) == 58
    sizes = {"first_token": 0, "num_tokens": 77, "num_owner_tokens": 77}
    plan = plan_pull(find_routes(reader.layout, 0, owner.layout), owner_tables, tables, **sizes)
    assert plan.missing == [tables[0][32 // 32]]
    owner_tables[0][32 // 8 : 56 // 8] = [30, 31, 32]
    plan = plan_pull(find_routes(reader.layout, 0, owner.layout), owner_tables, tables, **sizes)
    assert plan.missing == []


def test_a_state_is_pulled_only_after_the_tokens_that_it_is_the_state_of() -> None:
    reader, owner = FakeEngine(["states"], 1, 32), FakeEngine(["states"], 1, 16)
    routes = find_routes(reader.layout, 0, owner.layout)

    def missing(num_tokens: int) -> list[int]:
        tables = owner.tables(1, 77)
        own = reader.tables(2, num_tokens)
        sizes = {"first_token": 0, "num_tokens": num_tokens, "num_owner_tokens": 77}
        return plan_pull(routes, tables, own, **sizes).missing

    assert missing(77) == []
    assert all(len(missing(num_tokens)) == 2 for num_tokens in (76, 64, 80)), "both pages"


def test_a_block_is_one_run_of_bytes_where_both_sides_allow_it() -> None:
    def num_runs(reader: FakeEngine, owner: FakeEngine) -> list[int]:
        tables = owner.tables(1, 64), reader.tables(2, 64)
        sizes = {"first_token": 0, "num_tokens": 64, "num_owner_tokens": 64}
        plan = plan_pull(find_routes(reader.layout, 0, owner.layout), *tables, **sizes)
        return [len(piece.pattern.lengths) for piece in plan.pieces]

    layers = ["full"] * 3
    same = FakeEngine(layers)
    assert num_runs(same, same) == [1]
    assert num_runs(FakeEngine(layers, 2), same) == [1]
    assert num_runs(same, FakeEngine(layers, 2)) == [1, 1]
    assert num_runs(FakeEngine(layers, 1, 32), same) == [24, 24]  # 4 heads, 3 layers, keys, values
    states = FakeEngine(["states"] * 3)
    assert num_runs(states, states) == [1], "of each page"


def test_pulls_with_copies_on_several_ranks_are_spread() -> None:
    for kind in ("latents", "one head"):
        owner, reader = FakeEngine([kind], 4), FakeEngine([kind], 4)
        ranks = [
            [route.owner_rank for route in find_routes(reader.layout, rank, owner.layout)]
            for rank in range(4)
        ]
        assert ranks == [[0], [1], [2], [3]]


# What cannot be pulled is refused by name


FULL: Final = FullAttentionSpec(16, 2, 8, 4)
STATE: Final = StateSpec(
    block_size=16,
    shapes=((4, 2, 3), (3, 20)),
    dtype_bytes=(4, 4),
    channels=(("head", 2), ("group", 6), ("group", 6)),
)


def layout_of(*specs: KVCacheSpec, num_ranks: int = 1) -> EngineLayout:
    groups = tuple(KVCacheGroup((f"layer.{at}",), spec) for at, spec in enumerate(specs))
    return EngineLayout((RankLayout(groups, 1 << 20, 4),) * num_ranks)


@pytest.mark.req("CRG-06")
@pytest.mark.parametrize(
    ("own", "other", "reason"),
    [
        (FULL, msgspec.structs.replace(FULL, head_size=16), "head_size=8 here and 16"),
        (FULL, msgspec.structs.replace(FULL, dtype_bytes=2), "dtype_bytes=4 here and 2"),
        (
            msgspec.structs.replace(FULL, head_size_v=4),
            msgspec.structs.replace(FULL, head_size_v=4),
            "values of another size",
        ),
        (FULL, msgspec.structs.replace(FULL, num_kv_heads=3), "2 KV heads or groups on each of 1"),
        (
            SlidingWindowSpec(16, 2, 8, 4, sliding_window=32),
            SlidingWindowSpec(16, 2, 8, 4, sliding_window=64),
            "sliding_window=32 here and 64",
        ),
        (FULL, SlidingWindowSpec(16, 2, 8, 4, sliding_window=64), "a SlidingWindowSpec on"),
        (MLAAttentionSpec(16, 8, 4), MLAAttentionSpec(16, 12, 4), "head_size=8 here and 12"),
        (
            SinkFullAttentionSpec(16, 2, 8, 4, sink_tokens=4),
            SinkFullAttentionSpec(16, 2, 8, 4, sink_tokens=4),
            "a SinkFullAttentionSpec, whose blocks cannot be pulled",
        ),
        (
            CrossAttentionSpec(16, 2, 8, 4, max_encoder_tokens=4),
            CrossAttentionSpec(16, 2, 8, 4, max_encoder_tokens=4),
            "a CrossAttentionSpec, whose blocks cannot be pulled",
        ),
        (
            CustomSpec(16, 64, "package:Manager"),
            CustomSpec(16, 64, "package:Manager"),
            "a CustomSpec, whose blocks cannot be pulled",
        ),
        (
            STATE,
            msgspec.structs.replace(STATE, shapes=((4, 2, 3), (4, 20))),
            "shapes .* on the owner",
        ),
        (STATE, msgspec.structs.replace(STATE, dtype_bytes=(4, 2)), "dtype_bytes="),
        (STATE, msgspec.structs.replace(STATE, channels=(("head", 5),)), "channels="),
        (
            msgspec.structs.replace(STATE, channels=()),
            msgspec.structs.replace(STATE, channels=(), shapes=((2, 2, 3), (3, 16))),
            "how it is divided among ranks is not known",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, msgspec.Struct) else None,
)
def test_other_models_and_kinds_are_refused(
    own: KVCacheSpec, other: KVCacheSpec, reason: str
) -> None:
    with pytest.raises(LayoutMismatch, match=reason):
        check_layouts(layout_of(own), layout_of(other))


def test_more_layers_than_the_owner_has_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match=r"the owner has no KV of layer layer\.1"):
        check_layouts(layout_of(FULL, FULL), layout_of(FULL))


@pytest.mark.parametrize(
    "wrong", [{"num_blocks": 0}, {"block_bytes": 8}, {"num_blocks": 1 << 50}], ids=str
)
def test_memory_of_an_impossible_size_is_refused(wrong: dict[str, Any]) -> None:
    good = msgspec.to_builtins(layout_of(FULL).ranks[0])
    msgspec.convert(good, RankLayout)
    with pytest.raises(msgspec.ValidationError, match="cannot hold groups"):
        msgspec.convert(good | wrong, RankLayout)
