"""The body of POST /v1/responses, and the chat that it means."""

import uuid
from collections.abc import Sequence
from typing import Annotated, Final, TypeAlias

import msgspec

from longshore.deploy.gateway.openai.chat_messages import MAX_MESSAGES, ChatMessage
from longshore.deploy.gateway.openai.errors import invalid
from longshore.deploy.gateway.openai.parameters import read_parameters
from longshore.deploy.gateway.openai.requests import (
    CacheSalt,
    ChatRequest,
    Int32,
    StreamOptions,
    check_deadline,
)
from longshore.deploy.gateway.responses_api.bodies import (
    InputItem,
    InputText,
    Message,
    OutputText,
)
from longshore.protocol.errors import shortened

MAX_METADATA: Final = 16
_Key: TypeAlias = Annotated[str, msgspec.Meta(max_length=64)]
_Value: TypeAlias = Annotated[str, msgspec.Meta(max_length=512)]

# Accepted, without effect on the answer: labels and cache hints.
IGNORED: Final = frozenset(
    {
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "user",
    }
)
# Not supported yet. The values here (and null) have no effect, so they are accepted.
UNSUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "access_programs": (),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "include": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prompt": (),
    "reasoning": ({},),
    "service_tier": ("auto", "default"),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_TEXTS: Final = ("input_text", "output_text", "text")


class ResponsePart(msgspec.Struct):
    """A part of an item's content; only text is supported."""

    type: str
    text: str | None = None


class ResponseItem(msgspec.Struct):
    """An item of the input; only type `message` is supported. Items of a former output can be sent
    back as they are."""

    type: str = "message"
    role: str | None = None
    content: str | list[ResponsePart] | None = None


class TextFormat(msgspec.Struct):
    """Only type `text` is supported."""

    type: str


class TextSettings(msgspec.Struct, forbid_unknown_fields=True):
    """The form of the output."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses. `top_k` and the parameters after it are Longshore's, as for chats.

    input:        a text, or messages.
    instructions: a system message, for this response only.
    previous_response_id: a stored response, whose conversation is continued.
    store:        keep the response; None: yes, if this server stores responses.
    background:   return at once; the stored response is completed later.
    """

    input: str | list[ResponseItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextSettings | None = None
    metadata: dict[_Key, _Value] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: Int32 | None = None
    seed: int | None = None
    cache_salt: CacheSalt | None = None
    deadline_s: float | None = None
    priority: Int32 | None = None

    def messages(self) -> list[Message]:
        """The messages of `input`. Raises ApiError for what is not supported."""
        if isinstance(self.input, str):
            return [("user", self.input)]
        if not self.input:
            raise invalid("input is empty; it needs at least one item", param="input")
        return [_message(item, f"input[{i}]") for i, item in enumerate(self.input)]


class ResponseChat(ChatRequest, kw_only=True):
    """The chat of a response.

    original:     the request.
    conversation: the messages without instructions, which the next response continues.
    items:        those that this request adds.
    owner:        whose response it is; see `ResponseStore`.
    """

    original: ResponsesRequest
    conversation: Sequence[Message]
    items: Sequence[InputItem]
    owner: str


def parse_response_request(body: bytes) -> ResponsesRequest:
    """A request body. Raises ApiError naming the invalid parameter."""
    request = read_parameters(ResponsesRequest, body, ignored=IGNORED, unsupported=UNSUPPORTED)
    check_deadline(request.deadline_s)
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
    settings = request.text or TextSettings()
    if settings.format is not None and settings.format.type != "text":
        raise invalid(
            f"text.format has type {shortened(settings.format.type)!r}; only 'text' is supported",
            param="text",
            code="unsupported_parameter",
        )
    if settings.verbosity not in (None, "medium"):
        raise invalid(
            "text.verbosity is not supported; remove it or set it to 'medium'",
            param="text",
            code="unsupported_parameter",
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
    if request.stream_options is not None and request.stream_options.include_usage:
        raise invalid(
            "stream_options.include_usage is not a parameter of this endpoint: its last event "
            "always has the usage",
            param="stream_options",
        )
    return request


def chat_of(request: ResponsesRequest, former: Sequence[Message], owner: str) -> ResponseChat:
    """The chat of a request that continues the former messages. Raises ApiError."""
    own = request.messages()
    conversation = [*former, *own]
    if len(conversation) > MAX_MESSAGES:
        raise invalid(
            f"the conversation has {len(conversation)} messages; at most {MAX_MESSAGES} are "
            "allowed",
            param="input",
        )
    messages = [ChatMessage(role, text) for role, text in conversation]
    if request.instructions is not None:
        messages.insert(0, ChatMessage("system", request.instructions))
    prefix = uuid.uuid4().hex
    items = [
        InputItem(
            id=f"msg_{prefix}_{index}",
            role=role,
            content=[OutputText(text) if role == "assistant" else InputText(text)],
        )
        for index, (role, text) in enumerate(own)
    ]
    return ResponseChat(
        original=request,
        conversation=conversation,
        items=items,
        owner=owner,
        model=request.model,
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        cache_salt=request.cache_salt,
        deadline_s=request.deadline_s,
        priority=request.priority,
        stream=request.stream,
        stream_options=StreamOptions(include_usage=True) if request.stream else None,
    )


def _message(item: ResponseItem, where: str) -> Message:
    if item.type != "message":
        raise invalid(
            f"{where}: items of type {shortened(item.type)!r} are not supported; send messages",
            param="input",
            code="unsupported_parameter",
        )
    if item.role not in ("user", "assistant", "system", "developer"):
        raise invalid(
            f"{where}.role is {shortened(str(item.role))!r}; supported are user, assistant, system "
            "and developer",
            param="input",
        )
    if item.content is None:
        raise invalid(f"{where}.content is missing", param="input")
    if isinstance(item.content, str):
        return item.role, item.content
    for part in item.content:
        if part.type not in _TEXTS or part.text is None:
            raise invalid(
                f"{where}.content has a part of type {shortened(part.type)!r}; only text is "
                "supported",
                param="input",
                code="unsupported_parameter",
            )
    return item.role, "\n".join(part.text or "" for part in item.content)
