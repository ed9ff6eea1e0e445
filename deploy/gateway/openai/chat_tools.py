"""The tools of a chat: which functions the model may call, and which it must."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from longshore.deploy.gateway.openai.errors import ApiError, invalid
from longshore.deploy.parsers.json_text import MAX_NAME_CHARACTERS
from longshore.protocol.errors import shortened

MAX_TOOLS: Final = 1024


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
    is_forced:   the answer is calls only, and at least one.
    forced_name: the answer is one call of this function.
    """

    names: frozenset[str] = frozenset()
    may_call: bool = False
    is_parallel: bool = True
    is_forced: bool = False
    forced_name: str | None = None


def tool_use(request: ToolParameters) -> ToolUse:
    """Raises ApiError for invalid parameters."""
    names = function_names(request.tools or ())
    is_parallel = request.parallel_tool_calls is not False
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return ToolUse(names, bool(names) and choice != "none", is_parallel)
    name = _forced_function(choice)
    if not names:
        raise invalid_choice("needs tools; remove it or send tools")
    if name is not None and name not in names:
        raise invalid_choice(f"names the function {shortened(name)!r}, which is not in tools")
    return ToolUse(names, True, is_parallel, True, name)


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
    raise invalid_choice(
        'must be "auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
    )


def invalid_choice(problem: str) -> ApiError:
    return invalid(f"tool_choice {problem}", param="tool_choice")
