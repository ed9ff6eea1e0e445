"""anthropic, the official client of Anthropic's API."""

import asyncio
from typing import Any

import anthropic
from features import (
    ANSWER,
    LOOKUP,
    MODEL,
    QUESTION,
    RECORD,
    UNLISTED,
    URL,
    Record,
    feature,
    lookup,
    use_all,
)

SERVER: dict[str, Any] = {"base_url": URL, "api_key": "none", "max_retries": 0}
CLIENT = anthropic.Anthropic(**SERVER)
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 256}
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
TOOLS: Any = [
    {
        "name": LOOKUP["name"],
        "description": LOOKUP["description"],
        "input_schema": LOOKUP["parameters"],
    }
]


@feature
def models() -> None:
    assert [model.id for model in CLIENT.models.list()] == [MODEL]


@feature
def chat() -> None:
    message = CLIENT.messages.create(**ASKED, messages=MESSAGES)
    assert [block.text for block in message.content] == [ANSWER]
    assert message.stop_reason == "end_turn"


@feature
def chat_streamed() -> None:
    with CLIENT.messages.stream(**ASKED, messages=MESSAGES) as stream:
        assert "".join(stream.text_stream) == ANSWER
        assert stream.get_final_message().usage.output_tokens == 4


@feature
def chat_with_history() -> None:
    first = CLIENT.messages.create(**ASKED, messages=MESSAGES)
    cached: Any = {
        "type": "text",
        "text": "You are a clerk.",
        "cache_control": {"type": "ephemeral"},
    }
    history = [*MESSAGES, {"role": "assistant", "content": first.content}]
    history += [{"role": "user", "content": "And C009?"}]
    answer = CLIENT.messages.create(**ASKED, system=[cached], messages=history)
    assert [block.text for block in answer.content] == ["C009 B07 blue"]


@feature
def chats_at_the_same_time() -> None:
    async def ask() -> list[Any]:
        async with anthropic.AsyncAnthropic(**SERVER) as client:
            chats = (client.messages.create(**ASKED, messages=MESSAGES) for _ in range(4))
            return await asyncio.gather(*chats)

    assert [answer.content[0].text for answer in asyncio.run(ask())] == [ANSWER] * 4


@feature
def tools() -> None:
    messages: list[Any] = [{"role": "user", "content": UNLISTED}]
    first = CLIENT.messages.create(**ASKED, messages=messages, tools=TOOLS)
    assert first.stop_reason == "tool_use"
    (use,) = first.content
    result = {"type": "tool_result", "tool_use_id": use.id, "content": lookup(**use.input)}
    messages += [{"role": "assistant", "content": first.content}]
    messages += [{"role": "user", "content": [result]}]
    last = CLIENT.messages.create(**ASKED, messages=messages, tools=TOOLS)
    assert [block.text for block in last.content] == [ANSWER]


@feature
def tools_streamed() -> None:
    messages: list[Any] = [{"role": "user", "content": UNLISTED}]
    with CLIENT.messages.stream(**ASKED, messages=messages, tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        (use,) = stream.get_final_message().content
    assert "input_json" in kinds
    assert lookup(**use.input) == ANSWER


@feature
def forced_tool_calls() -> None:
    for choice in (
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "lookup"},
    ):
        answer = CLIENT.messages.create(**ASKED, messages=MESSAGES, tools=TOOLS, tool_choice=choice)
        (use,) = answer.content
        assert use.input.keys() == {"container"}


@feature
def structured_output() -> None:
    answer = CLIENT.messages.parse(**ASKED, messages=MESSAGES, output_format=Record)
    assert answer.parsed_output == RECORD


@feature
def token_counts() -> None:
    usage = CLIENT.messages.create(**ASKED, messages=MESSAGES).usage
    count = CLIENT.messages.count_tokens(model=MODEL, messages=MESSAGES)
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@feature
def errors() -> None:
    changes: Any
    for changes, expected in [
        ({"model": "other"}, anthropic.NotFoundError),
        ({"max_tokens": -1}, anthropic.BadRequestError),
    ]:
        try:
            CLIENT.messages.create(**ASKED | {"messages": MESSAGES} | changes)
        except expected:
            continue
        raise AssertionError(f"{changes} was not rejected")


use_all("anthropic")
