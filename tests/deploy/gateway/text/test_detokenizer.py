"""Streams of tokens become text without broken characters, equal to decoding all tokens at once."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from longshore.deploy.gateway.text.chat_template import PLAIN_TEMPLATE, ChatTemplate
from longshore.deploy.gateway.text.detokenizer import REPLACEMENT, IncrementalDetokenizer
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from tests.deploy.tiny_tokenizer import (
    BOS_ID,
    EOS_ID,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    unigram_tokenizer,
    with_added_tokens,
)

TOKENIZERS = {"byte level": byte_level_tokenizer(), "byte fallback": byte_fallback_tokenizer()}
KINDS = {
    f"{name}{' with added tokens' if adds else ''}": with_added_tokens(make()) if adds else make()
    for make, name in (
        (byte_level_tokenizer, "byte level"),
        (byte_fallback_tokenizer, "byte fallback"),
        (unigram_tokenizer, "unigram"),
    )
    for adds in (False, True)
}
words = st.sampled_from(
    ["the", " ", "a", "é", "e\u0301", "日", "日本", "🚢", "<think>", "crane-7", "<|end|>", "\n"]
)
texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters=REPLACEMENT))
chunk_sizes = st.lists(st.integers(1, 5), min_size=1)


def model_tokenizer(tokenizer: Tokenizer) -> ModelTokenizer:
    return ModelTokenizer(tokenizer, ChatTemplate(PLAIN_TEMPLATE, {}))


def pieces(
    tokenizer: ModelTokenizer,
    token_ids: Sequence[int],
    sizes: Sequence[int] = (1,),
    prompt: Sequence[int] = (),
) -> list[str]:
    """The text that appears when the ids arrive in chunks of the given sizes, repeated in turn."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    shown = []
    start = 0
    while start < len(token_ids):
        size = sizes[len(shown) % len(sizes)]
        shown.append(detokenizer.append(token_ids[start : start + size]))
        start += size
    return [*shown, detokenizer.finish()]


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=texts, sizes=chunk_sizes)
def test_pieces_join_to_the_text_and_hold_no_broken_character(
    kind: str, text: str, sizes: list[int]
) -> None:
    tokenizer = model_tokenizer(TOKENIZERS[kind])
    token_ids = tokenizer.encode(text)
    shown = pieces(tokenizer, token_ids, sizes)
    assert "".join(shown) == tokenizer.decode(token_ids)
    assert not any(REPLACEMENT in piece for piece in shown)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), sizes=chunk_sizes)
def test_pieces_of_any_tokens_are_no_more_broken_than_the_whole(
    kind: str, data: st.DataObject, sizes: list[int]
) -> None:
    tokenizer = model_tokenizer(KINDS[kind])
    any_id = st.integers(0, KINDS[kind].get_vocab_size() - 1)
    written = st.lists(words).map(lambda each: tokenizer.encode("".join(each)))
    token_ids = data.draw(st.lists(any_id, max_size=12) | written)
    shown = pieces(tokenizer, token_ids, sizes)
    whole = tokenizer.decode([i for i in token_ids if i not in tokenizer.special_token_ids])
    assert sum(piece.count(REPLACEMENT) for piece in shown) <= whole.count(REPLACEMENT)
    if REPLACEMENT not in whole:
        assert "".join(shown) == whole


@given(prompt=texts, num_special=st.integers(0, 5), answer=texts)
def test_answer_continues_the_prompt_that_it_follows(
    prompt: str, num_special: int, answer: str
) -> None:
    tokenizer = model_tokenizer(TOKENIZERS["byte level"])
    prompt_ids = tokenizer.encode(prompt) + [EOS_ID] * num_special
    assert "".join(pieces(tokenizer, tokenizer.encode(answer), prompt=prompt_ids)) == answer


def test_character_that_the_prompt_began_is_not_shown_broken() -> None:
    tokenizer = model_tokenizer(TOKENIZERS["byte level"])
    ship = tokenizer.encode("🚢")
    for num_in_prompt in range(1, 4):
        prompt = tokenizer.encode("The ") + ship[:num_in_prompt]
        answer = ship[num_in_prompt:] + tokenizer.encode("ab")
        assert "".join(pieces(tokenizer, answer, prompt=prompt)) == "ab"


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(byte_values=st.lists(st.integers(0, 255), max_size=40), sizes=chunk_sizes)
def test_bytes_that_are_no_text_neither_fail_nor_stall(
    kind: str, byte_values: list[int], sizes: list[int]
) -> None:
    tokenizer = model_tokenizer(TOKENIZERS[kind])
    end_marker = tokenizer.encode("zz")[-2:]
    shown = "".join(pieces(tokenizer, [2 + byte for byte in byte_values] + end_marker, sizes))
    assert shown.endswith("zz")


def test_space_between_words_is_kept_where_a_text_would_drop_it() -> None:
    tokenizer = model_tokenizer(TOKENIZERS["byte fallback"])
    prompt = tokenizer.encode("ab")
    answer = tokenizer.encode("cd")  # begins with the space that starts every word
    assert "".join(pieces(tokenizer, answer, prompt=prompt)) == " cd"


def test_character_is_shown_with_its_last_byte() -> None:
    tokenizer = model_tokenizer(TOKENIZERS["byte level"])
    assert pieces(tokenizer, tokenizer.encode("🚢")) == ["", "", "", "🚢", ""]


def test_character_cut_off_by_the_end_is_left_out() -> None:
    tokenizer = model_tokenizer(TOKENIZERS["byte level"])
    assert "".join(pieces(tokenizer, tokenizer.encode("a🚢")[:-1])) == "a"


def test_special_tokens_have_no_text() -> None:
    tokenizer = model_tokenizer(TOKENIZERS["byte level"])
    assert "".join(pieces(tokenizer, [BOS_ID, *tokenizer.encode("a b"), EOS_ID])) == "a b"


def test_cost_of_a_token_does_not_grow_with_the_text() -> None:
    class CountingDecoder:
        special_token_ids: frozenset[int] = frozenset()
        is_bytewise = False
        num_decoded = 0

        def decode(self, token_ids: Sequence[int]) -> str:
            self.num_decoded += len(token_ids)
            return "x" * len(token_ids)

    decoder = CountingDecoder()
    detokenizer = IncrementalDetokenizer(decoder)
    for _ in range(1000):
        detokenizer.append([7])
    assert decoder.num_decoded <= 4 * 1000


@given(st.lists(st.integers(0, 261)), st.lists(st.integers(2, 257), max_size=8))
def test_tokens_that_are_bytes_give_the_same_with_a_window_and_without(
    token_ids: list[int], prompt: list[int]
) -> None:
    direct = model_tokenizer(TOKENIZERS["byte level"])
    windowed = model_tokenizer(TOKENIZERS["byte level"])
    assert direct.is_bytewise
    windowed.is_bytewise = False
    assert pieces(direct, token_ids, prompt=prompt) == pieces(windowed, token_ids, prompt=prompt)
