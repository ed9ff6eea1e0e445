"""litellm: its `openai` providers, and `cohere`, `jina_ai` and `hosted_vllm` for reranking."""

import asyncio
import json
from typing import Any

import litellm
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

SERVER: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0}
ASKED: dict[str, Any] = {
    "model": f"openai/{MODEL}",
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 256,
    **SERVER,
}


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@feature
def chat() -> None:
    whole = litellm.completion(**ASKED)
    assert whole.choices[0].message.content == ANSWER
    usage = whole.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens <= 256


@feature
def chat_streamed() -> None:
    chunks = list(litellm.completion(**ASKED, stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == ANSWER
    usage = [c.usage for c in chunks if getattr(c, "usage", None)][-1]
    assert usage.total_tokens == litellm.completion(**ASKED).usage.total_tokens


@feature
def chats_at_the_same_time() -> None:
    async def ask() -> tuple[str, str]:
        whole = await litellm.acompletion(**ASKED)
        stream = await litellm.acompletion(**ASKED, stream=True)
        return whole.choices[0].message.content, text_of([chunk async for chunk in stream])

    assert asyncio.run(ask()) == (ANSWER, ANSWER)


@feature
def sampling_parameters() -> None:
    several = litellm.completion(**ASKED, n=3, stop=["zzz"], seed=4, user="ann", logprobs=True)
    assert len(several.choices) == 3
    of_server = litellm.completion(**ASKED | {"temperature": 1, "extra_body": {"top_k": 1}})
    assert of_server.choices[0].message.content == ANSWER


TOOLS: list[Any] = [{"type": "function", "function": LOOKUP}]


@feature
def tools() -> None:
    messages: list[Any] = [{"role": "user", "content": UNLISTED}]
    first = litellm.completion(**ASKED | {"messages": messages}, tools=TOOLS).choices[0]
    assert first.finish_reason == "tool_calls"
    (call,) = first.message.tool_calls
    result = lookup(**json.loads(call.function.arguments))
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    last = litellm.completion(**ASKED | {"messages": messages}, tools=TOOLS)
    assert last.choices[0].message.content == ANSWER


@feature
def tools_streamed() -> None:
    messages: list[Any] = [{"role": "user", "content": UNLISTED}]
    chunks = litellm.completion(**ASKED | {"messages": messages}, tools=TOOLS, stream=True)
    whole = litellm.stream_chunk_builder(list(chunks))
    (call,) = whole.choices[0].message.tool_calls
    assert lookup(**json.loads(call.function.arguments)) == ANSWER


@feature
def forced_tool_calls() -> None:
    answer = litellm.completion(
        **ASKED, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments).keys() == {"container"}


@feature
def structured_output() -> None:
    answer = litellm.completion(**ASKED, response_format=Record)
    assert Record.model_validate_json(answer.choices[0].message.content) == RECORD


@feature
def reranking() -> None:
    documents = ["the quay", "C417 B42 red", "fog"]
    for provider, base in [("hosted_vllm", f"{URL}/v1"), ("cohere", URL), ("jina_ai", URL)]:
        answer = litellm.rerank(
            model=f"{provider}/{MODEL}",
            query="C417 B42 red",
            documents=documents,
            top_n=2,
            api_base=base,
            api_key="none",
        )
        assert answer.results[0]["index"] == 1
        assert len(answer.results) == 2


@feature
def completions() -> None:
    completion = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="C417", max_tokens=3, **SERVER
    )
    assert completion.usage.completion_tokens <= 3


@feature
def embeddings() -> None:
    answer = litellm.embedding(model=f"openai/{MODEL}", input=["berth", "crane"], **SERVER)
    assert [len(line["embedding"]) for line in answer.data] == [256, 256]


def error_of(**changes: Any) -> Exception:
    try:
        litellm.completion(**ASKED | changes)
    except Exception as error:
        return error
    raise AssertionError(f"{changes} was not rejected")


@feature
def errors() -> None:
    assert isinstance(error_of(model="openai/other"), litellm.NotFoundError)
    assert isinstance(error_of(temperature=-1), litellm.BadRequestError)
    too_long = [{"role": "user", "content": "x" * 9000}]
    assert isinstance(error_of(messages=too_long), litellm.ContextWindowExceededError)


use_all("litellm")
