"""What a layer with latents does before attention: every variant against float64."""

import pytest
import torch
from torch import Tensor

from longshore.worker.kernels.latents import LatentNorm, LatentPlaces, prepare_latents
from longshore.worker.kernels.rotary import Rotation
from tests.worker.kernels.variants import every_variant_and_triton, using

EPS = 1e-5
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def rotated(x: Tensor, positions: Tensor, angles: Tensor) -> Tensor:
    """x: (n, heads, size) float64."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.exp(1j * angles[positions]).unsqueeze(1)
    return torch.cat((turned.real, turned.imag), dim=-1)


@every_variant_and_triton
@dtypes
@pytest.mark.parametrize(("num_heads", "latent_dim", "num_pairs"), [(5, 40, 6), (16, 512, 32)])
def test_vectors_are_cached_and_queries_lie_where_attention_reads_them(
    variant: str, dtype: torch.dtype, num_heads: int, latent_dim: int, num_pairs: int
) -> None:
    """Queries and vectors are parts of products. A slot of -1 is not written."""
    rope_dim = 2 * num_pairs
    q_product = torch.randn(4, num_heads * (rope_dim + 3)).to(dtype)
    q_rope = q_product[:, : num_heads * rope_dim].unflatten(1, (num_heads, rope_dim))
    down = torch.randn(4, 7 + latent_dim + rope_dim).to(dtype)
    vectors = down[:, 7:]
    angles = torch.randn(30, num_pairs, dtype=torch.float64)
    table = torch.stack((angles.cos(), angles.sin()), dim=1).float()
    positions, slots = torch.tensor([3, 29, 0, 7]), torch.tensor([9, -1, 2, 31])
    weight = torch.randn(latent_dim).to(dtype)
    latents, k_rope = vectors.double().split((latent_dim, rope_dim), dim=1)
    wanted_latents = latents / (latents.square().mean(1, keepdim=True) + EPS).sqrt()
    wanted = torch.cat(
        (
            wanted_latents * weight.double(),
            rotated(k_rope.unsqueeze(1), positions, angles).squeeze(1),
        ),
        dim=1,
    )
    wanted_q = rotated(q_rope.double(), positions, angles)
    cache = torch.zeros(4, 2, 8, latent_dim + rope_dim, dtype=dtype)
    before = down[:, :7].clone()
    with using(variant):
        q = prepare_latents(
            q_rope,
            vectors,
            norm=LatentNorm(weight, EPS),
            rotation=Rotation(positions, table),
            places=LatentPlaces(cache[:, 1], slots),
        )
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        q[..., latent_dim:].double(), wanted_q, rtol=tolerance, atol=tolerance
    )
    torch.testing.assert_close(vectors.double(), wanted, rtol=tolerance, atol=tolerance)
    stored = torch.zeros_like(cache)
    stored[1, 1, 1], stored[0, 1, 2], stored[3, 1, 7] = vectors[0], vectors[2], vectors[3]
    assert torch.equal(cache, stored)
    assert torch.equal(down[:, :7], before)


@every_variant_and_triton
def test_without_a_norm_and_positions_vectors_are_only_cached(variant: str) -> None:
    q_rope, vectors = torch.randn(2, 3, 4), torch.randn(2, 14)
    cache, before = torch.zeros(1, 8, 14), vectors.clone()
    with using(variant):
        q = prepare_latents(q_rope, vectors, places=LatentPlaces(cache, torch.tensor([5, 1])))
        assert len(prepare_latents(q_rope[:0], vectors[:0])) == 0
    assert torch.equal(q[..., 10:], q_rope)
    assert torch.equal(vectors, before)
    assert torch.equal(cache[0, [5, 1]], before)
