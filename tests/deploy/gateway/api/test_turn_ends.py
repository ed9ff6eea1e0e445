"""Where the prompts of next turns depart from a prompt, by the model's chat template."""

from itertools import takewhile
from typing import Any

import pytest

from longshore.deploy.gateway.api.prompts import PromptReader
from longshore.deploy.gateway.api.requests import ChatRequest
from longshore.deploy.gateway.text.chat_template import ChatTemplate
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.model.folder import SamplingDefaults
from longshore.deploy.requests.chat_messages import ChatMessage
from longshore.deploy.requests.chat_prompt import num_common
from tests.deploy.tiny_tokenizer import byte_level_tokenizer

TURN = "<{{ m.role }}>{{ m.content }}</s>"
BEGIN = "{% if add_generation_prompt %}<assistant><think>{% endif %}"
KEEPS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}</s>{% endfor %}" + BEGIN
)
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}" + BEGIN
DROPS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}</s>{% endfor %}" + BEGIN
)
ONE_TURN = "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}" + PLAIN
USER = ChatMessage("user", "What is in the file?")
CALL = ChatMessage("assistant", "I read it.", reasoning_content="It is a file. " * 5)
RESULT = ChatMessage("tool", "It has three lines.")
ANSWER = ChatMessage("assistant", "Three lines.", reasoning_content="So it is three.")
AGAIN = ChatMessage("user", "And the other one?")


def reader_of(template: str, *, keeps_states: bool = True) -> PromptReader:
    tokenizer = ModelTokenizer(
        byte_level_tokenizer(), ChatTemplate(template, {"eos_token": "</s>"})
    )
    return PromptReader(
        tokenizer,
        SamplingDefaults(),
        vocab_size=1000,
        max_model_len=10_000,
        keeps_states=keeps_states,
    )


async def prompt_of(reader: PromptReader, *messages: ChatMessage, **fields: Any) -> list[int]:
    return await reader.chat_token_ids(ChatRequest(messages=list(messages), **fields))


async def ends_of(reader: PromptReader, *messages: ChatMessage, **fields: Any) -> tuple[int, ...]:
    request = ChatRequest(messages=list(messages), **fields)
    return await reader.turn_ends(request, await reader.chat_token_ids(request))


def num_equal(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@pytest.mark.parametrize("template", [KEEPS, PLAIN, DROPS], ids=["keeps", "plain", "drops"])
@pytest.mark.parametrize(
    ("messages", "following"),
    [([USER], [ANSWER, AGAIN]), ([USER, CALL, RESULT], [ANSWER, AGAIN]), ([USER], [CALL, RESULT])],
    ids=["question", "user after tools", "tools"],
)
async def test_a_next_turn_departs_at_an_end_or_not_much_later(
    template: str, messages: list[ChatMessage], following: list[ChatMessage]
) -> None:
    reader = reader_of(template)
    prompt, later = [await prompt_of(reader, *each) for each in (messages, [*messages, *following])]
    ends = await ends_of(reader, *messages)
    common = num_equal(prompt, later)
    assert ends == tuple(sorted(set(ends)))
    assert 0 <= common - max(end for end in ends if end <= common) <= len("<assistant><think>") + 1


async def test_a_template_that_drops_reasoning_has_an_end_before_the_reasoning() -> None:
    messages = [USER, CALL, RESULT]
    first, second = await ends_of(reader_of(DROPS), *messages)
    assert second - first > len(CALL.reasoning_content or "")
    assert len(await ends_of(reader_of(KEEPS), *messages)) == 2


async def test_a_template_that_rejects_the_next_turn_leaves_the_end_without_an_answer() -> None:
    reader = reader_of(ONE_TURN)
    (end,) = await ends_of(reader, USER)
    prompt = await prompt_of(reader, USER)
    assert 0 < len(prompt) - end <= len("<assistant><think>") + 1


async def test_other_requests_and_models_have_no_ends() -> None:
    assert await ends_of(reader_of(PLAIN, keeps_states=False), USER) == ()
    continued = {"add_generation_prompt": False, "continue_final_message": True}
    assert await ends_of(reader_of(PLAIN), USER, ANSWER, **continued) == ()
    request = ChatRequest(messages=[])
    assert await reader_of(PLAIN).turn_ends(request, [1, 2, 3]) == ()


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("", "", 0),
        ("a", "", 0),
        ("ab", "ac", 1),
        ("ab", "abc", 2),
        ("b", "a", 0),
        ("abc", "abc", 3),
    ],
)
def test_leading_characters_in_common(one: str, other: str, expected: int) -> None:
    assert num_common(one, other) == num_common(other, one) == expected
