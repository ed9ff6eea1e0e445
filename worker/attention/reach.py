"""Which earlier tokens a token attends to. Does not import torch: model configs use it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Positions = TypeVar("Positions", int, "Tensor")


@dataclass(frozen=True)
class Reach:
    """window: tokens attended to, the token itself included. chunk: chunk size; a token attends
    only to its own chunk. At most one of them is set; with neither, a token attends to all."""

    window: int | None = None
    chunk: int | None = None

    @property
    def max_tokens(self) -> int | None:
        """Maximum number of tokens that one token attends to, itself included; None: no limit."""
        return self.chunk if self.window is None else self.window

    def max_blocks(self, block_size: int) -> int | None:
        """Maximum number of blocks that one token attends to; None: no limit. The reach need not
        begin at a block border."""
        return None if self.max_tokens is None else -(-(self.max_tokens - 1) // block_size) + 1

    def first_key(self, positions: Positions) -> Positions:
        """The first position that tokens at `positions` attend to; may be below 0."""
        if self.window is not None:
            return positions - (self.window - 1)
        return positions * 0 if self.chunk is None else positions - positions % self.chunk
