"""Chunks of reads, and the memory in which they are gathered."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longshore.connectors.pull.layout import Pattern
from longshore.connectors.pull.p2p import staging
from longshore.connectors.pull.p2p.gloo import GlooLibrary
from longshore.connectors.pull.p2p.staging import StagingPool, chunks_of, positions_of
from longshore.connectors.pull.transport import BlockReads
from tests.connectors.pull.p2p.sides import ids

OWNER_BYTES, READER_BYTES = 64, 96


@st.composite
def block_reads(draw: st.DrawFn) -> BlockReads:
    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    starts = np.cumsum([0, *lengths[:-1]]) + draw(st.integers(0, 8))
    pattern = Pattern(starts, starts[::-1].copy() * 2, np.array(lengths))
    count = draw(st.integers(1, 6))
    owner, reader = (np.array(draw(st.permutations(range(6)))[:count], np.int64) for _ in range(2))
    return BlockReads(pattern, owner, reader)


@pytest.mark.req("CRG-03")
@given(st.lists(block_reads(), min_size=1, max_size=3), st.integers(1, 40), st.integers(1, 5))
def test_chunks_copy_every_byte_once_in_order(
    reads: list[BlockReads], chunk_bytes: int, max_runs: int
) -> None:
    found: list[tuple[int, int]] = []
    for chunk in chunks_of(reads, OWNER_BYTES, READER_BYTES, chunk_bytes, max_runs):
        assert 0 < chunk.num_bytes <= chunk_bytes
        assert len(chunk.lengths) <= max_runs
        for owner, reader, length in zip(*(each.tolist() for each in chunk), strict=True):
            found += [(owner + offset, reader + offset) for offset in range(length)]
    wanted = [
        (owner * OWNER_BYTES + first + offset, reader * READER_BYTES + own_first + offset)
        for pattern, owners, readers in reads
        for owner, reader in zip(owners.tolist(), readers.tolist(), strict=True)
        for first, own_first, length in zip(*(each.tolist() for each in pattern), strict=True)
        for offset in range(length)
    ]
    assert found == wanted


def test_neighbours_are_one_run() -> None:
    whole = Pattern(ids(0), ids(0), ids(16))
    (chunk,) = chunks_of([BlockReads(whole, ids(3, 4, 5), ids(7, 8, 1))], 16, 16)
    assert [each.tolist() for each in chunk] == [[48, 80], [112, 16], [32, 16]]
    assert positions_of(chunk.lengths).tolist() == [0, 32]


@pytest.mark.req("CRG-03")
def test_staging_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "CHUNK_BYTES", 8)
    pool = StagingPool(GlooLibrary("127.0.0.1"), num_buffers=2)
    first, second = pool.take(0.0), pool.take(0.0)
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    assert pool.take(0.01) is None
    pool.release(first)
    assert pool.take(0.0) is first
    pool.replace(first, is_unused=True)
    third = pool.take(0.0)
    assert third is not None
    assert third is not first, "what a failed transfer has used is never used again"
    pool.replace(third, is_unused=False)
    assert pool.take(0.0) is None, "what the library may still use counts"
