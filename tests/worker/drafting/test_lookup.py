"""Drafts that are looked up in the request and in recent outputs."""

from typing import Any

import numpy as np
import pytest

from longshore.protocol.arrays import int32_array
from longshore.worker.drafting import lookup
from longshore.worker.drafting.config import SpeculativeConfig
from longshore.worker.drafting.drafter import Drafter
from longshore.worker.drafting.lookup import NgramDrafter, SuffixDrafter


def ngram(low: int = 2, high: int = 3) -> NgramDrafter:
    config = SpeculativeConfig(
        method="ngram", num_speculative_tokens=4, prompt_lookup_min=low, prompt_lookup_max=high
    )
    return NgramDrafter(config)


def suffix(**settings: Any) -> SuffixDrafter:
    given = {f"suffix_decoding_{name}": value for name, value in settings.items()}
    return SuffixDrafter(SpeculativeConfig(method="suffix", **given))


def start(drafter: Drafter, tokens: list[int], row: int = 0, num_prompt: int = 1) -> None:
    drafter.start(row, int32_array(tokens), num_prompt)


def test_ngram_continues_the_longest_repetition() -> None:
    drafter = ngram()
    start(drafter, [1, 2, 3, 7, 7, 2, 3, 8, 8, 1, 2, 3])
    assert drafter.propose(0, 2) == [7, 7]  # after 1, 2, 3, although 2, 3 came again later


def test_ngram_continues_the_latest_of_equally_long_repetitions() -> None:
    drafter = ngram()
    start(drafter, [2, 3, 7, 2, 3, 8, 5, 2, 3])
    assert drafter.propose(0, 2) == [8, 5]


def test_ngram_has_no_draft_without_a_repetition_or_after_the_end() -> None:
    drafter = ngram()
    start(drafter, [1, 2, 3, 4])
    assert not drafter.propose(0, 4)
    drafter.append(0, [9, 3, 4])
    assert drafter.propose(0, 4) == [9, 3, 4]


def test_tokens_are_appended_and_rewound() -> None:
    drafter = ngram()
    start(drafter, [1, 2, 3])
    drafter.append(0, [4, 1])
    drafter.append(0, [2])
    assert drafter.propose(0, 1) == [3]
    drafter.rewind(0, 5)
    assert not drafter.propose(0, 1)
    drafter.append(0, [2])
    assert drafter.propose(0, 1) == [3]
    drafter.end(0, is_finished=True)
    start(drafter, [1, 2])
    assert not drafter.propose(0, 1)


def test_suffix_drafts_no_more_tokens_than_are_equal() -> None:
    drafter = suffix()
    start(drafter, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3])
    assert drafter.propose(0, 8) == [4, 5, 6]
    drafter = suffix(max_spec_factor=2.0)
    start(drafter, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3])
    assert drafter.propose(0, 8) == [4, 5, 6, 7, 8, 9]
    assert drafter.propose(0, 4) == [4, 5, 6, 7]


def test_suffix_drafts_what_followed_most_often() -> None:
    drafter = suffix()
    start(drafter, [1, 2, 5, 9, 11, 1, 2, 6, 9, 12, 1, 2, 5, 8, 13, 1, 2, 7, 9, 14, 1, 2])
    assert drafter.propose(0, 8) == [5, 8]  # 5 twice of four times; then 8 is the newer of two


def test_suffix_ends_where_continuations_disagree() -> None:
    tokens = [1, 2, 5, 6, 1, 2, 5, 7, 1, 2]
    drafter = suffix(min_token_prob=0.6)
    start(drafter, tokens)
    assert drafter.propose(0, 8) == [5]


def test_suffix_learns_from_ended_requests_only() -> None:
    drafter = suffix()
    start(drafter, [99, 98, 1, 2, 3, 4, 5], row=1, num_prompt=2)
    start(drafter, [20, 1, 2, 3], row=2)
    assert not drafter.propose(2, 4)
    drafter.end(1, is_finished=False)  # preempted
    assert not drafter.propose(2, 4)
    start(drafter, [99, 98, 1, 2, 3, 4, 5], row=1, num_prompt=2)
    drafter.end(1, is_finished=True)
    assert drafter.propose(2, 4) == [4, 5]
    start(drafter, [30, 99, 98], row=3)
    assert not drafter.propose(3, 4)  # prompts are no outputs


def test_suffix_does_not_run_from_one_output_into_the_next() -> None:
    drafter = suffix()
    for row, output in ((0, [1, 2]), (1, [5, 6, 7])):
        start(drafter, [0, *output], row)
        drafter.end(row, is_finished=True)
    start(drafter, [9, 1, 2], 2)
    assert not drafter.propose(2, 4)


def test_suffix_keeps_no_outputs_if_it_may_not() -> None:
    drafter = suffix(max_cached_requests=0)
    start(drafter, [0, 1, 2, 3, 4], row=1)
    drafter.end(1, is_finished=True)
    start(drafter, [9, 1, 2], row=2)
    assert not drafter.propose(2, 4)


@pytest.mark.parametrize("limit", ["requests", "tokens"])
def test_old_outputs_are_forgotten(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if limit == "tokens":
        monkeypatch.setattr(lookup, "MAX_CACHED_TOKENS", 12)
    drafter = suffix(max_cached_requests=4 if limit == "requests" else 10_000)
    for number in range(6):
        start(drafter, [0, *range(10 * number + 1, 10 * number + 6)], row=number)
        drafter.end(number, is_finished=True)

    def knows(number: int) -> bool:
        start(drafter, [0, 10 * number + 1, 10 * number + 2], row=50)
        known = drafter.propose(50, 1) == [10 * number + 3]
        drafter.end(50, is_finished=False)
        return known

    assert [knows(number) for number in range(6)] == [False] * 2 + [True] * 4


def test_the_tokens_of_the_request_are_looked_up_in_outputs_of_any_length() -> None:
    drafter = suffix()
    output = np.random.default_rng(0).integers(0, 10_000, 500).tolist()
    start(drafter, [0, *output], row=0)
    drafter.end(0, is_finished=True)
    start(drafter, [0, *output[:100]], row=1)
    assert drafter.propose(1, 64) == output[100:124]  # as many as are compared
