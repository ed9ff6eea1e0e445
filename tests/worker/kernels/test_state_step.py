"""One token of Mamba 2 sequences: the Triton kernel against float64, and what it may touch."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from longshore.worker.kernels.operators import num_launches
from longshore.worker.kernels.state_step import StateWeights, reference, state_step
from tests.worker.kernels.variants import in_triton

BLOCK_SIZE, NUM_BLOCKS = 4, 16
TOLERANCES = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Shape:
    num_heads: int = 6
    head_dim: int = 17
    num_groups: int = 2
    state_size: int = 5
    conv_width: int = 4

    @property
    def num_channels(self) -> int:
        return self.num_heads * self.head_dim + 2 * self.num_groups * self.state_size


def arguments(shape: Shape, lens: list[int], dtype: torch.dtype, *, has_bias: bool) -> Any:
    """Inputs of `state_step`. Blocks that no sequence reads are NaN; the null block is zeros. The
    tensors of the step are parts of wider ones."""
    generator = torch.Generator().manual_seed(len(lens))

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    n, channels = len(lens), shape.num_channels
    sizes = (shape.num_heads, shape.head_dim, shape.state_size)
    states = torch.full((NUM_BLOCKS, 2, *sizes), float("nan"))[:, 1]
    kept = torch.full((NUM_BLOCKS, 2, shape.conv_width - 1, channels), float("nan")).to(dtype)[:, 1]
    states[0], kept[0] = 0, 0
    table = torch.zeros((n, 4), dtype=torch.int32)
    for row, length in enumerate(lens):
        for column in {max(length - 2, 0) // BLOCK_SIZE, max(length - 1, 0) // BLOCK_SIZE}:
            table[row, column] = 1 + 2 * row + column % 2
        if length > 1:
            read = table[row, (length - 2) // BLOCK_SIZE]
            states[read] = normal(*sizes)
            kept[read] = normal(*kept.shape[1:]).to(dtype)
    rows = torch.randperm(n, generator=generator)
    weights = StateWeights(
        conv_weight=normal(shape.conv_width, channels),
        conv_bias=normal(channels) if has_bias else None,
        decay=-normal(shape.num_heads).exp(),
        skip=normal(shape.num_heads),
        dt_bias=8 * normal(shape.num_heads),
    )
    inputs = normal(n, channels + 3).to(dtype)[:, :channels]
    dt = normal(n, shape.num_heads + 1).to(dtype)[:, 1:]
    places = (table, rows, torch.tensor(lens, dtype=torch.int64)[rows])
    return (inputs, dt, states, kept, *places), weights


def check(shape: Shape, lens: list[int], dtype: torch.dtype, *, has_bias: bool = True) -> None:
    (inputs, dt, states, kept, *places), weights = arguments(shape, lens, dtype, has_bias=has_bias)
    exact_states, exact_kept = states.double(), kept.clone()
    settings = {"num_groups": shape.num_groups, "block_size": BLOCK_SIZE}
    exact = StateWeights(*(None if each is None else each.double() for each in weights))
    wanted = reference(inputs, dt, exact_states, exact_kept, *places, exact, **settings)
    with in_triton():
        got = state_step(inputs, dt, states, kept, *places, weights, **settings)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(kept.isnan(), exact_kept.isnan())
    assert torch.equal(kept.nan_to_num(), exact_kept.nan_to_num())
    torch.testing.assert_close(
        states.double(), exact_states, rtol=tolerance, atol=tolerance, equal_nan=True
    )


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_sequences_of_any_length_advance_by_one_token(dtype: torch.dtype, has_bias: bool) -> None:
    """Some read and write the same block, some another one, and that of length 0 none."""
    check(Shape(num_heads=2), [0, 1, 2, 4, 5, 13], dtype, has_bias=has_bias)


@pytest.mark.parametrize("shape", [
    Shape(num_heads=3, head_dim=2, num_groups=3, state_size=1, conv_width=5),
    Shape(num_heads=4, head_dim=16, num_groups=1, state_size=16, conv_width=2),
    Shape(num_heads=3, head_dim=50, num_groups=1, state_size=33, conv_width=3),
], ids=str)  # fmt: skip
def test_sizes_cross_every_border_of_a_program(shape: Shape) -> None:
    check(shape, [1, 2, 5, 0], torch.float32)


def test_a_step_without_sequences_launches_nothing() -> None:
    (inputs, dt, states, kept, *places), weights = arguments(
        Shape(), [], torch.float32, has_bias=True
    )
    with in_triton():
        out = state_step(inputs, dt, states, kept, *places, weights, num_groups=2, block_size=4)
    assert out.shape == (0, 6 * 17)


def test_the_launches_are_declared() -> None:
    assert num_launches("state_step") == 2
