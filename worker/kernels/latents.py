"""What a layer with latents does between its products and attention, in one call: the latents are
normalised, their rotary keys and the queries are rotated, and the vectors are cached."""

from typing import NamedTuple

from torch import Tensor

from longshore.worker.kernels.operators import uses_triton
from longshore.worker.kernels.rms_norm import rms_norm
from longshore.worker.kernels.rotary import Rotation, rotary_


class LatentNorm(NamedTuple):
    """The RMS norm of latents. weight: (latent_dim,)."""

    weight: Tensor
    eps: float


class LatentPlaces(NamedTuple):
    """latents: (num_blocks, block_size, latent_dim + rope_dim), of one layer, contiguous within a
    token. slots: (n,) int64, block_id * block_size + offset; negative: the token is not stored."""

    latents: Tensor
    slots: Tensor


def prepare_latents(
    q_rope: Tensor,
    vectors: Tensor,
    *,
    norm: LatentNorm | None = None,
    rotation: Rotation | None = None,
    places: LatentPlaces | None = None,
) -> Tensor:
    """q_rope: (n, num_heads, rope_dim), contiguous within a head, and within a token if it is
              rotated; overwritten.
    vectors:  (n, latent_dim + rope_dim), contiguous within a line. The first part is normalised,
              the second one is rotated, in place; None: it is not.
    places:   where the vectors are cached; None: they are not.

    Returns (n, num_heads, latent_dim + rope_dim): the last part are the rotated q_rope, the first
    part is to be filled by the caller.
    """
    num_tokens, num_heads, rope_dim = q_rope.shape
    latent_dim = vectors.shape[1] - rope_dim
    q = q_rope.new_empty(num_tokens, num_heads, vectors.shape[1])
    if uses_triton(q_rope):
        from longshore.worker.kernels.gpu import latents as gpu

        weight, eps = (None, 0.0) if norm is None else norm
        positions, table = (None, None) if rotation is None else rotation[:2]
        cache, slots = (None, None) if places is None else places
        gpu.latents(q_rope, vectors, q, weight, eps, positions, table, cache, slots)
        return q
    latents, k_rope = vectors.split((latent_dim, rope_dim), dim=1)
    if norm is not None:
        latents.copy_(rms_norm(latents, *norm))
    if rotation is not None:
        rotary_(q_rope, k_rope.unsqueeze(1), rotation)
    q[..., latent_dim:] = q_rope
    if places is not None:
        _write(vectors, places)
    return q


def _write(vectors: Tensor, places: LatentPlaces) -> None:
    stored = (places.slots >= 0).nonzero().squeeze(1)
    slots = places.slots.index_select(0, stored)
    block_size = places.latents.shape[1]
    blocks = slots.div(block_size, rounding_mode="floor")
    place = (blocks, slots - blocks * block_size)
    places.latents.index_put_(place, vectors.index_select(0, stored))
