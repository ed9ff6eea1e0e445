"""The tools of a chat: which functions the model may call, and which it must."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from longshore.deploy.gateway.openai.errors import ApiError, invalid
from longshore.deploy.parsers.json_text import MAX_NAME_CHARACTERS
from longshore.protocol.errors import shortened

MAX_TOOLS: Final = 1024
_DEFINITIONS: Final = ("$defs", "definitions")
_MOVED: Final = tuple(f"#/{key}/" for key in _DEFINITIONS)
_TYPES: Final = frozenset({"type", "$ref", "allOf", "anyOf", "oneOf"})  # say what the value is


class ToolParameters(Protocol):
    """The parameters of a request body for tools; None: not set."""

    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    parallel_tool_calls: bool | None


class ToolUse(msgspec.Struct, frozen=True):
    """How the model may use the tools of a request.

    names:       of the functions.
    may_call:    calls are looked for in the answer.
    is_parallel: an answer may have several calls.
    forced_name: the answer is a call of this function.
    schema:      the JSON schema of an answer that `ForcedCalls` reads; None: no call is forced.
    """

    names: frozenset[str] = frozenset()
    may_call: bool = False
    is_parallel: bool = True
    forced_name: str | None = None
    schema: dict[str, Any] | None = None


def tool_use(request: ToolParameters) -> ToolUse:
    """Raises ApiError for invalid parameters."""
    tools = request.tools or ()
    names = function_names(tools)
    is_parallel = request.parallel_tool_calls is not False
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return ToolUse(names, bool(names) and choice != "none", is_parallel)
    name = _forced_function(choice)
    if not names:
        raise _invalid_choice("needs tools; remove it or send tools")
    if name is None:
        return ToolUse(names, True, is_parallel, None, _any_call(tools, is_parallel=is_parallel))
    if name not in names:
        raise _invalid_choice(f"names the function {shortened(name)!r}, which is not in tools")
    (schema, *_) = [_arguments_schema(tool) for tool in tools if tool["function"]["name"] == name]
    return ToolUse(names, True, is_parallel, name, schema)


def _arguments_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool["function"].get("parameters")
    if not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    # Without a type, arguments that are no object would be valid.
    return schema if _TYPES.intersection(schema) else {"type": "object", **schema}


def _any_call(tools: Sequence[Mapping[str, Any]], *, is_parallel: bool) -> dict[str, Any]:
    """The schema of an array of calls. The definitions of all schemas move to the root, where their
    references find them. Raises ApiError if two of them differ but have the same name, and for
    references to something else."""
    definitions: dict[str, dict[str, Any]] = {key: {} for key in _DEFINITIONS}
    calls = []
    for tool in tools:
        arguments = dict(_arguments_schema(tool))
        _check_references(arguments)
        for key, known in definitions.items():
            for name, definition in (arguments.pop(key, None) or {}).items():
                if known.setdefault(name, definition) != definition:
                    raise _invalid_choice(
                        f'cannot be "required": two functions define {shortened(name)!r} '
                        f"differently in {key}; rename one"
                    )
        properties = {"name": {"const": tool["function"]["name"]}, "parameters": arguments}
        calls.append(
            {"type": "object", "properties": properties, "required": ["name", "parameters"]}
        )
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not is_parallel:
        schema["maxItems"] = 1
    return schema | {key: known for key, known in definitions.items() if known}


def _check_references(schema: object) -> None:
    """Raise ApiError for a reference that is lost when the schema becomes part of another one."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, dict):
            pending += node.values()
            target = node.get("$ref")
            if isinstance(target, str) and not target.startswith(_MOVED):
                raise _invalid_choice(
                    f'cannot be "required": a function has the reference {shortened(target)!r}; '
                    f"only references to {' and '.join(_MOVED)} are supported"
                )


def function_names(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The names of the functions. Raises ApiError for tools that are no functions."""
    if len(tools) > MAX_TOOLS:
        raise invalid(
            f"tools has {len(tools)} items; at most {MAX_TOOLS} are allowed", param="tools"
        )
    return frozenset(_function_name(tool, position) for position, tool in enumerate(tools))


def _function_name(tool: Mapping[str, Any], position: int) -> str:
    where = f"tools[{position}]"
    if tool.get("type") != "function":
        raise invalid(
            f"{where}.type is {shortened(repr(tool.get('type')))}; only function is supported",
            param="tools",
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{where}.function must be an object", param="tools")
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise invalid(
            f"{where}.function.name must be a text of 1 to {MAX_NAME_CHARACTERS} characters",
            param="tools",
        )
    if not isinstance(function.get("parameters") or {}, dict):
        raise invalid(f"{where}.function.parameters must be a JSON schema", param="tools")
    return name


def _forced_function(choice: str | dict[str, Any] | None) -> str | None:
    """The function that a forced choice names; None: any. Raises ApiError if it is another
    choice."""
    if choice == "required":
        return None
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return str(function["name"])
    raise _invalid_choice(
        'must be "auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
    )


def _invalid_choice(problem: str) -> ApiError:
    return invalid(f"tool_choice {problem}", param="tool_choice")
