"""On which thread prompts are tokenized, and when that is aborted."""

import threading
from typing import Any, cast

import pytest

from longshore.deploy.gateway.api.errors import status_of
from longshore.deploy.gateway.api.prompts import PromptReader
from longshore.deploy.gateway.api.requests import GenerationRequest
from longshore.deploy.gateway.text.tokenizer import (
    MAX_INLINE_CHARACTERS,
    SLICE_CHARACTERS,
    ModelTokenizer,
)
from longshore.deploy.model.folder import SamplingDefaults
from longshore.deploy.requests.errors import RequestError


class RecordingTokenizer:
    """One token per prompt, or too many; records the thread on which each prompt was encoded."""

    max_inline_characters = MAX_INLINE_CHARACTERS

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.num_characters = 0

    def encode(self, text: str) -> list[int]:
        self.threads.append(threading.get_ident())
        self.num_characters += len(text)
        return [1] * (1000 if text.startswith("long") else 1 + text.count(" "))

    encode_rendered = encode


def make_reader(tokenizer: RecordingTokenizer) -> PromptReader:
    return PromptReader(
        cast(ModelTokenizer, cast(Any, tokenizer)),
        SamplingDefaults(),
        vocab_size=10,
        max_model_len=100,
    )


async def read(tokenizer: RecordingTokenizer, prompts: list[str]) -> list[list[int]]:
    return await make_reader(tokenizer).prompts(prompts, GenerationRequest(), max_output_tokens=1)


@pytest.mark.parametrize(
    ("prompts", "is_inline"),
    [
        (["short"], True),
        (["x" * (MAX_INLINE_CHARACTERS + 1)], False),
        (["x" * 1000] * (MAX_INLINE_CHARACTERS // 1000 + 1), False),
    ],
    ids=["short", "one long", "many short"],
)
async def test_much_text_is_tokenized_beside_the_loop(prompts: list[str], is_inline: bool) -> None:
    tokenizer = RecordingTokenizer()
    assert await read(tokenizer, prompts) == [[1]] * len(prompts)
    assert {thread == threading.get_ident() for thread in tokenizer.threads} == {is_inline}


async def test_first_prompt_that_does_not_fit_ends_the_work() -> None:
    tokenizer = RecordingTokenizer()
    prompts = ["fits", "long", "fits", "fits"]
    with pytest.raises(RequestError, match=r"prompt\[1\] has 1000 tokens"):
        await read(tokenizer, prompts)
    assert len(tokenizer.threads) == 2


async def test_text_that_can_never_fit_is_not_tokenized_whole() -> None:
    tokenizer = RecordingTokenizer()
    prompts = ["a " * 1_000_000]
    with pytest.raises(RequestError, match="has at least") as caught:
        await read(tokenizer, prompts)
    assert status_of(caught.value) == 400
    assert tokenizer.num_characters <= SLICE_CHARACTERS
