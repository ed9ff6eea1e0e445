"""The tools of a chat: which functions the model may call, and which it must.

A custom tool of OpenAI's takes a text. The model sees it as a function with the argument `input`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol

import msgspec

from longshore.deploy.parsers.json_text import MAX_NAME_CHARACTERS, read_json
from longshore.deploy.requests.errors import RequestError, invalid
from longshore.protocol.errors import shortened

MAX_TOOLS: Final = 1024
TOOL_TYPES: Final = ("function", "custom")
_INPUT: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"((?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*)')
"""The beginning of a custom tool's arguments, up to the last whole character."""


class ToolParameters(Protocol):
    """The parameters of a request body for tools; None: not set."""

    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    parallel_tool_calls: bool | None


class TextGrammar(msgspec.Struct, frozen=True):
    """What the input of a custom tool matches."""

    syntax: Literal["lark", "regex"]
    definition: str


class TextFormat(msgspec.Struct, frozen=True):
    """grammar: of type `grammar`."""

    type: Literal["text", "grammar"] = "text"
    grammar: TextGrammar | None = None


class CustomTool(msgspec.Struct, frozen=True):
    """A tool whose input is a text."""

    name: str
    description: str = ""
    format: TextFormat = TextFormat()

    def as_function(self) -> dict[str, Any]:
        """As the model sees it, with its grammar in the description."""
        description, grammar = self.description, self.format.grammar
        if grammar is not None:
            description += (
                f"\n\nThe input matches this {grammar.syntax} grammar:\n{grammar.definition}"
            )
        parameters = {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
            "additionalProperties": False,
        }
        function = {"name": self.name, "parameters": parameters}
        if description:
            function["description"] = description.lstrip()
        return {"type": "function", "function": function}


class ToolUse(msgspec.Struct, frozen=True):
    """How the model may use the tools of a request.

    names:       of the functions and custom tools that may be called.
    is_limited:  there are other tools.
    schemas:     JSON schemas of their arguments, by name.
    custom_names: of the custom tools.
    may_call:    calls are looked for in the answer.
    is_parallel: an answer may have several calls.
    is_forced:   the answer is calls only, and at least one.
    forced_name: the answer is one call of this function or custom tool.
    forced_grammar: the answer is its input, which matches this grammar.
    """

    names: frozenset[str] = frozenset()
    custom_names: frozenset[str] = frozenset()
    may_call: bool = False
    is_parallel: bool = True
    is_forced: bool = False
    forced_name: str | None = None
    forced_grammar: TextGrammar | None = None
    schemas: Mapping[str, Mapping[str, Any]] = {}
    is_limited: bool = False


def tool_use(request: ToolParameters) -> ToolUse:
    """Raises RequestError for invalid parameters."""
    tools = request.tools or ()
    names = function_names(tools)
    custom = {
        tool["custom"]["name"]: custom_tool(tool) for tool in tools if tool["type"] == "custom"
    }
    custom_names = frozenset(custom)
    is_parallel = request.parallel_tool_calls is not False
    functions = [tool["function"] for tool in as_functions(tools)]
    schemas = {each["name"]: each.get("parameters") or {} for each in functions}
    choice, is_limited = request.tool_choice, False
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, allowed = _allowed_tools(choice)
        if unknown := sorted(allowed - names):
            raise invalid_choice(f"allows {shortened(unknown[0])!r}, which is not in tools")
        is_limited, names = allowed < names, allowed
    if choice in (None, "auto", "none"):
        may_call = bool(names) and choice != "none"
        return ToolUse(
            names, custom_names, may_call, is_parallel, schemas=schemas, is_limited=is_limited
        )
    name = _forced_function(choice)
    if not names:
        raise invalid_choice("needs tools; remove it or send tools")
    if name is not None and name not in names:
        raise invalid_choice(f"names the function {shortened(name)!r}, which is not in tools")
    grammar = custom[name].format.grammar if name in custom else None
    return ToolUse(names, custom_names, True, is_parallel, True, name, grammar, schemas, is_limited)


