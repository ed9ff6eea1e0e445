"""Request bodies of Anthropic's Messages API, and the chat that they mean."""

from typing import Any, Final, Literal

import msgspec

from longshore.deploy.gateway.anthropic.content import (
    CacheControl,
    Content,
    MessageParam,
    cache_controls,
    chat_messages,
)
from longshore.deploy.gateway.anthropic.tools import Tool, ToolChoice, set_tools
from longshore.deploy.gateway.openai.errors import invalid
from longshore.deploy.gateway.openai.requests import (
    CacheSalt,
    ChatRequest,
    Int32,
    JobId,
    StreamOptions,
    check_deadline,
    check_job,
    check_no_store,
)
from longshore.deploy.gateway.openai.structured_output import JsonSchemaFormat, ResponseFormat
from longshore.protocol.requests import CacheHint

MAX_CACHE_BREAKPOINTS: Final = 4
_TTLS_S: Final = {"5m": 300.0, "1h": 3600.0}

# Accepted, without effect on the answer.
IGNORED: Final = frozenset({"metadata", "user_profile_id", "workspace_id"})
# Not supported yet. The values here (and null) have no effect, so they are accepted.
UNSUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "container": (),
    "context_management": (),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "output_format": (),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """type: `disabled` leaves the reasoning out of the answer; with the others, the answer has it.
    budget_tokens, display: accepted; how much the model reasons depends on the model, and the
    answer has all of it."""

    type: Literal["adaptive", "enabled", "disabled"]
    budget_tokens: Int32 | None = None
    display: Literal["summarized"] | None = None


class OutputFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON schema that the answer conforms to."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """effort: accepted are null and `high`, the default."""

    format: OutputFormat | None = None
    effort: Literal["high"] | None = None


class HintedChat(ChatRequest, kw_only=True):
    """A chat with the hint of its cache_control."""

    hint: CacheHint | None = None

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

    def chat(self) -> ChatRequest:
        """The request as a chat, which continues the last message if it is the assistant's. Raises
        ApiError for what is not supported."""
        chat = HintedChat(model=self.model, messages=chat_messages(self.system, self.messages))
        chat.hint = self._cache_hint()
        chat.continue_final_message = self.messages[-1].role == "assistant"
        set_tools(chat, self.tools, self.tool_choice)
        chat.include_reasoning = self.thinking is None or self.thinking.type != "disabled"
        if self.output_config is not None and self.output_config.format is not None:
            schema = JsonSchemaFormat("answer", self.output_config.format.schema)
            chat.response_format = ResponseFormat("json_schema", schema)
        return chat

    def _cache_hint(self) -> CacheHint | None:
        """The longest of those asked for. Raises ApiError for too many."""
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

    def chat(self) -> ChatRequest:
        """The request as a chat. Raises ApiError naming the invalid parameter."""
        chat = super().chat()
        for name in (
            *("max_tokens", "temperature", "top_p", "top_k", "stream"),
            *("cache_salt", "deadline_s", "no_store", "priority", "seed", "job_id", "is_last_step"),
        ):
            setattr(chat, name, getattr(self, name))
        chat.stop = self.stop_sequences
        chat.stops("stop_sequences")
        if self.stream:
            chat.stream_options = StreamOptions(include_usage=True)
        check_deadline(chat.deadline_s)
        check_no_store(chat)
        check_job(chat)
        return chat
