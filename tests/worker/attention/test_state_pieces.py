"""Chunks that stop on the way: what is left at a stop is what a chunk that ends there leaves."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.attention import state_backend
from longshore.worker.attention.state_pieces import PIECE_TOKENS, Convolution, Pieces, num_pieces

CPU = torch.device("cpu")
COUNTS = (300, 140, 64, 5)
STOPS = ((16, 64, 70, 299), (1, 2, 100), (63,), ())
NO_STOPS = ((),) * len(COUNTS)


def pieces_of(counts: tuple[int, ...], stops: tuple[tuple[int, ...], ...]) -> Pieces:
    numbers = np.array(counts)
    return Pieces(numbers.cumsum() - numbers, numbers, CPU, stops)


@pytest.mark.parametrize("stops", [STOPS, NO_STOPS], ids=["stops", "none"])
def test_every_token_has_one_place_and_no_piece_goes_beyond_a_stop(
    stops: tuple[tuple[int, ...], ...],
) -> None:
    pieces = pieces_of(COUNTS, stops)
    assert pieces.tokens.shape[1] == PIECE_TOKENS
    is_token = ~pieces.is_padding.flatten()
    assert pieces.tokens.flatten()[pieces.places].tolist() == list(range(sum(COUNTS)))
    assert is_token[pieces.places].all()
    assert is_token.sum() == sum(COUNTS)
    numbers = [num_pieces(count, of) for count, of in zip(COUNTS, stops, strict=True)]
    assert pieces.num_pieces.tolist() == numbers
    begins = np.cumsum((0, *COUNTS))
    wanted = [begins[chunk] + stop for chunk, of in enumerate(stops) for stop in of]
    assert pieces.tokens[pieces.after_stops, 0].tolist() == wanted


def test_the_width_is_that_of_the_longest_piece() -> None:
    assert pieces_of((20, 9), ((7, 12), ())).tokens.shape == (4, 9)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize(
    ("counts", "stops"), [((1, *COUNTS), ((), *STOPS)), ((300,), STOPS[:1])], ids=["many", "one"]
)
def test_a_convolution_stores_its_inputs_at_ends_and_stops(
    counts: tuple[int, ...], stops: tuple[tuple[int, ...], ...], width: int
) -> None:
    check_convolution(np.array(counts), stops, width)


def check_convolution(
    counts: npt.NDArray[np.int64], stops: tuple[tuple[int, ...], ...], width: int
) -> None:
    firsts, channels = counts.cumsum() - counts, 3
    generator = torch.Generator().manual_seed(width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    inputs, kept = normal(int(counts.sum()), channels), normal(len(counts), width - 1, channels)
    weight, bias = normal(width, channels), normal(channels)
    convolution = Convolution(firsts, counts, width, CPU, stops)
    got, stored = convolution.run(inputs, kept, weight, bias)
    ends = [*enumerate(counts.tolist())]
    ends += [(seq, stop) for seq, of_seq in enumerate(stops) for stop in of_seq]
    whole = [
        torch.cat((before, of_seq))
        for before, of_seq in zip(kept, inputs.split(counts.tolist()), strict=True)
    ]
    assert len(stored) == len(ends)
    for line, (seq, end) in zip(stored, ends, strict=True):
        assert torch.equal(line, whole[seq][end : end + width - 1])
    wanted = torch.cat([
        F.conv1d(of_seq.T[None], weight.T.unsqueeze(1), bias, groups=channels)[0].T
        for of_seq in whole
    ])  # fmt: skip
    torch.testing.assert_close(got, F.silu(wanted))


def mamba_scan(
    counts: tuple[int, ...], stops: tuple[tuple[int, ...], ...], inputs: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """inputs: state, x, b, c, dt of all of COUNTS; chunks are cut to `counts`. Returns the outputs,
    the states after the chunks, and those at the stops."""
    state, *tokens = inputs
    cut = [
        torch.cat([part[:n] for n, part in zip(counts, each.split(COUNTS), strict=False)])
        for each in tokens
    ]
    state = state[: len(counts)].clone()
    y, at_stops = state_backend.scan(
        pieces_of(counts, stops), state, *cut, -torch.tensor([0.1, 1.0])
    )
    return y, state, at_stops


def test_states_of_mamba_at_stops_are_those_of_shorter_chunks() -> None:
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(COUNTS)
    shapes = (len(COUNTS), 2, 3, 4), (num_tokens, 2, 3), (num_tokens, 1, 4), (num_tokens, 1, 4)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    inputs.append(torch.rand(num_tokens, 2, generator=generator))
    whole, ends, _ = mamba_scan(COUNTS, NO_STOPS, inputs)
    y, state, at_stops = mamba_scan(COUNTS, STOPS, inputs)
    torch.testing.assert_close(y, whole)
    torch.testing.assert_close(state, ends)
    index = 0
    for chunk, of_chunk in enumerate(STOPS):
        for stop in of_chunk:
            shorter = (*COUNTS[:chunk], stop)
            _, wanted, _ = mamba_scan(shorter, ((),) * len(shorter), inputs)
            torch.testing.assert_close(at_stops[index], wanted[chunk])
            index += 1
    assert len(at_stops) == index
