"""ollama, the official client of Ollama's API."""

import asyncio
from typing import Any

import ollama
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

CLIENT = ollama.Client(URL)
ASKED: dict[str, Any] = {"model": MODEL, "options": {"temperature": 0, "num_predict": 256}}
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
TOOLS: list[Any] = [{"type": "function", "function": LOOKUP}]


@feature
def models() -> None:
    assert [model.model for model in CLIENT.list().models] == [MODEL]
    assert [model.model for model in CLIENT.ps().models] == [MODEL]
    assert {"completion", "tools"} <= set(CLIENT.show(MODEL).capabilities or ())


@feature
def chat() -> None:
    answer = CLIENT.chat(**ASKED, messages=MESSAGES)
    assert answer.message.content == ANSWER
    assert (answer.done, answer.done_reason, answer.eval_count) == (True, "stop", 4)
    assert (answer.total_duration or 0) >= (answer.eval_duration or 0) > 0


@feature
def chat_streamed() -> None:
    parts = list(CLIENT.chat(**ASKED, messages=MESSAGES, stream=True))
    assert "".join(part.message.content or "" for part in parts) == ANSWER
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


@feature
def chats_at_the_same_time() -> None:
    async def ask() -> list[Any]:
        client = ollama.AsyncClient(URL)
        return await asyncio.gather(*(client.chat(**ASKED, messages=MESSAGES) for _ in range(4)))

    assert [answer.message.content for answer in asyncio.run(ask())] == [ANSWER] * 4


@feature
def chat_with_history() -> None:
    first = CLIENT.chat(**ASKED, messages=MESSAGES)
    history = [*MESSAGES, first.message, {"role": "user", "content": "And C009?"}]
    assert CLIENT.chat(**ASKED, messages=history).message.content == "C009 B07 blue"


@feature
def log_probabilities() -> None:
    answer = CLIENT.chat(**ASKED, messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert answer.logprobs is not None
    assert "".join(each.token for each in answer.logprobs[:3]) == ANSWER
    assert [len(each.top_logprobs or ()) for each in answer.logprobs[:3]] == [2] * 3


@feature
def tools() -> None:
    messages: list[Any] = [{"role": "user", "content": UNLISTED}]
    first = CLIENT.chat(**ASKED, messages=messages, tools=TOOLS).message
    (call,) = first.tool_calls or ()
    result = lookup(**call.function.arguments)
    messages += [first, {"role": "tool", "tool_name": call.function.name, "content": result}]
    assert CLIENT.chat(**ASKED, messages=messages, tools=TOOLS).message.content == ANSWER


@feature
def tools_streamed() -> None:
    messages: list[Any] = [{"role": "user", "content": UNLISTED}]
    parts = CLIENT.chat(**ASKED, messages=messages, tools=TOOLS, stream=True)
    (call,) = [call for part in parts for call in part.message.tool_calls or ()]
    assert lookup(**call.function.arguments) == ANSWER


@feature
def structured_output() -> None:
    answer = CLIENT.chat(**ASKED, messages=MESSAGES, format=Record.model_json_schema())
    assert Record.model_validate_json(answer.message.content or "") == RECORD


@feature
def completions() -> None:
    assert CLIENT.generate(**ASKED, prompt=QUESTION).response == ANSWER
    assert CLIENT.generate(model=MODEL).done_reason == "load"


@feature
def completions_streamed() -> None:
    parts = CLIENT.generate(**ASKED, prompt=QUESTION, stream=True)
    assert "".join(part.response or "" for part in parts) == ANSWER


@feature
def embeddings() -> None:
    one, other = CLIENT.embed(MODEL, ["C417 B42 red", "C009 B07 blue"]).embeddings
    assert len(one) == len(other)
    assert abs(sum(x * x for x in one) - 1) < 1e-3
    assert len(CLIENT.embeddings(MODEL, "C417 B42 red").embedding) == len(one)


@feature
def errors() -> None:
    for use, status in (
        (lambda: CLIENT.chat("other", MESSAGES), 404),
        (lambda: CLIENT.chat(MODEL, MESSAGES, options={"temperature": -1}), 400),
        (lambda: CLIENT.pull(MODEL), 400),
        (lambda: CLIENT.delete(MODEL), 400),
    ):
        try:
            use()
        except ollama.ResponseError as error:
            if error.status_code == status:
                continue
            raise
        raise AssertionError("not rejected")


use_all("ollama")
