"""The body of POST /v1/responses, and the chat that it means."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, TypeAlias

import msgspec

from longshore.deploy.gateway.api.field_rules import FIELD_RULES
from longshore.deploy.gateway.api.parameters import read_parameters
from longshore.deploy.gateway.api.requests import (
    OF_CHATS,
    CacheKey,
    CacheRetention,
    CacheSalt,
    ChatRequest,
    Effort,
    Int32,
    JobId,
    StreamOptions,
)
from longshore.deploy.gateway.api.sealed_reasoning import ReasoningSeal
from longshore.deploy.gateway.api.unknown_fields import ignore_fields
from longshore.deploy.gateway.responses_api.bodies import InputItem
from longshore.deploy.gateway.responses_api.items import ResponseItem, read_items
from longshore.deploy.gateway.responses_api.tools import (
    TextSettings,
    chat_response_format,
    chat_tool_choice,
    chat_tools,
)
from longshore.deploy.requests.cache_hints import KVCacheRetention, PromptCacheOptions
from longshore.deploy.requests.chat_messages import MAX_MESSAGES, ChatMessage
from longshore.deploy.requests.errors import invalid

MAX_METADATA: Final = 16
ENCRYPTED_REASONING: Final = "reasoning.encrypted_content"
_Key: TypeAlias = Annotated[str, msgspec.Meta(max_length=64)]
_Value: TypeAlias = Annotated[str, msgspec.Meta(max_length=512)]


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    """effort: see `thinking_variables`. The other fields of OpenAI's are hints."""

    effort: Effort | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses. `top_k` and the parameters after it are Longshore's, as for chats.

    input:        a text, or items.
    instructions: a system message, for this response only.
    previous_response_id: a stored response, whose conversation is continued.
    store:        keep the response; None: yes, if this server stores responses.
    background:   return at once; the stored response is completed later.
    include:      `reasoning.encrypted_content` seals the reasoning; other parts are hints.
    """

    input: str | list[ResponseItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[_Key, _Value] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: Int32 | None = None
    seed: int | None = None
    cache_salt: CacheSalt | None = None
    prompt_cache_key: CacheKey | None = None
    prompt_cache_retention: CacheRetention | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    kv_cache_retention: KVCacheRetention | None = None
    user: str | None = None
    deadline_s: float | None = None
    no_store: bool | None = None
    priority: Int32 | None = None
    job_id: JobId | None = None
    is_last_step: bool | None = None
    thinking_token_budget: Int32 | None = None

    @property
    def seals_reasoning(self) -> bool:
        return ENCRYPTED_REASONING in (self.include or ())


class ResponseChat(ChatRequest, kw_only=True):
    """The chat of a response.

    original:     the request.
    conversation: the messages without instructions, which the next response continues.
    items:        those that this request adds.
    owner:        whose response it is; see `ResponseStore`.
    """

    effort_name: ClassVar[str] = "reasoning.effort"

    original: ResponsesRequest
    conversation: Sequence[ChatMessage]
    items: Sequence[InputItem]
    owner: str


def parse_response_request(body: bytes) -> ResponsesRequest:
    """A request body. Raises RequestError naming the invalid parameter."""
    request = read_parameters(
        ResponsesRequest, body, rules={**OF_CHATS, **FIELD_RULES["responses"]}
    )
    others = [part for part in request.include or () if part != ENCRYPTED_REASONING]
    ignore_fields(f"include.{part}" for part in others)
    if request.max_output_tokens is not None and request.max_output_tokens < 1:
        raise invalid(
            f"max_output_tokens={request.max_output_tokens} must be at least 1",
            param="max_output_tokens",
        )
    if len(request.metadata or ()) > MAX_METADATA:
        raise invalid(
            f"metadata has {len(request.metadata or ())} pairs; at most {MAX_METADATA} are allowed",
            param="metadata",
        )
    if request.background and request.stream:
        raise invalid(
            "background with stream=true is not supported; poll the response, or remove one of "
            "them",
            param="background",
            code="unsupported_parameter",
        )
    if request.background and request.store is False:
        raise invalid("background needs store=true, or no value for it", param="background")
    return request


def chat_of(
    request: ResponsesRequest, former: Sequence[ChatMessage], owner: str, seal: ReasoningSeal
) -> ResponseChat:
    """The chat of a request that continues the former messages. Raises RequestError."""
    own, items = read_items(request.input, seal)
    conversation = [*former, *own]
    if len(conversation) > MAX_MESSAGES:
        raise invalid(
            f"the conversation has {len(conversation)} messages; at most {MAX_MESSAGES} are "
            "allowed",
            param="input",
        )
    messages = list(conversation)
    if request.instructions is not None:
        messages.insert(0, ChatMessage("system", request.instructions))
    chat = ResponseChat(
        original=request,
        conversation=conversation,
        items=items,
        owner=owner,
        model=request.model,
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        tools=chat_tools(request.tools),
        tool_choice=chat_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=chat_response_format(request.text),
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        cache_salt=request.cache_salt,
        prompt_cache_key=request.prompt_cache_key,
        user=request.user,
        prompt_cache_retention=request.prompt_cache_retention,
        prompt_cache_options=request.prompt_cache_options,
        kv_cache_retention=request.kv_cache_retention,
        deadline_s=request.deadline_s,
        no_store=request.no_store,
        priority=request.priority,
        job_id=request.job_id,
        is_last_step=request.is_last_step,
        thinking_token_budget=request.thinking_token_budget,
        stream=request.stream,
        stream_options=StreamOptions(include_usage=True) if request.stream else None,
    )
    chat.check()
    return chat
