"""One token of short convolutions: the Triton kernel against float64, and what it may touch."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from longshore.worker.kernels.conv_step import ConvWeights, conv_step, reference
from longshore.worker.kernels.operators import num_launches
from tests.worker.kernels.placed_states import ANY_LENGTHS, LAYER, PlacedStates
from tests.worker.kernels.variants import in_triton


@dataclass(frozen=True)
class Shape:
    """num_heads: number of channels; each is a head without a state."""

    num_heads: int = 34
    conv_width: int = 3
    has_bias: bool = True
    unit_bytes: int = 16
    num_pages: int = 7


def run(
    shape: Shape, lens: tuple[int, ...], dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, PlacedStates]:
    """The outputs, those of float64, and the states after both. The inputs of the step are a part
    of a wider tensor."""
    generator = torch.Generator().manual_seed(len(lens))

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    n, channels = len(lens), shape.num_heads
    weights = ConvWeights(
        weight=normal(shape.conv_width, channels),
        bias=normal(channels) if shape.has_bias else None,
    )
    states = PlacedStates(
        ((channels, 0), (shape.conv_width - 1, channels)),
        lens,
        dtype,
        unit_bytes=shape.unit_bytes,
        num_pages=shape.num_pages,
        device=device,
    )
    inputs = normal(n, channels + 3).to(dtype)[:, :channels]
    exact = ConvWeights(*(None if each is None else each.double() for each in weights))
    wanted = reference(inputs, states.exact, LAYER, *states.of_kernel, exact)
    got = conv_step(inputs, states.pages, LAYER, *states.of_kernel, weights)
    return got, wanted, states


def check(shape: Shape, lens: tuple[int, ...], dtype: torch.dtype) -> None:
    with in_triton():
        got, wanted, states = run(shape, lens, dtype)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, rtol=2e-5, atol=2e-5)
    states.check(2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_sequences_of_any_length_advance_by_one_token(dtype: torch.dtype) -> None:
    check(Shape(), ANY_LENGTHS, dtype)


@pytest.mark.parametrize("shape", [
    Shape(num_heads=1, conv_width=2, unit_bytes=8),
    Shape(num_heads=256, conv_width=4, unit_bytes=64, num_pages=1, has_bias=False),
    Shape(num_heads=257, conv_width=5, unit_bytes=512, num_pages=13),
    Shape(num_heads=64, unit_bytes=512, num_pages=5),
], ids=str)  # fmt: skip
def test_sizes_cross_every_border_of_a_program_a_unit_and_a_page(shape: Shape) -> None:
    check(shape, (1, 2, 5, 0, 3), torch.float32)


def test_a_step_without_sequences_launches_nothing() -> None:
    with in_triton():
        out, *_ = run(Shape(), (), torch.float32)
    assert out.shape == (0, 34)


def test_the_launch_is_declared() -> None:
    assert num_launches("conv_step") == 1
