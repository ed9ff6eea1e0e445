"""The contract of parsers, and the source that they read.

A parser is a generator over the text of one answer, which arrives in pieces. It looks at
`source.text`, takes what it has understood, and gives it as events. Text that it has not taken yet
is never lost: if a parser raises, that text is shown as it is.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import msgspec


class Content(msgspec.Struct, frozen=True):
    """Text of the answer."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text of the reasoning before the answer."""

    text: str


class ToolCall(msgspec.Struct, frozen=True):
    """A call begins. arguments: JSON text, or the beginning of it. call_id: as the model writes it;
    empty: it writes none."""

    name: str
    arguments: str
    call_id: str = ""


class MoreArguments(msgspec.Struct, frozen=True):
    """The next part of the last call's arguments."""

    text: str


Event: TypeAlias = Content | Reasoning | ToolCall | MoreArguments
Events: TypeAlias = Iterator[Event | None]
T = TypeVar("T")
Steps: TypeAlias = Generator[Event | None, None, T]
"""Part of a parser: yields events, or None if it needs more text; returns T."""
Lookahead: TypeAlias = Generator[None, None, T]
"""Part of a parser that takes nothing: yields None if it needs more text; returns T."""
Translation: TypeAlias = Generator[str | None, None, bool]
"""Yields the arguments of a call as JSON, in parts, or None if it needs more text; returns whether
they are complete."""


class AnswerContext(msgspec.Struct, frozen=True):
    """What a parser knows about the request.

    tool_names: functions that the request declares.
    prompt_end: the end of the prompt's text, including special tokens.
    schemas:    JSON schemas of the functions' arguments, by name.
    """

    tool_names: frozenset[str] = frozenset()
    prompt_end: str = ""
    schemas: Mapping[str, Mapping[str, Any]] = {}


class Source:
    """The text of one answer that the parser has not taken yet.

    is_complete:   no more text will come.
    is_cut:        because the answer has reached its maximum length: a call that has begun is given
                   as far as it has come.
    num_malformed: long objects that were no calls.
    """

    def __init__(self) -> None:
        self.text = ""
        self.num_malformed = 0
        self.is_complete = False
        self.is_cut = False

    def take(self, num_characters: int | None = None) -> str:
        """Remove and return the beginning of the text; None: all of it."""
        if num_characters is None:
            num_characters = len(self.text)
        taken, self.text = self.text[:num_characters], self.text[num_characters:]
        return taken

    def space(self, start: int = 0) -> Lookahead[int]:
        """The index of the first character from `start` on that is not white space."""
        while True:
            rest = self.text[start:]
            num_space = len(rest) - len(rest.lstrip())
            if num_space < len(rest) or self.is_complete:
                return start + num_space
            yield None

    def begins_with(self, start: int, *markers: str) -> Lookahead[str | None]:
        """The marker that the text has at `start`; None: none of them."""
        while True:
            rest = self.text[start:]
            for marker in markers:
                if rest.startswith(marker):
                    return marker
            if self.is_complete or not any(marker.startswith(rest) for marker in markers):
                return None
            yield None

    def take_markers(self, *markers: str) -> Lookahead[bool]:
        """Take each of the markers that follows, in this order, and the white space around them.
        Returns whether the last one did."""
        self.take((yield from self.space()))
        found = None
        for marker in markers:
            found = yield from self.begins_with(0, marker)
            if found is not None:
                self.take((yield from self.space(len(marker))))
        return found is not None

    def find(self, start: int, end: str, max_characters: int) -> Lookahead[int | None]:
        """The index of `end` at or after `start`; None: it is not within `max_characters`."""
        while True:
            index = self.text.find(end, start, start + max_characters)
            if index >= 0:
                return index
            if self.is_complete or len(self.text) - start >= max_characters:
                return None
            yield None


def show_until(
    source: Source,
    *markers: str,
    kind: type[Content] | type[Reasoning] = Content,
    holds_space: bool = True,
) -> Steps[tuple[int, str] | None]:
    """Give the text before the first of `markers` as it arrives. Returns the index of the marker
    and the marker, which are not taken yet; None at the end of the text.

    holds_space: do not take the white space before the marker.
    """
    firsts = {marker[0] for marker in markers}
    while True:
        text = source.text
        found = [(text.find(marker), marker) for marker in markers if marker in text]
        if found:
            index, marker = min(found)
            if num_shown := len(text[:index].rstrip()) if holds_space else index:
                yield kind(source.take(num_shown))
            return index - num_shown, marker
        if source.is_complete:
            if text:
                yield kind(source.take())
            return None
        end = len(text) - (_num_begun(text, markers) if not firsts.isdisjoint(text) else 0)
        if num_shown := len(text[:end].rstrip()) if holds_space else end:
            yield kind(source.take(num_shown))
        yield None


def show_rest(source: Source) -> Steps[None]:
    """Give all text that is left as it arrives."""
    while source.text or not source.is_complete:
        if source.text:
            yield Content(source.take())
        yield None


def _num_begun(text: str, markers: tuple[str, ...]) -> int:
    """The length of the longest end of `text` with which one of the markers begins."""
    for length in range(min(len(text), max(map(len, markers)) - 1), 0, -1):
        tail = text[-length:]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0


class AnswerParser(ABC):
    """Reads the format of a model family. One object serves all answers, so it keeps no state.

    special_tokens: special tokens of the format, which the parser has to see in the text.
    """

    special_tokens: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def parse(self, source: Source, context: AnswerContext) -> Events:
        """Yield the events of one answer, and None whenever more text is needed. It ends when
        `source.is_complete` and all text is taken. How the text is divided into pieces must not
        change the joined texts of the events."""


class ReasoningParser(AnswerParser):
    """Separates reasoning from the rest of an answer: yields `Reasoning` and `Content`.

    begin: what opens the reasoning, at the end of the prompt or the beginning of the answer.
    mark:  what the model ends it with.
    end:   what is put there instead if the reasoning exceeds its budget. Empty: it can have none.
    answers: each begins an answer, also one without reasoning. Empty: `mark` does, if there is
           reasoning.
    """

    begin: ClassVar[str] = ""
    mark: ClassVar[str] = ""
    end: ClassVar[str] = ""
    answers: ClassVar[tuple[str, ...]] = ()


class NotExpressible(ValueError):
    """A format of calls cannot enforce what a function asks for."""


class CallForm(msgspec.Struct, frozen=True):
    """What a function's arguments follow.

    schema:    a JSON schema; None: they are any object.
    syntax, definition: of a custom tool: the grammar of its only argument `input`.
    """

    schema: Mapping[str, Any] | None = None
    syntax: Literal["lark", "regex"] | None = None
    definition: str = ""


class CallGrammar(msgspec.Struct, frozen=True):
    """What calls follow from their marker on.

    marker:  the token that begins a call, or several of them.
    text:    the grammar of what follows it, up to the end of the call.
    phrases: texts that begin a call instead, if the marker is empty.
    is_answer: nothing marks calls: the grammar is of the whole answer.
    """

    marker: str
    text: str
    phrases: tuple[str, ...] = ()
    is_answer: bool = False


class ToolParser(AnswerParser):
    """Finds the tool calls in an answer without reasoning: yields all other events."""

    def call_id(self) -> str:
        """A new id of a call."""
        return f"call_{secrets.token_hex(12)}"

    def call_grammar(
        self, forms: Mapping[str, CallForm], special_ids: Mapping[str, int]
    ) -> CallGrammar | None:
        """The grammar of calls of these functions; None: the format has none. special_ids: of
        the model's special tokens. Raises NotExpressible."""
        return None
