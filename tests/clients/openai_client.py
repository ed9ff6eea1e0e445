"""openai, the official client of OpenAI's API."""

import asyncio
import json
from typing import Any

import openai
from features import (
    ANSWER,
    LOOKUP,
    MODEL,
    QUESTION,
    RECORD,
    UNLISTED,
    URL,
    Record,
    empty_object_bias,
    feature,
    lookup,
    use_all,
)

SERVER: dict[str, Any] = {"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
CLIENT = openai.OpenAI(**SERVER)
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
ASKED: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 256}
TOOLS: Any = [{"type": "function", "function": LOOKUP}]
CALL: Any = {"type": "function", "function": {"name": "lookup"}}


@feature
def models() -> None:
    assert [model.id for model in CLIENT.models.list()] == [MODEL]
    assert CLIENT.models.retrieve(MODEL).id == MODEL


@feature
def chat() -> None:
    answer = CLIENT.chat.completions.create(**ASKED, messages=MESSAGES)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"


@feature
def chat_streamed() -> None:
    with CLIENT.chat.completions.stream(**ASKED, messages=MESSAGES) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert text == ANSWER
        assert stream.get_final_completion().choices[0].message.content == ANSWER


@feature
def chats_at_the_same_time() -> None:
    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(**SERVER) as client:
            chats = (client.chat.completions.create(**ASKED, messages=MESSAGES) for _ in range(4))
            return await asyncio.gather(*chats)

    assert [a.choices[0].message.content for a in asyncio.run(ask())] == [ANSWER] * 4


@feature
def log_probabilities() -> None:
    answer = CLIENT.chat.completions.create(
        **ASKED, messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    lines = answer.choices[0].logprobs
    assert lines is not None
    assert lines.content is not None
    assert "".join(line.token for line in lines.content[:3]) == ANSWER


@feature
def tools() -> None:
    messages: list[Any] = [{"role": "user", "content": UNLISTED}]
    first = CLIENT.chat.completions.create(**ASKED, messages=messages, tools=TOOLS).choices[0]
    assert first.finish_reason == "tool_calls"
    (call,) = first.message.tool_calls or ()
    result = lookup(**json.loads(call.function.arguments))
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    last = CLIENT.chat.completions.create(**ASKED, messages=messages, tools=TOOLS).choices[0]
    assert last.message.content == ANSWER


@feature
def tools_streamed() -> None:
    messages: list[Any] = [{"role": "user", "content": UNLISTED}]
    with CLIENT.chat.completions.stream(**ASKED, messages=messages, tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert "tool_calls.function.arguments.done" in kinds
    assert lookup(**json.loads(call.function.arguments)) == ANSWER


@feature
def forced_tool_calls() -> None:
    for choice in ("required", CALL):
        answer = CLIENT.chat.completions.create(
            **ASKED,
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
        )
        (call,) = answer.choices[0].message.tool_calls or ()
        assert json.loads(call.function.arguments).keys() == {"container"}


@feature
def structured_output() -> None:
    answer = CLIENT.chat.completions.parse(**ASKED, messages=MESSAGES, response_format=Record)
    assert answer.choices[0].message.parsed == RECORD


@feature
def structured_output_streamed() -> None:
    with CLIENT.chat.completions.stream(
        **ASKED, messages=MESSAGES, response_format=Record
    ) as stream:
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert parsed == RECORD


@feature
def json_mode() -> None:
    answer = CLIENT.chat.completions.create(
        **ASKED,
        messages=MESSAGES,
        response_format={"type": "json_object"},
        logit_bias=empty_object_bias(),
    )
    assert json.loads(answer.choices[0].message.content or "") == {}


@feature
def responses() -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0}
    first = CLIENT.responses.create(**asked, input=QUESTION)
    assert first.output_text == ANSWER
    after = CLIENT.responses.create(**asked, input="And C009?", previous_response_id=first.id)
    assert after.output_text == "C009 B07 blue"
    assert CLIENT.responses.retrieve(first.id).output_text == ANSWER
    CLIENT.responses.delete(first.id)
    parsed = CLIENT.responses.parse(**asked, input=QUESTION, text_format=Record)
    assert parsed.output_parsed == RECORD


@feature
def responses_streamed() -> None:
    with CLIENT.responses.stream(model=MODEL, temperature=0, input=QUESTION) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == stream.get_final_response().output_text == ANSWER


@feature
def responses_with_tools() -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0}
    asked["tools"] = [{"type": "function", "strict": True, **LOOKUP}]
    items: list[Any] = [{"role": "user", "content": UNLISTED}]
    first = CLIENT.responses.create(**asked, input=items)
    (call,) = first.output
    assert call.type == "function_call"
    result = lookup(**json.loads(call.arguments))
    items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": result}]
    assert CLIENT.responses.create(**asked, input=items).output_text == ANSWER


@feature
def completions() -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 4}
    texts = [
        choice.text for choice in CLIENT.completions.create(**asked, prompt=["C4", "B"]).choices
    ]
    assert len(texts) == 2
    chunks = CLIENT.completions.create(**asked, prompt="C4", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == texts[0]


@feature
def embeddings() -> None:
    answer = CLIENT.embeddings.create(model=MODEL, input=["berth", "crane"])
    assert [len(line.embedding) for line in answer.data] == [256, 256]


def error_of(**changes: Any) -> Exception:
    try:
        CLIENT.chat.completions.create(**ASKED | {"messages": MESSAGES} | changes)
    except openai.APIError as error:
        return error
    raise AssertionError(f"{changes} was not rejected")


@feature
def errors() -> None:
    assert isinstance(error_of(model="other"), openai.NotFoundError)
    wrong = error_of(temperature=-1)
    assert isinstance(wrong, openai.BadRequestError)
    assert wrong.param == "temperature"


use_all("openai")
