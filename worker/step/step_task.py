"""What one step does, as the plan (or the warm-up) states it: the input of `StepLauncher.prepare`.

The host's part reads all of it; the device's part keeps it until the step has run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from torch import Tensor

from longshore.protocol.plan import KeptState
from longshore.worker.attention.backend import AttentionStep
from longshore.worker.kv_cache.block_guard import GuardedStep
from longshore.worker.sampling.columns import SamplingColumns
from longshore.worker.sampling.pooling import StepPooling
from longshore.worker.step.decode_graphs import GraphKey
from longshore.worker.step.encoder_rows import EncoderInput
from longshore.worker.step.given_tokens import GivenTokens
from longshore.worker.step.planned_drafts import PlannedDrafts
from longshore.worker.step.step_batch import Int64s, StepBatch
from longshore.worker.step.worker_rows import NO_COPIES, BlockCopies
from longshore.worker.transfer.connector import StepTransfers

Preparation: TypeAlias = Callable[[Tensor, Tensor, AttentionStep], None]


@dataclass(frozen=True, slots=True)
class StepTask:
    """The tokens of a step, and what is done before and after they are computed.

    sampling: settings of all rows.
    sampled_rows, sampled_positions: of each token to sample, by ascending row and position; a row
              has one for each draft, and one more.
    copies:   blocks copied before the step.
    kept_states: states of rows that are also written to blocks of their own, by row.
    zero_block_ids: blocks cleared before the step, besides those that its tokens begin.
    common_prefix_blocks: leading blocks that all rows share, per group; empty: none.
    started:  (row, token ids on the host) of added rows.
    encoded:  encoder inputs of added rows.
    given:    tokens that this step computes and that no step of this rank has sampled.
    drafts:   those of them that the step verifies.
    num_drafts: the most drafts of a row that a drafter with weights makes for the next step.
    pooling:  the step's part of pooled vectors, if any.
    transfers: the connector's hooks of this step; None without a connector and in the warm-up.
    guard:    verifies full blocks, with `--poison-kv`.
    prepare:  called with the model's inputs before the forward pass; used in the warm-up.
    captured: the graph that this step is captured as; it gives no results. Used in the warm-up.
    """

    batch: StepBatch
    sampling: SamplingColumns
    sampled_rows: Int64s
    sampled_positions: Int64s
    copies: BlockCopies = NO_COPIES
    kept_states: Mapping[int, Sequence[KeptState]] = field(default_factory=dict)
    zero_block_ids: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    common_prefix_blocks: Sequence[int] = ()
    started: Sequence[tuple[int, Tensor]] = ()
    encoded: Sequence[EncoderInput] = ()
    given: Sequence[GivenTokens] = ()
    drafts: PlannedDrafts | None = None
    num_drafts: int = 0
    pooling: StepPooling | None = None
    transfers: StepTransfers | None = None
    guard: GuardedStep | None = None
    prepare: Preparation | None = None
    captured: GraphKey | None = None
