"""One token of gated DeltaNet sequences: the Triton kernel against float64, and what it may
touch."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from longshore.worker.kernels.delta_step import DeltaWeights, delta_step, reference
from longshore.worker.kernels.operators import num_launches
from tests.worker.kernels.variants import in_triton

BLOCK_SIZE, NUM_BLOCKS = 4, 16
TOLERANCES = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Shape:
    num_heads: int = 6
    num_key_heads: int = 2
    key_dim: int = 5
    value_dim: int = 17
    conv_width: int = 4

    @property
    def num_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim


def arguments(shape: Shape, lens: list[int], dtype: torch.dtype) -> Any:
    """Inputs of `delta_step`. Blocks that no sequence reads are NaN; the null block is zeros. The
    tensors of the step are parts of wider ones."""
    generator = torch.Generator().manual_seed(len(lens))

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    n, channels = len(lens), shape.num_channels
    sizes = (shape.num_heads, shape.key_dim, shape.value_dim)
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
    weights = DeltaWeights(
        conv_weight=normal(shape.conv_width, channels),
        decay=-normal(shape.num_heads).exp(),
        dt_bias=8 * normal(shape.num_heads),
    )
    inputs = normal(n, channels + 3).to(dtype)[:, :channels]
    dt, beta = (normal(n, shape.num_heads + 1).to(dtype)[:, 1:] for _ in range(2))
    places = (table, rows, torch.tensor(lens, dtype=torch.int64)[rows])
    return (inputs, dt, 8 * beta, states, kept, *places), weights


def check(shape: Shape, lens: list[int], dtype: torch.dtype) -> None:
    (inputs, dt, beta, states, kept, *places), weights = arguments(shape, lens, dtype)
    exact_states, exact_kept = states.double(), kept.clone()
    settings = {"num_key_heads": shape.num_key_heads, "block_size": BLOCK_SIZE}
    exact = DeltaWeights(*(each.double() for each in weights))
    wanted = reference(inputs, dt, beta, exact_states, exact_kept, *places, exact, **settings)
    with in_triton():
        got = delta_step(inputs, dt, beta, states, kept, *places, weights, **settings)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(kept.isnan(), exact_kept.isnan())
    assert torch.equal(kept.nan_to_num(), exact_kept.nan_to_num())
    torch.testing.assert_close(
        states.double(), exact_states, rtol=tolerance, atol=tolerance, equal_nan=True
    )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_sequences_of_any_length_advance_by_one_token(dtype: torch.dtype) -> None:
    """Some read and write the same block, some another one, and that of length 0 none."""
    check(Shape(num_heads=2), [0, 1, 2, 4, 5, 13], dtype)


@pytest.mark.parametrize("shape", [
    Shape(num_heads=3, num_key_heads=3, key_dim=1, value_dim=2, conv_width=5),
    Shape(num_heads=4, num_key_heads=1, key_dim=16, value_dim=16, conv_width=2),
    Shape(num_heads=3, num_key_heads=1, key_dim=33, value_dim=50, conv_width=3),
], ids=str)  # fmt: skip
def test_sizes_cross_every_border_of_a_program(shape: Shape) -> None:
    check(shape, [1, 2, 5, 0], torch.float32)


def test_a_step_without_sequences_launches_nothing() -> None:
    (*tensors, table, rows, lens), weights = arguments(Shape(), [], torch.float32)
    with in_triton():
        out = delta_step(
            *tensors, table, rows, lens, weights, num_key_heads=2, block_size=BLOCK_SIZE
        )
    assert out.shape == (0, 6 * 17)


def test_the_launches_are_declared() -> None:
    assert num_launches("delta_step") == 2
