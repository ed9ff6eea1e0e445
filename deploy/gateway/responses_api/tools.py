"""The tools and output formats of the Responses API, in the format of chats."""

from typing import Any, Final

import msgspec

from longshore.deploy.gateway.openai.errors import invalid
from longshore.deploy.gateway.openai.structured_output import JsonSchemaFormat, ResponseFormat
from longshore.deploy.gateway.openai.unknown_fields import ignore_fields
from longshore.protocol.errors import shortened


class FunctionTool(msgspec.Struct):
    """A function that the client runs; other types of tools are not supported."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


_TOOL_FIELDS: Final = frozenset(FunctionTool.__struct_fields__)


def chat_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Raises ApiError."""
    return [_function(tool, position) for position, tool in enumerate(tools)] if tools else None


def _function(given: dict[str, Any], position: int) -> dict[str, Any]:
    kind = given.get("type")
    if kind != "function":
        raise invalid(
            f"tools[{position}].type is {shortened(str(kind))!r}; only function is supported",
            param="tools",
            code="unsupported_parameter",
        )
    ignore_fields(f"tools[{position}].{name}" for name in given.keys() - _TOOL_FIELDS)
    try:
        tool = msgspec.convert(given, FunctionTool)
    except msgspec.ValidationError as error:
        raise invalid(f"tools[{position}]: {shortened(str(error))}", param="tools") from error
    values = {
        name: value
        for name, value in msgspec.structs.asdict(tool).items()
        if name != "type" and value is not None
    }
    return {"type": "function", "function": values}


def chat_tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """The choice as chats have it, which reject what is no choice. Raises ApiError."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise invalid(
            'tool_choice must be "auto", "none", "required" or {"type": "function", "name": ...}',
            param="tool_choice",
        )
    ignore_fields(f"tool_choice.{name}" for name in choice.keys() - {"type", "name"})
    return {"type": "function", "function": {"name": choice["name"]}}


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    """Type `text`, `json_object` or `json_schema`; the others are of a schema."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextSettings(msgspec.Struct, forbid_unknown_fields=True):
    """The form of the output."""

    format: TextFormat | None = None
    verbosity: str | None = None


def chat_response_format(settings: TextSettings | None) -> ResponseFormat | None:
    """Raises ApiError."""
    if settings is None:
        return None
    if settings.verbosity not in (None, "medium"):
        raise invalid(
            "text.verbosity is not supported; remove it or set it to 'medium'",
            param="text",
            code="unsupported_parameter",
        )
    match settings.format:
        case None | TextFormat(type="text"):
            return None
        case TextFormat(type="json_object"):
            return ResponseFormat("json_object")
        case TextFormat("json_schema", name, schema, strict, description):
            if name is None or schema is None:
                raise invalid("text.format has no name or no schema", param="text")
            return ResponseFormat(
                "json_schema", JsonSchemaFormat(name, schema, strict, description)
            )
        case TextFormat(type=kind):
            raise invalid(
                f"text.format has type {shortened(kind)!r}; supported are text, json_object and "
                "json_schema",
                param="text",
                code="unsupported_parameter",
            )
