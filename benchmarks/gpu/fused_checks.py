"""Kernels that fuse what follows the products of a layer, against float64."""

from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.exactness import assert_near, poisoned_memory
from benchmarks.gpu.operator_checks import EPS, normal_in_float64, rotated_in_float64
from benchmarks.gpu.results import Run
from longshore.worker.kernels import one_row
from longshore.worker.kernels.copy_arrays import copy_arrays
from longshore.worker.kernels.embedding import embed_part
from longshore.worker.kernels.latents import LatentNorm, LatentPlaces, prepare_latents
from longshore.worker.kernels.layer_norm import add_layer_norm
from longshore.worker.kernels.logits import to_logits
from longshore.worker.kernels.rotary import Rotation
from longshore.worker.kernels.wide_norm import WholeHeads, sums_of_squares, wide_norm

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_SIZE: Final = 16


def check(run: Run) -> None:
    run.check("copies of a step's inputs and results", partial(_check_copies, run.device))
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        draw = partial(_draw, run.device, dtype)
        rows = (1, 5) if run.is_dry else (1, 5, 256, 2048)
        run.check(f"layer norm, {name}", partial(_check_layer_norm, draw, rows))
        run.check(f"logits, {name}", partial(_check_logits, draw, rows[:3]))
        run.check(f"norms of whole heads, {name}", partial(_check_wide_norm, draw, rows))
        run.check(f"embeddings of a part, {name}", partial(_check_embedding, draw, rows))
        run.check(f"products of one row, {name}", partial(_check_one_row, draw, run.is_dry))
        sizes = ((5, 3, 48, 8),) if run.is_dry else ((5, 3, 48, 8), (300, 128, 512, 64))
        for size in sizes:
            run.check(f"latents of {size}, {name}", partial(_check_latents, draw, *size))


def _draw(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _check_copies(device: str) -> None:
    """To the device and back, through pinned memory."""
    is_pinned = device == "cuda"
    for num_ints, num_reals in ((1, 0), (3, 1), (0, 5), (40_000, 513)):
        ints = torch.randint(1 << 40, (num_ints,), pin_memory=is_pinned)
        reals = torch.randn(num_reals, pin_memory=is_pinned)
        with poisoned_memory():
            there = torch.empty_like(ints, device=device), torch.empty_like(reals, device=device)
            back = (torch.empty_like(x, pin_memory=is_pinned) for x in (ints.int(), reals))
        back_ints, back_reals = back
        copy_arrays(there[0], ints, there[1], reals)
        copy_arrays(back_ints, there[0], back_reals, there[1])
        if is_pinned:
            torch.cuda.synchronize()
        assert torch.equal(there[0].cpu(), ints)
        assert torch.equal(back_ints, ints.int())
        assert torch.equal(back_reals, reals)


def _check_one_row(draw: Any, is_dry: bool) -> None:
    for size, width in ((40, 6),) if is_dry else ((40, 6), (1024, 2048), (12_288, 4096), (2880, 5)):
        x, weight, bias = draw(1, size), draw(width, size), draw(width)
        exact = F.linear(x.double(), weight.double())
        with poisoned_memory():
            assert_near(one_row.linear(x, weight), exact)
            assert_near(one_row.linear(x, weight, bias), exact + bias.double())


def _check_layer_norm(draw: Any, rows: tuple[int, ...]) -> None:
    for num_rows in rows:
        for size in (40, 1024):
            x, residual, weight, bias = (
                draw(num_rows, size), draw(num_rows, size), draw(size), draw(size)
            )  # fmt: skip
            total = residual + x
            exact = F.layer_norm(total.double(), (size,), weight.double(), bias.double(), EPS)
            with poisoned_memory():
                assert_near(add_layer_norm(x, residual, weight, bias, EPS), exact)
            assert torch.equal(residual, total)


def _check_logits(draw: Any, rows: tuple[int, ...]) -> None:
    """Of a head with padded columns."""
    for num_rows in rows:
        for scale, cap in ((1.0, None), (0.5, None), (1.0, 30.0), (2.0, 5.0)):
            x, size = 10 * draw(num_rows, 1003), 1000
            exact = x[:, :size].double() * scale
            exact = exact if cap is None else (exact / cap).tanh() * cap
            with poisoned_memory():
                assert_near(to_logits(x, size, scale=scale, cap=cap), exact)


def _check_wide_norm(draw: Any, rows: tuple[int, ...]) -> None:
    """All heads, and the halves that two ranks have."""
    for num_rows in rows:
        for q_size, k_size in ((96, 48), (2048, 512)):
            q, k, q_weight, k_weight = (
                draw(num_rows, q_size), draw(num_rows, k_size), draw(q_size), draw(k_size)
            )  # fmt: skip
            exact = normal_in_float64(q, q_weight), normal_in_float64(k, k_weight)
            halves = [
                [each.chunk(2, dim=-1)[rank].clone() for each in (q, k, q_weight, k_weight)]
                for rank in range(2)
            ]
            with poisoned_memory():
                got = wide_norm(q, k, q_weight, k_weight, EPS)
                squares = sum(sums_of_squares(*half[:2]) for half in halves)
                parts = [
                    wide_norm(*half, EPS, WholeHeads(squares.clone(), q_size, k_size))
                    for half in halves
                ]
            for index, wanted in enumerate(exact):
                assert_near(got[index], wanted)
                assert_near(torch.cat([part[index] for part in parts], dim=1), wanted)


def _check_embedding(draw: Any, rows: tuple[int, ...]) -> None:
    table, first = draw(50, 136), 30
    for num_rows in rows:
        ids = torch.randint(100, (num_rows,), device=table.device)
        is_here = (ids >= first) & (ids < first + 48)
        with poisoned_memory():
            got = embed_part(ids, table, first, 48)
        assert torch.equal(got[is_here], table[ids[is_here] - first])
        assert not got[~is_here].any()


def _check_latents(
    draw: Any, num_tokens: int, num_heads: int, latent_dim: int, rope_dim: int
) -> None:
    """Latents are normalised, rotary keys and queries rotated, and the vectors cached."""
    q_rope, vectors = draw(num_tokens, num_heads, rope_dim), draw(num_tokens, latent_dim + rope_dim)
    device, weight = vectors.device, draw(latent_dim)
    angles = draw(100, rope_dim // 2).float()
    positions = torch.randint(100, (num_tokens,), device=device)
    rotation = Rotation(positions, torch.stack((angles.cos(), angles.sin()), dim=1))
    cache = draw(-(-2 * num_tokens // BLOCK_SIZE), BLOCK_SIZE, latent_dim + rope_dim).fill_(7)
    slots = torch.randperm(2 * num_tokens, device=device)[:num_tokens]
    slots[1] = -1
    latents, k_rope = vectors.split((latent_dim, rope_dim), dim=1)
    exact = torch.cat(
        (
            normal_in_float64(latents, weight),
            rotated_in_float64(k_rope[:, None], *rotation[:3])[:, 0],
        ),
        dim=1,
    )
    exact_q = rotated_in_float64(q_rope, *rotation[:3])
    with poisoned_memory():
        q = prepare_latents(
            q_rope,
            vectors,
            norm=LatentNorm(weight, EPS),
            rotation=rotation,
            places=LatentPlaces(cache, slots),
        )
    assert_near(q[..., latent_dim:], exact_q)
    stored = slots >= 0
    places = slots[stored] // BLOCK_SIZE, slots[stored] % BLOCK_SIZE
    assert_near(cache[places], exact[stored])
    num_written = int((cache != 7).any(-1).sum())
    assert num_written == int(stored.sum()), f"{num_written} tokens are stored"
