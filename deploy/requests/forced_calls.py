"""The JSON schemas of forced calls, which the parser `ForcedCalls` reads."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from longshore.deploy.requests.chat_tools import ToolUse, as_functions, invalid_choice
from longshore.deploy.requests.structured_outputs import (
    StructuredOutputsParams,
    strict_arguments,
)
from longshore.protocol.errors import shortened
from longshore.protocol.requests import MAX_CONSTRAINT_BYTES

_DEFINITIONS: Final = ("$defs", "definitions")
_MOVED: Final = tuple(f"#/{key}/" for key in _DEFINITIONS)
_TYPES: Final = frozenset({"type", "$ref", "allOf", "anyOf", "oneOf"})  # say what the value is


MAX_FORCED_CALLS: Final = 16


def forced_constraint(
    tools: Sequence[Mapping[str, Any]], use: ToolUse, max_calls: int = MAX_FORCED_CALLS
) -> StructuredOutputsParams | None:
    """What the answer matches; None: no call is forced. Raises RequestError if there is nothing for
    these tools. max_calls: of any function."""
    match use.forced_grammar:
        case None:
            functions = [
                each for each in as_functions(tools) if each["function"]["name"] in use.names
            ]
            schema = forced_schema(functions, use, max_calls) if use.is_forced else None
            return None if schema is None else StructuredOutputsParams(json=schema)
        case grammar if grammar.syntax == "lark":
            return StructuredOutputsParams(grammar=grammar.definition)
        case grammar:
            return StructuredOutputsParams(regex=grammar.definition)


def forced_schema(
    tools: Sequence[Mapping[str, Any]], use: ToolUse, max_calls: int = MAX_FORCED_CALLS
) -> dict[str, Any] | None:
    """The schema of an answer that is calls of these functions; None: no call is forced. Raises
    RequestError if there is none for them."""
    if not use.is_forced:
        return None
    if use.forced_name is None:
        return _any_call(tools, max_calls if use.is_parallel else 1)
    (named, *_) = [tool for tool in tools if tool["function"]["name"] == use.forced_name]
    return _arguments_schema(named)


def _arguments_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool["function"].get("parameters")
    if tool["function"].get("strict"):
        return strict_arguments(schema or {})
    if not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    # Without a type, arguments that are no object would be valid.
    return schema if _TYPES.intersection(schema) else {"type": "object", **schema}


def _any_call(tools: Sequence[Mapping[str, Any]], max_calls: int) -> dict[str, Any]:
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
    items = {"anyOf": calls}
    schema = {"type": "array", "minItems": 1, "maxItems": max_calls, "items": items}
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
    """Raise RequestError for a reference that is lost when the schema becomes part of another
    one."""
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
