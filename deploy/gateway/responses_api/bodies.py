"""Response bodies of the Responses API: the response, its events, and what a store keeps of it."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from longshore.deploy.gateway.api.usage import PromptTokensDetails, Usage
from longshore.deploy.requests.chat_messages import ChatMessage

COMPLETED: Final = "completed"
INCOMPLETE: Final = "incomplete"
IN_PROGRESS: Final = "in_progress"
QUEUED: Final = "queued"
CANCELLED: Final = "cancelled"
FAILED: Final = "failed"


class OutputText(msgspec.Struct, frozen=True, tag="output_text"):
    text: str
    annotations: Sequence[str] = ()
    logprobs: Sequence[str] = ()


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    id: str
    status: str
    role: str = "assistant"
    content: Sequence[OutputText] = ()


class ReasoningText(msgspec.Struct, frozen=True, tag="reasoning_text"):
    text: str


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag="reasoning"):
    """encrypted_content: see ReasoningSeal."""

    id: str
    status: str
    summary: Sequence[str] = ()
    content: Sequence[ReasoningText] = ()
    encrypted_content: str | msgspec.UnsetType = msgspec.UNSET


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True, tag="function_call"):
    """arguments: JSON text; of an incomplete call, the beginning of it."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str = ""


class CustomToolCall(msgspec.Struct, frozen=True, kw_only=True, tag="custom_tool_call"):
    """input: a text; of an incomplete call, the beginning of it."""

    id: str
    status: str
    call_id: str
    name: str
    input: str = ""


OutputItem: TypeAlias = OutputMessage | ReasoningItem | FunctionCall | CustomToolCall


class InputText(msgspec.Struct, frozen=True, tag="input_text"):
    text: str


class InputMessage(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    id: str
    role: str
    content: Sequence[InputText | OutputText]
    status: str = COMPLETED


class FunctionCallOutput(msgspec.Struct, frozen=True, kw_only=True, tag="function_call_output"):
    id: str
    call_id: str
    output: str
    status: str = COMPLETED


class CustomToolCallOutput(
    msgspec.Struct, frozen=True, kw_only=True, tag="custom_tool_call_output"
):
    id: str
    call_id: str
    output: str
    status: str = COMPLETED


InputItem: TypeAlias = (
    InputMessage
    | FunctionCall
    | FunctionCallOutput
    | CustomToolCall
    | CustomToolCallOutput
    | ReasoningItem
)


class InputItemList(msgspec.Struct, frozen=True, kw_only=True):
    data: Sequence[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/responses/input_tokens."""

    object: str = "response.input_tokens"
    input_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class FailureBody(msgspec.Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """A response. Unsupported parameters have the values with which they are accepted."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    completed_at: int | None = None
    background: bool
    error: FailureBody | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: Sequence[OutputItem] = ()
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    text: Mapping[str, Any]
    tool_choice: str | dict[str, Any]
    tools: Sequence[dict[str, Any]]
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    metadata: Mapping[str, str]


class DeletedResponse(msgspec.Struct, frozen=True):
    id: str
    object: str = "response"
    deleted: bool = True


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True):
    sequence_number: int


class _OfResponse(ResponseEvent, frozen=True, kw_only=True):
    response: ResponseBody


class ResponseCreated(_OfResponse, frozen=True, tag="response.created"):
    pass


class ResponseInProgress(_OfResponse, frozen=True, tag="response.in_progress"):
    pass


class ResponseCompleted(_OfResponse, frozen=True, tag="response.completed"):
    pass


class ResponseIncomplete(_OfResponse, frozen=True, tag="response.incomplete"):
    pass


class ResponseFailed(_OfResponse, frozen=True, tag="response.failed"):
    pass


class ErrorEvent(ResponseEvent, frozen=True, kw_only=True, tag="error"):
    code: str | None
    message: str
    param: str | None


class _OfItem(ResponseEvent, frozen=True, kw_only=True):
    output_index: int
    item: OutputItem


class OutputItemAdded(_OfItem, frozen=True, tag="response.output_item.added"):
    pass


class OutputItemDone(_OfItem, frozen=True, tag="response.output_item.done"):
    pass


class _OfPart(ResponseEvent, frozen=True, kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0


class ContentPartAdded(_OfPart, frozen=True, kw_only=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class ContentPartDone(_OfPart, frozen=True, kw_only=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class OutputTextDelta(_OfPart, frozen=True, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: Sequence[str] = ()


class OutputTextDone(_OfPart, frozen=True, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: Sequence[str] = ()


class ReasoningTextDelta(_OfPart, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningTextDone(_OfPart, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class _OfCall(ResponseEvent, frozen=True, kw_only=True):
    item_id: str
    output_index: int


class FunctionCallArgumentsDelta(
    _OfCall, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    delta: str


class FunctionCallArgumentsDone(
    _OfCall, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    name: str
    arguments: str


class CustomToolCallInputDelta(
    _OfCall, frozen=True, kw_only=True, tag="response.custom_tool_call_input.delta"
):
    delta: str


class CustomToolCallInputDone(
    _OfCall, frozen=True, kw_only=True, tag="response.custom_tool_call_input.done"
):
    input: str


ResponseStreamEvent: TypeAlias = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ErrorEvent
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | FunctionCallArgumentsDelta
    | FunctionCallArgumentsDone
    | CustomToolCallInputDelta
    | CustomToolCallInputDone
)


class StoredResponse(msgspec.Struct, frozen=True):
    """A response as it is stored.

    input_items:  the items of the request.
    conversation: all messages, including those of former responses and the output, without
                  instructions.
    """

    response: ResponseBody
    input_items: Sequence[InputItem]
    conversation: Sequence[ChatMessage]


def response_usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        usage.prompt_tokens,
        PromptTokensDetails(usage.num_cached_tokens),
        usage.completion_tokens,
        OutputTokensDetails(),
        usage.total_tokens,
    )
