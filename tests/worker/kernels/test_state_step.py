"""One token of Mamba 2 sequences: the kernels against float64, and what they may touch."""

from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.gpu.state_step import places_of
from longshore.worker.kernels.operators import num_launches
from longshore.worker.kernels.state_step import StateWeights, reference, state_step
from tests.worker.kernels.placed_states import ANY_LENGTHS, LAYER, PlacedStates
from tests.worker.kernels.variants import every_variant_and_triton, in_triton, using

TOLERANCES = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@triton.jit
def write_places(table_ptr, out_ptr, block_stride):
    elements = tl.arange(0, 16)
    places = places_of(table_ptr, elements, elements < 16, 1, block_stride, 2, 3)
    tl.store(out_ptr + elements, places)


@dataclass(frozen=True)
class Shape:
    num_heads: int = 6
    head_dim: int = 17
    num_groups: int = 2
    state_size: int = 5
    conv_width: int = 4
    unit_bytes: int = 16
    num_pages: int = 7

    @property
    def num_channels(self) -> int:
        return self.num_heads * self.head_dim + 2 * self.num_groups * self.state_size


def run(
    shape: Shape,
    lens: tuple[int, ...],
    dtype: torch.dtype,
    *,
    has_bias: bool = True,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, PlacedStates]:
    """The outputs, those of float64, and the states after both. The tensors of the step are parts
    of wider ones."""
    generator = torch.Generator().manual_seed(len(lens))

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    n, channels = len(lens), shape.num_channels
    weights = StateWeights(
        conv_weight=normal(shape.conv_width, channels),
        conv_bias=normal(channels) if has_bias else None,
        decay=-normal(shape.num_heads).exp(),
        skip=normal(shape.num_heads),
        dt_bias=8 * normal(shape.num_heads),
    )
    states = PlacedStates(
        ((shape.num_heads, shape.head_dim, shape.state_size), (shape.conv_width - 1, channels)),
        lens,
        dtype,
        unit_bytes=shape.unit_bytes,
        num_pages=shape.num_pages,
        device=device,
    )
    inputs = normal(n, channels + 3).to(dtype)[:, :channels]
    dt = normal(n, shape.num_heads + 1).to(dtype)[:, 1:]
    tokens, groups = (inputs, dt), {"num_groups": shape.num_groups}
    exact = StateWeights(*(None if each is None else each.double() for each in weights))
    wanted = reference(*tokens, states.exact, LAYER, *states.of_kernel, exact, **groups)
    got = state_step(*tokens, states.pages, LAYER, *states.of_kernel, weights, **groups)
    return got, wanted, states


def check(
    variant: str,
    shape: Shape,
    lens: tuple[int, ...],
    dtype: torch.dtype,
    *,
    has_bias: bool = True,
) -> None:
    with using(variant, num_threads=2):
        got, wanted, states = run(shape, lens, dtype, has_bias=has_bias)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)
    states.check(tolerance)


@every_variant_and_triton
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_sequences_of_any_length_advance_by_one_token(
    variant: str, dtype: torch.dtype, has_bias: bool
) -> None:
    check(variant, Shape(num_heads=2), ANY_LENGTHS, dtype, has_bias=has_bias)


@every_variant_and_triton
@pytest.mark.parametrize("shape", [
    Shape(num_heads=3, head_dim=2, num_groups=3, state_size=1, conv_width=5, unit_bytes=8),
    Shape(num_heads=4, head_dim=16, num_groups=1, state_size=16, conv_width=2, unit_bytes=64,
          num_pages=1),
    Shape(num_heads=3, head_dim=50, num_groups=1, state_size=33, conv_width=3),
    Shape(num_heads=2, head_dim=20, num_groups=1, state_size=12, unit_bytes=64, num_pages=13),
    Shape(num_heads=2, head_dim=20, num_groups=1, state_size=32, unit_bytes=512, num_pages=20),
    Shape(num_heads=2, head_dim=8, num_groups=2, state_size=64, unit_bytes=2048, num_pages=5),
], ids=str)  # fmt: skip
def test_sizes_cross_every_border_of_a_program_a_unit_and_a_page(
    variant: str, shape: Shape
) -> None:
    """Units are parts of a row of a state, one, several, or a whole head."""
    check(variant, shape, (1, 2, 5, 0, 3), torch.float32)


def test_a_pool_has_more_elements_than_an_int32_counts() -> None:
    pages = [5, 1 << 20, 3 << 20]
    out = torch.zeros(16, dtype=torch.int64)
    with in_triton():
        write_places[(1,)](torch.tensor(pages, dtype=torch.int32), out, 1 << 14)
    units = [divmod(1 + element // 2, 3) for element in range(16)]
    assert out.tolist() == [
        (pages[page] << 14) + 2 * unit + element % 2 for element, (page, unit) in enumerate(units)
    ]


def test_a_step_without_sequences_launches_nothing() -> None:
    with in_triton():
        out, *_ = run(Shape(), (), torch.float32)
    assert out.shape == (0, 6 * 17)


def test_the_launches_are_declared() -> None:
    assert num_launches("state_step") == 2
