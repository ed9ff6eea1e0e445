"""Tokens that a plan gives: drafts, and sampled tokens for the first pipeline stage, which does not
sample. They are written into the token table before the step reads it."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longshore.protocol.arrays import Int32Array, Int64Array
from longshore.protocol.errors import PlanMismatch
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.rows import RowTable
from longshore.worker.step.token_table import TokenTable


@dataclass(frozen=True)
class GivenTokens:
    """The tokens of one step, on the host (pinned for CUDA).

    index:     (n,) int64 flat indices into the token table.
    token_ids: (n,) int32, to write there.
    """

    index: Tensor
    token_ids: Tensor

    @staticmethod
    def of(index: Int64Array, token_ids: Int32Array, *, pin_memory: bool) -> "GivenTokens":
        """token_ids are copied: the message will be freed."""
        places, ids = torch.from_numpy(index), torch.from_numpy(np.array(token_ids, np.int32))
        if pin_memory:
            places, ids = places.pin_memory(), ids.pin_memory()
        return GivenTokens(places, ids)

    def write(self, tokens: TokenTable) -> None:
        """Write the tokens into the table. On the compute queue, before the step reads them."""
        device = tokens.ids.device
        tokens.scatter(
            self.index.to(device, non_blocking=True), self.token_ids.to(device, non_blocking=True)
        )


def fed_back_tokens(
    plan: SchedulerOutput,
    rows: RowTable,
    num_scheduled: Int64Array,
    *,
    vocab_size: int,
    token_width: int,
    pin_memory: bool,
) -> GivenTokens | None:
    """The sampled tokens in `plan`, which `rows` have just applied; None if no row needs one.

    num_scheduled: (max_num_seqs,) tokens of each row in the plan.

    A row needs its token if it computes one that was sampled since the row started, or if it is
    rewound to a position after one. Raises PlanMismatch unless the plan has tokens of exactly the
    rows that need one.
    """
    positions = rows.num_computed - num_scheduled
    is_needed = (num_scheduled > 0) & (positions >= rows.num_known)
    rewound = [rewind.row for rewind in plan.rewound]
    is_needed[rewound] = True
    positions[rewound] = rows.num_known[rewound] - 1
    needed = is_needed.nonzero()[0]
    if not np.array_equal(needed, plan.sampled_rows):
        raise PlanMismatch(
            f"step {plan.step} has sampled tokens of rows {plan.sampled_rows.tolist()}, but rows "
            f"{needed.tolist()} need them"
        )
    ids = plan.sampled_tokens
    if len(ids) != len(needed):
        raise PlanMismatch(f"step {plan.step} has {len(ids)} sampled tokens for {len(needed)} rows")
    if not len(ids):
        return None
    if not 0 <= ids.min() <= ids.max() < vocab_size:
        raise PlanMismatch(f"a sampled token id is outside 0..{vocab_size - 1}")
    index = needed * token_width + positions[needed]
    return GivenTokens.of(index, ids, pin_memory=pin_memory)
