"""Captured graphs: a replay gives the same results as the kernels one by one, and covers all of
them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from longshore.worker.kernels.argmax import argmax
from longshore.worker.kernels.gate import SILU
from longshore.worker.kernels.graph import Graph, NotCapturable, capture
from longshore.worker.kernels.linear import PackedMatrix
from longshore.worker.kernels.native import native
from longshore.worker.kernels.rms_norm import add_rms_norm, rms_norm
from longshore.worker.kernels.rotary import Rotation, rotary_
from tests.worker.kernels.variants import NATIVE, using

TOKENS, SIZE = 24, 48

every_set = pytest.mark.parametrize("variant", NATIVE)


def captured(function: Callable[[], Tensor]) -> tuple[Tensor, Graph]:
    kernels = native()
    assert kernels is not None
    return capture(kernels, function, TOKENS, ())


def layer(x: Tensor, residual: Tensor, positions: Tensor, table: Tensor, norm: Tensor) -> Tensor:
    """Norms, a gate, and rotary positions of two query heads and one key head."""
    x = add_rms_norm(x, residual, norm, 1e-6)
    heads = rms_norm(x, norm, 1e-6).view(len(x), 3, SIZE // 3)
    rotary_(heads[:, :2], heads[:, 2:], Rotation(positions, table))
    x = rms_norm(heads.view(len(x), SIZE), norm, 1e-6)
    return rms_norm(SILU(x), norm[: SIZE // 2], 1e-6)


@every_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_replay_computes_other_and_fewer_tokens(
    variant: str, dtype: torch.dtype, num_threads: int
) -> None:
    table, norm = torch.randn(50, 2, SIZE // 6), torch.rand(SIZE).to(dtype)
    x, residual = torch.zeros(2, TOKENS, SIZE, dtype=dtype)
    positions = torch.zeros(TOKENS, dtype=torch.int64)
    with using(variant, num_threads=num_threads):
        result, graph = captured(lambda: layer(x, residual, positions, table, norm))
        for num_tokens in (TOKENS, 1, 7):
            new_x, new_residual = torch.randn(2, num_tokens, SIZE).to(dtype)
            new_positions = torch.randint(50, (num_tokens,))
            for place, values in ((x, new_x), (residual, new_residual), (positions, new_positions)):
                place[:num_tokens] = values
            graph.replay(num_tokens, ())
            expected = layer(new_x, new_residual, new_positions, table, norm)
            assert torch.equal(result[:num_tokens], expected)
            assert torch.equal(residual[:num_tokens], new_residual)


@pytest.mark.skipif("avx512bf16" not in NATIVE, reason="the processor has no such products")
def test_products_are_replayed() -> None:
    x = torch.zeros(TOKENS, SIZE).bfloat16()
    with using("avx512bf16", num_threads=2):
        matrix = PackedMatrix.plain(torch.randn(70, SIZE).bfloat16())
        bias = torch.randn(70).bfloat16()
        result, graph = captured(lambda: matrix.product(x, bias))
        x[:5] = torch.randn(5, SIZE)
        graph.replay(5, ())
        assert torch.equal(result[:5], matrix.product(x[:5], bias))


@every_set
def test_unreferenced_memory_is_reused(variant: str) -> None:
    norm, x = torch.ones(SIZE), torch.randn(TOKENS, SIZE)

    def chain() -> Tensor:
        y = x
        for _ in range(20):
            y = rms_norm(y, norm, 1e-6)
        return y

    with using(variant):
        result, graph = captured(chain)
        assert graph.num_calls == 20
        assert graph.num_bytes <= 3 * x.nbytes
        graph.replay(TOKENS, ())
        assert torch.equal(result, chain())


@every_set
def test_rows_that_are_not_of_tokens_cannot_be_captured(variant: str) -> None:
    others = torch.rand(TOKENS + 1, SIZE)
    with using(variant), pytest.raises(NotCapturable, match="not a multiple of the step"):
        captured(lambda: rms_norm(others, others[0], 1e-6))


@pytest.mark.skipif("generic" not in NATIVE, reason="the CPU kernels are not built")
@pytest.mark.parametrize(
    "foreign",
    [
        lambda x: rms_norm(x, torch.ones_like(x[0]), 1e-6),
        lambda x: rms_norm(x + x, x[0], 1e-6),
        lambda x: rms_norm(x, x[0], float(x[0, 0])),
        lambda x: rms_norm(x.t(), x[:, 0], 1e-6),
        lambda x: argmax(x)[0],
        lambda x: x.mul_(2),
    ],
    ids=["memory", "sum", "value", "copy", "kernel", "in place"],
)
def test_an_operation_that_is_not_a_recorded_kernel_cannot_be_captured(
    foreign: Callable[[Tensor], Tensor],
) -> None:
    with using("generic"), pytest.raises(NotCapturable, match="is no"):
        captured(lambda: foreign(torch.rand(TOKENS, SIZE)))
