"""A hand-made scheduler, just enough to drive the worker with real plans."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from longshore.protocol.arrays import Int32Array, Int64Array, int32_array
from longshore.protocol.outputs import ModelRunnerOutput
from longshore.protocol.plan import (
    AppendedBlocks,
    Rewind,
    RowStart,
    SchedulerOutput,
    digest_changes,
)
from longshore.protocol.requests import PoolingParams
from longshore.protocol.rows import RowTable
from longshore.protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Entry:
    """A request to put on a row. `blocks` already hold the first `num_computed_tokens`."""

    row: int
    prompt: Sequence[int]
    outputs: Sequence[int] = ()
    sampling: SamplingParams = GREEDY
    blocks: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    request_id: str = "request"
    pooling: PoolingParams | None = None
    has_structured_output: bool = False


class Planner:
    """Writes consistent plans. Blocks come from a shuffled list, so that no order is assumed."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int = 8,
        max_model_len: int = 256,
        epoch: int = 1,
        seed: int = 0,
        num_lookahead: int = 0,
    ) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.epoch = epoch
        self.num_lookahead = num_lookahead  # slots after the tokens of each row
        self.step = 0
        self.digest = 0
        self.rows = RowTable(max_num_seqs)
        self.blocks: dict[int, list[int]] = {}
        self.free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self.free)
        self.generation = 0
        self.sampled_rows: dict[int, Int64Array] = {}
        self.num_drafts: dict[int, dict[int, int]] = {}  # by step and row
        self._rejected: dict[int, int] = {}
        self.masked_rows: set[int] = set()

    def plan(
        self,
        scheduled: Mapping[int, int] | None = None,
        *,
        added: Sequence[Entry] = (),
        finished: Sequence[int] = (),
        preempted: Sequence[int] = (),
        rewound: Sequence[Rewind] = (),
        copies: Sequence[tuple[int, int, int]] = (),
        drafts: Mapping[int, Sequence[int]] | None = None,
        connector_metadata: bytes = b"",
        has_loads: bool = False,
    ) -> SchedulerOutput:
        """One step. scheduled: tokens of rows that compute another number than predicted. copies:
        (source block, target block, tokens). drafts: by ascending row, verified after its token."""
        rows, drafts = self.rows, drafts or {}
        scheduled = dict(scheduled or {}) | {row: 1 + len(ids) for row, ids in drafts.items()}
        rejected, self._rejected = self._rejected, {}
        if rejected:
            rows.reject(np.array(list(rejected)), np.array(list(rejected.values())))
        for row in (*finished, *preempted):
            rows.drop(row)
            self.masked_rows.discard(row)
            self.free += self.blocks.pop(row)
        for rewind in rewound:
            rows.rewind(rewind)
            held = self.blocks[rewind.row]
            keep = -(-rewind.num_computed_tokens // self.block_size)
            self.free += held[keep:]
            del held[keep:]
        starts = [self._start(entry) for entry in added]
        self.masked_rows |= {entry.row for entry in added if entry.has_structured_output}
        num_scheduled = rows.expected()
        for row, count in scheduled.items():
            num_scheduled[row] = count
        rows.advance(num_scheduled)
        appended = self._append({start.row for start in starts})
        changes = {
            "rejected_rows": int32_array(list(rejected)),
            "rejected_tokens": int32_array(list(rejected.values())),
            "finished_rows": int32_array(list(finished)),
            "preempted_rows": int32_array(list(preempted)),
            "rewound": tuple(rewound),
            "added": tuple(self._with_blocks(start) for start in starts),
            "appended": appended,
            "scheduled_rows": int32_array(list(scheduled)),
            "scheduled_tokens": int32_array(list(scheduled.values())),
            "copy_source_ids": int32_array([source for source, _, _ in copies]),
            "copy_target_ids": int32_array([target for _, target, _ in copies]),
            "copy_num_tokens": int32_array([count for _, _, count in copies]),
        }
        self.digest = digest_changes(self.digest, **changes)
        self.step += 1
        self.sampled_rows[self.step] = np.flatnonzero(rows.samples(num_scheduled))
        self.num_drafts[self.step] = {row: len(ids) for row, ids in drafts.items()}
        return SchedulerOutput(
            epoch=self.epoch,
            step=self.step,
            previous_step=self.step - 1,
            num_rows=rows.num_rows,
            num_scheduled_tokens=int(num_scheduled.sum()),
            digest=self.digest,
            connector_metadata=connector_metadata,
            has_loads=has_loads,
            has_structured_output=bool(self.rows_to_mask()),
            draft_rows=int32_array([row for row, ids in drafts.items() for _ in ids]),
            draft_tokens=int32_array([token for ids in drafts.values() for token in ids]),
            **changes,
        )

    def rows_to_mask(self) -> list[int]:
        """Rows that sample with structured output in the last plan."""
        return sorted(self.masked_rows & set(self.sampled_rows[self.step].tolist()))

    def tokens_of(self, output: ModelRunnerOutput) -> dict[int, int]:
        """Row to sampled id."""
        rows = self.sampled_rows[output.step].tolist()
        return dict(zip(rows, output.sampled_tokens.tolist(), strict=True))

    def verified(self, output: ModelRunnerOutput) -> dict[int, list[int]]:
        """Row to sampled ids. The next plan tells of the rejected drafts."""
        rows = self.sampled_rows[output.step].tolist()
        counts = output.num_sampled.tolist() or [1] * len(rows)
        ids = np.split(output.sampled_tokens, np.cumsum(counts)[:-1])
        for row, count in zip(rows, counts, strict=True):
            num_drafts = self.num_drafts[output.step].get(row, 0)
            if num_drafts >= count:
                self._rejected[row] = num_drafts + 1 - count
        return {row: own.tolist() for row, own in zip(rows, ids, strict=True)}

    def _start(self, entry: Entry) -> RowStart:
        self.generation += 1
        self.blocks[entry.row] = list(entry.blocks)
        start = RowStart(
            row=entry.row,
            generation=self.generation,
            request_id=entry.request_id,
            num_computed_tokens=entry.num_computed_tokens,
            last_computed=self.max_model_len - 1 if entry.pooling is None else len(entry.prompt),
            prompt_token_ids=int32_array(list(entry.prompt)),
            output_token_ids=int32_array(list(entry.outputs)),
            block_ids=(),
            sampling=entry.sampling,
            pooling=entry.pooling,
            has_structured_output=entry.has_structured_output,
        )
        self.rows.start(start)
        return start

    def _append(self, new_rows: set[int]) -> tuple[AppendedBlocks, ...]:
        rows, ids = [], []
        for row, held in self.blocks.items():
            num_slots = int(self.rows.num_computed[row]) + self.num_lookahead
            needed = -(-min(num_slots, self.max_model_len) // self.block_size)
            while len(held) < needed:
                held.append(self.free.pop())
                if row not in new_rows:
                    rows.append(row)
                    ids.append(held[-1])
        return (AppendedBlocks(0, int32_array(rows), int32_array(ids)),) if rows else ()

    def _with_blocks(self, start: RowStart) -> RowStart:
        block_ids: tuple[Int32Array, ...] = (int32_array(self.blocks[start.row]),)
        return RowStart(
            row=start.row,
            generation=start.generation,
            request_id=start.request_id,
            num_computed_tokens=start.num_computed_tokens,
            last_computed=start.last_computed,
            prompt_token_ids=start.prompt_token_ids,
            output_token_ids=start.output_token_ids,
            block_ids=block_ids,
            sampling=start.sampling,
            pooling=start.pooling,
            has_structured_output=start.has_structured_output,
        )
