"""litellm with the server at argv[1]. It pins an older openai than ours, so it runs in a separate
environment. Prints `passed`, or ends with an error."""

import asyncio
import sys
from typing import Any

import litellm

URL, MODEL = sys.argv[1], sys.argv[2]
SERVER: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0}
CHAT = [{"role": "user", "content": "Which berth holds C417?"}]
ASKED: dict[str, Any] = {
    "model": f"openai/{MODEL}",
    "messages": CHAT,
    "temperature": 0,
    "max_tokens": 8,
    **SERVER,
}


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


async def ask_at_the_same_time() -> tuple[str, str]:
    whole = await litellm.acompletion(**ASKED)
    stream = await litellm.acompletion(**ASKED, stream=True)
    return whole.choices[0].message.content, text_of([chunk async for chunk in stream])


def error_of(**changes: Any) -> Exception:
    try:
        litellm.completion(**ASKED | changes)
    except Exception as error:
        return error
    raise AssertionError(f"{changes} was not refused")


def main() -> None:
    whole = litellm.completion(**ASKED)
    text = whole.choices[0].message.content
    usage = whole.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens <= 8

    chunks = list(litellm.completion(**ASKED, stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == text
    assert [c.usage for c in chunks if getattr(c, "usage", None)][-1].total_tokens == (
        usage.total_tokens
    )
    assert asyncio.run(ask_at_the_same_time()) == (text, text)

    several = litellm.completion(**ASKED, n=3, stop=["zzz"], seed=4, user="ann", logprobs=True)
    assert len(several.choices) == 3

    completion = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="C417", max_tokens=3, **SERVER
    )
    assert completion.usage.completion_tokens <= 3

    assert isinstance(error_of(model="openai/other"), litellm.NotFoundError)
    assert isinstance(error_of(temperature=-1), litellm.BadRequestError)
    too_long = [{"role": "user", "content": "x" * 9000}]
    assert isinstance(error_of(messages=too_long), litellm.ContextWindowExceededError), error_of(
        messages=too_long
    )
    print("passed")


main()
