"""Grammars that take a while to compile, and refuse some of the wrong drafts."""

from collections.abc import Sequence

from longshore.protocol.requests import StructuredOutput
from tests.oracle.fake_worker import sample_token


def grammar_for(request_id: str, ready_turn: int) -> StructuredOutput:
    """What a request asks for whose grammar is compiled from turn `ready_turn` on."""
    return StructuredOutput("grammar", f"{ready_turn}@{request_id}")


class FakeGrammars:
    """One grammar per request: at each output position it allows the token that the worker will
    sample, and of the others those with odd ids. Whoever drives the scheduler sets `turn`."""

    def __init__(self, vocab_size: int) -> None:
        self.turn = 0
        self.vocab_size = vocab_size

    def is_ready(self, spec: StructuredOutput) -> bool:
        """Whether it is compiled."""
        return self.turn >= int(spec.text.split("@")[0])

    def allows(self, spec: StructuredOutput, position: int, token: int) -> bool:
        """Whether it takes `token` as output number `position`, counted from 0."""
        request_id = spec.text.split("@")[1]
        return token % 2 == 1 or token == sample_token(request_id, position, self.vocab_size)

    def num_valid(self, spec: StructuredOutput, num_outputs: int, tokens: Sequence[int]) -> int:
        """How many leading tokens it takes behind so many outputs."""
        for index, token in enumerate(tokens):
            if not self.allows(spec, num_outputs + index, token):
                return index
        return len(tokens)
