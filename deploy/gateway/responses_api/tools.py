"""The tools and output formats of the Responses API, in the format of chats."""

from typing import Any, Final

import msgspec

from longshore.deploy.gateway.api.field_rules import TOOL_FIELDS
from longshore.deploy.gateway.api.structured_output import JsonSchemaFormat, ResponseFormat
from longshore.deploy.gateway.api.tools import client_tools
from longshore.deploy.gateway.api.unknown_fields import ignore_fields
from longshore.deploy.requests.errors import invalid
from longshore.protocol.errors import shortened


class Function(msgspec.Struct):
    """A function that the client runs."""

    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomFormat(msgspec.Struct):
    """The format of a custom tool's input; the fields after `type` are of type `grammar`."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class Custom(msgspec.Struct):
    """A tool that takes a text, and that the client runs."""

    name: str | None = None
    description: str | None = None
    format: CustomFormat | None = None


_TOOLS: Final[dict[str, type[Function] | type[Custom]]] = {"function": Function, "custom": Custom}


def chat_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools in the form of chat completions. Raises RequestError."""
    kept = client_tools(tools, TOOL_FIELDS["responses"]) or ()
    return [_nested(tool, position) for position, tool in enumerate(kept)]


def _nested(given: dict[str, Any], position: int) -> dict[str, Any]:
    kind = given.get("type")
    if kind not in _TOOLS:
        raise invalid(f"tools[{position}].type is missing", param="tools")
    try:
        tool = msgspec.convert(given, _TOOLS[kind], strict=False)
    except msgspec.ValidationError as error:
        raise invalid(f"tools[{position}]: {shortened(str(error))}", param="tools") from error
    values = msgspec.structs.asdict(tool)
    match values.get("format"):
        case CustomFormat("grammar", syntax, definition):
            grammar = {"syntax": syntax, "definition": definition}
            values["format"] = {"type": "grammar", "grammar": grammar}
        case CustomFormat(type=other):
            values["format"] = {"type": other}
    return {
        "type": kind,
        kind: {name: value for name, value in values.items() if value is not None},
    }


def chat_tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """The choice as chats have it, which reject what is no choice. Raises RequestError."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools":
        tools = choice.get("tools")
        nested = [chat_tool_choice(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": kind, kind: {"mode": choice.get("mode"), "tools": nested}}
    if not isinstance(kind, str) or (kind in _TOOLS and not isinstance(choice.get("name"), str)):
        raise invalid(
            'tool_choice must be "auto", "none", "required" or {"type": "function", "name": ...}',
            param="tool_choice",
        )
    if kind not in _TOOLS:
        return choice  # of a tool that this server does not run
    ignore_fields(f"tool_choice.{name}" for name in choice.keys() - {"type", "name"})
    return {"type": kind, kind: {"name": choice["name"]}}


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    """Type `text`, `json_object` or `json_schema`; the others are of a schema."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextSettings(msgspec.Struct, forbid_unknown_fields=True):
    """The form of the output. `verbosity` is a hint that no template knows."""

    format: TextFormat | None = None


def chat_response_format(settings: TextSettings | None) -> ResponseFormat | None:
    """The response format of chat completions. Raises RequestError."""
    form = None if settings is None else settings.format
    match form:
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
