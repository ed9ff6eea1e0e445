"""`SamplingParams` as users of vLLM write them: what is taken, and what is refused by name."""

from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from longshore import RepetitionDetection, SamplingParams, StructuredOutputsParams
from longshore.deploy.gateway.text.chat_template import PLAIN_TEMPLATE, ChatTemplate
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.requests.refused import REFUSED
from longshore.protocol.sampling import SamplingParams as EngineSamplingParams
from tests.deploy.tiny_tokenizer import byte_level_tokenizer

CHOICE = StructuredOutputsParams(choice=["yes", "no"])


@pytest.fixture
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer(byte_level_tokenizer(), ChatTemplate(PLAIN_TEMPLATE, {}))


def test_settings_reach_the_engine_with_their_values() -> None:
    params = SamplingParams(
        n=3,
        temperature=np.float64(0.5),
        top_k=-1,
        top_p=0.9,
        min_p=0.1,
        seed=7,
        stop="the end",
        stop_token_ids=[np.int64(5)],
        ignore_eos=True,
        max_tokens=None,
        logprobs=2,
        prompt_logprobs=0,
        logit_bias={6: 1.5},
    )
    assert params.engine_params(None) == EngineSamplingParams(
        temperature=0.5,
        top_k=0,
        top_p=0.9,
        min_p=0.1,
        seed=7,
        stop_token_ids=(5,),
        ignore_eos=True,
        max_tokens=None,
        logprobs=2,
        prompt_logprobs=0,
        logit_bias={6: 1.5},
    )
    assert params.stops().texts == ("the end",)


def test_the_defaults_are_those_of_the_engine() -> None:
    assert SamplingParams().engine_params(None) == EngineSamplingParams()


def test_repeated_output_is_detected_as_the_engine_does() -> None:
    detection = RepetitionDetection(3)
    params = SamplingParams(repetition_detection=detection)
    assert params.engine_params(None).repetition == detection


def test_a_constraint_is_checked_at_once_and_given_to_the_engine() -> None:
    assert SamplingParams().constraint() is None
    constraint = SamplingParams(structured_outputs=CHOICE).constraint()
    assert constraint is not None
    assert (constraint.kind, constraint.text) == ("choice", '["yes","no"]')
    with pytest.raises(ValueError, match='invalid at "/type"'):
        SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "text"}))


def test_a_changed_setting_is_checked_when_it_is_used() -> None:
    params = SamplingParams()
    params.max_tokens = 32
    assert params.engine_params(None).max_tokens == 32
    params.top_p = 2
    with pytest.raises(ValueError, match="top_p=2"):
        params.engine_params(None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 0}, "n=0 must be between"),
        ({"top_k": -2}, "top_k=-2"),
        ({"logprobs": -1}, "logprobs=-1 must lie within 0..20"),
        ({"stop": ["a", ""]}, "stop has an empty string"),
        ({"stop": "a", "detokenize": False}, "stop needs detokenize=True"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"structured_outputs": {"regex": "a"}}, r"must be longshore\.StructuredOutputsParams"),
        ({"structured_outputs": CHOICE, "ignore_eos": True}, "ignore_eos is not possible"),
    ],
)
def test_an_invalid_setting_is_named_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**settings)


@pytest.mark.parametrize("name", REFUSED["SamplingParams"])
def test_a_setting_that_is_not_supported_is_refused_unless_it_changes_nothing(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} is not supported; \w"):
        SamplingParams(**{name: [3]})
    neutral, *_ = REFUSED["SamplingParams"][name]
    for value in (None, *neutral):
        assert SamplingParams(**{name: value}) == SamplingParams()


def test_an_unknown_setting_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="top_q"):
        SamplingParams(top_q=1)  # type: ignore[call-arg]


def test_bad_words_are_forbidden_in_both_spellings(tokenizer: ModelTokenizer) -> None:
    params = SamplingParams(bad_words=["quay"], bad_words_token_ids=[[3]])
    words = params.engine_params(tokenizer).bad_words_token_ids
    assert words == ((3,), *map(tuple, tokenizer.encode_each(["quay", " quay"])))
    with pytest.raises(ValueError, match="bad_words needs a tokenizer"):
        params.engine_params(None)
    with pytest.raises(ValueError, match="bad_words has an empty text"):
        SamplingParams(bad_words=[" "]).engine_params(tokenizer)


def test_none_is_the_default_of_optional_settings() -> None:
    params = SamplingParams.from_optional(temperature=None, n=None, top_k=3, max_tokens=None)
    assert params == SamplingParams(top_k=3, max_tokens=None)
    assert params.clone() == params


def test_a_thinking_budget_needs_tags_that_the_chat_template_shows() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    template = ChatTemplate("{{ '<think>' if thinks else '</think>' }}", {})
    model = ModelTokenizer(tokenizer, template)
    budget = SamplingParams(thinking_token_budget=3).engine_params(model).thinking
    assert budget is not None
    assert (budget.num_tokens, model.decode(budget.end_token_ids)) == (3, "</think>")
    for none in (None, -1):
        assert SamplingParams(thinking_token_budget=none).engine_params(model).thinking is None
    with pytest.raises(ValueError, match="thinking_token_budget=-2 must be at least 0"):
        SamplingParams(thinking_token_budget=-2)
    plain = ModelTokenizer(tokenizer, ChatTemplate("", {}))
    for other in (plain, None):
        with pytest.raises(ValueError, match="no known tags of reasoning"):
            SamplingParams(thinking_token_budget=3).engine_params(other)
