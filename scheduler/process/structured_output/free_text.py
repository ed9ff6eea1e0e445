"""Grammars of a part of the output: of an answer after its reasoning, or of the calls in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from longshore.protocol.arrays import Int32Array
from longshore.protocol.requests import FreeText
from longshore.scheduler.process.structured_output.matcher import CompiledGrammar, Matcher, allow

_ALL: Final = np.int32(-1)


class PartialGrammar:
    """A grammar of what follows free text. num_bytes: of both."""

    def __init__(
        self, grammar: CompiledGrammar, free: FreeText, *, vocab_size: int, ends: Sequence[int]
    ) -> None:
        self.num_bytes = grammar.num_bytes
        self._grammar = grammar
        self._free = free
        self._vocab_size = vocab_size
        self._ends = frozenset(ends)

    def matcher(self) -> "_PartialMatcher":
        return _PartialMatcher(self._grammar, self._free, self._vocab_size, self._ends)


@dataclass(slots=True)
class _Part:
    """matcher: None: the part is free text. marks: end it. is_reasoning: another free text follows,
    and not what the grammar allows."""

    matcher: Matcher | None
    marks: tuple[tuple[int, ...], ...] = ()
    is_reasoning: bool = False
    num_tokens: int = 0


class _PartialMatcher:
    """The output is a sequence of parts, the last of which grows."""

    def __init__(
        self, grammar: CompiledGrammar, free: FreeText, vocab_size: int, ends: frozenset[int]
    ) -> None:
        self._grammar = grammar
        self._free = free
        self._vocab_size = vocab_size
        self._ends = ends
        self._token_ids: list[int] = []
        self._parts = [self._first_part()]

    def _first_part(self) -> _Part:
        reasoning = self._free.reasoning
        if reasoning is not None and reasoning.begin is None:
            return self._reasoning(reasoning)
        return self._free_part() if self._free.begin is None else self._constrained()

    def _free_part(self) -> _Part:
        return _Part(None, self._free.marks)

    def _constrained(self) -> _Part:
        return _Part(self._grammar.matcher())

    @staticmethod
    def _reasoning(reasoning: FreeText) -> _Part:
        return _Part(None, reasoning.marks, is_reasoning=True)

    def accept(self, token_id: int) -> bool:
        part = self._growing()
        if not self._token_ids:
            part = self._begun(part, token_id)
        if part.matcher is not None:
            if not part.matcher.accept(token_id):
                return False
        elif token_id in self._ends and not self._free.repeats:
            return False
        part.num_tokens += 1
        self._token_ids.append(token_id)
        if self._has_mark(part):
            self._add(self._free_part() if part.is_reasoning else self._constrained())
        return True

    def fill(self, mask: Int32Array) -> None:
        part = self._growing()
        if part.matcher is not None:
            part.matcher.fill(mask)
            if not self._token_ids and self._free.begin is not None:
                allow(mask, (self._free.begin,))
            return
        mask[:] = _ALL
        words = mask.view(np.uint32)
        if num_rest := self._vocab_size % 32:
            words[-1] = np.uint32((1 << num_rest) - 1)
        if not self._free.repeats:
            for token_id in self._ends:
                words[token_id // 32] &= ~np.uint32(1 << (token_id % 32))

    def rollback(self, num_tokens: int) -> None:
        while num_tokens:
            part = self._parts[-1]
            if not part.num_tokens:
                self._parts.pop()
                continue
            num_undone = min(num_tokens, part.num_tokens)
            if part.matcher is not None:
                part.matcher.rollback(num_undone)
            del self._token_ids[len(self._token_ids) - num_undone :]
            part.num_tokens -= num_undone
            num_tokens -= num_undone
        if not self._token_ids:  # the first token decides again what the output begins with
            del self._parts[1:]

    def is_over(self) -> bool:
        matcher = self._parts[-1].matcher
        return not self._free.repeats and matcher is not None and matcher.is_over()

    def _growing(self) -> _Part:
        """The part of the next token."""
        part = self._parts[-1]
        if self._free.repeats and part.matcher is not None and part.matcher.is_over():
            return self._add(self._free_part())
        return part

    def _add(self, part: _Part) -> _Part:
        self._parts.append(part)
        return part

    def _begun(self, part: _Part, token_id: int) -> _Part:
        """The part that the output begins with, if this is its first token."""
        if token_id == self._free.begin:
            return self._add(self._free_part())
        reasoning = self._free.reasoning
        if reasoning is not None and token_id == reasoning.begin:
            return self._add(self._reasoning(reasoning))
        return part

    def _has_mark(self, part: _Part) -> bool:
        """Whether the latest tokens of the output are a mark of the part, within it."""
        return any(
            len(mark) <= part.num_tokens and tuple(self._token_ids[-len(mark) :]) == mark
            for mark in part.marks
        )
