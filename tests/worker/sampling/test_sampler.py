"""The sampler: the distribution, top_k and top_p, and the independence of rows."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longshore.worker.sampling import sampler
from longshore.worker.sampling.sampler import sample
from longshore.worker.sampling.uniform import uniform
from tests.worker.draws import make_draws


def draw(
    logits: Tensor,
    u: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    cut: bool | None = None,
) -> list[int]:
    """One token per row of `logits`. cut: the sorting path even if nothing is cut off."""
    draws = make_draws(u, temperature=temperature, top_k=top_k, top_p=top_p)
    is_cut = cut if cut is not None else top_k > 0 or top_p < 1
    return sample(logits, draws, num_whole=0 if is_cut else len(u)).tolist()


def even_numbers(count: int) -> Tensor:
    """The middles of `count` equal parts of [0, 1)."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def shares(tokens: list[int], vocab_size: int) -> Tensor:
    return torch.bincount(torch.tensor(tokens), minlength=vocab_size) / len(tokens)


def logits_of(probabilities: list[float], num_rows: int) -> Tensor:
    return torch.tensor(probabilities).log().expand(num_rows, -1)


PROBABILITIES = [0.1, 0.4, 0.05, 0.25, 0.2]


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_follow_the_softmax_at_every_temperature(temperature: float, cut: bool) -> None:
    logits = logits_of(PROBABILITIES, 4000)
    tokens = draw(logits, even_numbers(4000), temperature=temperature, cut=cut)
    wanted = (logits[0] / temperature).softmax(-1)
    torch.testing.assert_close(shares(tokens, 5), wanted, atol=5e-4, rtol=0)


@pytest.mark.parametrize("top_k", [1, 2, 3, 5, 100])
def test_top_k_keeps_the_k_most_likely_tokens(top_k: int) -> None:
    tokens = draw(logits_of(PROBABILITIES, 4000), even_numbers(4000), top_k=top_k)
    kept = torch.tensor(PROBABILITIES).sort(descending=True).indices[:top_k]
    wanted = torch.zeros(5)
    wanted[kept] = torch.tensor(PROBABILITIES)[kept]
    torch.testing.assert_close(shares(tokens, 5), wanted / wanted.sum(), atol=5e-4, rtol=0)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.01, [1]), (0.39, [1]), (0.41, [1, 3]), (0.84, [1, 3, 4]), (0.86, [0, 1, 3, 4])],
)
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(top_p: float, kept: list[int]) -> None:
    tokens = draw(logits_of(PROBABILITIES, 4000), even_numbers(4000), top_p=top_p)
    wanted = torch.zeros(5)
    wanted[kept] = torch.tensor(PROBABILITIES)[kept]
    torch.testing.assert_close(shares(tokens, 5), wanted / wanted.sum(), atol=5e-4, rtol=0)


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    # Of the best three, 0.4 + 0.25 are 0.76 of the mass: enough for 0.7 of it.
    tokens = draw(logits_of(PROBABILITIES, 1000), even_numbers(1000), top_k=3, top_p=0.7)
    assert set(tokens) == {1, 3}


def test_equal_logits_are_kept_by_the_lower_id() -> None:
    assert set(draw(torch.zeros(100, 7), even_numbers(100), top_k=3)) == {0, 1, 2}


