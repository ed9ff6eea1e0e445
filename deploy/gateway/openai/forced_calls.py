"""The JSON schemas of forced calls, which the parser `ForcedCalls` reads."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from longshore.deploy.gateway.openai.chat_tools import ToolUse, invalid_choice
from longshore.protocol.errors import shortened
from longshore.protocol.requests import MAX_CONSTRAINT_BYTES

_DEFINITIONS: Final = ("$defs", "definitions")
_MOVED: Final = tuple(f"#/{key}/" for key in _DEFINITIONS)
_TYPES: Final = frozenset({"type", "$ref", "allOf", "anyOf", "oneOf"})  # say what the value is


def forced_schema(tools: Sequence[Mapping[str, Any]], use: ToolUse) -> dict[str, Any] | None:
    """The schema of the answer; None: no call is forced. Raises ApiError if there is none for these
    tools."""
    if not use.is_forced:
        return None
    if use.forced_name is None:
        return _any_call(tools, is_parallel=use.is_parallel)
    (named, *_) = [tool for tool in tools if tool["function"]["name"] == use.forced_name]
    return _arguments_schema(named)


def _arguments_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool["function"].get("parameters")
    if not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    # Without a type, arguments that are no object would be valid.
    return schema if _TYPES.intersection(schema) else {"type": "object", **schema}


def _any_call(tools: Sequence[Mapping[str, Any]], *, is_parallel: bool) -> dict[str, Any]:
    """The schema of an array of calls. The definitions of all schemas move to the root, where their
    references find them."""
    if len(msgspec.json.encode(tools)) > MAX_CONSTRAINT_BYTES:
        raise invalid_choice(
            f'cannot be "required" with more than {MAX_CONSTRAINT_BYTES} bytes of tools; name a '
            "function, or send fewer tools"
        )
    definitions: dict[str, dict[str, Any]] = {key: {} for key in _DEFINITIONS}
    calls = []
    for tool in tools:
        arguments = dict(_arguments_schema(tool))
        _check_references(arguments)
        for key, known in definitions.items():
            _move(key, arguments.pop(key, None), known)
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    "parameters": arguments,
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not is_parallel:
        schema["maxItems"] = 1
    return schema | {key: known for key, known in definitions.items() if known}


def _move(key: str, definitions: object, known: dict[str, Any]) -> None:
    """Add a function's definitions, which have this key, to those of all functions."""
    if definitions is None:
        return
    if not isinstance(definitions, dict):
        raise invalid_choice(f'cannot be "required": a function has {key} that is not an object')
    for name, definition in definitions.items():
        if known.setdefault(name, definition) != definition:
            raise invalid_choice(
                f'cannot be "required": two functions define {shortened(name)!r} differently in '
                f"{key}; rename one"
            )


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
                raise invalid_choice(
                    f'cannot be "required": a function has the reference {shortened(target)!r}; '
                    f"only references to {' and '.join(_MOVED)} are supported"
                )
