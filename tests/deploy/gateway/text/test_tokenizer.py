"""How much of long texts a tokenizer encodes, and what it caches."""

import threading
import time
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from longshore.deploy.gateway.text.chat_template import PLAIN_TEMPLATE, ChatTemplate
from longshore.deploy.gateway.text.tokenizer import SLICE_CHARACTERS, ModelTokenizer
from tests.deploy.tiny_tokenizer import byte_level_tokenizer

LONG = "the ships, the crates " * 20_000


class CountingTokenizer:
    """num_characters: the number of encoded characters.
    decoded: the ids that were decoded, in order.
    """

    def __init__(self) -> None:
        self._tokenizer = byte_level_tokenizer()
        self.num_characters = 0
        self.decoded: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: Sequence[str], **options: Any) -> Any:
        self.num_characters += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts, **options)

    def decode(self, token_ids: Sequence[int], **options: Any) -> Any:
        self.decoded += token_ids
        return self._tokenizer.decode(token_ids, **options)


def model_tokenizer(tokenizer: Any, *, keeps_end: bool = False) -> ModelTokenizer:
    template = ChatTemplate(PLAIN_TEMPLATE, {})
    return ModelTokenizer(cast(Tokenizer, tokenizer), template, keeps_end=keeps_end)


@pytest.mark.parametrize("keeps_end", [False, True])
@given(st.integers(0, 4 * SLICE_CHARACTERS), st.integers(1, 3 * SLICE_CHARACTERS))
def test_a_cut_text_has_the_first_or_last_tokens_of_the_whole(
    keeps_end: bool, num_characters: int, max_tokens: int
) -> None:
    tokenizer = model_tokenizer(byte_level_tokenizer(), keeps_end=keeps_end)
    text = LONG[:num_characters]
    whole = tokenizer.encode_rendered(text)
    kept = whole[-max_tokens:] if keeps_end else whole[:max_tokens]
    assert tokenizer.encode_cut(text, max_tokens, with_special=False) == kept


@pytest.mark.parametrize("keeps_end", [False, True])
def test_what_is_cut_off_is_not_tokenized(keeps_end: bool) -> None:
    counting = CountingTokenizer()
    tokenizer = model_tokenizer(counting, keeps_end=keeps_end)
    assert len(tokenizer.encode_cut(LONG, 100, with_special=False)) == 100
    assert counting.num_characters == 2 * SLICE_CHARACTERS  # counted, then truncated


def test_a_batch_has_the_ids_and_the_text_that_single_texts_have() -> None:
    library = byte_level_tokenizer()
    tokenizer = model_tokenizer(library)
    ids = library.encode(LONG, add_special_tokens=False).ids
    assert tokenizer.encode_rendered(LONG) == ids
    assert tokenizer.encode_each([LONG, "", "a"])[:2] == [ids, []]
    assert tokenizer.decode(ids) == library.decode(ids) == LONG


@pytest.mark.parametrize("name", ["encode_rendered", "decode"])
def test_work_on_a_long_text_does_not_hold_the_interpreter_lock(name: str) -> None:
    tokenizer = model_tokenizer(byte_level_tokenizer())
    argument: Any = LONG if name == "encode_rendered" else tokenizer.encode_rendered(LONG * 4)
    is_done = threading.Event()
    worked_s = 0.0

    def work() -> None:
        nonlocal worked_s
        started_s = time.thread_time()
        getattr(tokenizer, name)(argument)
        worked_s = time.thread_time() - started_s
        is_done.set()

    thread = threading.Thread(target=work)
    started_s = time.thread_time()
    thread.start()
    while not is_done.is_set():
        pass
    thread.join()
    # Processor time of a thread that always computes: as much as the other's if it needs no lock.
    assert time.thread_time() - started_s > 0.2 * worked_s


def test_texts_of_tokens_are_remembered_if_the_vocabulary_holds_them() -> None:
    counting = CountingTokenizer()
    tokenizer = model_tokenizer(counting)
    asked = [60, 60, 10**6, 10**6, 2**31 - 1]
    assert [tokenizer.decode([i]) for i in asked] == ["[", "[", "", "", ""]
    assert counting.decoded == asked[1:]
