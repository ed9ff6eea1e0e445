"""The parameters that constrain an answer: OpenAI's, vLLM's and vLLM's former ones."""

from typing import Any, Final, Literal

import msgspec

from longshore.deploy.gateway.http.json_body import MAX_INLINE_BYTES, JsonThread
from longshore.deploy.requests.errors import invalid
from longshore.deploy.requests.structured_outputs import (
    StructuredOutputError,
    StructuredOutputsParams,
    structured_output,
)
from longshore.protocol.requests import StructuredOutput


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The schema is always enforced. `strict` also forbids properties that it does not name, as
    OpenAI's strict schemas do. `description` changes nothing: the model does not see it."""

    name: str
    schema: dict[str, Any]
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's `response_format`, and what other servers take there: a schema beside `json_object`,
    which is `schema` for llama.cpp and `value` for TGI, whose types are also `json` and `regex`."""

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None
    value: dict[str, Any] | str | None = None


class ConstrainedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The parameters of completions and chats. At most one of them constrains the answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def constraint(self) -> tuple[str, StructuredOutputsParams] | None:
        """The parameter that constrains the answer, and what it asks for. Raises RequestError."""
        given = {
            name: value
            for name in CONSTRAINTS
            if (value := getattr(self, name)) is not None and not _is_text(value)
        }
        if len(given) > 1:
            names = " and ".join(given)
            raise invalid(f"{names} constrain the same answer; send one of them", param=[*given][1])
        for name, value in given.items():
            match value:
                case StructuredOutputsParams():
                    return name, value
                case ResponseFormat():
                    return _of_format(value)
                case _:
                    kind = name.removeprefix("guided_")
                    return name, StructuredOutputsParams(**{kind: value})
        return None


CONSTRAINTS: Final = ConstrainedRequest.__struct_fields__


def _is_text(value: object) -> bool:
    return isinstance(value, ResponseFormat) and value.type == "text"


def _of_format(given: ResponseFormat) -> tuple[str, StructuredOutputsParams]:
    param, schema, is_strict = "response_format", given.schema, False
    match given.type, given.value:
        case "regex", str(regex):
            return param, StructuredOutputsParams(regex=regex)
        case "regex", _:
            schema = None
        case "json_schema", _ if given.json_schema is not None:
            schema, is_strict = given.json_schema.schema, bool(given.json_schema.strict)
        case _, dict(value) if schema is None:
            schema = value
    if schema is not None:
        return param, StructuredOutputsParams(json=schema, disable_additional_properties=is_strict)
    if given.type == "json_object" and given.value is None:
        return param, StructuredOutputsParams(json_object=True)
    missing = "json_schema" if given.type == "json_schema" else "value"
    raise invalid(f'response_format has type "{given.type}" but no {missing}', param=param)


async def read_constraint(
    constraint: tuple[str, StructuredOutputsParams] | None,
    thread: JsonThread,
    *,
    ignores_end: bool | None,
) -> StructuredOutput | None:
    """What the engine gets. Raises InvalidRequest, with the JSON pointer of what is wrong in a
    schema.

    constraint: of the request.
    ignores_end: the request's `ignore_eos`.
    """
    if constraint is None:
        return None
    param, params = constraint
    if ignores_end:
        raise invalid(
            f"ignore_eos is not possible with {param}: a complete answer ends with the "
            "end-of-sequence token; remove one of them",
            param="ignore_eos",
        )
    # A schema is checked off the event loop, however small: the first one imports a library.
    size_bytes = 0 if params.json is None else MAX_INLINE_BYTES + 1
    try:
        return await thread.run(size_bytes, structured_output, params)
    except StructuredOutputError as error:
        raise invalid(f"{param}: {error}", param=param) from error
