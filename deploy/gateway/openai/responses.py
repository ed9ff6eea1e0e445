"""Response bodies of the OpenAI API: whole answers, chunks of streams, the list of models."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from longshore.deploy.gateway.api.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprob
from longshore.deploy.gateway.api.usage import Usage

PromptLogprobs: TypeAlias = list[dict[int, PromptLogprob] | None]


class ResponseOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that identify a response; equal in all chunks of a stream."""

    id: str
    created: int
    model: str


class CompletionChoice(msgspec.Struct, frozen=True):
    """A whole choice, or one piece of it in a stream.

    routed_experts: see `routed_experts.encoded`; in a stream in the last piece.
    """

    index: int
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    routed_experts: str | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(ResponseOrigin, frozen=True, kw_only=True):
    """A whole completion, or a chunk of a streamed one.

    kv_transfer_params: with which another engine continues it, if the request asked for that.
    """

    choices: tuple[CompletionChoice, ...]
    object: str = "text_completion"
    kv_transfer_params: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class CalledFunctionText(msgspec.Struct, frozen=True):
    """A call, or a piece of it in a stream. arguments: JSON text, or a part of it."""

    arguments: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class CalledCustomText(msgspec.Struct, frozen=True):
    """The call of a custom tool."""

    name: str
    input: str


class AnswerToolCall(msgspec.Struct, frozen=True):
    """Of a function, or of a custom tool."""

    id: str
    function: CalledFunctionText | msgspec.UnsetType = msgspec.UNSET
    type: str = "function"
    custom: CalledCustomText | msgspec.UnsetType = msgspec.UNSET


class ToolCallDelta(msgspec.Struct, frozen=True):
    """The first delta of a call has its id and name, the next ones only more arguments. The only
    delta of a custom tool has all of its input."""

    index: int
    function: CalledFunctionText | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET
    custom: CalledCustomText | msgspec.UnsetType = msgspec.UNSET


class ChatAnswer(msgspec.Struct, frozen=True):
    """reasoning, reasoning_content: the same text under both names in use."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: tuple[AnswerToolCall, ...] | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    message: ChatAnswer
    finish_reason: str | None
    index: int = 0
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    routed_experts: str | msgspec.UnsetType = msgspec.UNSET


class ChatResponse(ResponseOrigin, frozen=True, kw_only=True):
    """kv_transfer_params: as in a CompletionResponse."""

    choices: tuple[ChatChoice, ...]
    usage: Usage
    prompt_token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    object: str = "chat.completion"
    kv_transfer_params: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    """The first delta has the role, the next ones have text or calls, the last has neither."""

    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: tuple[ToolCallDelta, ...] | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    delta: ChatDelta
    finish_reason: str | None = None
    index: int = 0
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    routed_experts: str | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(ResponseOrigin, frozen=True, kw_only=True):
    """prompt_token_ids: in the first chunk with tokens, if requested."""

    choices: tuple[ChatChunkChoice, ...]
    prompt_token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET
    object: str = "chat.completion.chunk"
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class InputTokenDetails(msgspec.Struct, frozen=True):
    audio_tokens: int
    text_tokens: int


class TranscriptionUsage(msgspec.Struct, frozen=True):
    """audio_tokens: encoder tokens of all pieces; text_tokens: tokens of the decoder's prompts."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: InputTokenDetails
    type: str = "tokens"


def transcription_usage(
    audio_tokens: int, text_tokens: int, output_tokens: int
) -> TranscriptionUsage:
    return TranscriptionUsage(
        audio_tokens + text_tokens,
        output_tokens,
        audio_tokens + text_tokens + output_tokens,
        InputTokenDetails(audio_tokens, text_tokens),
    )


class Transcript(msgspec.Struct, frozen=True):
    """The text of an audio file."""

    text: str
    usage: TranscriptionUsage


class TranscriptDelta(msgspec.Struct, frozen=True):
    """New text of a streamed transcript."""

    delta: str
    type: str = "transcript.text.delta"


class TranscriptDone(msgspec.Struct, frozen=True):
    """The last event of a streamed transcript, with its whole text."""

    text: str
    usage: TranscriptionUsage
    type: str = "transcript.text.done"


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    max_model_len: int
    vocab_size: int
    object: str = "model"
    owned_by: str = "longshore"


class ServerVersion(msgspec.Struct, frozen=True):
    version: str


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What results from the settings of an engine."""

    dtype: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


class ServerInfo(msgspec.Struct, frozen=True):
    """Of /server_info. settings: without secrets. engines: those that are ready, by number."""

    version: str
    settings: Mapping[str, Any]
    engines: Mapping[int, EngineInfo]


class ServerLoad(msgspec.Struct, frozen=True):
    """server_load: requests that run or wait in the engines, of all gateways."""

    server_load: int


class ModelList(msgspec.Struct, frozen=True):
    data: tuple[Model, ...]
    object: str = "list"
