"""Decode and prefill attention and the KV write in Triton, against plain torch in float64."""

import math
import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from longshore.worker.attention.kind import PagedAttentionKind
from longshore.worker.attention.reach import Reach
from longshore.worker.attention.selector import make_attention
from longshore.worker.attention.torch_backend import TorchAttention
from longshore.worker.attention.triton_backend import TritonAttention
from longshore.worker.kernels.cascade_attention import (
    cascade_attention,
    num_shared_splits,
    pays,
)
from longshore.worker.kernels.decode_attention import decode_attention, num_splits
from longshore.worker.kernels.prefill_attention import prefill_attention
from longshore.worker.kernels.rotary import Rotation, rotary_
from longshore.worker.kernels.scoring import Scoring
from longshore.worker.kernels.write_kv import reference as write_in_torch
from longshore.worker.kernels.write_kv import write_kv
from longshore.worker.kv_cache.fp8 import FP8, KVScales
from tests.worker.attention.test_backends import PagedSequences
from tests.worker.caches import paged_kv
from tests.worker.kernels.variants import in_triton

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NUM_BLOCKS, MAX_BLOCKS = 40, 8


class Cell(NamedTuple):
    """One shape of attention. value_dim: of latents; 0: there are values."""

    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    value_dim: int = 0


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CELLS = [
    Cell(F32, 4, 2, 8, 4),
    Cell(F16, 4, 2, 64, 16),
    Cell(BF16, 8, 1, 80, 16),
    Cell(F32, 2, 2, 64, 7, window=9),
    Cell(F32, 2, 1, 96, 64, chunk=10),
    Cell(F32, 4, 1, 32, 1, softcap=5.0),
    Cell(F32, 4, 1, 32, 32, window=33, softcap=0.5, has_sinks=True),
    Cell(F16, 20, 1, 192, 16, has_sinks=True),
    Cell(F16, 70, 1, 16, 16),
    Cell(F32, 4, 1, 72, 16, value_dim=64),
    Cell(F16, 4, 1, 576, 16, value_dim=512),
    Cell(F32, 3, 1, 56, 16, value_dim=48),
    Cell(F32, 3, 3, 256, 32, window=40),
    Cell(F32, 2, 1, 64, 16, window=1),
    Cell(F32, 2, 1, 64, 128, chunk=64, has_sinks=True),
]


class Paged:
    """A random cache with lines of a block table. `nan_before(row, position)` makes the blocks that
    lie wholly before a position those of nobody, which hold NaN."""

    def __init__(self, cell: Cell, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.random = random.Random(seed)
        shape = (NUM_BLOCKS, cell.num_kv_heads, 2, cell.block_size, cell.head_dim)
        cache = torch.randn(shape, generator=self.generator).to(cell.dtype)
        cache[NUM_BLOCKS - 1] = math.nan
        self.keys, self.values = cache.unbind(2)
        if cell.value_dim:
            self.values = self.keys[..., : cell.value_dim]
        ids = list(range(1, NUM_BLOCKS - 1))
        self.random.shuffle(ids)
        lines = [[ids.pop() for _ in range(MAX_BLOCKS)] for _ in range(4)]
        self.table = torch.tensor(lines, dtype=torch.int32)
        self.max_tokens = MAX_BLOCKS * cell.block_size
        self.cell = cell
        self.reach = Reach(window=cell.window, chunk=cell.chunk)
        sinks = self.draw(cell.num_heads).float() if cell.has_sinks else None
        self.scoring = Scoring(cell.head_dim**-0.5, self.reach, cell.softcap, sinks)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.cell.dtype)

    def with_nobodys_blocks(self, spans: list[tuple[int, int, int]]) -> Tensor:
        """The table without the blocks that (row, first position, length) does not read."""
        table = torch.full_like(self.table, NUM_BLOCKS - 1)
        for row, first, length in spans:
            start = max(0, self.reach.first_key(first)) // self.cell.block_size
            end = -(-length // self.cell.block_size)
            table[row, start:end] = self.table[row, start:end]
        return table

    def check(self, got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
        tolerance = TOLERANCES[self.cell.dtype]
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one.double(), other, atol=tolerance, rtol=tolerance)


every_cell = pytest.mark.parametrize("cell", CELLS, ids=str)


@every_cell
@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.long), 3])
def test_decodes_equal_attention_in_float64(cell: Cell, splits: int) -> None:
    """Also a sequence of no tokens, whose result is 0, and one of one token."""
    paged = Paged(cell)
    rows = torch.tensor([0, 2, 1, 3])
    lens = torch.tensor([0, 1, paged.random.randrange(2, paged.max_tokens), paged.max_tokens])
    q = paged.draw(4, cell.num_heads, cell.head_dim)
    spans = [(row, max(n - 1, 0), n) for row, n in zip(rows.tolist(), lens.tolist(), strict=True)]
    table = paged.with_nobodys_blocks(spans)
    wide = q.double(), paged.keys.double(), paged.values.double()
    expected = decode_attention(*wide, table, rows, lens, paged.scoring)
    assert not expected[0][0].any()
    with in_triton():
        got = decode_attention(
            q, paged.keys, paged.values, table, rows, lens, paged.scoring, num_splits=splits
        )
    paged.check(got, expected)


