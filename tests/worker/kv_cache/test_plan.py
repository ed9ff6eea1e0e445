"""The KV cache plan: groups of layers, block sizes, and the report."""

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.protocol.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    CustomSpec,
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheSpec,
    LongestRequest,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    StateSpec,
    max_blocks,
    num_reserved_blocks,
)
from longshore.worker.errors import UnsupportedModel
from longshore.worker.kv_cache.plan import (
    MAX_GROUPS,
    block_bytes,
    check_cache_specs,
    groups_of_rank,
    plan_groups,
)
from longshore.worker.kv_cache.report import report_on


def full(heads: int = 8, head_size: int = 128) -> FullAttentionSpec:
    return FullAttentionSpec(16, num_kv_heads=heads, head_size=head_size, dtype_bytes=2)


def window(size: int, heads: int = 8, head_size: int = 128) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        16, num_kv_heads=heads, head_size=head_size, dtype_bytes=2, sliding_window=size
    )


def state(*shape: int) -> StateSpec:
    return StateSpec(block_size=16, shapes=(shape,), dtype_bytes=(4,))


def planned(specs: list[KVCacheSpec], max_model_len: int = 32_768) -> tuple[KVCacheGroup, ...]:
    named = {f"layer {index}": spec for index, spec in enumerate(specs)}
    return plan_groups(named, max_model_len=max_model_len, max_num_batched_tokens=2048)


def shapes(groups: tuple[KVCacheGroup, ...]) -> list[tuple[str, int, int]]:
    """Spec, layers and tokens per block."""
    return [(type(g.spec).__name__, len(g.layer_names), g.spec.block_size) for g in groups]


def test_a_model_of_one_kind_has_one_group_of_unchanged_blocks() -> None:
    for spec in (full(), window(1024), MLAAttentionSpec(16, 576, 2)):
        (group,) = planned([spec] * 32)
        assert group.spec == spec
        assert group.layer_names == tuple(f"layer {index}" for index in range(32))


@pytest.mark.parametrize(
    ("pattern", "num_layers", "windows", "num_full"),
    [(6, 24, [4] * 5, 4), (6, 26, [4, 4, 4, 4, 3, 3], 4), (6, 62, [9] * 4 + [8] * 2, 10),
     (2, 24, [12], 12)],
    ids=["20 and 4", "22 and 4", "52 and 10", "12 and 12"],
)  # fmt: skip
def test_layers_with_windows_are_divided_into_groups_of_the_size_of_the_full_one(
    pattern: int, num_layers: int, windows: list[int], num_full: int
) -> None:
    is_full = [layer % pattern == pattern - 1 for layer in range(num_layers)]
    groups = planned([full() if each else window(1024) for each in is_full], 131_072)
    wanted = [("SlidingWindowSpec", count, 16) for count in windows]
    assert shapes(groups) == [*wanted, ("FullAttentionSpec", num_full, 16)]
    assert groups[0].layer_names[0] == "layer 0"


def test_layers_that_need_less_have_blocks_of_more_tokens() -> None:
    groups = planned([window(1024, 16, 256), full(4, 512)])
    assert shapes(groups) == [("SlidingWindowSpec", 1, 16), ("FullAttentionSpec", 1, 32)]
    assert len({group.block_size_bytes for group in groups}) == 1


def test_attention_in_a_hybrid_keeps_its_blocks_and_a_state_takes_pages_of_their_size() -> None:
    mamba = state(128, 64, 128)
    groups = planned([full() if i in (9, 18, 27) else mamba for i in range(32)], 131_072)
    assert shapes(groups) == [("FullAttentionSpec", 3, 16), ("StateSpec", 29, 16)]
    report = report_on(groups, 10_000, LongestRequest(131_072, 4096))
    assert report.padding_share < 0.02


