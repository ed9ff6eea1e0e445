"""Rotary positions: every variant against complex numbers in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from longshore.worker.kernels.rotary import Rotation, rotary_
from tests.worker.kernels.variants import every_variant_and_triton, using

MAX_POSITIONS = 50
EPS = 1e-6


def expected(heads: Tensor, positions: Tensor, angles: Tensor, norm: Tensor | None) -> Tensor:
    """angles: (MAX_POSITIONS, num_pairs) float64."""
    wide = heads.double()
    if norm is not None:
        wide = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
    num_pairs = angles.shape[1]
    first, second, rest = wide.tensor_split((num_pairs, 2 * num_pairs), dim=-1)
    turned = torch.complex(first, second) * torch.exp(1j * angles[positions]).unsqueeze(1)
    return torch.cat((turned.real, turned.imag, rest), dim=-1)


@every_variant_and_triton
@given(
    num_tokens=st.integers(0, 6),
    num_heads=st.integers(1, 5),
    num_kv_heads=st.integers(1, 3),
    num_pairs=st.integers(1, 40),
    num_rest=st.sampled_from([0, 1, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    norm_type=st.sampled_from([None, "like the heads", "float32"]),
    num_threads=st.sampled_from([1, 3]),
)
def test_heads_of_one_product_are_rotated_in_place_and_values_are_unchanged(
    variant: str,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    num_pairs: int,
    num_rest: int,
    dtype: torch.dtype,
    norm_type: str | None,
    num_threads: int,
) -> None:
    head_dim = 2 * num_pairs + num_rest
    angles = torch.randn(MAX_POSITIONS, num_pairs, dtype=torch.float64)
    table = torch.stack((angles.cos(), angles.sin()), dim=1).float()
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    positions = torch.randint(0, MAX_POSITIONS, (num_tokens,))
    norms = (None, None)
    if norm_type is not None:
        norms = torch.randn(2, head_dim).to(torch.float32 if norm_type == "float32" else dtype)
    wanted_q = expected(q, positions, angles, norms[0])
    wanted_k = expected(k, positions, angles, norms[1])
    values = v.clone()
    with using(variant, num_threads=num_threads):
        rotary_(q, k, Rotation(positions, table, *norms, EPS))
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(q.double(), wanted_q, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(k.double(), wanted_k, rtol=tolerance, atol=tolerance)
    assert torch.equal(v, values)


def test_wrong_shapes_and_dtypes_are_rejected() -> None:
    q, k = torch.zeros(3, 4, 8), torch.zeros(3, 2, 8)
    positions, table = torch.zeros(3, dtype=torch.int64), torch.zeros(5, 2, 4)
    rotation = Rotation(positions, table)
    with pytest.raises(ValueError, match=r"heads torch.float32"):
        rotary_(q, torch.zeros(3, 2, 6), rotation)
    with pytest.raises(ValueError, match=r"heads torch.bfloat16"):
        rotary_(q, k.bfloat16(), rotation)
    with pytest.raises(ValueError, match="each token contiguous"):
        rotary_(torch.zeros(4, 3, 8).transpose(0, 1), k, rotation)
    with pytest.raises(ValueError, match=r"the table is torch.float64"):
        rotary_(q, k, rotation._replace(table=table.double()))
    with pytest.raises(ValueError, match="at most 4"):
        rotary_(q, k, rotation._replace(table=torch.zeros(5, 2, 5)))
    with pytest.raises(ValueError, match=r"positions are torch.int32"):
        rotary_(q, k, rotation._replace(positions=positions.int()))
    with pytest.raises(ValueError, match="q_norm or k_norm is"):
        rotary_(q, k, rotation.with_norms(torch.ones(7), None, EPS))
    with pytest.raises(ValueError, match=r"q_norm or k_norm is torch\.float64"):
        rotary_(q, k, rotation.with_norms(None, torch.ones(8).double(), EPS))
    half = torch.ones(8).bfloat16()
    with pytest.raises(ValueError, match="use one dtype"):
        rotary_(q.bfloat16(), k.bfloat16(), rotation.with_norms(half, torch.ones(8), EPS))
