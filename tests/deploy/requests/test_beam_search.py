"""The tree of a beam search, without an engine."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.deploy.requests.beam_search import BeamSearchParams, BeamTree

VOCABULARY = 5
END = 0


def logprobs_after(table: list[list[float]], tokens: tuple[int, ...]) -> list[tuple[int, float]]:
    """A model whose next token depends only on the last one; the most likely first."""
    values = np.array(table[tokens[-1] if tokens else 0])
    values = values - np.log(np.exp(values).sum())
    return sorted(enumerate(values.tolist()), key=lambda pair: -pair[1])


def search(table: list[list[float]], params: BeamSearchParams) -> BeamTree:
    tree = BeamTree(params)
    while tree.beams:
        assert len(tree.beams) <= params.beam_width
        found = [logprobs_after(table, beam.token_ids) for beam in tree.beams]
        tree.advance([each[: params.num_candidates] for each in found])
    return tree


TABLES = st.lists(
    st.lists(st.floats(-3, 3), min_size=VOCABULARY, max_size=VOCABULARY),
    min_size=VOCABULARY,
    max_size=VOCABULARY,
)


@settings(max_examples=60, deadline=None)
@given(TABLES, st.integers(1, 3))
def test_a_beam_as_wide_as_the_tree_finds_the_best_of_all_answers(
    table: list[list[float]], max_tokens: int
) -> None:
    params = BeamSearchParams(10, max_tokens)
    best = max(
        sum(
            dict(logprobs_after(table, tokens[:index]))[token] for index, token in enumerate(tokens)
        )
        for tokens in itertools.product(range(VOCABULARY), repeat=max_tokens)
    )
    if VOCABULARY ** (max_tokens - 1) > params.beam_width:
        return
    finished = search(table, params).finished[0]
    assert finished.score == pytest.approx(best / max_tokens, abs=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    TABLES,
    st.integers(1, 4),
    st.integers(1, 8),
    st.sampled_from([-1.0, 0.0, 0.7, 2.0]),
    st.sampled_from([True, False, "never"]),
)
def test_what_is_found_is_sorted_scored_and_within_its_limits(
    table: list[list[float]], width: int, max_tokens: int, penalty: float, early: Any
) -> None:
    params = BeamSearchParams(width, max_tokens, penalty, early, frozenset({END}))
    tree = search(table, params)
    assert 1 <= len(tree.finished) <= width
    scores = [finished.score for finished in tree.finished]
    assert scores == sorted(scores, reverse=True)
    answers = [finished.beam.token_ids for finished in tree.finished]
    assert len(set(answers)) == len(answers)
    for finished in tree.finished:
        tokens = finished.beam.token_ids
        assert len(tokens) <= max_tokens
        assert END not in tokens[:-1]
        assert (tokens[-1] == END) is finished.beam.has_ended
        assert finished.beam.has_ended or len(tokens) == max_tokens
        logprob = sum(
            dict(logprobs_after(table, tokens[:index]))[token] for index, token in enumerate(tokens)
        )
        assert finished.score == pytest.approx(logprob / len(tokens) ** penalty, abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"beam_width": 0}, "beam_width=0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"length_penalty": math.nan}, "length_penalty"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"beam_width": 11}, "use at most 10"),
        ({"beam_width": 7, "end_token_ids": frozenset({1, 2})}, "use at most 6"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_rejected(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 4} | settings))
