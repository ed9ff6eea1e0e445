"""The number of tokens that a step may compute, which is lowered when the device lacks memory."""

from dataclasses import dataclass
from typing import Final

MIN_TOKENS: Final = 16
"""Steps are not made smaller than this: the memory of so few tokens is that of the weights."""


@dataclass(slots=True)
class TokenBudget:
    """can_shrink: False if a step must have room for a whole prompt, encoder input or block of
    states. max_chunk: what each running request gets at most; 0: no limit."""

    num_tokens: int
    can_shrink: bool
    max_chunk: int = 0

    def halve(self) -> bool:
        """Lower it for all later steps. Returns False if it cannot be lower."""
        if not self.can_shrink or self.num_tokens <= MIN_TOKENS:
            return False
        self.num_tokens = max(MIN_TOKENS, self.num_tokens // 2)
        return True