@every_cell
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_chunks_equal_attention_in_float64(cell: Cell, seed: int) -> None:
    paged = Paged(cell, seed)
    chunks, first = [], 0
    for row in range(3):
        count = paged.random.randrange(1, min(40, paged.max_tokens))
        length = count if row == 0 else paged.random.randrange(count, paged.max_tokens + 1)
        chunks.append((row, first, count, length))
        first += count
    q = paged.draw(first, cell.num_heads, cell.head_dim)
    table = paged.with_nobodys_blocks([(row, n - count, n) for row, _, count, n in chunks])
    most = max(count for _, _, count, _ in chunks)
    wide = q.double(), paged.keys.double(), paged.values.double()
    packed = torch.tensor(chunks)
    expected = prefill_attention(*wide, table, packed, paged.scoring, max_tokens=most)
    with in_triton():
        got = prefill_attention(
            q, paged.keys, paged.values, table, packed, paged.scoring, max_tokens=most
        )
    paged.check(got, expected)


def test_splits_fill_the_gpu_but_do_not_become_shorter_than_a_tile() -> None:
    assert num_splits(1, 8, 100_000) == 64
    assert num_splits(256, 8, 100_000) == 1
    assert num_splits(8, 8, 100_000) == 16
    assert num_splits(1, 8, 300) == 2
    assert num_splits(1, 8, 1000) == 4
    assert num_splits(1, 8, 10) == 1


