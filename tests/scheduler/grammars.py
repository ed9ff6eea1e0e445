"""A compiler of grammars that is done when a test says so."""

from collections.abc import Sequence

import numpy as np

from longshore.protocol.requests import StructuredOutput


class AnyGrammar:
    """Allows everything."""

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        return True

    def num_valid(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def fill_masks(self, draft_token_ids: Sequence[int], masks: np.ndarray) -> None:
        masks[:] = 0xFF


class Grammars:
    """Texts in `ready` are compiled. polled: what was asked for, in order."""

    def __init__(self, *ready: str) -> None:
        self.ready = set(ready)
        self.polled: list[str] = []

    def poll(self, spec: StructuredOutput) -> AnyGrammar | None:
        self.polled.append(spec.text)
        return AnyGrammar() if spec.text in self.ready else None
