"""The KV buffer: its layout, its size in bytes, and how many blocks memory holds."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import EngineDead, KVCacheTooSmall
from longshore.protocol.kv_cache_spec import (
    CustomSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    LongestRequest,
    MLAAttentionSpec,
    SlidingWindowSpec,
    StateSpec,
)
from longshore.worker.config import WorkerConfig
from longshore.worker.kv_cache import buffer as kv_cache
from longshore.worker.kv_cache.fp8 import Fp8Layers, KVScales
from longshore.worker.kv_cache.state_pages import StatePages
from longshore.worker.worker import Worker
from tests.worker.caches import attention_group

CPU = torch.device("cpu")


def group_of(num_layers: int, num_kv_heads: int, head_dim: int = 128) -> KVCacheGroup:
    return attention_group(num_layers, num_kv_heads, head_dim, block_size=16, dtype_bytes=2)


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
    cache.buffer[1] = 1
    cache.copy_blocks(*torch.tensor([[1], [2], [16]]), [1])
    assert cache.block_size_bytes == cache.buffer[2].count_nonzero() == 5_242_880
    bandwidth = 3.35e12
    assert 1e6 * cache.block_size_bytes / bandwidth == pytest.approx(1.6, abs=0.05)
    assert 1e6 * 2 * cache.block_size_bytes / bandwidth == pytest.approx(3.1, abs=0.05)


@pytest.mark.req("COW-03", "ERR-39")
def test_a_copy_has_keys_and_values_of_all_layers_and_zeros_after_its_tokens() -> None:
    cache = allocated(group_of(3, 2, head_dim=4), 6)
    torch.manual_seed(0)
    planes = cache.view(0).planes
    planes[1:] = torch.randn(planes[1:].shape).half()
    before = planes.clone()
    # Block 3 is copied from and to: its old content is copied to block 5.
    cache.copy_blocks(*torch.tensor([[1, 3, 1], [3, 5, 4], [16, 5, 1]]), [3])
    assert torch.equal(planes[3], before[1])
    assert torch.equal(planes[5, :, :, :, :5], before[3, :, :, :, :5])
    assert torch.equal(planes[4, :, :, :, :1], before[1, :, :, :, :1])
    assert not planes[5, :, :, :, 5:].any()
    assert not planes[4, :, :, :, 1:].any()
    assert torch.equal(planes[:3], before[:3])


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
        [LLAMA_70B], device=CPU, kv_cache_bytes=None, memory_fraction=0.7, max_useful_blocks=1
    )
    assert num_blocks == 11_468
    per_request = LLAMA_70B.spec.max_blocks(LongestRequest(131_072))
    assert per_request == 8_192
    assert round(num_blocks / per_request, 2) == 1.40


def measured(group: KVCacheGroup, kv_cache_bytes: int) -> int:
    return kv_cache.measure_num_blocks(
        [group],
        device=CPU,
        kv_cache_bytes=kv_cache_bytes,
        memory_fraction=None,
        max_useful_blocks=1,
    )


def allocated(group: KVCacheGroup, num_blocks: int) -> kv_cache.KVCache:
    config = KVCacheConfig(num_blocks, (group,), "float16")
    return kv_cache.KVCache(config, dtype=torch.float16, device=CPU)


def test_the_default_cache_of_a_cpu_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_bytes", lambda device: 1 << 40)

    def default(group: KVCacheGroup, max_useful_blocks: int) -> int:
        return kv_cache.measure_num_blocks(
            [group],
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


@pytest.mark.req("ERR-39")
def test_the_address_of_a_token_depends_on_head_layer_and_keys_or_values() -> None:
    num_heads, num_layers, head_dim, itemsize = 3, 2, 4, 2
    cache = allocated(group_of(num_layers, num_heads, head_dim), 5)
    planes = cache.view(0).planes
    for block, head, layer, values, token in ((0, 0, 0, 0, 0), (4, 2, 1, 1, 15), (2, 1, 0, 1, 7)):
        position = ((head * num_layers + layer) * 2 + values) * 16 + token
        address = block * cache.block_size_bytes + position * head_dim * itemsize
        found = planes[block, head, layer, values, token].data_ptr()
        assert found == cache.buffer.data_ptr() + address


@given(
    num_heads=st.integers(1, 8),
    num_layers=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.float8_e4m3fn]),
    data=st.data(),
)
def test_any_range_of_kv_heads_of_a_block_is_one_run_of_bytes(
    num_heads: int, num_layers: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, num_heads - 1))
    end = data.draw(st.integers(first + 1, num_heads))
    group = attention_group(num_layers, num_heads, 8, block_size=4, dtype_bytes=dtype.itemsize)
    larger = attention_group(num_layers + 1, num_heads, 8, block_size=4, dtype_bytes=dtype.itemsize)
    buffer = torch.zeros((3, larger.block_size_bytes), dtype=torch.uint8)
    view = kv_cache.view_blocks(buffer, group, dtype)
    assert isinstance(view, kv_cache.PagedKV)
    view.planes.view(torch.uint8)[1, first:end] = 255
    head_bytes = group.block_size_bytes // num_heads
    offset, size = first * head_bytes, (end - first) * head_bytes
    expected = torch.zeros_like(buffer)
    expected[1, offset : offset + size] = 255
    assert torch.equal(buffer, expected)


def test_clearing_blocks_touches_no_other() -> None:
    cache = allocated(group_of(2, 2, head_dim=4), 5)
    cache.buffer.fill_(255)
    cache.clear(torch.tensor([3, 1]))
    assert [bool(block.any()) for block in cache.buffer] == [True, False, True, False, True]


def test_a_cache_that_cannot_hold_the_longest_request_is_rejected(
    checkpoint: tuple[Path, Any],
) -> None:
    settings: dict[str, Any] = {"model": str(checkpoint[0]), "show_progress": False}
    with pytest.raises(KVCacheTooSmall, match="max_model_len=256"):
        assert Worker(WorkerConfig(**settings, num_blocks=16)).kv_cache
    with pytest.raises(KVCacheTooSmall, match="num_blocks=0 are too few"):
        assert Worker(WorkerConfig(**settings, kv_cache_bytes=1)).kv_cache


FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=4, dtype_bytes=2)
WINDOW = SlidingWindowSpec(
    block_size=32, num_kv_heads=1, head_size=4, dtype_bytes=2, sliding_window=40
)
LATENT = MLAAttentionSpec(block_size=16, head_size=10, dtype_bytes=2)
STATE = StateSpec(block_size=16, shapes=((2, 3), (5, 1)), dtype_bytes=(4, 2), num_pages=2)
CUSTOM = CustomSpec(16, page_size_bytes=24, manager="package.module:Class")


def hybrid(num_blocks: int) -> kv_cache.KVCache:
    """Groups of several kinds; only the second one needs a whole block."""
    groups = tuple(
        KVCacheGroup(tuple(f"{type(spec).__name__} {layer}" for layer in range(num_layers)), spec)
        for spec, num_layers in ((FULL, 3), (WINDOW, 4), (LATENT, 2), (STATE, 2), (CUSTOM, 1))
    )
    config = KVCacheConfig(num_blocks, groups, "float16")
    return kv_cache.KVCache(config, dtype=torch.float16, device=CPU)


def test_every_group_has_its_own_view_of_the_same_blocks() -> None:
    cache = hybrid(5)
    assert cache.block_size_bytes == 4 * 2 * 32 * 4 * 2
    views = [cache.view(group) for group in range(5)]
    full, window, latent, state, custom = views
    assert full.planes.shape == (5, 2, 3, 2, 16, 4)
    assert (full.num_blocks, full.num_layers, full.block_size) == (5, 3, 16)
    assert (full.num_kv_heads, full.head_dim, full.dtype) == (2, 4, torch.float16)
    assert window.planes.shape == (5, 1, 4, 2, 32, 4)
    assert window.planes[3].is_contiguous()
    assert latent.latents.shape == (5, 2, 16, 10)
    assert (latent.num_layers, latent.block_size, latent.head_size) == (2, 16, 10)
    assert isinstance(state, StatePages)
    assert state.dtypes == (torch.float32, torch.float16)
    assert state.buffer.data_ptr() == cache.buffer.data_ptr()
    assert custom.pages.shape == (5, 1, 24)
    tensors = [full.planes, window.planes, latent.latents, custom.pages]
    for tensor in tensors:
        assert tensor.stride(0) * tensor.element_size() == cache.block_size_bytes
        before = cache.buffer.clone()
        tensor[3] = 1
        changed = (cache.buffer != before).any(dim=1)
        assert changed.tolist() == [False, False, False, True, False]
        cache.buffer.zero_()


def test_the_parts_of_a_block_that_layers_have_do_not_overlap() -> None:
    cache = hybrid(2)
    for group in range(5):
        view = cache.view(group)
        match view:
            case kv_cache.PagedKV():
                parts = [view.planes.transpose(1, 2)]
            case kv_cache.PagedLatents():
                parts = [view.latents]
            case StatePages():
                continue  # see test_state_pages
            case kv_cache.PagedBytes():
                parts = [view.pages]
        num_bytes = 0
        for part in parts:
            for layer in range(part.shape[1]):
                part[1, layer].view(torch.uint8).fill_(255)
                num_bytes += part[1, layer].nbytes
        assert int((cache.buffer == 255).sum()) == num_bytes
        cache.buffer.zero_()


@pytest.mark.req("COW-03")
def test_a_copy_is_truncated_according_to_the_spec_of_its_group() -> None:
    cache = hybrid(12)
    cache.buffer[1:] = torch.randint(1, 100, cache.buffer[1:].shape, dtype=torch.uint8)
    before = cache.buffer.clone()
    # Two of the first group, one of the second, none of the third, one of the fourth.
    copies = torch.tensor([[1, 2, 3, 4], [6, 7, 8, 9], [16, 5, 20, 7]])
    cache.copy_blocks(*copies, [2, 1, 0, 1, 0])
    unpadded = cache.groups[0].block_size_bytes
    assert torch.equal(cache.buffer[6, :unpadded], before[1, :unpadded])
    full, window = cache.view(0).planes, cache.view(1).planes
    assert torch.equal(full[7, :, :, :, :5], full[2, :, :, :, :5])
    assert not full[7, :, :, :, 5:].any()
    assert torch.equal(window[8, :, :, :, :20], window[3, :, :, :, :20])
    assert not window[8, :, :, :, 20:].any()
    assert torch.equal(cache.buffer[9], before[4])
    kept = [0, 1, 2, 3, 4, 5, 10, 11]
    assert torch.equal(cache.buffer[kept], before[kept])


@pytest.mark.req("COW-03")
def test_a_copy_in_fp8_holds_zeros_after_the_shared_tokens() -> None:
    spec = FullAttentionSpec(16, num_kv_heads=2, head_size=4, dtype_bytes=1)
    config = KVCacheConfig(4, (KVCacheGroup(("a", "b"), spec),), "fp8_e4m3")
    scales = {"b": KVScales(0.5, 2.0)}
    cache = kv_cache.KVCache(config, dtype=torch.bfloat16, device=CPU, scales=scales)
    view = cache.view(0)
    assert isinstance(view, kv_cache.PagedKV)
    assert view.dtype == torch.bfloat16
    assert view.fp8 == Fp8Layers(torch.bfloat16, (KVScales(), KVScales(0.5, 2.0)))
    cache.buffer[1:] = torch.randint(1, 127, cache.buffer[1:].shape, dtype=torch.uint8)
    before = cache.buffer.clone()
    cache.copy_blocks(*torch.tensor([[1], [3], [5]]), [1])
    planes = view.planes.view(torch.uint8)
    assert torch.equal(planes[3, :, :, :, :5], planes[1, :, :, :, :5])
    assert not planes[3, :, :, :, 5:].any()
    assert torch.equal(cache.buffer[:3], before[:3])
    cache.clear(torch.tensor([3]))
    assert not view.planes[3].any()


def test_a_stage_without_layers_of_a_group_has_blocks_for_the_others() -> None:
    groups = (KVCacheGroup(("a",), FULL), KVCacheGroup((), WINDOW))
    cache = kv_cache.KVCache(KVCacheConfig(3, groups, "float16"), dtype=torch.float16, device=CPU)
    assert cache.block_size_bytes == FULL.page_size_bytes
    cache.copy_blocks(*torch.tensor([[1], [2], [20]]), [0, 1])


@pytest.fixture
def kept_fd() -> Iterator[int]:
    fd = os.memfd_create("kv")
    yield fd
    os.close(fd)


def in_memory(fd: int, adopted: list[int] | None, num_blocks: int = 4) -> kv_cache.KVCache:
    block_ids = None if adopted is None else int32_array(adopted)
    return kv_cache.KVCache(
        KVCacheConfig(num_blocks, (group_of(2, 1),), "bfloat16"),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        memory=kv_cache.KVMemory(fd, block_ids),
    )


def test_blocks_outlive_the_cache_if_they_are_adopted(kept_fd: int) -> None:
    former = in_memory(kept_fd, None)
    assert not former.buffer.any()
    former.buffer[1:] = torch.arange(3)[:, None] + 1
    assert in_memory(kept_fd, [1, 3]).buffer[:, 0].tolist() == [0, 1, 2, 3]
    assert not in_memory(kept_fd, None).buffer.any()


def test_memory_of_another_size_is_not_adopted(kept_fd: int) -> None:
    in_memory(kept_fd, None, num_blocks=5)
    with pytest.raises(EngineDead, match=r"has \d+ bytes, but needs \d+"):
        in_memory(kept_fd, [1])


def test_memory_that_no_machine_has_is_refused_when_it_is_mapped(kept_fd: int) -> None:
    with pytest.raises(MemoryError):
        in_memory(kept_fd, None, num_blocks=1 << 40)
