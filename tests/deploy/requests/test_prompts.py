"""Prompts as token ids: what messages call them, and pairs of texts."""

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from longshore.deploy.gateway.text.chat_template import PLAIN_TEMPLATE, ChatTemplate
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.requests.errors import RequestError
from longshore.deploy.requests.prompts import PromptCut, PromptEncoder, PromptForm, text_pairs
from tests.deploy.tiny_tokenizer import EOS_ID, byte_level_tokenizer

NAMES = ("queries", "items")


@pytest.fixture
def encoder() -> PromptEncoder:
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="$A", pair="$A </s> $B", special_tokens=[("</s>", EOS_ID)]
    )
    plain = ModelTokenizer(tokenizer, ChatTemplate(PLAIN_TEMPLATE, {}))
    return PromptEncoder(plain, vocab_size=320, max_model_len=16)


def test_one_text_is_paired_with_each_of_the_others_or_as_many_with_as_many() -> None:
    for first, second, named in (
        ("q", "a", [("queries", "items")]),
        ("q", ["a", "b"], [("queries", "items[0]"), ("queries", "items[1]")]),
        (["q"], ["a", "b"], [("queries[0]", "items[0]"), ("queries[0]", "items[1]")]),
        (["q", "r"], ["a", "b"], [("queries[0]", "items[0]"), ("queries[1]", "items[1]")]),
    ):
        pairs = text_pairs(first, second, NAMES)
        assert [(one.name, other.name) for one, other in pairs] == named
    with pytest.raises(RequestError, match="queries has 2 texts and items has 3"):
        text_pairs(["q"] * 2, ["a"] * 3, NAMES)
    with pytest.raises(RequestError, match=r"items\[1\] is empty"):
        text_pairs("q", ["a", ""], NAMES)


def test_the_second_text_of_a_pair_is_cut_at_the_side_that_is_asked_for(
    encoder: PromptEncoder,
) -> None:
    assert encoder.tokenizer is not None
    ids_of = encoder.tokenizer.encode_rendered
    pairs = text_pairs("qr", ["abcd", "e"], NAMES)
    assert [*encoder.pairs(pairs, None)] == [
        [*ids_of("qr"), EOS_ID, *ids_of("abcd")],
        [*ids_of("qr"), EOS_ID, *ids_of("e")],
    ]
    for keeps_end, kept in ((True, "cd"), (False, "ab")):
        first, second = encoder.pairs(pairs, PromptCut(5, keeps_end))
        assert first == [*ids_of("qr"), EOS_ID, *ids_of(kept)]
        assert second == [*ids_of("qr"), EOS_ID, *ids_of("e")]


@pytest.mark.parametrize(
    ("second", "cut", "param", "says"),
    [
        (["a", "b" * 15], None, "items", r"items\[1\] with queries has 17 tokens; .* is 16 tokens"),
        ("a", PromptCut(2, keeps_end=True), "queries", "queries has 1 tokens, .* none of 2"),
    ],
)
def test_a_pair_that_does_not_fit_is_named(
    encoder: PromptEncoder, second: Any, cut: PromptCut | None, param: str, says: str
) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        list(encoder.pairs(text_pairs("q", second, NAMES), cut))
    assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")


@pytest.mark.parametrize(
    ("given", "gives_tokens", "says"),
    [
        ([], True, r"input\[3\] has no tokens; there is nothing to continue"),
        ([], False, r"input\[3\] has no tokens; there is nothing to compute"),
        ([5] * 16, True, r"input\[3\] has 16 tokens; .* is 16 tokens, including at least one out"),
        ([5] * 17, False, r"input\[3\] has 17 tokens; .* is 16 tokens\. Shorten it, or set trunc"),
        ([5, 320], False, r"input\[3\] has token id 320, outside the vocabulary \(0 to 319\)"),
        ([-1, 5], False, r"input\[3\] has token id -1"),
    ],
)
def test_what_the_model_cannot_compute_is_named(
    encoder: PromptEncoder, given: list[int], gives_tokens: bool, says: str
) -> None:
    form = PromptForm(gives_tokens=gives_tokens)
    with pytest.raises(RequestError, match=says) as caught:
        encoder.token_ids(given, form, "input[3]")
    assert caught.value.param == "input"
    assert encoder.token_ids([5] * 15, form, "input[3]") == [5] * 15
