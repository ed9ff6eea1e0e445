"""The chunked form of the gated delta rule against the recurrence in float64. What it has in common
with other layers with states is tested in test_state_backend.py."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.attention import delta_backend
from longshore.worker.attention.delta_backend import Tokens, scan
from longshore.worker.attention.state_pieces import Pieces

CPU = torch.device("cpu")
COUNTS = (150, 90, 64, 5)
STOPS = ((16, 64, 70, 149), (1, 2, 89), (63,), ())
GROUP, KEY_HEADS, KEY_DIM, VALUE_DIM = 2, 3, 8, 5
HEADS = GROUP * KEY_HEADS


def random_tokens(seed: int = 0) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    n = sum(COUNTS)
    q, k = (torch.randn(n, KEY_HEADS, KEY_DIM, generator=generator) for _ in range(2))
    gates = (torch.rand(n, HEADS, generator=generator) for _ in range(2))
    return Tokens(
        F.normalize(q, dim=2),
        F.normalize(k, dim=2),
        torch.randn(n, HEADS, VALUE_DIM, generator=generator),
        -next(gates),
        next(gates),
    )


def random_states() -> Tensor:
    generator = torch.Generator().manual_seed(99)
    return torch.randn(len(COUNTS), HEADS, KEY_DIM, VALUE_DIM, generator=generator)


def recurrence(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs, and the state after each token, of one chunk."""
    q, k, v, log_decay, beta = (each.double() for each in tokens.with_key_for_each_head())
    state, outputs, states = state.double(), [], []
    for token in range(len(v)):
        state = state * log_decay[token].exp()[:, None, None]
        predicted = torch.einsum("hkv,hk->hv", state, k[token])
        correction = beta[token, :, None] * (v[token] - predicted)
        state = state + torch.einsum("hk,hv->hkv", k[token], correction)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[token]))
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


def check(tokens: Tokens, *, tolerance: float = 2e-6) -> None:
    """Differences relative to the largest number."""

    def assert_near(got: Tensor, wanted: Tensor) -> None:
        assert got.isfinite().all()
        atol = tolerance * max(1.0, wanted.abs().max().item())
        torch.testing.assert_close(got.double(), wanted, atol=atol, rtol=0)

    counts = np.array(COUNTS)
    pieces = Pieces(counts.cumsum() - counts, counts, CPU, STOPS)
    before = random_states()
    state = before.clone()
    out, at_stops = scan(pieces, state, tokens)
    index = first = 0
    for chunk, count in enumerate(COUNTS):
        of_chunk = slice(first, first + count)
        outputs, states = recurrence(tokens.at(of_chunk), before[chunk])
        assert_near(out[of_chunk], outputs)
        assert_near(state[chunk], states[-1])
        for stop in STOPS[chunk]:
            assert_near(at_stops[index], states[stop - 1])
            index += 1
        first += count
    assert len(at_stops) == index


@pytest.mark.parametrize("seed", range(3))
def test_chunks_and_their_stops_are_computed_as_token_by_token(seed: int) -> None:
    check(random_tokens(seed))


@pytest.mark.parametrize("beta", [0.0, 1e-7, 0.5, 1 - 1e-6, 1.0])
@pytest.mark.parametrize("log_decay", [0.0, -1e-9, -1e-3, -1.0, -20.0, -1e4])
def test_gates_at_their_limits_lose_no_precision(log_decay: float, beta: float) -> None:
    tokens = random_tokens()
    check(tokens._replace(
        log_decay=torch.full_like(tokens.log_decay, log_decay),
        beta=torch.full_like(tokens.beta, beta),
    ))  # fmt: skip


@pytest.mark.parametrize("angle", [0.0, 1e-3, 0.3])
@pytest.mark.parametrize("log_decay", [0.0, -1e-3])
def test_tokens_with_nearly_the_same_key_replace_each_others_values(
    log_decay: float, angle: float
) -> None:
    """The triangular system is the farthest from the identity: its entries are near 1."""
    tokens = random_tokens()
    k = torch.zeros_like(tokens.k)
    k[..., 0], k[..., 1] = math.cos(angle), math.sin(angle)
    k[::2, :, 1] *= -1
    check(tokens._replace(
        k=k,
        log_decay=torch.full_like(tokens.log_decay, log_decay),
        beta=torch.ones_like(tokens.beta),
    ), tolerance=1e-5)  # fmt: skip


def test_strong_decay_after_weak_loses_no_precision() -> None:
    """Sums of logarithms over a piece are large, but those of a single token are tiny."""
    tokens = random_tokens()
    log_decay = torch.full_like(tokens.log_decay, -80.0)
    log_decay[40:64] = -1e-4
    check(tokens._replace(log_decay=log_decay))


@pytest.mark.parametrize("num_bytes", [1, 5_000_000, 1 << 40])
def test_any_number_of_heads_is_computed_together(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_backend, "SCAN_BYTES", num_bytes)
    check(random_tokens())
