"""litellm: chats and completions through its `openai` providers."""

import asyncio
from typing import Any

import litellm
from features import ANSWER, MODEL, QUESTION, URL, feature, use_all

SERVER: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0}
ASKED: dict[str, Any] = {
    "model": f"openai/{MODEL}",
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 8,
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
    assert 0 < usage.completion_tokens <= 8


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


use_all()
