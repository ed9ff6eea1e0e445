"""The tools of Anthropic's API, in OpenAI's format."""

from typing import Any, Literal

import msgspec

from longshore.deploy.gateway.anthropic.content import CacheControl
from longshore.deploy.gateway.api.requests import ChatRequest
from longshore.deploy.gateway.api.tools import leave_out
from longshore.deploy.requests.errors import invalid


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the client runs. Tools that Anthropic runs, or defines, have another `type`.

    eager_input_streaming: accepted; arguments are sent as they are generated in any case.
    """

    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    cache_control: CacheControl | None = None

    def function(self, position: int) -> dict[str, Any]:
        """The definition of the function. Raises RequestError."""
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
    """Set the parameters of the chat. Raises RequestError."""
    functions = []
    for position, tool in enumerate(tools or ()):
        if tool.type in (None, "custom"):
            functions.append(tool.function(position))
        else:
            leave_out(tool.type)
    chat.tools = functions or None
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
