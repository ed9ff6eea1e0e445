"""Drafts that a step verifies: each is accepted if it is the token that is sampled in its place.

The step computes the row's latest token and its drafts, and samples after each of them, with the
number of its own (seed, position). So the accepted tokens are those that steps of one token would
have sampled, whatever the settings of the request.
"""

from dataclasses import dataclass

import numpy as np

from longshore.protocol.arrays import BoolArray, Int32Array, Int64Array
from longshore.protocol.errors import PlanMismatch
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.rows import RowTable
from longshore.worker.step.given_tokens import GivenTokens


@dataclass(frozen=True)
class PlannedDrafts:
    """The drafts of one step, by ascending row and position.

    rows, positions, token_ids: (n,) of each draft. A row's drafts are the last tokens that it
                computes.
    """

    rows: Int64Array
    positions: Int64Array
    token_ids: Int32Array

    def num_of_rows(self, max_num_seqs: int) -> Int64Array:
        """(max_num_seqs,) drafts of each row."""
        counts: Int64Array = np.bincount(self.rows, minlength=max_num_seqs)
        return counts

    def samples(self, rows: Int64Array, ends: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The row and the position of every token to sample. rows, ends: (n,) sampling rows, and
        the position of the last token of each."""
        counts = self.num_of_rows(int(rows.max(initial=0)) + 1)[rows] + 1
        before = np.repeat(np.cumsum(counts), counts) - np.arange(counts.sum()) - 1
        return np.repeat(rows, counts), np.repeat(ends, counts) - before

    def given(self, token_width: int, *, pin_memory: bool) -> GivenTokens:
        """The drafts as tokens of the token table."""
        index = self.rows * token_width + self.positions
        return GivenTokens.of(index, self.token_ids, pin_memory=pin_memory)

    def valid_samples(self, sampled: Int32Array, sampled_rows: Int64Array) -> BoolArray:
        """(n,) which of the sampled tokens, (n,) by ascending row and position, are valid: each
        row's first one, and those after accepted drafts."""
        is_last = np.append(sampled_rows[1:] != sampled_rows[:-1], True)
        is_draft = np.isin(sampled_rows, self.rows) & ~is_last
        differs = np.zeros(len(sampled), np.int64)
        differs[is_draft] = sampled[is_draft] != self.token_ids
        num_before = np.cumsum(differs) - differs  # wrong drafts before each sample
        firsts = np.flatnonzero(np.append(True, is_last[:-1]))
        counts = np.diff(np.append(firsts, len(sampled)))
        valid: BoolArray = num_before == np.repeat(num_before[firsts], counts)
        return valid


def planned_drafts(
    plan: SchedulerOutput,
    rows: RowTable,
    num_scheduled: Int64Array,
    *,
    max_drafts: int,
    vocab_size: int,
) -> PlannedDrafts | None:
    """The drafts of `plan`, which `rows` have just applied; None if there are none.

    num_scheduled: (max_num_seqs,) tokens of each row in the plan.
    max_drafts:    of a row in a step.

    Raises PlanMismatch for drafts that are not all tokens of their rows but one, or whose ids are
    not known.
    """
    draft_rows, token_ids = plan.draft_rows.astype(np.int64), plan.draft_tokens
    if not len(draft_rows) and not len(token_ids):
        return None
    if not max_drafts:
        raise PlanMismatch(
            f"step {plan.step} has draft_rows, but this worker has no speculative_config. Start "
            "scheduler and workers with the same one."
        )
    in_order = len(draft_rows) == len(token_ids) and (np.diff(draft_rows) >= 0).all()
    if not in_order or draft_rows[0] < 0 or draft_rows[-1] >= rows.max_num_seqs:
        raise PlanMismatch(
            f"step {plan.step} has {len(token_ids)} drafts for rows {draft_rows.tolist()}, which "
            f"must be in ascending order and in 0..{rows.max_num_seqs - 1}"
        )
    if not 0 <= token_ids.min() <= token_ids.max() < vocab_size:
        raise PlanMismatch(
            f"step {plan.step} has a draft outside 0..{vocab_size - 1}; this worker has told the "
            "scheduler all drafts that it knows"
        )
    counts = np.bincount(draft_rows, minlength=rows.max_num_seqs)
    some = np.flatnonzero(counts)
    verifies = (num_scheduled[some] == counts[some] + 1) & rows.samples(num_scheduled)[some]
    if not verifies.all() or counts.max() > max_drafts:
        raise PlanMismatch(
            f"step {plan.step} verifies {counts[some].tolist()} drafts of rows {some.tolist()}, "
            f"which compute {num_scheduled[some].tolist()} tokens; a row verifies at most "
            f"{max_drafts}, after its latest token"
        )
    ends = np.cumsum(counts[some])
    positions = np.arange(len(draft_rows)) + np.repeat(rows.num_computed[some] - ends, counts[some])
    return PlannedDrafts(draft_rows, positions, token_ids)
