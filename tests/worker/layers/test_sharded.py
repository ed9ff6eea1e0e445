"""Layers divided among shards give the same results as whole ones, for all sizes."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longshore.worker.layers.embedding import OutputHead, VocabParallelEmbedding
from longshore.worker.layers.linear import ColumnParallelLinear, Columns, RowParallelLinear
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensors
from longshore.worker.ranks.parallel import Parallel
from tests.worker.models.thread_ranks import on_every_rank

WIDTH = 6
SHARDS = st.integers(1, 5)


def fill(tensors: StoredTensors, checkpoint: dict[str, Tensor]) -> None:
    assert tensors.keys() == checkpoint.keys()
    for name, stored in tensors.items():
        assert stored.shape == tuple(checkpoint[name].shape)
        for place, index in stored.parts:
            place.copy_(checkpoint[name][index])


def of_every_shard(num_shards: int, compute: Callable[[Placement], Tensor]) -> list[Tensor]:
    def run(places: list[Parallel]) -> Tensor:
        return compute(Placement(torch.float64, torch.device("cpu"), places[0]))

    return on_every_rank(num_shards, 1, run)


def random(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 0.5


@settings(max_examples=40)
@given(vocab_size=st.integers(1, 40), num_shards=SHARDS)
def test_every_token_has_its_vector_and_its_score(vocab_size: int, num_shards: int) -> None:
    table, ids = random(vocab_size, WIDTH), torch.arange(vocab_size, dtype=torch.int32)

    def compute(placement: Placement) -> Tensor:
        embedding = VocabParallelEmbedding(vocab_size, WIDTH, placement)
        head = OutputHead(vocab_size, WIDTH, placement)
        tied = OutputHead(vocab_size, WIDTH, placement, tied_to=embedding)
        fill({"e": embedding.stored(), "h": head.stored()}, {"e": table, "h": table})
        vectors = embedding(ids)
        torch.testing.assert_close(vectors, table)
        torch.testing.assert_close(tied(vectors), head(vectors))
        return head(vectors)

    for scores in of_every_shard(num_shards, compute):
        torch.testing.assert_close(scores, (table @ table.T).float())


@settings(max_examples=40)
@given(
    parts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    num_shards=SHARDS,
    bias=st.booleans(),
    is_stacked=st.booleans(),
)
def test_column_and_row_parallel_products_equal_the_whole_one(
    parts: list[int], num_shards: int, bias: bool, is_stacked: bool
) -> None:
    sizes = [part * num_shards for part in parts]
    inner = sizes[0]
    names = ["in"] if is_stacked else [f"in{index}" for index in range(len(sizes))]
    weights = [random(size, WIDTH) for size in sizes]
    biases = [random(size) + size for size in sizes]
    if is_stacked:
        weights, biases = [torch.cat(weights)], [torch.cat(biases)]
    stored = {f"{name}.weight": weight for name, weight in zip(names, weights, strict=True)}
    stored |= {f"{name}.bias": b for name, b in zip(names, biases, strict=True)} if bias else {}
    out = {"out.weight": random(WIDTH, inner)} | ({"out.bias": random(WIDTH) + 1} if bias else {})
    x = random(3, WIDTH)

    def compute(placement: Placement) -> Tensor:
        columns = [Columns(size, placement.parallel.share(size)) for size in sizes]
        into = ColumnParallelLinear(WIDTH, columns, bias=bias, placement=placement)
        back = RowParallelLinear(inner, WIDTH, bias=bias, placement=placement)
        fill(into.checkpoint_tensors(names), stored)
        fill(back.checkpoint_tensors("out"), out)
        return back(into(x)[:, : inner // num_shards].contiguous())

    first = F.linear(x, weights[0], biases[0] if bias else None)[:, :inner]
    wanted = F.linear(first, out["out.weight"], out.get("out.bias"))
    for got in of_every_shard(num_shards, compute):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("size", [1, 2, 17, 300])
def test_a_packed_matrix_gives_the_same_product(size: int) -> None:
    placement = Placement(torch.bfloat16, torch.device("cpu"))
    linear = RowParallelLinear(48, 80, bias=True, placement=placement)
    checkpoint = {"m.weight": random(80, 48).bfloat16(), "m.bias": random(80).bfloat16()}
    fill(linear.checkpoint_tensors("m"), checkpoint)
    x = random(size, 48).bfloat16()
    placement.loaded()
    wanted = F.linear(x.float(), checkpoint["m.weight"].float(), checkpoint["m.bias"].float())
    torch.testing.assert_close(linear(x).float(), wanted, rtol=2**-7, atol=2**-9)


def test_packing_a_tied_head_does_not_change_the_embeddings() -> None:
    placement = Placement(torch.bfloat16, torch.device("cpu"))
    embedding = VocabParallelEmbedding(50, 16, placement)
    head = OutputHead(50, 16, placement, tied_to=embedding)
    table = random(50, 16).bfloat16()
    fill({"e": embedding.stored()}, {"e": table})
    placement.loaded()
    assert torch.equal(embedding(torch.arange(50)), table)
    wanted = table.float() @ table.float().T
    torch.testing.assert_close(head(table), wanted, rtol=2**-7, atol=2**-9)
