"""POST /v1/messages: a chat whose request and response have Anthropic's format."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

import msgspec

from longshore.deploy.gateway.anthropic.bodies import (
    AnthropicUsage,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    OutputBlock,
    Ping,
    SignatureDelta,
    StopDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from longshore.deploy.gateway.anthropic.requests import (
    Conversation,
    ConversationChat,
    MessagesRequest,
)
from longshore.deploy.gateway.api.chat import ChatEndpoint, chat_parsing
from longshore.deploy.gateway.api.endpoint import NamedEventWriter, ResponseWriter, Service
from longshore.deploy.gateway.api.error_body import anthropic_error
from longshore.deploy.gateway.api.field_rules import FIELD_RULES
from longshore.deploy.gateway.api.parameters import read_parameters
from longshore.deploy.gateway.api.requests import OF_CHATS, ChatRequest
from longshore.deploy.gateway.api.sealed_reasoning import ReasoningSeal
from longshore.deploy.gateway.api.usage import Usage
from longshore.deploy.gateway.http.exchange import Exchange, server_sent_event
from longshore.deploy.parsers.json_text import is_json_object, whole_members
from longshore.deploy.requests.answer_blocks import (
    AnswerBlock,
    AnswerBlocks,
    BlockDelta,
    BlockEnd,
    BlockEvent,
    BlockStart,
)
from longshore.deploy.requests.errors import RequestError
from longshore.deploy.requests.generation_spec import GenerationSpec, Piece

_DELTAS: Final[Mapping[str, Callable[[str], TextDelta | ThinkingDelta | InputJsonDelta]]] = {
    "text": TextDelta,
    "reasoning": ThinkingDelta,
    "call": InputJsonDelta,
}
# Other finish reasons of ours: the model's turn ended.
_STOP_REASONS: Final = {"length": "max_tokens"}

ConversationT = TypeVar("ConversationT", bound=Conversation)


def parse_conversation(
    kind: type[ConversationT], seal: ReasoningSeal, body: bytes
) -> ConversationChat:
    """A request body of the given kind, as a chat. Raises RequestError naming the invalid
    parameter."""
    # How an answer is generated does not matter where tokens are counted.
    of_answers = {} if kind is Conversation else OF_CHATS
    return read_parameters(kind, body, rules={**of_answers, **FIELD_RULES["anthropic"]}).chat(seal)


class MessagesEndpoint(ChatEndpoint):
    """One answer to a conversation."""

    path = "/v1/messages"
    id_prefix = "msg"
    names: Mapping[str, str] = {"response_format": "output_config.format"}

    async def read(self, exchange: Exchange, service: Service) -> ChatRequest:
        body = await self.read_body(exchange, service)
        return await service.json.run(
            len(body), partial(parse_conversation, MessagesRequest, service.seal), body
        )

    def writer(
        self, service: Service, request: ChatRequest, spec: GenerationSpec
    ) -> ResponseWriter:
        blocks = AnswerBlocks(chat_parsing(service, request), service.tokenizer)
        assert isinstance(request, ConversationChat)
        return MessageWriter(
            spec, service.model_name, blocks, service.seal, shows_thinking=request.shows_thinking
        )


class MessageWriter(NamedEventWriter):
    """Writes the bodies of /v1/messages. A stream has an empty message, then each content block as
    it grows, then the reason why it stopped.

    seal:           signs the reasoning.
    shows_thinking: its text is sent, too.
    """

    def __init__(
        self,
        spec: GenerationSpec,
        model_name: str,
        blocks: AnswerBlocks,
        seal: ReasoningSeal,
        *,
        shows_thinking: bool,
    ) -> None:
        self._seal = seal
        self._shows_thinking = shows_thinking
        self._message = Message(
            id=spec.request_id,
            model=model_name,
            usage=AnthropicUsage(input_tokens=len(spec.prompts[0]), output_tokens=0),
        )
        self._max_tokens = spec.sampling.max_tokens
        self._blocks = blocks
        self._last: Piece | None = None

    def first_chunks(self) -> Sequence[msgspec.Struct]:
        return [MessageStart(self._message), Ping()]

    def chunks(self, piece: Piece) -> Sequence[msgspec.Struct]:
        if piece.finish_reason is not None:
            self._last = piece
        return [chunk for event in self._blocks.feed(piece) for chunk in self._block_chunks(event)]

    def last_chunks(self, usage: Usage) -> Sequence[msgspec.Struct]:
        assert self._last is not None
        return [MessageDelta(self._stop(self._last, usage), _usage(usage)), MessageStop()]

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> msgspec.Struct:
        (piece,) = pieces
        self._blocks.feed(piece)
        stop = self._stop(piece, usage)
        return msgspec.structs.replace(
            self._message,
            content=[self._whole_block(block, piece) for block in self._blocks.blocks],
            stop_reason=stop.stop_reason,
            stop_sequence=stop.stop_sequence,
            usage=_usage(usage),
        )

    def error_events(self, error: RequestError) -> Sequence[bytes]:
        return [server_sent_event(msgspec.json.encode(anthropic_error(error)), "error")]

    def _stop(self, piece: Piece, usage: Usage) -> StopDelta:
        if piece.stop_string is not None:
            return StopDelta("stop_sequence", piece.stop_string)
        if piece.finish_reason == "stop" and self._blocks.ends_with_calls:
            return StopDelta("tool_use", None)
        reason = _STOP_REASONS.get(piece.finish_reason or "", "end_turn")
        limit = self._max_tokens
        if reason == "max_tokens" and limit is not None and usage.completion_tokens < limit:
            reason = "model_context_window_exceeded"
        return StopDelta(reason, None)

    def _block_chunks(self, event: BlockEvent) -> Iterator[msgspec.Struct]:
        index, block = event.index, event.block
        match event:
            case BlockStart():
                empty = AnswerBlock(block.kind, [], block.name, block.call_id)
                yield ContentBlockStart(index, _block(empty))
            case BlockDelta(text=text):
                if block.kind != "reasoning" or self._shows_thinking:
                    yield ContentBlockDelta(index, _DELTAS[block.kind](text))
            case BlockEnd():
                if block.kind == "reasoning":
                    signature = self._seal.seal(block.text)
                    yield ContentBlockDelta(index, SignatureDelta(signature))
                yield ContentBlockStop(index)

    def _whole_block(self, block: AnswerBlock, piece: Piece) -> OutputBlock:
        """A block of an answer with this last piece. A call that is cut off at the maximum length
        has the arguments that are complete."""
        if block.kind in ("call", "custom") and piece.finish_reason == "length":
            arguments = block.text if is_json_object(block.text) else whole_members(block.text)
            block = msgspec.structs.replace(block, texts=[arguments])
        if block.kind != "reasoning":
            return _block(block)
        shown = block.text if self._shows_thinking else ""
        return ThinkingBlock(shown, self._seal.seal(block.text))


def _block(block: AnswerBlock) -> OutputBlock:
    """Arguments that are no object, for which the model is to blame, stay text."""
    text = block.text
    match block.kind:
        case "text":
            return TextBlock(text)
        case "reasoning":
            return ThinkingBlock(text)
        case "call" | "custom":
            arguments = text or "{}"
            if not is_json_object(arguments):
                return TextBlock(text)
            return ToolUseBlock(block.call_id, block.name, msgspec.Raw(arguments.encode()))


def _usage(usage: Usage) -> AnthropicUsage:
    return AnthropicUsage(
        input_tokens=usage.prompt_tokens - usage.num_cached_tokens,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=usage.num_cached_tokens,
    )
