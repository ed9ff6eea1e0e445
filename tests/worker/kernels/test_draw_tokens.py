"""The draws of a GPU, in Triton's interpreter, against float64."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longshore.worker.kernels import draw_tokens as wrapper
from longshore.worker.kernels.gpu.draw_tokens import draw_tokens as operator
from longshore.worker.sampling.sampler import Draws, sample
from tests.worker.draws import make_draws
from tests.worker.kernels.variants import in_triton

LAST = 1 - 2**-53


def expected(logits: Tensor, u: float, setting: dict[str, Any]) -> int:
    """By the definition, with a sort and float64."""
    wide = logits.double().numpy()
    weights = np.exp((wide - wide.max()) / setting.get("temperature", 1.0))
    weights[weights < setting.get("min_p", 0.0)] = 0.0
    order = np.argsort(-wide, kind="stable")
    order = order[weights[order] > 0][: setting.get("top_k", 0) or None]
    before = weights[order].cumsum() - weights[order]
    order = np.sort(order[before < setting.get("top_p", 1.0) * weights[order].sum()])
    mass = weights[order].cumsum()
    return int(order[(mass <= u * mass[-1]).sum()])


def draws_of(u: Sequence[float], settings: Sequence[dict[str, Any]]) -> Draws:
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    columns = {
        name: torch.tensor([{**defaults, **each}[name] for each in settings], dtype=torch.float64)
        for name in defaults
    }
    return make_draws(torch.tensor(u, dtype=torch.float64), **columns)


def drawn(logits: Tensor, draws: Draws, split: int) -> list[int]:
    """The tokens of all rows, if a program reads `split` tokens."""
    best = logits.argmax(-1)
    columns = (draws.rows, draws.top_k, draws.top_p, draws.u, draws.temperature, draws.min_p)
    with in_triton():
        operator(logits, best, *columns, split)
    return best.tolist()


def check(logits: Tensor, u: Sequence[float], settings: Sequence[dict[str, Any]]) -> None:
    """Through the sampler."""
    with in_triton():
        tokens = sample(logits, draws_of(u, settings)).tolist()
    assert tokens == [expected(*each) for each in zip(logits, u, settings, strict=True)]


MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"top_k": 5},
    {"top_p": 0.7, "temperature": 1.7},
    {"min_p": 0.1},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.05, "temperature": 1.5},
]


@pytest.mark.parametrize(
    ("vocab_size", "split"), [(1, 16), (2, 16), (15, 16), (16, 16), (17, 16), (200, 32)]
)
def test_rows_with_any_settings_share_a_step(vocab_size: int, split: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(len(MIXED), vocab_size, generator=generator) * 3
    logits[::2] = logits[::2].round()  # many are equal
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -math.inf
    logits[:, vocab_size // 2] = 1.0
    u = torch.rand(len(MIXED), dtype=torch.float64, generator=generator).tolist()
    tokens = drawn(logits, draws_of(u, MIXED), split)
    assert tokens == [expected(*each) for each in zip(logits, u, MIXED, strict=True)]


@pytest.mark.parametrize("vocab_size", [2047, 2048, 2049, 4097])
def test_vocabularies_end_anywhere_in_a_split(vocab_size: int) -> None:
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(1)) * 2
    logits[:, -1] = 6.0
    check(logits, [0.3, LAST, 0.8], [{"top_k": 50, "top_p": 0.9}, {}, {"top_p": 0.99}])


def test_among_equal_logits_the_lowest_ids_are_kept_across_splits() -> None:
    num_kept, u = 37, [0.0, 0.25, 0.5, 0.75, LAST]
    logits = torch.full((len(u), 100), -0.0)
    logits[:, 1::3] = 0.0  # not above -0
    settings = [{"top_k": num_kept}] * len(u)
    wanted = [int(each * num_kept) for each in u]
    assert drawn(logits, draws_of(u, settings), split=16) == wanted
    settings = [{"top_p": num_kept / 100}] * len(u)
    assert drawn(logits, draws_of(u, settings), split=16) == wanted


@pytest.mark.parametrize("vocab_size", [8192, pytest.param(1 << 18, marks=pytest.mark.long)])
def test_sums_of_equally_likely_tokens_do_not_overflow(vocab_size: int) -> None:
    draws = draws_of([LAST], [{"top_k": vocab_size - 1}])
    assert drawn(torch.zeros(1, vocab_size), draws, split=4096) == [vocab_size - 2]


def test_the_ends_of_the_unit_interval_give_tokens_that_are_kept() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -9.0, 0.1, -math.inf, -50.0, -math.inf]])
    settings: list[dict[str, Any]] = [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.5}]
    for u, token_id in ((0.0, 1), (LAST, 3)):
        draws = draws_of([u] * 4, settings)
        assert drawn(logits.expand(4, -1), draws, split=16) == [token_id] * 4


@pytest.mark.parametrize("setting", [{}, {"top_k": 4}, {"top_p": 0.9}], ids=str)
def test_extreme_temperatures_are_greedy_and_uniform(setting: dict[str, Any]) -> None:
    logits = torch.randn(4, 70, generator=torch.Generator().manual_seed(2)) * 5
    cold = [{**setting, "temperature": 1e-30}, {**setting, "temperature": 1e-6}]
    hot = [{**setting, "temperature": 1e30}, {**setting, "temperature": 1e4}]
    tokens = drawn(logits, draws_of([LAST, 0.5, 0.605, 0.605], cold + hot), split=32)
    assert tokens[:2] == logits[:2].argmax(-1).tolist()
    assert tokens[2:] == [
        expected(line, 0.605, each) for line, each in zip(logits[2:], hot, strict=True)
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_gets_a_valid_id_and_changes_no_other(bad: float) -> None:
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(3))
    draws = draws_of([0.1, 0.9, 0.2, 0.5], [MIXED[1], MIXED[3], MIXED[0], MIXED[5]])
    clean = drawn(logits, draws, split=16)
    logits[1, 2:4] = bad
    logits[3] = bad
    tokens = drawn(logits, draws, split=16)
    assert all(0 <= token < 40 for token in tokens)
    assert (tokens[0], tokens[2]) == (clean[0], clean[2])


def test_a_token_depends_neither_on_the_other_rows_nor_on_the_splits() -> None:
    logits = torch.randn(4, 130, generator=torch.Generator().manual_seed(4)) * 2
    u, settings = [0.15, 0.9, 0.25, 0.35], [MIXED[1], MIXED[3], MIXED[0], MIXED[5]]
    together = drawn(logits, draws_of(u, settings), split=16)
    assert drawn(logits, draws_of(u, settings), split=256) == together
    for row in range(4):
        draws = replace(draws_of([u[row]], [settings[row]]), rows=torch.tensor([row]))
        greedy = logits.argmax(-1).tolist()
        greedy[row] = together[row]
        assert drawn(logits, draws, split=64) == greedy


def test_the_cpu_draws_the_same_tokens() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(12, 600, generator=generator) * 3
    u = torch.rand(12, dtype=torch.float64, generator=generator).tolist()
    draws = draws_of(u, MIXED * 2)
    with in_triton():
        tokens = sample(logits, draws).tolist()
    assert tokens == sample(logits, draws).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(MIXED[0], marks=pytest.mark.long),
        pytest.param(MIXED[3], marks=pytest.mark.long),
        {"top_k": 5, "min_p": 0.05},
    ],
    ids=str,
)
def test_tokens_follow_the_distribution_that_is_left(setting: dict[str, Any]) -> None:
    """Chi-square over random numbers with a fixed seed."""
    num_draws, vocab_size, num_parts = 80, 8, 1000
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(vocab_size, generator=generator)
    u = torch.rand(num_draws, dtype=torch.float64, generator=generator)
    draws = draws_of(u.tolist(), [setting] * num_draws)
    tokens = drawn(logits.expand(num_draws, -1), draws, split=4)
    middles = [expected(logits, (part + 0.5) / num_parts, setting) for part in range(num_parts)]
    wanted = np.bincount(middles, minlength=vocab_size) * num_draws / num_parts
    counts, is_kept = np.bincount(tokens, minlength=vocab_size), wanted > 0
    assert not counts[~is_kept].any()
    chi_square = ((counts - wanted)[is_kept] ** 2 / wanted[is_kept]).sum()
    freedom = is_kept.sum() - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


def test_wrong_shapes_and_dtypes_are_rejected() -> None:
    draws, logits = make_draws(torch.zeros(2)), torch.zeros(2, 8)
    columns = {
        name: getattr(draws, name)
        for name in ("rows", "top_k", "top_p", "u", "temperature", "min_p")
    }
    best = torch.zeros(2, dtype=torch.int64)
    for wrong in (logits.half(), logits[0], logits[:, :0], torch.zeros(8, 2).t()):
        with pytest.raises(ValueError, match="logits"):
            wrapper.draw_tokens(wrong, best, **columns)
    with pytest.raises(ValueError, match="best"):
        wrapper.draw_tokens(logits, best.int(), **columns)
    with pytest.raises(ValueError, match=r"top_p torch.float32"):
        wrapper.draw_tokens(logits, best, **{**columns, "top_p": torch.ones(2)})
    with pytest.raises(ValueError, match=r"min_p torch.float32"):
        wrapper.draw_tokens(logits, best, **{**columns, "min_p": torch.zeros(3)})