ATTENTION = st.one_of(
    st.builds(full, st.sampled_from([1, 2, 8]), st.sampled_from([64, 128])),
    st.builds(window, st.integers(1, 4096), st.sampled_from([1, 8]), st.sampled_from([64, 128])),
    st.builds(
        lambda size: ChunkedLocalAttentionSpec(
            16, num_kv_heads=2, head_size=64, dtype_bytes=2, attention_chunk_size=size
        ),
        st.integers(16, 8192),
    ),
    st.builds(lambda size: MLAAttentionSpec(16, size, 2), st.sampled_from([128, 576])),
    st.just(SinkFullAttentionSpec(16, num_kv_heads=2, head_size=64, dtype_bytes=2, sink_tokens=20)),
    st.just(
        CrossAttentionSpec(16, num_kv_heads=2, head_size=64, dtype_bytes=2, max_encoder_tokens=1500)
    ),
    st.just(CustomSpec(16, 10_000, "package.module:Class")),
)
STATES = st.builds(state, st.integers(1, 64), st.sampled_from([16, 64]), st.just(64))


@given(
    st.builds(
        lambda others, states: [*others, *states],
        st.lists(ATTENTION, min_size=1, max_size=4, unique_by=repr),
        st.lists(STATES, max_size=1),
    ),
    st.lists(st.integers(1, 40), min_size=5, max_size=5),
    st.integers(1, 200_000),
)
def test_every_layer_has_a_place_in_groups_that_fit_one_block(
    kinds: list[KVCacheSpec], counts: list[int], max_model_len: int
) -> None:
    layers = [spec for spec, count in zip(kinds, counts, strict=False) for _ in range(count)]
    groups = planned(layers, max_model_len)
    names = [name for group in groups for name in group.layer_names]
    assert sorted(names) == sorted(f"layer {index}" for index in range(len(layers)))
    assert len(groups) <= max(MAX_GROUPS, len(kinds)) + 1
    assert block_bytes(groups) >= max(group.block_size_bytes for group in groups)
    sizes: dict[str, set[int]] = {}
    for group in groups:
        first = layers[int(group.layer_names[0].removeprefix("layer "))]
        assert all(layers[int(name.removeprefix("layer "))] == first for name in group.layer_names)
        if isinstance(group.spec, StateSpec):
            state_bytes = len(group.layer_names) * group.spec.state_size_bytes
            assert group.spec.num_pages * block_bytes(groups) >= state_bytes
            continue
        assert group.spec.block_size % 16 == 0
        sizes.setdefault(repr(first), set()).add(len(group.layer_names))
        assert (group.spec.block_size // 16).bit_count() == 1
    assert all(max(counted) - min(counted) <= 1 for counted in sizes.values())


@given(st.integers(1, 4), st.integers(0, 20), st.integers(1, 8))
def test_all_pipeline_stages_have_the_same_groups_and_their_part_of_each(
    num_stages: int, num_windows: int, num_full: int
) -> None:
    specs: list[KVCacheSpec] = [window(1024)] * num_windows + [full()] * num_full
    specs = specs[::2] + specs[1::2]
    groups = planned(specs)
    names = [f"layer {index}" for index in range(len(specs))]
    stages = [groups_of_rank(groups, names[stage::num_stages]) for stage in range(num_stages)]
    for index, group in enumerate(groups):
        assert {stage[index].spec for stage in stages} == {group.spec}
        held = [name for stage in stages for name in stage[index].layer_names]
        assert sorted(held) == sorted(group.layer_names)


def test_what_a_request_may_hold_counts_every_group_and_sinks_are_set_aside() -> None:
    sink = SinkFullAttentionSpec(16, num_kv_heads=2, head_size=64, dtype_bytes=2, sink_tokens=20)
    groups = (
        KVCacheGroup(("a",), full()),
        KVCacheGroup(("b",), window(33)),
        KVCacheGroup(("c",), sink),
    )
    assert max_blocks(groups, LongestRequest(160, 16)) == 10 + (math.ceil((32 + 16) / 16) + 1) + 10
    assert num_reserved_blocks(groups) == 1 + 2


@pytest.mark.req("NUM-18", "NUM-20")
def test_the_report_has_the_tokens_and_requests_that_fit() -> None:
    group = KVCacheGroup(tuple(f"layer {i}" for i in range(80)), full())
    report = report_on([group], 11_469, LongestRequest(131_072, 4096))
    assert report.block_bytes == 5_242_880
    assert round(report.max_concurrency, 2) == 1.40
    assert report.num_tokens == 11_468 * 16
    assert report.padding_share == 0
    both = [group, KVCacheGroup(tuple(f"layer {i}" for i in range(60)), window(1024))]
    report = report_on(both, 8193 + 258, LongestRequest(131_072, 4096))
    assert report.groups[1].padding_bytes == 20 * 65_536
    assert report.groups[1].max_blocks == math.ceil((1023 + 4096) / 16) + 1
    assert report.max_concurrency == (8192 + 258) / (8192 + report.groups[1].max_blocks)


def test_a_plan_is_made_without_torch() -> None:
    program = (
        "import sys, longshore.deploy.cli.cache_plan;"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert shown.stdout.strip() == "[]"


def test_keys_and_values_of_different_sizes_are_rejected_by_layer_and_setting() -> None:
    same = FullAttentionSpec(16, num_kv_heads=1, head_size=8, dtype_bytes=2, head_size_v=8)
    check_cache_specs({"model.layers.0": same, "model.layers.1": state(3)}, "auto")
    differs = FullAttentionSpec(16, num_kv_heads=1, head_size=8, dtype_bytes=2, head_size_v=4)
    with pytest.raises(
        UnsupportedModel,
        match=r"layers\.1 has keys of 8 and values of 4 elements \(head_dim and v_head_dim",
    ):
        check_cache_specs({"model.layers.0": same, "model.layers.1": differs}, "auto")


def delta_net(
    num_layers: int, kv_heads: int, key_heads: int, value_heads: int, num_shards: int, size: int = 2
) -> list[KVCacheSpec]:
    """Qwen 3.5: three layers of gated DeltaNet, with heads of 128, before each one of attention.
    size: bytes of an element of the KV cache."""
    keys, values = key_heads // num_shards * 128, value_heads // num_shards
    state = StateSpec(
        block_size=16,
        shapes=((values, 128, 128), (3, 2 * keys + values * 128)),
        dtype_bytes=(4, 2),
    )
    attention = FullAttentionSpec(16, max(1, kv_heads // num_shards), 256, size)
    return [state, state, state, attention] * (num_layers // 4)


PUBLISHED = {
    "0.8B": (24, 2, 16, 16),
    "9B": (32, 4, 16, 32),
    "35B-A3B": (40, 2, 16, 32),
    "27B": (64, 4, 16, 48),
}


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("size", [1, 2])
def test_a_state_fills_its_pages_whatever_the_tensor_parallel_size(
    name: str, num_shards: int, size: int
) -> None:
    groups = planned(delta_net(*PUBLISHED[name], num_shards, size))
    attention, states = groups
    assert isinstance(states.spec, StateSpec)
    page_bytes = block_bytes(groups)
    state_bytes = len(states.layer_names) * states.spec.state_size_bytes
    padding = states.spec.num_pages * page_bytes / state_bytes - 1
    assert 0 <= padding <= 0.02
    assert page_bytes <= 1.001 * attention.block_size_bytes, "attention has no padding"
    assert states.spec.unit_bytes <= 16 << 10
    assert max_blocks(groups, LongestRequest(32_768, 2048)) == 2048 + states.spec.num_pages
    stages = [
        groups_of_rank(
            groups, [n for g in groups for n in g.layer_names if int(n[6:]) // 4 % 2 == i]
        )
        for i in range(2)
    ]
    assert all(block_bytes(stage) <= 0.6 * page_bytes for stage in stages), "pages of two stages"


def test_a_model_of_states_only_has_one_page_for_each() -> None:
    spec = StateSpec(block_size=64, shapes=((3, 5, 7), (2, 9)), dtype_bytes=(4, 2))
    (group,) = planned([spec] * 3)
    assert isinstance(group.spec, StateSpec)
    assert (group.spec.num_pages, group.spec.block_size) == (1, 64)
    assert 5 * 7 * 4 % group.spec.unit_bytes == 0, "a head is whole units"
    assert block_bytes([group]) >= 3 * spec.state_size_bytes
    with pytest.raises(UnsupportedModel, match="states of different shapes"):
        planned([spec, StateSpec(block_size=64, shapes=((2, 2),), dtype_bytes=(4,))])
