"""States in units that are scattered over pages."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.protocol.kv_cache_spec import KVCacheConfig, KVCacheGroup, StateSpec
from longshore.worker.kv_cache.buffer import KVCache
from longshore.worker.kv_cache.state_pages import StatePages

NUM_BLOCKS = 40
HEADS, ROWS, WIDTH = 4, 8, 4
STATE, INPUTS = range(2)


def make_pages(
    unit_bytes: int, num_pages: int, num_layers: int = 2, channels: int = 5
) -> tuple[KVCache, StatePages]:
    spec = StateSpec(
        block_size=16,
        shapes=((HEADS, ROWS, WIDTH), (3, channels)),
        dtype_bytes=(4, 2),
        num_pages=num_pages,
        unit_bytes=unit_bytes,
    )
    names = tuple(f"layer.{layer}" for layer in range(num_layers))
    config = KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(names, spec),), "bfloat16")
    cache = KVCache(config, dtype=torch.bfloat16, device=torch.device("cpu"))
    view = cache.view(0)
    assert isinstance(view, StatePages)
    return cache, view


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    unit_bytes=st.sampled_from([8, 16, 32, 64, 128]),
    num_pages=st.integers(1, 9),
    num_layers=st.integers(1, 3),
    channels=st.integers(1, 9),
    seed=st.integers(0, 1 << 20),
)
@pytest.mark.req("STM-10")
def test_states_of_several_sequences_and_layers_are_read_as_they_were_written(
    unit_bytes: int, num_pages: int, num_layers: int, channels: int, seed: int
) -> None:
    cache, view = make_pages(unit_bytes, num_pages, num_layers, channels)
    generator = torch.Generator().manual_seed(seed)
    tables = 1 + torch.randperm(NUM_BLOCKS - 1, generator=generator)[: 3 * num_pages].view(3, -1)
    written = {}
    for layer in range(num_layers):
        for tensor, (shape, dtype) in enumerate(zip(view.spec.shapes, view.dtypes, strict=True)):
            values = torch.randn(3, *shape, generator=generator).to(dtype)
            view.write(tensor, layer, tables, values)
            written[layer, tensor] = values
    for (layer, tensor), values in written.items():
        assert torch.equal(view.read(tensor, layer, tables), values)
    others = np.setdiff1d(np.arange(NUM_BLOCKS), tables.numpy())
    assert not cache.buffer[torch.from_numpy(others)].any(), "other blocks are untouched"
    moved = tables.flip(0)
    cache.copy_blocks(tables[0], moved[0], torch.ones(num_pages, dtype=torch.int64), [num_pages])
    for (layer, tensor), values in written.items():
        expected = torch.stack((values[0], values[1], values[0]))
        assert torch.equal(view.read(tensor, layer, tables), expected), "a state is copied by pages"


@pytest.mark.parametrize("unit_bytes", [8, 32, 128])
def test_heads_are_read_and_written_alone(unit_bytes: int) -> None:
    _, view = make_pages(unit_bytes, num_pages=3)
    tables = torch.tensor([[7, 3, 5], [1, 9, 2]])
    whole = torch.randn(2, HEADS, ROWS, WIDTH)
    view.write(STATE, 1, tables, whole)
    view.write(STATE, 1, tables, -whole[:, 1:3], slice(1, 3))
    whole[:, 1:3].neg_()
    assert torch.equal(view.read(STATE, 1, tables), whole)
    assert torch.equal(view.read(STATE, 1, tables, slice(2, 4)), whole[:, 2:])
    assert not view.read(STATE, 0, tables).any(), "another layer"


def test_the_null_block_reads_as_the_state_before_the_first_token() -> None:
    _, view = make_pages(32, num_pages=3)
    assert not view.read(STATE, 0, torch.zeros(2, 3, dtype=torch.int64)).any()
    assert view.read(INPUTS, 0, torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3, 5)