def test_temperature_zero_takes_the_lowest_id_among_the_largest_logits() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, -1.0, 5.0]])
    tokens = sample(logits, None)
    assert tokens.tolist() == [1, 0]
    assert tokens.dtype == torch.int32


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("temperature", [1e-9, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float, top_p: float) -> None:
    logits = torch.randn(50, 20, generator=torch.Generator().manual_seed(0)) * 10
    tokens = draw(logits, even_numbers(50), temperature=temperature, top_p=top_p)
    assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("cut", [False, True])
def test_the_ends_of_the_unit_interval_give_tokens_that_are_possible(u: float, cut: bool) -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    (token,) = draw(logits, torch.tensor([u], dtype=torch.float64), cut=cut)
    assert token == (1 if u == 0 else 3)


@pytest.mark.parametrize("cut", [False, True])
def test_the_largest_number_never_reaches_beyond_the_last_possible_token(cut: bool) -> None:
    logits = torch.full((500, 6), -math.inf)
    logits[:, 1:4] = torch.randn(500, 3, generator=torch.Generator().manual_seed(6))
    u = torch.full((500,), 1 - 2**-53, dtype=torch.float64)
    assert set(draw(logits, u, cut=cut)) <= {1, 2, 3}


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 12), st.integers(2, 40))
def test_a_token_does_not_depend_on_the_rest_of_the_batch(
    data: st.DataObject, num_rows: int, vocab_size: int
) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 4
    columns = {
        name: torch.tensor(data.draw(st.lists(values, min_size=num_rows, max_size=num_rows)))
        for name, values in (
            ("temperature", st.floats(0.1, 3)),
            ("top_k", st.integers(0, vocab_size)),
            ("top_p", st.floats(0.05, 1)),
        )
    }
    u = torch.rand(num_rows, dtype=torch.float64, generator=generator)
    together = sample(logits, make_draws(u, **columns))
    for row in range(num_rows):
        one = slice(row, row + 1)
        alone = make_draws(u[one], **{name: values[one] for name, values in columns.items()})
        assert sample(logits[one], alone).item() == together[row].item()


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 5, 8, 29])
def test_drawing_a_part_and_then_a_token_of_it_is_drawing_a_token(
    vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "PART_SIZE", 4)
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(500, vocab_size, generator=generator) * 3
    # Tokens, and whole parts, that cannot be drawn; one always can.
    logits[torch.rand(500, vocab_size, generator=generator) < 0.6] = -math.inf
    logits[:, vocab_size // 2] = 0.0
    u = torch.rand(500, dtype=torch.float64, generator=generator)
    u[:20], u[20:40] = 0.0, 1 - 2**-53
    tokens = torch.tensor(draw(logits, u))
    weights = logits.double().softmax(-1)
    after = weights.cumsum(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    own = weights.gather(1, tokens.unsqueeze(1)).squeeze(1)
    assert (own > 0).all()
    assert (after > u - 1e-6).all()
    assert (after - own <= u + 1e-6).all()


@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
@pytest.mark.parametrize("num_candidates", [1, 2, 8, 30])
def test_sorting_only_the_best_tokens_first_changes_nothing(
    num_candidates: int, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "NUM_CANDIDATES", num_candidates)
    num_rows, vocab_size = 400, 31
    generator = torch.Generator().manual_seed(num_candidates)
    # Rounded, so that many are equal, also where the candidates end.
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * spread * 4).round() / 4
    logits[7, 3] = math.nan
    choices = torch.tensor([1.0, 0.999, 0.9, 0.5, 0.05], dtype=torch.float64)
    draws = make_draws(
        torch.rand(num_rows, dtype=torch.float64, generator=generator),
        temperature=torch.rand(num_rows, generator=generator) + 0.3,
        top_k=torch.randint(0, vocab_size + 2, (num_rows,), generator=generator)
        * torch.randint(0, 2, (num_rows,), generator=generator),
        top_p=choices[torch.randint(0, 5, (num_rows,), generator=generator)],
        min_p=torch.rand(num_rows, generator=generator) * 0.3,
    )
    wanted = sampler._draw_from_sorted(logits, draws).tolist()
    got = sampler._draw_from_candidates(logits, draws).tolist()
    del wanted[7], got[7]
    assert got == wanted
    assert sample(logits, draws).tolist()[:7] == wanted[:7]


def test_a_row_with_few_tokens_left_is_not_sorted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_draw_from_sorted", None)
    logits = torch.randn(20, 2000, generator=torch.Generator().manual_seed(9)) * 6
    for settings_ in ({"top_k": 50}, {"top_p": 0.9}, {"top_k": 200, "top_p": 0.95}):
        draw(logits, even_numbers(20), **settings_)  # type: ignore[arg-type]


def test_greedy_and_drawn_rows_share_a_batch() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(3))
    u = torch.full((2,), 0.7, dtype=torch.float64)
    draws = make_draws(
        u.repeat(2),
        rows=torch.tensor([4, 1, 0, 5]),
        top_k=torch.tensor([0, 0, 5, 0]),
        top_p=torch.tensor([1.0, 1.0, 1.0, 0.8], dtype=torch.float64),
    )
    tokens = sample(logits, draws, num_whole=2).tolist()
    assert [tokens[2], tokens[3]] == logits[2:4].argmax(-1).tolist()
    assert [tokens[4], tokens[1]] == draw(logits[[4, 1]], u)
    assert tokens[0] == draw(logits[:1], u[:1], top_k=5)[0]
    assert tokens[5] == draw(logits[5:], u[:1], top_p=0.8)[0]


def test_drawing_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(37, 50, generator=torch.Generator().manual_seed(4))
    whole, cut = draw(logits, even_numbers(37)), draw(logits, even_numbers(37), top_p=0.9)
    monkeypatch.setattr(sampler, "MAX_DRAW_ELEMENTS", 150)
    assert draw(logits, even_numbers(37)) == whole
    assert draw(logits, even_numbers(37), top_p=0.9) == cut


@pytest.mark.parametrize("settings_", [{}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_do_not_crash(bad: float, settings_: dict[str, float]) -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(5))
    clean = draw(logits, even_numbers(3), **settings_)  # type: ignore[arg-type]
    logits[1, 2:4] = bad
    tokens = draw(logits, even_numbers(3), **settings_)  # type: ignore[arg-type]
    assert (tokens[0], tokens[2]) == (clean[0], clean[2])
    assert 0 <= tokens[1] < 8
    logits[:] = bad
    assert all(0 <= token < 8 for token in draw(logits, even_numbers(3), **settings_))  # type: ignore[arg-type]


def test_uniform_numbers_depend_on_seed_and_position_alone() -> None:
    seeds = np.array([0, 1, 1, 2**64 - 1], np.uint64)
    positions = np.array([0, 0, 1, 5])
    together = uniform(seeds, positions)
    for index in range(4):
        one = slice(index, index + 1)
        assert uniform(seeds[one], positions[one])[0] == together[index]
    assert len(set(together.tolist())) == 4


def test_uniform_numbers_are_the_same_on_every_machine() -> None:
    numbers = uniform(np.array([0, 42], np.uint64), np.array([0, 7]))
    assert numbers.tolist() == [0.7012121095215252, 0.11138329335761343]


def test_uniform_numbers_are_spread_evenly_over_seeds_and_positions() -> None:
    seeds, positions = (part.ravel() for part in np.mgrid[0:100, 0:100])
    numbers = uniform(seeds.astype(np.uint64), positions)
    assert 0 <= numbers.min() <= numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert np.abs(counts - 500).max() < 5 * math.sqrt(500)
    grid = numbers.reshape(100, 100)
    for neighbours in (grid[1:], grid[:, 1:]):  # next seed, next position
        part = grid[: neighbours.shape[0], : neighbours.shape[1]]
        assert abs(np.corrcoef(part.ravel(), neighbours.ravel())[0, 1]) < 0.05
