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
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
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


def state(*shape: int) -> MambaSpec:
    return MambaSpec(16, shapes=(shape,), dtype_bytes=(4,))


def planned(specs: list[KVCacheSpec], max_model_len: int = 32_768) -> tuple[KVCacheGroup, ...]:
    named = {f"layer {index}": spec for index, spec in enumerate(specs)}
    return plan_groups(named, max_model_len=max_model_len, max_num_batched_tokens=2048)


def shapes(groups: tuple[KVCacheGroup, ...]) -> list[tuple[str, int, int]]:
    """Spec, layers and tokens per block."""
    return [(type(g.spec).__name__, len(g.layer_names), g.spec.block_size) for g in groups]


def test_a_model_of_one_kind_has_one_group_of_unchanged_blocks() -> None:
    for spec in (full(), window(1024), state(80, 64, 128), MLAAttentionSpec(16, 576, 2)):
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


def test_attention_in_a_hybrid_has_blocks_as_large_as_a_state_and_the_same_borders() -> None:
    mamba = state(128, 64, 128)
    groups = planned([full() if i in (9, 18, 27) else mamba for i in range(32)], 131_072)
    size_bytes = block_bytes(groups)
    (block_size,) = {group.spec.block_size for group in groups}
    assert block_size % 16 == 0
    (attention,) = [group for group in groups if group.layer_names[0] == "layer 9"]
    assert attention.block_size_bytes > 0.9 * size_bytes
    report = report_on(groups, 1000, LongestRequest(131_072, 4096))
    assert report.padding_share < 0.05


def test_a_block_covers_at_most_the_tokens_of_a_request() -> None:
    groups = planned([state(128, 64, 128)] * 8 + [full(1, 16)], max_model_len=100)
    assert {group.spec.block_size for group in groups} <= {16, 32, 48, 64, 80, 96, 112}


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
    st.lists(st.one_of(ATTENTION, STATES), min_size=1, max_size=5, unique_by=repr),
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
    assert len(groups) <= max(MAX_GROUPS, len(kinds))
    assert block_bytes(groups) >= max(group.block_size_bytes for group in groups)
    sizes: dict[str, set[int]] = {}
    for group in groups:
        first = layers[int(group.layer_names[0].removeprefix("layer "))]
        assert all(layers[int(name.removeprefix("layer "))] == first for name in group.layer_names)
        assert group.spec.block_size % 16 == 0
        sizes.setdefault(repr(first), set()).add(len(group.layer_names))
        if not any(isinstance(spec, MambaSpec) for spec in layers):
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
