"""KV cache specs: sizes of blocks, and how many a request needs."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.protocol.errors import ConfigError, KVCacheTooSmall
from longshore.protocol.kv_cache_spec import (
    BadSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    CustomSpec,
    FullAttentionSpec,
    HeadShare,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    LongestRequest,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    StateSpec,
    check_holds_one_request,
    max_blocks,
    num_blocks_needed,
    page_hashes,
    sink_block_ids,
    tokens_that_fit,
)

SPECS: tuple[KVCacheSpec, ...] = (
    FullAttentionSpec(16, 8, 128, 2),
    FullAttentionSpec(16, 8, 128, 2, sliding_window=64),
    SinkFullAttentionSpec(16, 8, 128, 2, sink_tokens=20),
    SlidingWindowSpec(16, 8, 128, 2, sliding_window=64),
    ChunkedLocalAttentionSpec(16, 8, 128, 2, attention_chunk_size=64),
    MLAAttentionSpec(16, 576, 2),
    StateSpec(
        block_size=16,
        shapes=((8, 32, 16), (3, 320)),
        dtype_bytes=(4, 2),
        channels=(("head", 32), ("group", 16), ("group", 16)),
    ),
    CrossAttentionSpec(16, 8, 128, 2, max_encoder_tokens=100),
    CustomSpec(16, 1024, manager="package.module:Class", settings={"ratio": 0.5}),
)


@pytest.mark.req("STM-01")
def test_every_spec_survives_encoding_and_is_immutable() -> None:
    groups = tuple(KVCacheGroup((f"layer.{i}",), spec) for i, spec in enumerate(SPECS))
    config = KVCacheConfig(10, groups, "float16")
    encoded = msgspec.msgpack.encode(config)
    assert msgspec.msgpack.decode(encoded, type=KVCacheConfig) == config
    for spec in SPECS:
        with pytest.raises(AttributeError, match="immutable"):
            spec.block_size = 32  # type: ignore[misc]


@pytest.mark.req("STM-02")
def test_keys_and_values_may_differ_in_width_and_a_full_spec_may_have_a_window_or_a_chunk() -> None:
    assert FullAttentionSpec(16, 4, 192, 2, head_size_v=128).page_size_bytes == 16 * 4 * 320 * 2
    assert FullAttentionSpec(16, 4, 192, 2).page_size_bytes == 16 * 4 * 384 * 2
    for field in ("sliding_window", "attention_chunk_size"):
        spec = FullAttentionSpec(16, 4, 192, 2, **{field: 64})
        assert spec.max_blocks(LongestRequest(1000, 16)) == 63  # it keeps all blocks nevertheless
    with pytest.raises(ConfigError, match="both set"):
        FullAttentionSpec(16, 4, 192, 2, sliding_window=64, attention_chunk_size=64)


@pytest.mark.req("STM-03")
@pytest.mark.parametrize(
    ("max_model_len", "batched", "blocks"),
    [(100_000, 2048, 193), (100_000, 1, 65), (1000, 2048, 64), (100_000, None, 6251)],
)
def test_a_window_of_1024_takes_blocks_for_itself_and_for_what_a_step_computes(
    max_model_len: int, batched: int | None, blocks: int
) -> None:
    spec = SlidingWindowSpec(16, 8, 128, 2, sliding_window=1024)
    assert spec.max_blocks(LongestRequest(max_model_len, batched)) == blocks
    assert spec.page_size_bytes == FullAttentionSpec(16, 8, 128, 2).page_size_bytes


def test_a_latent_vector_replaces_keys_and_values_of_all_heads() -> None:
    assert MLAAttentionSpec(16, 512 + 64, 2).page_size_bytes == 16 * 576 * 2


def test_a_state_takes_pages_of_whole_units_however_long_a_request_is() -> None:
    spec = StateSpec(
        block_size=16,
        shapes=((8, 32, 16), (3, 320)),
        dtype_bytes=(4, 2),
        channels=(("head", 32), ("group", 16), ("group", 16)),
        num_pages=5,
        unit_bytes=1024,
    )
    assert spec.state_size_bytes == 8 * 32 * 16 * 4 + 3 * 320 * 2
    assert spec.tensor_units == (16, 2)
    assert spec.first_units == (0, 16)
    assert spec.num_groups == 2
    assert spec.page_bytes(3) == 11 * 1024, "3 layers of 18 units on 5 pages"
    assert [spec.max_blocks(LongestRequest(n)) for n in (10, 10_000)] == [5, 5]
    group = KVCacheGroup(("a", "b", "c"), spec)
    assert group.block_size_bytes == 11 * 1024
    with pytest.raises(ConfigError, match="2 shapes but 1 element sizes"):
        StateSpec(block_size=64, shapes=((4,), (4,)), dtype_bytes=(4,))
    with pytest.raises(ConfigError, match="at most 65535 pages"):
        msgspec.structs.replace(spec, num_pages=1 << 16)


def test_the_pages_of_a_state_have_names_of_their_own() -> None:
    block_hash = bytes(range(32))
    names = page_hashes(block_hash, 1000)
    assert names[0] == block_hash
    assert len(set(names)) == 1000
    assert {len(name) for name in names} == {32}


def test_a_size_of_0_is_rejected_with_the_name_of_the_field() -> None:
    with pytest.raises(
        ConfigError, match=r"SlidingWindowSpec\.sliding_window=0 must be at least 1"
    ):
        SlidingWindowSpec(16, 8, 128, 2, sliding_window=0)
    encoded = msgspec.msgpack.encode(FullAttentionSpec(16, 8, 128, 2))
    with pytest.raises(msgspec.ValidationError, match="block_size=0 must be at least 1"):
        msgspec.msgpack.decode(encoded.replace(b"\x10", b"\x00", 1), type=FullAttentionSpec)


def test_sinks_follow_the_null_block_in_order_of_group() -> None:
    sink = SinkFullAttentionSpec(16, 8, 128, 2, sink_tokens=20)
    groups = tuple(KVCacheGroup(("layer",), spec) for spec in (sink, SPECS[0], sink))
    assert sink_block_ids(groups) == (range(1, 3), range(3, 3), range(3, 5))


@pytest.mark.req("NUM-15")
@pytest.mark.parametrize(("num_kv_heads", "size"), [(32, 262_144), (40, 327_680), (8, 65_536)])
def test_bytes_of_a_block_of_sixteen_tokens_of_one_layer(num_kv_heads: int, size: int) -> None:
    spec = FullAttentionSpec(16, num_kv_heads, head_size=128, dtype_bytes=2)
    assert spec.page_size_bytes == size


@pytest.mark.parametrize(
    ("num_kv_heads", "num_layers", "size"),
    [(32, 32, 8_388_608), (40, 40, 13_107_200), (8, 80, 5_242_880), (8, 32, 2_097_152),
     (8, 126, 8_257_536)],
)  # fmt: skip
@pytest.mark.req("NUM-16")
def test_bytes_of_a_block_of_all_layers(num_kv_heads: int, num_layers: int, size: int) -> None:
    spec = FullAttentionSpec(16, num_kv_heads, head_size=128, dtype_bytes=2)
    group = KVCacheGroup(tuple(f"layer.{index}" for index in range(num_layers)), spec)
    assert group.block_size_bytes == size


@pytest.mark.parametrize(("max_model_len", "blocks"), [(1, 1), (16, 1), (17, 2), (100, 7)])
def test_a_request_needs_a_block_for_its_last_tokens_too(max_model_len: int, blocks: int) -> None:
    assert FullAttentionSpec(16, 8, 128, 2).max_blocks(LongestRequest(max_model_len)) == blocks


def llama_70b() -> KVCacheGroup:
    spec = FullAttentionSpec(16, num_kv_heads=8, head_size=128, dtype_bytes=2)
    return KVCacheGroup(tuple(f"layer.{index}" for index in range(80)), spec)


@pytest.mark.req("NUM-17")
def test_eight_of_sixty_four_heads_take_an_eighth() -> None:
    all_heads = FullAttentionSpec(16, num_kv_heads=64, head_size=128, dtype_bytes=2)
    assert llama_70b().spec.page_size_bytes / all_heads.page_size_bytes == 0.125


@pytest.mark.req("NUM-18")
def test_bytes_of_2048_blocks() -> None:
    assert 2048 * llama_70b().block_size_bytes == 10_737_418_240


@pytest.mark.req("NUM-19", "ERR-03")
def test_blocks_that_fit_in_43_gigabytes_and_their_watermark() -> None:
    num_blocks = 43 * 10**9 // llama_70b().block_size_bytes
    assert (num_blocks, num_blocks * 16, int(num_blocks * 0.01)) == (8201, 131_216, 82)


@pytest.mark.req("NUM-20", "ERR-04")
def test_blocks_and_longest_requests_that_fit_in_seven_tenths_of_80_gib() -> None:
    num_blocks = int(0.7 * 80 * 2**30) // llama_70b().block_size_bytes
    longest = llama_70b().spec.max_blocks(LongestRequest(131_072))
    assert (num_blocks, longest, round(num_blocks / longest, 2)) == (11_468, 8192, 1.40)


@pytest.mark.req("NUM-29", "ERR-06")
@pytest.mark.parametrize(
    ("block_size", "worst"), [(8, 87.5), (16, 93.75), (32, 96.875), (64, 98.4375)]
)
def test_a_block_with_one_token_wastes_the_rest(block_size: int, worst: float) -> None:
    spec = FullAttentionSpec(block_size, 8, 128, 2)
    used = spec.page_size_bytes // block_size
    assert 100 * (1 - used / spec.page_size_bytes) == worst


@pytest.mark.req("NUM-30", "ERR-08")
def test_bytes_of_fifteen_empty_slots() -> None:
    wasted = 15 * llama_70b().block_size_bytes // 16
    assert wasted == 4_915_200
    assert round(100 * wasted / (80 * 10**9), 3) == 0.006


SOURCE_GIGA = 1024 * 10**6
"""What the source divides by as a gigabyte: 1,024 decimal megabytes."""


@pytest.mark.req("NUM-21", "ERR-02")
@pytest.mark.parametrize(
    ("gigabytes_per_s", "right_ms", "source_ms"),
    [(28, 0.187, 0.183), (7, 0.749, 0.731), (450, 0.0117, 0.011)],
)
def test_time_to_copy_a_block_in_decimal_units(
    gigabytes_per_s: int, right_ms: float, source_ms: float
) -> None:
    size = llama_70b().block_size_bytes
    digits = len(f"{right_ms}".partition(".")[2])
    assert round(1e3 * size / (gigabytes_per_s * 10**9), digits) == right_ms
    wrong_ms = 1e3 * size / (gigabytes_per_s * SOURCE_GIGA)
    assert round(wrong_ms, 3) == source_ms


@pytest.mark.req("NUM-22", "ERR-02")
def test_time_to_copy_the_blocks_of_4096_tokens() -> None:
    num_blocks = llama_70b().spec.max_blocks(LongestRequest(4096))
    assert num_blocks == 256
    size = num_blocks * llama_70b().block_size_bytes
    assert round(1e3 * size / 28e9, 1) == 47.9
    assert round(1e3 * size / (28 * SOURCE_GIGA), 1) == 46.8


@pytest.mark.req("NUM-23")
@pytest.mark.parametrize(
    ("num_tokens", "source_ms", "recompute_ms"),
    [(64, 0.7, 16), (256, 2.9, 64), (1024, 11.7, 256), (4096, 46.8, 1024), (16_384, 187, 4096)],
)
def test_the_sources_table_of_swapping_follows_from_the_size_of_a_block(
    num_tokens: int, source_ms: float, recompute_ms: int
) -> None:
    num_blocks = llama_70b().spec.max_blocks(LongestRequest(num_tokens))
    one_way_ms = 1e3 * num_blocks * llama_70b().block_size_bytes / (28 * SOURCE_GIGA)
    assert one_way_ms == pytest.approx(source_ms, rel=0.05)
    assert 1e3 * num_tokens / 4000 == recompute_ms
    if num_tokens == 4096:
        assert (round(recompute_ms / one_way_ms), round(recompute_ms / one_way_ms / 2)) == (22, 11)


@pytest.mark.req("ERR-07")
@pytest.mark.parametrize(("block_size", "kib"), [(1, 4), (8, 32), (16, 64), (32, 128), (64, 256)])
def test_bytes_to_copy_of_one_layer_by_block_size(block_size: int, kib: int) -> None:
    spec = FullAttentionSpec(block_size, num_kv_heads=8, head_size=128, dtype_bytes=2)
    assert spec.page_size_bytes == kib << 10


@pytest.mark.req("ERR-05")
@pytest.mark.parametrize("num_in_flight", [None, 16, 512, 131_072])
def test_chunks_do_not_change_how_many_blocks_full_attention_needs(
    num_in_flight: int | None,
) -> None:
    """Nor therefore how many requests fit at the same time."""
    assert llama_70b().spec.max_blocks(LongestRequest(131_072, num_in_flight)) == 8192


def test_a_pool_that_cannot_hold_a_request_is_rejected_with_advice() -> None:
    full = FullAttentionSpec(16, 1, 2, 4)
    window = SlidingWindowSpec(16, 1, 2, 4, sliding_window=33)
    for spec, longest, needed, advice in (
        (full, LongestRequest(256, 64, 2), 17, "lower max_model_len."),
        (window, LongestRequest(256, 64, 2), 8, "lower max_model_len or max_num_batched_tokens."),
        (window, LongestRequest(256, 32, 1), 6, "lower max_model_len or max_num_batched_tokens."),
    ):
        groups = [KVCacheGroup(("layer",), spec)]
        assert num_blocks_needed(groups, longest) == needed
        check_holds_one_request(groups, needed, longest)
        with pytest.raises(
            KVCacheTooSmall, match=rf"needs {needed}, including 1 reserved"
        ) as caught:
            check_holds_one_request(groups, needed - 1, longest)
        assert str(caught.value).endswith(advice)


@pytest.mark.req("FEA-06")
@pytest.mark.parametrize(("length", "blocks"), [(1, 1), (64, 1), (65, 2), (1000, 16)])
def test_ranks_that_share_the_tokens_of_a_block_need_fewer_blocks(length: int, blocks: int) -> None:
    groups = [KVCacheGroup(("a",), FullAttentionSpec(16, 8, 128, 2))]
    longest = LongestRequest(length, context_parallel_size=4)
    assert max_blocks(groups, longest) == blocks
    assert tokens_that_fit(groups, 1 + 2 * blocks, longest) == 2 * length


@given(st.integers(1, 8), st.integers(1, 8), st.booleans())
def test_the_shards_hold_every_kv_head_equally_often_and_in_order(
    fewer: int, times: int, has_more_heads: bool
) -> None:
    num_shards, total = (fewer, fewer * times) if has_more_heads else (fewer * times, fewer)
    shares = [HeadShare.of_shard(shard, num_shards, total) for shard in range(num_shards)]
    held = [head for share in shares for head in range(share.first, share.first + share.count)]
    copies = 1 if has_more_heads else times
    assert held == [head for head in range(total) for _ in range(copies)]


@pytest.mark.parametrize(
    "share", [(-1, 1, 4), (0, 0, 4), (3, 2, 4), (0, 1, 0)], ids=["before", "none", "after", "total"]
)
def test_a_share_of_heads_that_the_model_does_not_have_is_rejected(
    share: tuple[int, int, int],
) -> None:
    with pytest.raises(BadSpec, match="are not part of"):
        HeadShare(*share)
    with pytest.raises(msgspec.ValidationError, match="are not part of"):
        msgspec.convert(dict(zip(("first", "count", "total"), share, strict=True)), HeadShare)
