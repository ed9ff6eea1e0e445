"""The KV buffer: its layout, its size in bytes, and how many blocks memory holds."""

from pathlib import Path
from typing import Any

import pytest
import torch

from longshore.protocol.kv_cache_spec import FullAttentionSpec, KVCacheGroup
from longshore.worker import kv_cache
from longshore.worker.config import WorkerConfig
from longshore.worker.errors import KVCacheTooSmall
from longshore.worker.worker import Worker

CPU = torch.device("cpu")


def group_of(num_layers: int, num_kv_heads: int, head_dim: int = 128) -> KVCacheGroup:
    return kv_cache.attention_group(
        layers=range(num_layers),
        block_size=16,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=torch.float16,
    )


LLAMA_70B = group_of(80, 8)


@pytest.mark.req("NUM-15")
@pytest.mark.parametrize(("heads", "size_bytes"), [(32, 262_144), (40, 327_680), (8, 65_536)])
def test_bytes_of_a_block_of_one_layer(heads: int, size_bytes: int) -> None:
    assert group_of(1, heads).spec.page_size_bytes == size_bytes
    assert allocated(group_of(1, heads), 2).block_size_bytes == size_bytes


@pytest.mark.req("NUM-16")
@pytest.mark.parametrize(
    ("layers", "heads", "size_bytes"),
    [
        pytest.param(32, 32, 8_388_608, id="7B"),
        pytest.param(40, 40, 13_107_200, id="13B"),
        pytest.param(80, 8, 5_242_880, id="70B"),
        pytest.param(32, 8, 2_097_152, id="Mixtral"),
        pytest.param(126, 8, 8_257_536, id="405B"),
    ],
)
def test_bytes_of_a_block_of_all_layers(layers: int, heads: int, size_bytes: int) -> None:
    assert group_of(layers, heads).block_size_bytes == size_bytes
    assert allocated(group_of(layers, heads), 2).block_size_bytes == size_bytes


@pytest.mark.req("NUM-26")
def test_copying_a_block_of_the_70b_model_moves_5_24_megabytes() -> None:
    cache = allocated(LLAMA_70B, 3)
    cache.buffer[1] = 1.0
    cache.copy_blocks(*torch.tensor([[1], [2], [16]]))
    assert cache.block_size_bytes == cache.buffer[2].count_nonzero() * 2 == 5_242_880
    bandwidth = 3.35e12
    assert 1e6 * cache.block_size_bytes / bandwidth == pytest.approx(1.6, abs=0.05)
    assert 1e6 * 2 * cache.block_size_bytes / bandwidth == pytest.approx(3.1, abs=0.05)


@pytest.mark.req("COW-03")
def test_a_copy_has_keys_and_values_of_all_layers_and_nothing_behind_its_tokens() -> None:
    cache = allocated(group_of(3, 2, head_dim=4), 6)
    torch.manual_seed(0)
    cache.buffer[1:] = torch.randn(cache.buffer[1:].shape).half()
    before = cache.buffer.clone()
    # Block 3 is copied from and to: what it held goes on to block 5.
    cache.copy_blocks(*torch.tensor([[1, 3, 1], [3, 5, 4], [16, 5, 1]]))
    assert torch.equal(cache.buffer[3], before[1])
    assert torch.equal(cache.buffer[5, :, :, :5], before[3, :, :, :5])
    assert torch.equal(cache.buffer[4, :, :, :1], before[1, :, :, :1])
    assert not cache.buffer[5, :, :, 5:].any()
    assert not cache.buffer[4, :, :, 1:].any()
    assert torch.equal(cache.buffer[:3], before[:3])


@pytest.mark.req("NUM-17")
def test_grouped_heads_take_an_eighth_of_the_memory() -> None:
    assert LLAMA_70B.block_size_bytes / group_of(80, 64).block_size_bytes == 0.125


@pytest.mark.req("NUM-18")
def test_bytes_of_2048_blocks_of_the_70b_model() -> None:
    assert 2_048 * LLAMA_70B.block_size_bytes == 10_737_418_240


@pytest.mark.req("NUM-19")
def test_blocks_that_43_gigabytes_hold() -> None:
    num_blocks = measured(LLAMA_70B, 43 * 10**9)
    assert num_blocks == 8_201
    assert num_blocks * LLAMA_70B.spec.block_size == 131_216
    assert int(num_blocks * 0.01) == 82


