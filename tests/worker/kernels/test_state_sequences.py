"""Sequences through layers with states in the compiled kernels: any numbers of tokens, and states
that are kept on the way. What a token computes is tested with `delta_step` and `state_step`."""

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from longshore.protocol.kv_cache_spec import StateSpec
from longshore.worker.kernels.delta_step import DeltaWeights, delta_sequences
from longshore.worker.kernels.native import Native
from longshore.worker.kernels.state_sequences import PIECE_TOKENS, StateSequences
from longshore.worker.kernels.state_step import StateWeights, state_sequences
from longshore.worker.kv_cache.state_pages import StatePages
from tests.worker.kernels.variants import native_only, using

LAYER, NUM_LAYERS, NUM_PAGES = 1, 2, 9
COUNTS = (2 * PIECE_TOKENS + 6, 1, PIECE_TOKENS + 1, 2)
BEFORE = (9, 0, 5, 0)
STOPS = ((1, PIECE_TOKENS, 40, COUNTS[0]), (), (COUNTS[2],), (1,))

Advance: TypeAlias = Callable[[slice, StatePages, StateSequences], Tensor]


def normal(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


def of_tokens(width: int, dtype: torch.dtype) -> Tensor:
    return normal(sum(COUNTS), width).to(dtype)


def delta(row_size: int, dtype: torch.dtype) -> tuple[tuple[tuple[int, ...], ...], Advance]:
    """The shapes of a random layer's states, and what advances some of the tokens."""
    channels = 2 * 2 * 8 + 4 * row_size
    weights = DeltaWeights(normal(4, channels), -normal(4).exp(), normal(4))
    inputs, dt, beta = (of_tokens(width, dtype) for width in (channels, 4, 4))

    def advance(tokens: slice, pages: StatePages, sequences: StateSequences) -> Tensor:
        step = (inputs[tokens], dt[tokens], beta[tokens], pages, LAYER, sequences)
        return delta_sequences(*step, weights, num_key_heads=2)

    return ((4, 8, row_size), (3, channels)), advance


def mamba(row_size: int, dtype: torch.dtype) -> tuple[tuple[tuple[int, ...], ...], Advance]:
    channels = 4 * 20 + 2 * 2 * row_size
    of_heads = (-normal(4).exp(), normal(4), normal(4))
    weights = StateWeights(normal(4, channels), normal(channels), *of_heads)
    inputs, dt = (of_tokens(width, dtype) for width in (channels, 4))

    def advance(tokens: slice, pages: StatePages, sequences: StateSequences) -> Tensor:
        step = (inputs[tokens], dt[tokens], pages, LAYER, sequences)
        return state_sequences(*step, weights, num_groups=2)

    return ((4, 20, row_size), (3, channels)), advance


@native_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row_size", [17, 64], ids=["rows cross units", "whole rows"])
@pytest.mark.parametrize("layer", [delta, mamba])
def test_tokens_of_one_step_have_the_bits_of_steps_of_their_own(
    kernels: Native,
    layer: Callable[[int, torch.dtype], tuple[tuple[tuple[int, ...], ...], Advance]],
    row_size: int,
    dtype: torch.dtype,
) -> None:
    """Also the states that are kept on the way."""
    shapes, advance = layer(row_size, dtype)
    spec = StateSpec(
        block_size=16,
        shapes=shapes,
        dtype_bytes=(4, dtype.itemsize),
        num_pages=NUM_PAGES,
        unit_bytes=256,
    )
    num_states = len(COUNTS) + sum(map(len, STOPS))
    drawn = torch.randperm(num_states * NUM_PAGES, generator=torch.Generator().manual_seed(0))
    tables = drawn.int().view(num_states, NUM_PAGES)

    def pages() -> StatePages:
        buffer = torch.zeros(drawn.numel(), spec.page_bytes(NUM_LAYERS), dtype=torch.uint8)
        made = StatePages(buffer, spec, NUM_LAYERS, (torch.float32, dtype))
        for tensor, shape in enumerate(shapes):
            values = normal(num_states, *shape).to(made.dtypes[tensor])
            made.write(tensor, LAYER, tables.long(), values)
        return made

    together, apart = pages(), pages()
    kept = iter(tables[len(COUNTS) :])
    stops = [[(stop, next(kept)) for stop in each] for each in STOPS]
    firsts = [sum(COUNTS[:seq]) for seq in range(len(COUNTS))]
    lines = [
        [seq, first, count, BEFORE[seq] + count]
        for seq, (first, count) in enumerate(zip(firsts, COUNTS, strict=True))
    ]
    with using(kernels.instruction_set, num_threads=2):
        at_stops = [[(stop, to.numpy()) for stop, to in each] for each in stops]
        got = advance(slice(None), together, StateSequences(tables, torch.tensor(lines), at_stops))
        for seq, first, count, _ in lines:
            for token in range(count):
                place = slice(first + token, first + token + 1)
                length = torch.tensor([BEFORE[seq] + token + 1])
                alone = StateSequences.of_single_tokens(tables, torch.tensor([seq]), length)
                assert torch.equal(advance(place, apart, alone), got[place])
                for target in (to for stop, to in stops[seq] if stop == token + 1):
                    for tensor in range(2):
                        state = apart.read(tensor, LAYER, tables[seq : seq + 1].long())
                        apart.write(tensor, LAYER, target[None].long(), state)
    for tensor in range(2):
        states = [each.read(tensor, LAYER, tables.long()) for each in (together, apart)]
        assert torch.equal(*states)
