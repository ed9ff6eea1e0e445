"""Sizes of blocks."""

import pytest

from longshore.protocol.kv_cache_spec import FullAttentionSpec, KVCacheGroup


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
def test_a_request_holds_blocks_for_its_last_partly_filled_one_too(
    max_model_len: int, blocks: int
) -> None:
    assert FullAttentionSpec(16, 8, 128, 2).max_blocks(max_model_len) == blocks
