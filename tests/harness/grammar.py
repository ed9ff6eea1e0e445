"""Grammars without a language: a table says what each output position may hold."""

from collections.abc import Iterable, Sequence

import numpy as np

from longshore.protocol.arrays import UInt8Array
from longshore.protocol.requests import StructuredOutput
from longshore.scheduler.features.grammar import GrammarError
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
    broken:   texts that are no grammar.
    turn:     of a driver that counts them, see `grammar_for`.
    polled:   texts in the order in which they were asked for.
    grammars: the latest one of each text.
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
        self.turn = 0
        self.polled: list[str] = []
        self.grammars: dict[str, FakeGrammar] = {}
        self.vocab_size = vocab_size
        self._sample = sample

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

    def poll(self, spec: StructuredOutput) -> "FakeGrammar | None":
        self.polled.append(spec.text)
        if spec.text in self.broken:
            raise GrammarError(f"no grammar: {spec.text}")
        if not self.is_ready(spec):
            return None
        grammar = self.grammars[spec.text] = FakeGrammar(self, spec)
        return grammar


class FakeGrammar:
    """One request's grammar. tokens: those that it was advanced by."""

    def __init__(self, compiler: FakeCompiler, spec: StructuredOutput) -> None:
        self.tokens: list[int] = []
        self._compiler = compiler
        self._spec = spec

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        if self.num_valid(token_ids) < len(token_ids):
            return False
        self.tokens += token_ids
        return True

    def num_valid(self, token_ids: Sequence[int]) -> int:
        return self._compiler.num_valid(self._spec, len(self.tokens), token_ids)

    def fill_masks(self, draft_token_ids: Sequence[int], masks: UInt8Array) -> None:
        assert not masks.any()
        vocab_size = self._compiler.vocab_size
        assert masks.shape == (1 + len(draft_token_ids), -(-vocab_size // 8))
        if self._spec.kind != "grammar":
            masks[:] = 0xFF
            return
        odd = np.arange(vocab_size) % 2 == 1
        for index in range(len(masks)):
            allowed = odd.copy()
            allowed[self._compiler.own_token(self._spec, len(self.tokens) + index)] = True
            masks[index] = np.packbits(allowed, bitorder="little")
