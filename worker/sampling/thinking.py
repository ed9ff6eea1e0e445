"""Thinking budgets: at the budget, the tokens that end the reasoning are the only possible ones.

Whether an output is still reasoning then depends on its tokens, so the device decides it. The host
knows at which few output positions the question arises, so other steps pay nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from longshore.protocol.sampling import ThinkingBudget
from longshore.worker.step.token_table import TokenTable

MAX_SPACE_TOKENS: Final = 4
"""Tokens of white space that may follow the opening of the reasoning in a prompt."""


class RowBudget:
    """The thinking budget of one request.

    start: output position at which the reasoning begins.
    is_open: the prompt has opened it, so the output need not.
    """

    def __init__(self, budget: ThinkingBudget, prompt_token_ids: npt.NDArray[np.int32]) -> None:
        self.budget = budget
        begin = budget.begin_token_ids
        tail = prompt_token_ids[-(len(begin) + MAX_SPACE_TOKENS) :].tolist()
        opened = _last_index(tail, begin)
        closed = None if opened is None else _last_index(tail[opened:], budget.mark_token_ids)
        self.is_open = opened is not None and closed is None
        self.start = 0 if self.is_open else len(begin)

    def forced(self, num_outputs: int) -> int | None:
        """The token of output position `num_outputs` if the output is still reasoning at the
        budget; None: the position is another one."""
        index = num_outputs - self.start - self.budget.num_tokens
        ids = self.budget.end_token_ids
        return ids[index] if 0 <= index < len(ids) else None


def _last_index(tokens: Sequence[int], part: Sequence[int]) -> int | None:
    for start in range(len(tokens) - len(part), -1, -1):
        if tuple(tokens[start : start + len(part)]) == tuple(part):
            return start
    return None


@dataclass(frozen=True)
class ForcedToken:
    """A token that ends the reasoning of a row, if that has not ended yet.

    sample:   index among the sampling rows.
    row:      of the token table.
    num_prompt: tokens before the output.
    """

    sample: int
    row: int
    num_prompt: int
    token_id: int
    of: RowBudget

    def apply(self, logits: Tensor, tokens: TokenTable) -> None:
        """logits: (num_sampled, vocab_size) float32, changed in place."""
        budget, start = self.of.budget, self.num_prompt + self.of.start
        output = tokens.ids[self.row, self.num_prompt :]
        reasoning = tokens.ids[self.row, start : start + budget.num_tokens]
        ended = _occurs(reasoning, budget.mark_token_ids)
        if not self.of.is_open:
            begin = budget.begin_token_ids
            ended = ended | ~_occurs(output[: len(begin)], begin)
        row = logits[self.sample]
        forced = row.new_full(row.shape, -math.inf)
        forced[self.token_id] = 0.0
        row.copy_(row.where(ended, forced))


def _occurs(tokens: Tensor, part: Sequence[int]) -> Tensor:
    """Whether the tokens, (n,), have this part: a bool on the device."""
    num_places = max(0, len(tokens) - len(part) + 1)
    is_here = tokens.new_ones(num_places).bool()
    for offset, token_id in enumerate(part):
        is_here &= tokens[offset : offset + num_places] == token_id
    return is_here.any()
