"""The tools of Anthropic's API, in OpenAI's format."""

from typing import Any, Literal

import msgspec

from longshore.deploy.gateway.anthropic.content import CacheControl
from longshore.deploy.gateway.openai.errors import invalid
from longshore.deploy.gateway.openai.requests import ChatRequest
from longshore.protocol.errors import shortened


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the client runs. Tools that Anthropic runs, or defines, are not supported:
    they have another `type`, or no `input_schema`.

    eager_input_streaming: accepted; arguments are sent as they are generated in any case.
    """

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    cache_control: CacheControl | None = None

    def function(self, position: int) -> dict[str, Any]:
        """The definition of the function. Raises ApiError."""
        if self.type not in (None, "custom"):
            raise invalid(
                f"tools.{position}: the tool type {shortened(self.type)!r} is not supported; "
                "send tools with input_schema, which the client runs",
                param="tools",
                code="unsupported_parameter",
            )
        if self.input_schema is None:
            raise invalid(f"tools.{position}.input_schema is missing", param="tools")
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """name: of the function, for type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def set_tools(chat: ChatRequest, tools: list[Tool] | None, choice: ToolChoice | None) -> None:
    """Set the parameters of the chat. Raises ApiError."""
    if tools:
        chat.tools = [tool.function(position) for position, tool in enumerate(tools)]
    if choice is None:
        return
    if choice.disable_parallel_tool_use is not None:
        chat.parallel_tool_calls = not choice.disable_parallel_tool_use
    match choice.type:
        case "any":
            chat.tool_choice = "required"
        case "tool":
            if choice.name is None:
                raise invalid("tool_choice.name is missing", param="tool_choice")
            chat.tool_choice = {"type": "function", "function": {"name": choice.name}}
        case kind:
            chat.tool_choice = kind
