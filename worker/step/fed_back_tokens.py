"""Sampled tokens that come back to a first pipeline stage, which does not sample, with a plan."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longshore.protocol.arrays import Int64Array
from longshore.protocol.errors import PlanMismatch
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.rows import RowTable
from longshore.worker.step.token_table import TokenTable


@dataclass(frozen=True)
class FedBackTokens:
    """Of one step, on the host (pinned for CUDA): flat indices into the token table, (n,) int64,
    and the ids that belong there, (n,) int32."""

    index: Tensor
    token_ids: Tensor

    def write(self, tokens: TokenTable) -> None:
        """On the compute queue, before the step reads them."""
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
) -> FedBackTokens | None:
    """What `plan` brings, which `rows` have just applied, num_scheduled: (max_num_seqs,) in it.

    None if no row needs one. Raises PlanMismatch unless the plan names exactly those that do: they
    compute a token sampled since they started, or are rewound behind one.
    """
    positions = rows.num_computed - num_scheduled
    is_needed = (num_scheduled > 0) & (positions >= rows.num_known)
    rewound = [rewind.row for rewind in plan.rewound]
    is_needed[rewound] = True
    positions[rewound] = rows.num_known[rewound] - 1
    needed = is_needed.nonzero()[0]
    if not np.array_equal(needed, plan.sampled_rows):
        raise PlanMismatch(
            f"step {plan.step} brings sampled tokens of rows {plan.sampled_rows.tolist()}, but "
            f"rows {needed.tolist()} need theirs"
        )
    ids = plan.sampled_tokens
    if len(ids) != len(needed):
        raise PlanMismatch(f"step {plan.step} brings {len(ids)} tokens for {len(needed)} rows")
    if not len(ids):
        return None
    if not 0 <= ids.min() <= ids.max() < vocab_size:
        raise PlanMismatch(f"a sampled token id is outside 0..{vocab_size - 1}")
    index = torch.from_numpy(needed * token_width + positions[needed])
    token_ids = torch.from_numpy(np.array(ids, np.int32))  # the message's memory is not kept
    if pin_memory:
        index, token_ids = index.pin_memory(), token_ids.pin_memory()
    return FedBackTokens(index, token_ids)
