"""One answer as a sequence of blocks: reasoning, text and tool calls, for APIs that number them."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from longshore.deploy.gateway.openai.chat import PROMPT_END_TOKENS
from longshore.deploy.gateway.openai.chat_deltas import ChatParsing
from longshore.deploy.gateway.openai.chat_messages import (
    CalledFunction,
    ChatMessage,
    MessageToolCall,
)
from longshore.deploy.gateway.openai.generation_spec import Piece
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.parsers.answer import NO_PARSERS, ParsedAnswer
from longshore.deploy.parsers.parser import (
    AnswerContext,
    Content,
    Event,
    MoreArguments,
    Reasoning,
    ToolCall,
)


class AnswerBlock(msgspec.Struct):
    """texts: pieces of the text, or of the arguments of a call.
    name, call_id: of a call."""

    kind: Literal["text", "reasoning", "call"]
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
        self._answer: ParsedAnswer | None = None
        self._num_calls = 0
        self.blocks: list[AnswerBlock] = []

    @property
    def ends_with_calls(self) -> bool:
        """The answer has calls, and the arguments of each are complete."""
        return self._answer is not None and self._answer.ends_with_calls

    def feed(self, piece: Piece) -> Sequence[BlockEvent]:
        """What the piece adds. The last piece ends the last block."""
        if self._answer is None:
            self._answer = self._begin(piece)
        is_last = piece.finish_reason is not None
        events: list[BlockEvent] = []
        for event in self._answer.feed(piece.text, is_last=is_last):
            self._add(event, events)
        if is_last:
            self._end(events)
        return events

    def message(self) -> ChatMessage:
        """The answer as a message of a chat."""
        texts: dict[str, list[str]] = {"text": [], "reasoning": []}
        calls = []
        for block in self.blocks:
            if block.kind == "call":
                function = CalledFunction(block.name, block.text)
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

    def _begin(self, piece: Piece) -> ParsedAnswer:
        prompt_end = ""
        if piece.prompt is not None and self._tokenizer is not None:
            prompt_end = self._tokenizer.decode(piece.prompt.token_ids[-PROMPT_END_TOKENS:])
        parsing = self._parsing
        return ParsedAnswer(parsing.parsers, AnswerContext(parsing.tool_names, prompt_end))

    def _add(self, event: Event, events: list[BlockEvent]) -> None:
        match event:
            case Content(text):
                self._extend("text", text, events)
            case Reasoning(text):
                if self._parsing.has_reasoning:
                    self._extend("reasoning", text, events)
            case ToolCall(name, arguments):
                self._num_calls += 1
                if self._is_call_shown:
                    tools = self._parsing.parsers.tools
                    assert tools is not None
                    self._start(AnswerBlock("call", [], name, tools.call_id()), events)
                    self._extend("call", arguments, events)
            case MoreArguments(text):
                if self._is_call_shown:
                    self._extend("call", text, events)

    @property
    def _is_call_shown(self) -> bool:
        """Whether the last call is within the limit."""
        maximum = self._parsing.max_calls
        return maximum is None or self._num_calls <= maximum

    def _extend(
        self, kind: Literal["text", "reasoning", "call"], text: str, events: list[BlockEvent]
    ) -> None:
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
