"""When streams with random draws count as equal."""

import math

import pytest

from tests.chaos.streams import COMPLETE, TIE, TOP_K, Prompt, Stream, make_prompts

LOGPROBS = [math.log(share) for share in (0.1, 0.4, 0.2, 0.15, 0.05)]
"""Of five tokens, of which the four best are drawn from."""


def test_half_of_the_prompts_have_random_draws_of_their_own() -> None:
    seeds = [prompt.seed for prompt in make_prompts(1)]
    assert seeds.count(None) == len(seeds) / 2
    assert len({*seeds}) == len(seeds) / 2 + 1


def test_the_margin_of_a_greedy_token_is_its_distance_to_the_next() -> None:
    assert Prompt([1], 1, None).margin(0, [-2.5, -0.5]) == 2.0


@pytest.mark.parametrize("seed", range(20))
def test_the_margin_of_a_draw_is_its_distance_to_a_border(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The borders are at 40/85, 60/85, 75/85 and 1. Two tokens are not closer than 20 to 15."""
    monkeypatch.setattr("tests.chaos.streams.uniform", lambda seeds, positions: [seed / 20])
    to_border = min(abs(seed / 20 - border / 85) for border in (40, 60, 75, 85))
    assert len(LOGPROBS) == TOP_K + 1
    assert Prompt([1], 1, seed).margin(3, LOGPROBS) == pytest.approx(
        min(to_border, math.log(20 / 15))
    )


def test_a_draw_from_tokens_whose_order_is_uncertain_has_no_margin() -> None:
    logprobs = [*LOGPROBS[:-1], LOGPROBS[0] - TIE / 2]  # the fourth and the fifth
    assert Prompt([1], 1, 7).margin(3, logprobs) < TIE


def test_a_stream_may_differ_only_from_where_the_margin_is_small() -> None:
    calm = Stream(0, [1, 2, 3], [0.5, TIE / 2, 0.5], end=COMPLETE)
    assert Stream(0, [1, 9, 8], end=COMPLETE).difference(calm) is None
    assert Stream(0, [9, 2, 3], end=COMPLETE).difference(calm) is not None
    assert Stream(0, [1, 2, 9], end=COMPLETE).difference(calm) is not None