@pytest.mark.req("NUM-20")
def test_blocks_that_seven_tenths_of_80_gibibytes_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_bytes", lambda device: 80 << 30)
    num_blocks = kv_cache.measure_num_blocks(
        LLAMA_70B, device=CPU, kv_cache_bytes=None, memory_fraction=0.7, max_useful_blocks=1
    )
    assert num_blocks == 11_468
    per_request = LLAMA_70B.spec.max_blocks(131_072)
    assert per_request == 8_192
    assert round(num_blocks / per_request, 2) == 1.40


def measured(group: KVCacheGroup, kv_cache_bytes: int) -> int:
    return kv_cache.measure_num_blocks(
        group,
        device=CPU,
        kv_cache_bytes=kv_cache_bytes,
        memory_fraction=None,
        max_useful_blocks=1,
    )


def allocated(group: KVCacheGroup, num_blocks: int) -> kv_cache.KVCache:
    config = kv_cache.cache_config(group, num_blocks, torch.float16)
    return kv_cache.allocate(config, dtype=torch.float16, device=CPU)


def test_a_cpu_takes_no_more_than_its_default_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_bytes", lambda device: 1 << 40)

    def default(group: KVCacheGroup, max_useful_blocks: int) -> int:
        return kv_cache.measure_num_blocks(
            group,
            device=CPU,
            kv_cache_bytes=None,
            memory_fraction=None,
            max_useful_blocks=max_useful_blocks,
        )

    assert default(LLAMA_70B, 10**9) == kv_cache.MAX_DEFAULT_CPU_BYTES // 5_242_880
    assert default(LLAMA_70B, 100) == 100


def test_the_default_cache_of_a_small_model_holds_all_rows_at_full_length(
    checkpoint: tuple[Path, Any],
) -> None:
    config = WorkerConfig(model=str(checkpoint[0]), max_num_seqs=4, show_progress=False)
    assert Worker(config).kv_cache.num_blocks == 4 * 256 // 16 + 1


@pytest.mark.req("SYS-04")
def test_a_block_is_one_contiguous_run_of_bytes_at_its_id_times_its_size() -> None:
    cache = allocated(group_of(3, 2, head_dim=4), 5)
    base = cache.buffer.data_ptr()
    assert cache.buffer.is_contiguous()
    assert cache.buffer.nbytes == 5 * cache.block_size_bytes
    for block_id in range(5):
        assert cache.buffer[block_id].data_ptr() == base + block_id * cache.block_size_bytes
        assert cache.buffer[block_id].is_contiguous()


def test_the_views_address_every_token_and_every_block() -> None:
    cache = allocated(group_of(3, 2, head_dim=4), 5)
    cache.buffer.copy_(torch.randn(cache.buffer.shape))
    tokens, blocks = cache.token_vectors(), cache.block_vectors()
    assert tokens.data_ptr() == blocks.data_ptr() == cache.buffer.data_ptr()
    for block_id, layer, plane, offset in [(0, 0, 0, 0), (4, 2, 1, 15), (3, 1, 0, 7)]:
        line = (block_id * 3 + layer) * 2 + plane
        wanted = cache.buffer[block_id, layer, plane]
        assert torch.equal(blocks[line], wanted.flatten())
        assert torch.equal(tokens[line * 16 + offset], wanted[offset].flatten())


def test_clearing_blocks_touches_no_other() -> None:
    cache = allocated(group_of(2, 2, head_dim=4), 5)
    cache.buffer.fill_(float("nan"))
    cache.clear(torch.tensor([3, 1]))
    assert [bool(block.isnan().any()) for block in cache.buffer] == [True, False, True, False, True]


def test_a_cache_that_cannot_hold_the_longest_request_is_refused(
    checkpoint: tuple[Path, Any],
) -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=2, dtype_bytes=4)
    kv_cache.check_holds_one_request(17, spec, 256)
    with pytest.raises(KVCacheTooSmall, match="needs 17 blocks"):
        kv_cache.check_holds_one_request(16, spec, 256)
    with pytest.raises(KVCacheTooSmall, match="max_model_len=256"):
        Worker(WorkerConfig(model=str(checkpoint[0]), num_blocks=16, show_progress=False))
    with pytest.raises(KVCacheTooSmall, match="hold at most 0 tokens"):
        Worker(WorkerConfig(model=str(checkpoint[0]), kv_cache_bytes=1, show_progress=False))