@pytest.mark.parametrize("is_fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("norm", [None, "like the heads", "float32"])
@pytest.mark.parametrize("dtype", [F32, pytest.param(F16, marks=pytest.mark.long), BF16], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "num_pairs"), [pytest.param(16, 8, marks=pytest.mark.long), (20, 6), (80, 40)]
)
def test_keys_and_queries_are_rotated_and_stored_as_in_two_steps(
    is_fp8: bool, norm: str | None, dtype: torch.dtype, head_dim: int, num_pairs: int
) -> None:
    """Queries, keys and values are views of one product. A slot of -1 is not written. There are
    more heads than a program computes."""
    heads = (6, 5, 5)
    generator = torch.Generator().manual_seed(head_dim)
    product = torch.randn(5, sum(heads), head_dim, generator=generator).to(dtype)
    angles = torch.randn(30, num_pairs, generator=generator)
    table = torch.stack((angles.cos(), angles.sin()), dim=1)
    positions, slots = torch.tensor([3, 29, 0, 7, 8]), torch.tensor([9, 2, -1, 31, 16])
    rotation = Rotation(positions, table)
    if norm is not None:
        weights = torch.randn(2, head_dim, generator=generator)
        weights = weights if norm == "float32" else weights.to(dtype)
        rotation = rotation.with_norms(*weights, 1e-5)
    scales = KVScales(0.5, 2.0) if is_fp8 else KVScales()
    stored = torch.zeros(4, 5, 2, 8, head_dim, dtype=FP8 if is_fp8 else dtype)
    expected, wanted = stored.clone(), product.clone()
    q, k, v = wanted.split(heads, dim=1)
    rotary_(q, k, rotation)
    write_in_torch(k, v, *expected.unbind(2), slots, scales)
    new_q, new_k, new_v = product.split(heads, dim=1)
    with in_triton():
        write_kv(new_q, new_k, new_v, *stored.unbind(2), slots, scales, rotation)
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(new_q, q, atol=tolerance, rtol=tolerance)
    if is_fp8:  # a sum rounded differently may be the next number in fp8
        assert (stored.float() - expected.float()).abs().le(expected.float().abs() / 8).all()
    else:
        torch.testing.assert_close(stored, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(new_v, v)


def test_values_are_stored_with_the_bits_that_torch_stores_in_fp8() -> None:
    values = torch.cat((torch.linspace(-500, 500, 61), torch.tensor([1e-4, math.nan, -0.0])))
    v = values.view(4, 1, 16)
    stored = torch.zeros(2, 1, 2, 4, 16, dtype=FP8)
    expected = stored.clone()
    slots, scales = torch.tensor([0, 3, 5, 6]), KVScales(1.0, 0.75)
    write_in_torch(v, v, *expected.unbind(2), slots, scales)
    with in_triton():
        write_kv(v, v, v, *stored.unbind(2), slots, scales)
    is_nan = expected.float().isnan()
    assert torch.equal(stored.float().isnan(), is_nan)
    assert torch.equal(stored.view(torch.uint8)[~is_nan], expected.view(torch.uint8)[~is_nan])


@pytest.mark.parametrize("scales", [None, KVScales(0.5, 2.0)], ids=["plain", "fp8"])
@pytest.mark.parametrize(
    "kind",
    [{}, {"window": 5}, {"chunk": 6}, {"softcap": 2.0}],
    ids=str,
)
def test_the_backend_computes_steps_of_decodes_and_chunks(
    kind: dict[str, Any], scales: KVScales | None
) -> None:
    with in_triton():
        sequences = PagedSequences(
            TritonAttention,
            [13, 9, 20],
            block_size=4,
            group=2,
            seed=1,
            kind=PagedAttentionKind(num_heads=0, **kind),
            has_sinks=True,
            scales=scales,
        )
        for counts in ([7, 3, 11], [1, 1, 1], [2, 1, 7], [1, 4, 0]):
            sequences.step(counts)
            sequences.take_back()


@pytest.mark.parametrize(("head_dim", "kind"), [(576, TritonAttention), (577, TorchAttention)])
def test_larger_heads_are_computed_in_torch(head_dim: int, kind: type) -> None:
    cache = paged_kv(2, num_layers=1, block_size=16, num_kv_heads=1, head_dim=head_dim)
    with in_triton():
        assert type(make_attention(cache, PagedAttentionKind(num_heads=1))) is kind


@pytest.mark.parametrize(
    "cell",
    [cell for cell in CELLS if cell.window is None and cell.chunk is None],
    ids=str,
)
@pytest.mark.parametrize("num_shared", [0, 1, 5])
def test_shared_blocks_are_read_from_the_first_sequence(cell: Cell, num_shared: int) -> None:
    """In the tables of the others, they are blocks of nobody. One sequence has nothing else, and
    the last one is padding."""
    paged = Paged(cell)
    shared = num_shared * cell.block_size
    rows = torch.tensor([1, 0, 3, 2])
    lens = torch.tensor([shared + 1, max(shared, 1), paged.max_tokens, 0])
    table = paged.table.clone()
    table[:, :num_shared] = table[1, :num_shared]
    q = paged.draw(4, cell.num_heads, cell.head_dim)
    wide = q.double(), paged.keys.double(), paged.values.double()
    expected = decode_attention(*wide, table, rows, lens, paged.scoring)
    table[rows[1:], :num_shared] = NUM_BLOCKS - 1
    with in_triton():
        got = cascade_attention(
            q,
            paged.keys,
            paged.values,
            table,
            rows,
            lens,
            torch.tensor([shared]),
            paged.scoring,
            num_splits=2,
            num_shared_splits=3,
        )
    assert got[0].isfinite().all()
    paged.check((got[0][:3], got[1][:3]), (expected[0][:3], expected[1][:3]))


def test_shared_blocks_are_read_once_if_that_saves_enough() -> None:
    token_bytes = 2 * 8 * 128 * 2
    assert pays(64, 512, token_bytes)
    assert not pays(16, 256, token_bytes)
    assert not pays(1, 100_000, token_bytes)
    assert num_shared_splits(64, 32, 8, 100_000) == 64
    assert num_shared_splits(512, 32, 8, 100_000) == 8
