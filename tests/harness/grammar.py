"""Grammars without a language: a table says what each output position may hold."""

from collections.abc import Iterable, Sequence

import numpy as np

from longshore.protocol.requests import StructuredOutput
from longshore.scheduler.features.grammar import (
    GrammarError,
    GrammarLost,
    InvalidGrammar,
    TokenMasks,
)
from tests.harness.tokens import VOCAB_SIZE, Sample, steady_token


def grammar_for(request_id: str, ready_turn: int | None = None) -> StructuredOutput:
    """A grammar that allows the request's own tokens and all odd ones; compiled from turn
    `ready_turn` on, or when the test adds the request to `FakeCompiler.ready`."""
    text = request_id if ready_turn is None else f"{ready_turn}@{request_id}"
    return StructuredOutput("grammar", text)


class FakeCompiler:
    """Compiles what is `ready`, and knows what each grammar allows. A regex,
    a schema and a choice allow every token.

    ready:    texts whose grammar is compiled; with "all", every one is.
    broken:   texts that are no grammar, or have none any more.
    unmasked: texts whose masks are still being computed.
    lost:     texts whose grammar is lost, and not compiled again yet.
    turn:     of a driver that counts them, see `grammar_for`.
    polled:   texts in the order in which they were asked for.
    grammars: the latest one of each text.
    num_compiled: grammars that were asked for. num_lost: losses that a running request noticed.
    """

    def __init__(
        self,
        ready: Iterable[str] = (),
        *,
        sample: Sample = steady_token,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        self.ready = set(ready)
        self.broken: set[str] = set()
        self.unmasked: set[str] = set()
        self.lost: set[str] = set()
        self.num_compiled = self.num_lost = 0
        self.num_flushes = 0
        self.turn = 0
        self.polled: list[str] = []
        self.grammars: dict[str, FakeGrammar] = {}
        self.vocab_size = vocab_size
        self._sample = sample
        self._unreported: dict[int, FakeGrammar] = {}  # those that are not, or not any more

    def is_ready(self, spec: StructuredOutput) -> bool:
        """Whether it is compiled."""
        turn, has_turn, _ = spec.text.partition("@")
        if has_turn:
            return self.turn >= int(turn)
        return spec.text in self.ready or "all" in self.ready

    def own_token(self, spec: StructuredOutput, position: int) -> int:
        """What the request of this grammar samples as output number `position` (from 0)."""
        return self._sample(spec.text.rpartition("@")[2], position)

    def allows(self, spec: StructuredOutput, position: int, token: int) -> bool:
        """Whether output number `position` may be `token`."""
        return spec.kind != "grammar" or token % 2 == 1 or token == self.own_token(spec, position)

    def num_valid(self, spec: StructuredOutput, num_outputs: int, tokens: Sequence[int]) -> int:
        """How many leading tokens may follow the first `num_outputs` ones."""
        for index, token in enumerate(tokens):
            if not self.allows(spec, num_outputs + index, token):
                return index
        return len(tokens)

    def compile(self, grammar_id: int, spec: StructuredOutput) -> "FakeGrammar":
        self.num_compiled += 1
        grammar = self._unreported[grammar_id] = FakeGrammar(self, grammar_id, spec)
        return grammar

    def next_compiled(self) -> int | None:
        for grammar_id, grammar in self._unreported.items():
            text = grammar.spec.text
            has_failed = text in self.broken
            if (
                grammar.is_released
                or has_failed
                or (self.is_ready(grammar.spec) and text not in self.lost)
            ):
                del self._unreported[grammar_id]
                return grammar_id
        return None

    def lose(self, grammar: "FakeGrammar") -> None:
        """It is asked for, and lost; so its next event is reported."""
        self._unreported[grammar.grammar_id] = grammar

    def flush(self) -> None:
        self.num_flushes += 1


class FakeGrammar:
    """One request's grammar. tokens: those that it was advanced by."""

    def __init__(self, compiler: FakeCompiler, grammar_id: int, spec: StructuredOutput) -> None:
        self.grammar_id = grammar_id
        self.spec = spec
        self.tokens: list[int] = []
        self.is_released = False
        self._compiler = compiler

    def is_compiled(self) -> bool:
        compiler, text = self._compiler, self.spec.text
        compiler.polled.append(text)
        if text in compiler.broken:
            raise InvalidGrammar(f"no grammar: {text}")
        if text in compiler.lost:
            compiler.lose(self)
        elif compiler.is_ready(self.spec):
            compiler.grammars[text] = self
            return True
        return False

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        if self.num_valid(token_ids) < len(token_ids):
            return False
        self.tokens += token_ids
        return True

    def num_valid(self, token_ids: Sequence[int]) -> int:
        return self._compiler.num_valid(self.spec, len(self.tokens), token_ids)

    def release(self) -> None:
        assert not self.is_released
        self.is_released = True

    def fill_masks(self, draft_token_ids: Sequence[int], masks: TokenMasks) -> bool:
        assert not masks.any()
        if self.spec.text in self._compiler.broken:
            raise GrammarError(f"no mask: {self.spec.text}")
        if self.spec.text in self._compiler.lost:
            self._compiler.lose(self)
            self._compiler.num_lost += 1
            raise GrammarLost
        if self.spec.text in self._compiler.unmasked:
            return False
        vocab_size = self._compiler.vocab_size
        assert masks.shape == (1 + len(draft_token_ids), -(-vocab_size // 8))
        if self.spec.kind != "grammar":
            masks[:] = 0xFF
            return True
        odd = np.arange(vocab_size) % 2 == 1
        for index in range(len(masks)):
            allowed = odd.copy()
            allowed[self._compiler.own_token(self.spec, len(self.tokens) + index)] = True
            masks[index] = np.packbits(allowed, bitorder="little")
        return True
