"""Norms over all heads of a token: every variant against float64."""

import pytest
import torch

from longshore.worker.kernels.wide_norm import WholeHeads, sums_of_squares, wide_norm
from tests.worker.kernels.test_rms_norm import EPS, assert_close, expected
from tests.worker.kernels.variants import every_variant_and_triton, using

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
sizes = pytest.mark.parametrize(("q_size", "k_size"), [(96, 48), (300, 1), (64, 64)])


@every_variant_and_triton
@dtypes
@sizes
def test_queries_and_keys_of_one_product_are_normalised(
    variant: str, dtype: torch.dtype, q_size: int, k_size: int
) -> None:
    product = torch.randn(3, q_size + k_size + 7).to(dtype)
    q, k, v = product.split((q_size, k_size, 7), dim=1)
    q_weight, k_weight, values = torch.randn(q_size).to(dtype), torch.randn(k_size).to(dtype), v + 0
    wanted = expected(q, q_weight), expected(k, k_weight)
    with using(variant):
        actual = wide_norm(q, k, q_weight, k_weight, EPS)
    for one, other in zip(actual, wanted, strict=True):
        assert_close(one, other)
    assert torch.equal(v, values)


@every_variant_and_triton
@dtypes
@sizes
def test_parts_are_normalised_by_the_squares_of_all(
    variant: str, dtype: torch.dtype, q_size: int, k_size: int
) -> None:
    """Two ranks."""
    q, k = torch.randn(3, 2 * q_size).to(dtype), torch.randn(3, 2 * k_size).to(dtype)
    q_weight, k_weight = torch.randn(2 * q_size).to(dtype), torch.randn(2 * k_size).to(dtype)
    wanted = expected(q, q_weight), expected(k, k_weight)
    of_ranks = [
        [tensor.chunk(2, dim=-1)[rank].clone() for tensor in (q, k, q_weight, k_weight)]
        for rank in range(2)
    ]
    with using(variant):
        squares = sum(sums_of_squares(*of_rank[:2]) for of_rank in of_ranks)
        parts = [
            wide_norm(*of_rank, EPS, WholeHeads(squares.clone(), 2 * q_size, 2 * k_size))
            for of_rank in of_ranks
        ]
    for halves, whole in zip(zip(*parts, strict=True), wanted, strict=True):
        assert_close(torch.cat(halves, dim=1), whole)


@every_variant_and_triton
def test_steps_without_tokens_are_possible(variant: str) -> None:
    q, k = torch.empty(0, 8), torch.empty(0, 4)
    with using(variant):
        normal_q, _ = wide_norm(q, k, torch.ones(8), torch.ones(4), EPS)
        assert sums_of_squares(q, k).shape == (0, 2)
    assert normal_q.shape == q.shape
