"""instructor, which makes objects of answers, in its modes for servers with OpenAI's API."""

from typing import Any

import instructor
import openai
from features import MODEL, QUESTION, RECORD, URL, Record, empty_object_bias, feature, use_all
from instructor import Mode
from pydantic import BaseModel

CLIENT = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "max_retries": 0,
    "temperature": 0,
    "max_tokens": 256,
}


class Note(BaseModel):
    text: str = ""


def values(mode: Mode, kind: type[BaseModel], **settings: Any) -> dict[str, Any]:
    """Those of the answer, which is an object of a subclass of `kind`."""
    client = instructor.from_openai(CLIENT, mode=mode)
    answer = client.chat.completions.create(**ASKED, response_model=kind, **settings)
    return answer.model_dump()


@feature
def forced_tool_calls() -> None:
    """`Mode.TOOLS`, the default."""
    assert values(Mode.TOOLS, Record) == RECORD.model_dump()


@feature
def structured_output() -> None:
    """`Mode.JSON_SCHEMA`."""
    assert values(Mode.JSON_SCHEMA, Record) == RECORD.model_dump()


@feature
def structured_output_streamed() -> None:
    client = instructor.from_openai(CLIENT, mode=Mode.JSON_SCHEMA)
    parts = list(client.chat.completions.create_partial(**ASKED, response_model=Record))
    assert parts[-1].model_dump() == RECORD.model_dump()


@feature
def json_mode() -> None:
    """`Mode.JSON`, which puts the schema into the prompt."""
    assert values(Mode.JSON, Note, logit_bias=empty_object_bias()) == {"text": ""}


use_all("instructor")
