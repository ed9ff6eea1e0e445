"""One answer as a sequence of blocks: reasoning, text and tool calls, for APIs that number them."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.parsers.answer import NO_PARSERS
from longshore.deploy.parsers.parser import (
    Content,
    Event,
    MoreArguments,
    Reasoning,
    ToolCall,
)
from longshore.deploy.requests.chat_messages import CalledFunction, ChatMessage, MessageToolCall
from longshore.deploy.requests.chat_parsing import ChatParsing, ShownAnswer
from longshore.deploy.requests.chat_tools import custom_arguments
from longshore.deploy.requests.generation_spec import Piece

BlockKind: TypeAlias = Literal["text", "reasoning", "call", "custom"]


class AnswerBlock(msgspec.Struct):
    """texts: pieces of the text, of the arguments of a call, or of the input of a custom tool.
    name, call_id: of a call."""

    kind: BlockKind
    texts: list[str] = []
    name: str = ""
    call_id: str = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)


class BlockStart(msgspec.Struct, frozen=True):
    """index: position of the block in the answer."""

    index: int
    block: AnswerBlock


class BlockDelta(msgspec.Struct, frozen=True):
    """The next text of a block."""

    index: int
    block: AnswerBlock
    text: str


class BlockEnd(msgspec.Struct, frozen=True):
    index: int
    block: AnswerBlock


BlockEvent: TypeAlias = BlockStart | BlockDelta | BlockEnd


class AnswerBlocks:
    """The blocks of one answer as its text arrives.

    parsing: how the answer is parsed; None: it is text.
    """

    def __init__(self, parsing: ChatParsing | None, tokenizer: ModelTokenizer | None) -> None:
        self._parsing = parsing or ChatParsing(NO_PARSERS)
        self._tokenizer = tokenizer
        self._answer: ShownAnswer | None = None
        self.blocks: list[AnswerBlock] = []

    @property
    def ends_with_calls(self) -> bool:
        """The answer has calls, and the arguments of each are complete."""
        return self._answer is not None and self._answer.ends_with_calls

    def feed(self, piece: Piece) -> Sequence[BlockEvent]:
        """What the piece adds. The last piece ends the last block."""
        if self._answer is None:
            self._answer = ShownAnswer(self._parsing, self._tokenizer, piece)
        is_last = piece.finish_reason is not None
        events: list[BlockEvent] = []
        for event in self._answer.feed(piece.text, piece.finish_reason):
            self._add(event, self._answer, events)
        if is_last:
            self._end(events)
        return events

    def message(self) -> ChatMessage:
        """The answer as a message of a chat."""
        texts: dict[str, list[str]] = {"text": [], "reasoning": []}
        calls = []
        for block in self.blocks:
            if block.kind in ("call", "custom"):
                is_custom = block.kind == "custom"
                arguments = custom_arguments(block.text) if is_custom else block.text
                function = CalledFunction(block.name, arguments)
                calls.append(MessageToolCall(function, block.call_id, "function"))
            else:
                texts[block.kind].append(block.text)
        content = "\n".join(texts["text"])
        return ChatMessage(
            "assistant",
            content if content or not calls else None,
            tool_calls=calls or None,
            reasoning_content="\n".join(texts["reasoning"]) or None,
        )

    def _add(self, event: Event, answer: ShownAnswer, events: list[BlockEvent]) -> None:
        match event:
            case Content(text):
                self._extend("text", text, events)
            case Reasoning(text):
                self._extend("reasoning", text, events)
            case ToolCall(name, arguments):
                kind: BlockKind = "custom" if answer.is_custom(name) else "call"
                self._start(AnswerBlock(kind, [], name, answer.id_of(event)), events)
                self._extend(kind, arguments, events)
            case MoreArguments(text):
                self._extend("call", text, events)

    def _extend(self, kind: BlockKind, text: str, events: list[BlockEvent]) -> None:
        if not text:
            return
        if not self.blocks or self.blocks[-1].kind != kind:
            self._start(AnswerBlock(kind, []), events)
        block = self.blocks[-1]
        block.texts.append(text)
        events.append(BlockDelta(len(self.blocks) - 1, block, text))

    def _start(self, block: AnswerBlock, events: list[BlockEvent]) -> None:
        self._end(events)
        self.blocks.append(block)
        events.append(BlockStart(len(self.blocks) - 1, block))

    def _end(self, events: list[BlockEvent]) -> None:
        if self.blocks:
            events.append(BlockEnd(len(self.blocks) - 1, self.blocks[-1]))