def as_functions(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Valid tools as functions, as templates and schemas have them."""
    return [custom_tool(tool).as_function() if tool["type"] == "custom" else tool for tool in tools]


def custom_arguments(text: str) -> str:
    """The arguments of a call of a custom tool with this input."""
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The input of a call of a custom tool; of arguments that are cut off, the beginning of it.
    Other arguments, for which the model is to blame, are the input."""
    value = read_json(arguments)
    if isinstance(value, dict) and isinstance(value.get("input"), str):
        return str(value["input"])
    begun = None if isinstance(value, dict) else _INPUT.match(arguments)
    if begun is None:
        return arguments
    text: str = json.loads(f'"{begun[1]}"', strict=False)
    return text.encode(errors="ignore").decode()  # without half of a surrogate pair


def function_names(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The names of the tools. Raises RequestError for tools that are no functions or custom ones,
    or not valid."""
    if len(tools) > MAX_TOOLS:
        raise invalid(
            f"tools has {len(tools)} items; at most {MAX_TOOLS} are allowed", param="tools"
        )
    return frozenset(_function_name(tool, position) for position, tool in enumerate(tools))


def _function_name(tool: Mapping[str, Any], position: int) -> str:
    where, kind = f"tools[{position}]", tool.get("type")
    if kind not in TOOL_TYPES:
        raise invalid(
            f"{where}.type is {shortened(repr(kind))}; supported are {' and '.join(TOOL_TYPES)}",
            param="tools",
        )
    function = tool.get(kind)
    if not isinstance(function, dict):
        raise invalid(f"{where}.{kind} must be an object", param="tools")
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise invalid(
            f"{where}.{kind}.name must be a text of 1 to {MAX_NAME_CHARACTERS} characters",
            param="tools",
        )
    if kind == "custom":
        _check_custom(tool, where)
    elif not isinstance(function.get("parameters") or {}, dict):
        raise invalid(f"{where}.function.parameters must be a JSON schema", param="tools")
    return name


def custom_tool(tool: Mapping[str, Any]) -> CustomTool:
    """A valid custom tool. Raises ValidationError for another one."""
    given = {name: value for name, value in tool["custom"].items() if value is not None}
    return msgspec.convert(given, CustomTool)


def _check_custom(tool: Mapping[str, Any], where: str) -> None:
    try:
        form = custom_tool(tool).format
    except msgspec.ValidationError as error:
        raise invalid(f"{where}.custom: {shortened(str(error))}", param="tools") from error
    if form.type == "grammar" and form.grammar is None:
        raise invalid(f"{where}.custom.format.grammar is missing", param="tools")


def _allowed_tools(choice: Mapping[str, Any]) -> tuple[str, frozenset[str]]:
    """Mode and names of a choice of allowed tools. Raises RequestError."""
    given = choice.get("allowed_tools")
    mode, tools = (given.get("mode"), given.get("tools")) if isinstance(given, dict) else (0, 0)
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise invalid_choice(
            'of the type allowed_tools needs {"mode": "auto" or "required", "tools": [...]}'
        )
    own = [tool for tool in tools if isinstance(tool, dict) and tool.get("type") in TOOL_TYPES]
    if not own:
        raise invalid(
            "tool_choice allows only tools that are no functions or custom tools; name one that is",
            param="tool_choice",
            code="unsupported_parameter",
        )
    names = map(_forced_function, own)
    return mode, frozenset(name for name in names if name is not None)


def _forced_function(choice: str | dict[str, Any] | None) -> str | None:
    """The function that a forced choice names; None: any. Raises RequestError if it is another
    choice."""
    if choice == "required":
        return None
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(choice, dict) and kind in TOOL_TYPES:
        function = choice.get(str(kind))
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return str(function["name"])
    elif isinstance(kind, str):
        raise invalid(
            f"tool_choice of the type {shortened(kind)!r} is not supported; name a function or a "
            "custom tool, or remove it",
            param="tool_choice",
            code="unsupported_parameter",
        )
    raise invalid_choice(
        'must be "auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
    )


def invalid_choice(problem: str) -> RequestError:
    return invalid(f"tool_choice {problem}", param="tool_choice")
