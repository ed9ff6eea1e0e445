"""Which earlier tokens a token attends to. Settings are made of it: no tensor library is loaded."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Positions = TypeVar("Positions", int, "Tensor")


@dataclass(frozen=True)
class Reach:
    """window: tokens, the token itself included. chunk: tokens of the chunks that follow each other
    from the first token on, of which a token sees its own. At most one of them; None: all."""

    window: int | None = None
    chunk: int | None = None

    @property
    def max_tokens(self) -> int | None:
        """Tokens that one token attends to at most, itself included."""
        return self.chunk if self.window is None else self.window

    def max_blocks(self, block_size: int) -> int | None:
        """Blocks that one token attends to at most; they need not begin at a block border."""
        return None if self.max_tokens is None else -(-(self.max_tokens - 1) // block_size) + 1

    def first_key(self, positions: Positions) -> Positions:
        """The first position that tokens at `positions` attend to; may be below 0."""
        if self.window is not None:
            return positions - (self.window - 1)
        return positions * 0 if self.chunk is None else positions - positions % self.chunk
