"""Request bodies of Anthropic's Messages API, and the chat that they mean."""

from typing import Any, ClassVar, Final, Literal

import msgspec

from longshore.deploy.gateway.anthropic.content import (
    CacheControl,
    Content,
    MessageParam,
    cache_controls,
    chat_messages,
)
from longshore.deploy.gateway.anthropic.tools import Tool, ToolChoice, set_tools
from longshore.deploy.gateway.api.requests import (
    CacheSalt,
    ChatRequest,
    Effort,
    Int32,
    JobId,
    StreamOptions,
)
from longshore.deploy.gateway.api.sealed_reasoning import ReasoningSeal
from longshore.deploy.gateway.api.structured_output import JsonSchemaFormat, ResponseFormat
from longshore.deploy.requests.errors import invalid
from longshore.protocol.requests import CacheHint

MAX_CACHE_BREAKPOINTS: Final = 4
_TTLS_S: Final = {"5m": 300.0, "1h": 3600.0}


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """type: `disabled` turns reasoning off if the template can, and leaves it out of the answer.
    budget_tokens: see `ThinkingBudget`.
    display: `omitted` leaves the text out of the answer's blocks, which still have a signature."""

    type: Literal["adaptive", "between_tools", "enabled", "disabled"]
    budget_tokens: Int32 | None = None
    display: str | None = None

    @property
    def thinks(self) -> bool | None:
        """None: the model decides."""
        return {"enabled": True, "disabled": False}.get(self.type)


class OutputFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON schema that the answer conforms to."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """effort: see `thinking_variables`."""

    format: OutputFormat | None = None
    effort: Effort | None = None


class ConversationChat(ChatRequest, kw_only=True):
    """A chat with what only Anthropic's API has.

    hint:     of its cache_control.
    thinking: see `Thinking`.
    """

    effort_name: ClassVar[str] = "output_config.effort"
    budget_name: ClassVar[str] = "thinking.budget_tokens"

    hint: CacheHint | None = None
    thinking: Thinking | None = None

    @property
    def thinks(self) -> bool | None:
        return None if self.thinking is None else self.thinking.thinks

    @property
    def shows_thinking(self) -> bool:
        """Whether blocks of reasoning have their text."""
        return self.thinking is None or self.thinking.display != "omitted"

    def cache_hint(self) -> CacheHint | None:
        return self.hint


class Conversation(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens, and the prompt of POST /v1/messages."""

    model: str
    messages: list[MessageParam]
    system: Content | None = None
    cache_control: CacheControl | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    def chat(self, seal: ReasoningSeal) -> ConversationChat:
        """The request as a chat, which continues the last message if it is the assistant's. Raises
        RequestError for what is not supported."""
        messages = chat_messages(self.system, self.messages, seal)
        chat = ConversationChat(model=self.model, messages=messages)
        chat.hint = self._cache_hint()
        chat.thinking = self.thinking
        chat.thinking_token_budget = None if self.thinking is None else self.thinking.budget_tokens
        chat.continue_final_message = self.messages[-1].role == "assistant"
        set_tools(chat, self.tools, self.tool_choice)
        chat.include_reasoning = self.thinking is None or self.thinking.type != "disabled"
        config = self.output_config or OutputConfig()
        chat.reasoning_effort = config.effort
        form = config.format or self.output_format
        if config.format is not None and self.output_format not in (None, config.format):
            raise invalid(
                "output_format is the former name of output_config.format, but differs; remove one "
                "of them",
                param="output_format",
            )
        if form is not None:
            schema = JsonSchemaFormat("answer", form.schema)
            chat.response_format = ResponseFormat("json_schema", schema)
        return chat

    def _cache_hint(self) -> CacheHint | None:
        """The longest of those asked for. Raises RequestError for too many."""
        controls = [
            self.cache_control,
            *(tool.cache_control for tool in self.tools or ()),
            *cache_controls(self.system, self.messages),
        ]
        ttls = [_TTLS_S[control.ttl] for control in controls if control is not None]
        if len(ttls) > MAX_CACHE_BREAKPOINTS:
            raise invalid(
                f"{len(ttls)} blocks have cache_control; at most {MAX_CACHE_BREAKPOINTS} "
                "are allowed",
                param="cache_control",
            )
        return CacheHint(max(ttls)) if ttls else None


class MessagesRequest(Conversation, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages. `cache_salt` and the parameters after it are Longshore's, as for chats."""

    max_tokens: Int32
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    stream: bool | None = None
    cache_salt: CacheSalt | None = None
    deadline_s: float | None = None
    is_last_step: bool | None = None
    job_id: JobId | None = None
    no_store: bool | None = None
    priority: Int32 | None = None
    seed: int | None = None

    def chat(self, seal: ReasoningSeal) -> ConversationChat:
        """The request as a chat. Raises RequestError naming the invalid parameter."""
        chat = super().chat(seal)
        for name in (
            *("max_tokens", "temperature", "top_p", "top_k", "stream"),
            *("cache_salt", "deadline_s", "no_store", "priority", "seed", "job_id", "is_last_step"),
        ):
            setattr(chat, name, getattr(self, name))
        chat.stop = self.stop_sequences
        chat.stops("stop_sequences")
        if self.stream:
            chat.stream_options = StreamOptions(include_usage=True)
        chat.check()
        return chat
