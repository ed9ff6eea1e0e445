"""huggingface_hub, whose InferenceClient talks to servers with OpenAI's API."""

import json
import os
from typing import Any

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

os.environ.pop("HF_HUB_OFFLINE", None)  # it forbids all requests
from huggingface_hub import InferenceClient

CLIENT = InferenceClient(base_url=URL, api_key="none")
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
ASKED: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 256}
TOOLS: Any = [{"type": "function", "function": LOOKUP}]


@feature
def chat() -> None:
    answer = CLIENT.chat_completion(MESSAGES, **ASKED)
    assert answer.choices[0].message.content == ANSWER


@feature
def chat_streamed() -> None:
    chunks = CLIENT.chat_completion(MESSAGES, **ASKED, stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == ANSWER


@feature
def tools() -> None:
    messages: list[Any] = [{"role": "user", "content": UNLISTED}]
    first = CLIENT.chat_completion(messages, **ASKED, tools=TOOLS).choices[0].message
    (call,) = first.tool_calls or ()
    result = lookup(**_arguments(call.function.arguments))
    messages += [first, {"role": "tool", "tool_call_id": call.id, "content": result}]
    assert CLIENT.chat_completion(messages, **ASKED, tools=TOOLS).choices[0].message.content == (
        ANSWER
    )


@feature
def structured_output() -> None:
    schema = {"name": "record", "schema": Record.model_json_schema(), "strict": True}
    answer = CLIENT.chat_completion(
        MESSAGES,
        **ASKED,
        response_format={"type": "json_schema", "json_schema": schema},  # type: ignore[arg-type]
    )
    assert Record.model_validate_json(answer.choices[0].message.content or "") == RECORD


def _arguments(given: Any) -> dict[str, str]:
    found: dict[str, str] = json.loads(given) if isinstance(given, str) else given
    return found


use_all("huggingface_hub")
