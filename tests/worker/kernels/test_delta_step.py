"""One token of gated DeltaNet sequences: the kernels against float64, and what they may touch."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from longshore.worker.kernels.delta_step import DeltaWeights, delta_step, reference
from longshore.worker.kernels.operators import num_launches
from tests.worker.kernels.placed_states import ANY_LENGTHS, LAYER, PlacedStates
from tests.worker.kernels.variants import every_variant_and_triton, in_triton, using

TOLERANCES = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Shape:
    num_heads: int = 6
    num_key_heads: int = 2
    key_dim: int = 5
    value_dim: int = 17
    conv_width: int = 4
    unit_bytes: int = 16
    num_pages: int = 7

    @property
    def num_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim


def run(
    shape: Shape, lens: tuple[int, ...], dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, PlacedStates]:
    """The outputs, those of float64, and the states after both. The tensors of the step are parts
    of wider ones."""
    generator = torch.Generator().manual_seed(len(lens))

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    n, channels = len(lens), shape.num_channels
    weights = DeltaWeights(
        conv_weight=normal(shape.conv_width, channels),
        decay=-normal(shape.num_heads).exp(),
        dt_bias=8 * normal(shape.num_heads),
    )
    states = PlacedStates(
        ((shape.num_heads, shape.key_dim, shape.value_dim), (shape.conv_width - 1, channels)),
        lens,
        dtype,
        unit_bytes=shape.unit_bytes,
        num_pages=shape.num_pages,
        device=device,
    )
    inputs = normal(n, channels + 3).to(dtype)[:, :channels]
    dt, beta = (normal(n, shape.num_heads + 1).to(dtype)[:, 1:] for _ in range(2))
    tokens, keys = (inputs, dt, 8 * beta), {"num_key_heads": shape.num_key_heads}
    exact = DeltaWeights(*(each.double() for each in weights))
    wanted = reference(*tokens, states.exact, LAYER, *states.of_kernel, exact, **keys)
    got = delta_step(*tokens, states.pages, LAYER, *states.of_kernel, weights, **keys)
    return got, wanted, states


def check(variant: str, shape: Shape, lens: tuple[int, ...], dtype: torch.dtype) -> None:
    with using(variant, num_threads=2):
        got, wanted, states = run(shape, lens, dtype)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)
    states.check(tolerance)


@every_variant_and_triton
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_sequences_of_any_length_advance_by_one_token(variant: str, dtype: torch.dtype) -> None:
    check(variant, Shape(num_heads=2), ANY_LENGTHS, dtype)


@every_variant_and_triton
@pytest.mark.parametrize("shape", [
    Shape(num_heads=3, num_key_heads=3, key_dim=1, value_dim=2, conv_width=5, unit_bytes=8),
    Shape(num_heads=4, num_key_heads=1, key_dim=16, value_dim=16, conv_width=2, unit_bytes=64,
          num_pages=1),
    Shape(num_heads=3, num_key_heads=1, key_dim=33, value_dim=50, conv_width=3),
    Shape(num_heads=2, num_key_heads=1, key_dim=20, value_dim=12, unit_bytes=64, num_pages=13),
    Shape(num_heads=2, num_key_heads=1, key_dim=20, value_dim=32, unit_bytes=512, num_pages=20),
    Shape(num_heads=2, num_key_heads=2, key_dim=8, value_dim=64, unit_bytes=2048, num_pages=5),
    Shape(num_heads=2, num_key_heads=1, key_dim=8, value_dim=150, unit_bytes=64, num_pages=150),
], ids=str)  # fmt: skip
def test_sizes_cross_every_border_of_a_program_a_unit_and_a_page(
    variant: str, shape: Shape
) -> None:
    """Units are parts of a row of a state, one, several, or a whole head."""
    check(variant, shape, (1, 2, 5, 0, 3), torch.float32)


def test_a_step_without_sequences_launches_nothing() -> None:
    with in_triton():
        out, *_ = run(Shape(), (), torch.float32)
    assert out.shape == (0, 6 * 17)


def test_the_launches_are_declared() -> None:
    assert num_launches("delta_step") == 2
