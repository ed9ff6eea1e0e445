"""Grammars without a language behind them: what each output position may hold is a table."""

from collections.abc import Sequence

import numpy as np

from longshore.protocol.requests import StructuredOutput
from longshore.scheduler.features.grammar import GrammarError
from tests.scheduler.driver import VOCAB_SIZE, steady_token


def grammar_for(request_id: str) -> StructuredOutput:
    """What a request asks for whose output may be what `steady_token` gives it, or odd ids."""
    return StructuredOutput("grammar", request_id)


class FakeGrammar:
    """Allows at each position the request's own token and all odd ones.

    tokens: those that it was advanced by.
    """

    def __init__(self, request_id: str) -> None:
        self.tokens: list[int] = []
        self._request_id = request_id

    def allows(self, position: int, token: int) -> bool:
        return token % 2 == 1 or token == steady_token(self._request_id, position)

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        if self.num_valid(token_ids) < len(token_ids):
            return False
        self.tokens += token_ids
        return True

    def num_valid(self, token_ids: Sequence[int]) -> int:
        for index, token in enumerate(token_ids):
            if not self.allows(len(self.tokens) + index, token):
                return index
        return len(token_ids)

    def fill_masks(self, draft_token_ids: Sequence[int], masks: np.ndarray) -> None:
        assert not masks.any()
        assert masks.shape == (1 + len(draft_token_ids), -(-VOCAB_SIZE // 8))
        for index in range(len(masks)):
            bits = [self.allows(len(self.tokens) + index, token) for token in range(VOCAB_SIZE)]
            masks[index] = np.packbits(bits, bitorder="little")


class FakeCompiler:
    """Compiles when told. polled: request ids, in order.

    ready, broken: those whose grammar is compiled, or turned out to be none; "all" are ready.
    """

    def __init__(self, ready: set[str] | None = None) -> None:
        self.ready = set() if ready is None else ready
        self.broken: set[str] = set()
        self.polled: list[str] = []
        self.grammars: dict[str, FakeGrammar] = {}

    def poll(self, spec: StructuredOutput) -> FakeGrammar | None:
        request_id = spec.text
        self.polled.append(request_id)
        if request_id in self.broken:
            raise GrammarError(f"no grammar: {request_id}")
        if request_id not in self.ready and "all" not in self.ready:
            return None
        return self.grammars.setdefault(request_id, FakeGrammar(request_id))
