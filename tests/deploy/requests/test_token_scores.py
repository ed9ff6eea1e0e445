"""Log probabilities from the columns of a message, seeds of samples, and invalid ids."""

import numpy as np
import pytest
from tokenizers import Tokenizer

from longshore.deploy.gateway.api.logprobs import LEAST_LOGPROB, LogprobsWriter
from longshore.deploy.gateway.text.chat_template import ChatTemplate
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.requests.sample_params import sample_params
from longshore.deploy.requests.token_scores import Logprob, TokenScore, scores_of
from longshore.deploy.requests.validation import sampling_problem
from longshore.protocol.outputs import TokenLogprobs
from longshore.protocol.sampling import SamplingParams
from tests.deploy.tiny_tokenizer import (
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    unigram_tokenizer,
)


def test_ragged_columns_become_one_score_per_token() -> None:
    columns = TokenLogprobs(
        owners=np.array([4, 9, 4], np.int32),
        positions=np.array([0, 7, 1], np.int32),
        ranks=np.array([1, 3, 2], np.int32),
        num_listed=np.array([1, 3, 2], np.int32),
        token_ids=np.array([10, 20, 21, 22, 30, 31], np.int32),
        logprobs=np.array([-1, -2, -0.5, -0.75, -4, -3], np.float32),
    )
    assert list(scores_of(columns)) == [
        (4, 0, TokenScore(10, -1.0, 1, ())),
        (9, 7, TokenScore(20, -2.0, 3, ((21, -0.5), (22, -0.75)))),
        (4, 1, TokenScore(30, -4.0, 2, ((31, -3.0),))),
    ]


def test_a_token_is_listed_once_and_equal_ones_share_a_rank() -> None:
    score = TokenScore(7, -1.0, 2, ((5, -0.5), (6, -1.0), (7, -1.0), (8, -2.0)))
    assert score.by_token() == {
        7: Logprob(-1.0, 2),
        5: Logprob(-0.5, 1),
        6: Logprob(-1.0, 2),
        8: Logprob(-2.0, 4),
    }


def test_samples_differ_by_their_seeds_alone() -> None:
    sampling = SamplingParams(seed=3, top_k=5)
    first, *others = sample_params(sampling, 4)
    assert first == sampling
    assert len({each.seed for each in (first, *others)}) == 4
    assert {each.top_k for each in others} == {5}
    assert sample_params(sampling, 9)[:4] == [first, *others]
    assert [each.seed for each in sample_params(SamplingParams(), 2)] == [None, None]
    assert sample_params(SamplingParams(seed=4), 2)[1].seed != others[0].seed


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (SamplingParams(logit_bias={3: 1.0, 50: 1.0}), "logit_bias: 50 is outside"),
        (SamplingParams(bad_words_token_ids=((3,), (4, 77))), "bad_words_token_ids: 77 is outside"),
        (SamplingParams(stop_token_ids=(50,)), "stop_token_ids=50 is outside"),
        (SamplingParams(logit_bias={49: 1.0}, bad_words_token_ids=((49, 0),)), None),
    ],
)
def test_ids_outside_the_vocabulary_are_named(sampling: SamplingParams, words: str | None) -> None:
    problem = sampling_problem(sampling, vocab_size=50)
    assert problem == words if words is None else (problem and problem.startswith(words))


class Decoder:
    special_token_ids: frozenset[int] = frozenset()
    is_bytewise = False

    def __init__(self, tokenizer: "object") -> None:
        self._tokenizer = tokenizer

    def token_bytes(self, token_id: int) -> bytes | None:
        return None

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)  # type: ignore[attr-defined,no-any-return]


def test_a_token_s_text_has_the_space_that_a_text_s_first_word_loses() -> None:
    tokenizer = byte_fallback_tokenizer()
    writer = LogprobsWriter(Decoder(tokenizer))
    space, letter = tokenizer.token_to_id("▁"), tokenizer.token_to_id("a")
    assert (writer.token_text(space), writer.token_text(letter)) == (" ", "a")
    assert writer.token_text(tokenizer.token_to_id("<0xF0>")) == "\ufffd"
    level = byte_level_tokenizer()
    assert LogprobsWriter(Decoder(level)).token_text(level.token_to_id("Ġthe")) == " the"


@pytest.mark.parametrize(
    "tokenizer", [byte_level_tokenizer(), byte_fallback_tokenizer(), unigram_tokenizer()]
)
def test_parts_of_a_character_have_their_own_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🚢", add_special_tokens=False).ids
    writer = LogprobsWriter(ModelTokenizer(tokenizer, ChatTemplate("", {})))
    content = writer.chat([TokenScore(each, 0.0, 1, ()) for each in ids], 0).content
    parts = [bytes(each.bytes or ()) for each in content]
    assert b"".join(parts).strip() == "🚢".encode()
    assert {part for part in parts if part.strip()} == {bytes([one]) for one in "🚢".encode()}


def test_an_impossible_token_s_score_is_a_number_that_json_can_hold() -> None:
    score = TokenScore(7, float("-inf"), 50, ((5, float("-inf")),))
    lines = LogprobsWriter(None).completion([score], 1, 0)
    assert lines.token_logprobs == [LEAST_LOGPROB]
    assert lines.top_logprobs == [{"token_id:7": LEAST_LOGPROB, "token_id:5": LEAST_LOGPROB}]
