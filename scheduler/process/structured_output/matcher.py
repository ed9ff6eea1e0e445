"""What backends provide: compiled grammars, and their state in each request."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from longshore.protocol.arrays import Int32Array


class Matcher(Protocol):
    """The state of one request's grammar."""

    def accept(self, token_id: int) -> bool:
        """Advance by a token; False, without advancing, if it is not allowed. Raises
        GrammarError."""

    def fill(self, mask: Int32Array) -> None:
        """Set the bits of the tokens allowed next in `mask`, (cdiv(vocabulary, 32),) zeros. Raises
        GrammarError."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the latest tokens."""

    def is_over(self) -> bool:
        """Whether nothing but the end of the output may follow."""


class CompiledGrammar(Protocol):
    """num_bytes: estimate of its memory."""

    num_bytes: int

    def matcher(self) -> Matcher:
        """A new state, before the first token."""


def allow(mask: Int32Array, token_ids: Sequence[int]) -> None:
    """Set the bits of these tokens."""
    bits = mask.view(np.uint32)
    for token_id in token_ids:
        bits[token_id // 32] |= np.uint32(1 << (token_id % 32))
