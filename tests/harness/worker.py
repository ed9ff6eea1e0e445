"""Workers without a model, which follow plans and prove that each row computes on its own KV.

Plans are received at once and executed later, in order. When one is received, it must agree with
what the workers know of rows and blocks. When it is executed, every slot that a row reads must hold
the KV of exactly that row's tokens, on every rank; drafts must be where they are verified, items
encoded before a row computes their positions, and no more adapters loaded than there are places.
Invalid KV is followed from row to row (`memory`): a plan made after the output of the step that
reported it must not read it.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence

import numpy as np

from longshore.protocol.arrays import Int64Array, int32_array
from longshore.protocol.kv_cache_spec import CrossAttentionSpec, KVCacheSpec, StateSpec
from longshore.protocol.outputs import ModelRunnerOutput
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.rows import PlanFollower, RowTable
from longshore.scheduler.config import SchedulerConfig
from tests.harness.encoder import CrossEncoder, EncoderOutputs
from tests.harness.first_stage import FirstStage
from tests.harness.kv_cache import FakeKVCache, RowWork, tokens_per_entry
from tests.harness.tokens import GARBAGE, Content, Draft, Prefixes, Sample
from tests.harness.transfers import Commands
from tests.harness.worker_rows import Step, WorkerRow, check_tables_agree, token_logprobs


class Workers:
    """All ranks of one epoch.

    specs:    one per KV cache group.
    contents: by request id, what the KV of each request depends on beside its tokens.
    rows:     as of the latest step executed.
    table, tables, request_ids: columns, block tables and occupants of rows, as of the latest plan
              received.
    invalid_ids: gets the requests that have read invalid KV, or whose logits were not finite.
    kv_cache: what the ranks before them have left; None: nothing.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        specs: Sequence[KVCacheSpec],
        *,
        epoch: int,
        num_ranks: int,
        contents: Mapping[str, Content],
        invalid_ids: set[str],
        sample: Sample,
        draft: Draft,
        kv_cache: FakeKVCache | None = None,
    ) -> None:
        self.config = config
        self.kv_cache = kv_cache or FakeKVCache(specs, num_ranks)
        self.received: deque[Step] = deque()
        self.rows: dict[int, WorkerRow] = {}
        self.tables: dict[int, list[list[int]]] = {}
        self.request_ids: dict[int, str] = {}
        self.table = RowTable(config.max_num_seqs)
        self._follower = PlanFollower(self.table, epoch=epoch)
        self._contents = contents
        self._invalid_ids = invalid_ids
        self._sample = sample
        self._draft = draft
        self._masked_rows: set[int] = set()
        self._rewritten: dict[int, set[int]] = {}
        self._encoder_outputs = EncoderOutputs(config)
        self._cross: CrossEncoder | None = None
        if any(isinstance(spec, CrossAttentionSpec) for spec in specs):
            self._cross = CrossEncoder(config, specs, self.kv_cache.memory)
        self._first_stage: FirstStage | None = None
        if config.feed_back_tokens:
            self._first_stage = FirstStage(config.max_num_seqs, epoch=epoch)

    # A plan is received

    def receive(
        self, plan: SchedulerOutput, commands: Commands, references: Int64Array, held: set[int]
    ) -> Step:
        """Follow the plan's changes; nothing is computed yet. references, held: see `Step`."""
        for row in (*plan.finished_rows.tolist(), *plan.preempted_rows.tolist()):
            del self.tables[row], self.request_ids[row]
            self._masked_rows.discard(row)
            self._rewritten.pop(row, None)
        num_scheduled = self._follower.apply(plan)
        for rewind in plan.rewound:
            for ids, spec in zip(self.tables[rewind.row], self.kv_cache.specs, strict=True):
                if not isinstance(spec, StateSpec):
                    del ids[-(-rewind.num_computed_tokens // spec.block_size) :]
        for start in plan.added:
            assert start.row not in self.tables
            self.tables[start.row] = [ids.tolist() for ids in start.block_ids]
            self.request_ids[start.row] = start.request_id
            self._rewritten[start.row] = held & {
                block_id
                for ids, size in zip(start.block_ids, self.kv_cache.block_sizes, strict=True)
                for block_id in ids[-(-start.num_computed_tokens // size) :].tolist()
            }
            if start.has_structured_output:
                self._masked_rows.add(start.row)
        for blocks in plan.appended:
            for row, block_id in zip(blocks.rows.tolist(), blocks.block_ids.tolist(), strict=True):
                self.tables[row][blocks.group].append(block_id)
        self._check_copies(plan, references)
        for state in plan.full_state or ():
            for ids, table in zip(self.tables[state.row], state.block_ids, strict=True):
                check_tables_agree(ids, table)
        scheduled = np.flatnonzero(num_scheduled).tolist()
        samples = np.flatnonzero(self.table.samples(num_scheduled)).tolist()
        step = Step(
            plan,
            commands,
            {row: [list(ids) for ids in groups] for row, groups in self.tables.items()},
            dict(self.request_ids),
            {row: int(num_scheduled[row]) for row in scheduled},
            samples,
            self._masked_rows & set(samples),
            references,
            held,
            dict(self._rewritten),
            {s.request_id: self._contents.get(s.request_id, Content()) for s in plan.added},
        )
        assert plan.has_structured_output is bool(step.masked)
        self.received.append(step)
        return step

    def _check_copies(self, plan: SchedulerOutput, references: Int64Array) -> None:
        targets = plan.copy_target_ids.tolist()
        assert len(set(targets)) == len(targets)
        holders = Counter(
            block_id for table in self.tables.values() for ids in table for block_id in ids
        )
        for start in plan.added:  # a full block that is copied and completed now is a prefix hit
            for ids, size in zip(start.block_ids, self.kv_cache.block_sizes, strict=True):
                holders.subtract(ids[: start.num_computed_tokens // size].tolist())
        for target in targets:
            # Tables also have blocks that a window has freed, which may be another row's now.
            num_holders = min(holders[target], int(references[target]))
            assert num_holders == 1, "the target of a copy is shared"

    # A plan is executed

    def execute(self) -> Step:
        """Run the oldest plan that was not run; returns it with its output."""
        step = self.received.popleft()
        plan = step.plan
        self.kv_cache.begin(plan.step)
        self._apply_rows(step)
        self._prepare_memory(step)
        self._encode(step)
        drafts = self._drafts_of(plan)
        ends = {row: self.rows[row].num_computed + n for row, n in step.num_scheduled.items()}
        self._check_held_blocks(step)
        if self._first_stage is not None:
            self._first_stage.execute(plan, {row: self.rows[row].tokens for row in ends})
        else:
            assert (len(plan.sampled_rows), len(plan.sampled_tokens)) == (0, 0)
        invalid = self._compute(step, ends, drafts)
        first_sampled = {row: len(self.rows[row].tokens) for row in step.samples}
        for row in step.samples:
            step.sampled[row] = self._verify(row, drafts[row], is_invalid=row in invalid)
        scores = [
            score
            for row, end in ends.items()
            for score in self.rows[row].scores(
                row, end - step.num_scheduled[row], end, first_sampled.get(row)
            )
        ]
        step.output = self._output_of(step, scores)
        self.kv_cache.begin(0)
        return step

    def _apply_rows(self, step: Step) -> None:
        plan = step.plan
        for row in (*plan.finished_rows.tolist(), *plan.preempted_rows.tolist()):
            del self.rows[row]
        for rewind in plan.rewound:
            self.rows[rewind.row].rewind(rewind)
        for start in plan.added:
            tokens = [*start.prompt_token_ids.tolist(), *start.output_token_ids.tolist()]
            content = step.contents[start.request_id]
            self.rows[start.row] = WorkerRow(
                start, tokens, start.num_computed_tokens, Prefixes(content)
            )
        adapters = {row.start.lora.name for row in self.rows.values() if row.start.lora}
        assert len(adapters) <= self.config.max_loras, f"{adapters} are too many adapters"

    def _prepare_memory(self, step: Step) -> None:
        """Blocks are copied, then cleared, then filled by the loads of this step."""
        plan = step.plan
        sources, targets = plan.copy_source_ids.tolist(), plan.copy_target_ids.tolist()
        counts = plan.copy_num_tokens.tolist()
        self.kv_cache.copy(list(zip(sources, targets, counts, strict=True)))
        self.kv_cache.clear(plan.zero_block_ids.tolist())
        for load in step.commands.loads:
            if not load.is_async:
                self.kv_cache.load(load, step.failing, -plan.step)

    def _encode(self, step: Step) -> None:
        plan = step.plan
        if self._cross is not None:
            self._cross.check_plan(plan)
            for start in plan.added:
                tables = step.tables[start.row]
                for spec, table in zip(self.kv_cache.specs, tables, strict=True):
                    if isinstance(spec, CrossAttentionSpec):
                        shared = [each for each in table if step.references[each] != 1]
                        assert not shared, f"blocks {shared} of encoder output are shared"
                self._cross.encode(start.request_id, start.multimodal[0], tables)
            for row in step.num_scheduled:
                (item,) = self.rows[row].items
                self._cross.check_read(self.rows[row].request_id, item, step.tables[row])
            return
        items = [self.rows[row].items[index] for row, index in plan.encoder_inputs]
        self._encoder_outputs.encode(plan.freed_encoder_hashes, items)
        for row, count in step.num_scheduled.items():
            first = self.rows[row].num_computed
            self._encoder_outputs.check_computed(self.rows[row].items, first, first + count)

    def _compute(
        self, step: Step, ends: Mapping[int, int], drafts: Mapping[int, list[int]]
    ) -> set[int]:
        """Returns the rows whose tokens are meaningless."""
        kept: dict[int, list[tuple[int, list[int]]]] = {}
        for state in step.plan.kept_states:
            kept.setdefault(state.row, []).append((state.num_tokens, state.block_ids.tolist()))
        work = {
            row: RowWork(
                self.rows[row].request_id,
                self.rows[row].num_computed,
                end,
                step.tables[row],
                self.rows[row].prefixes_up_to(end, drafts.get(row, [])),
                kept.pop(row, ()),
            )
            for row, end in ends.items()
        }
        assert not kept, "states are kept of rows that compute nothing"
        invalid = self.kv_cache.compute(
            work,
            step=step.plan.step,
            answered_step=step.plan.answered_step,
            nan_rows=step.nan_rows,
            references=step.references,
        )
        self._invalid_ids |= {self.rows[row].request_id for row in invalid}
        for row, end in ends.items():
            self.rows[row].num_computed = end
        return invalid

    def _check_held_blocks(self, step: Step) -> None:
        """No row writes after tokens in a block that a waiting request or a send holds."""
        for row in step.num_scheduled if step.held else ():
            position = self.rows[row].num_computed
            for table, spec in zip(step.tables[row], self.kv_cache.specs, strict=True):
                if isinstance(spec, CrossAttentionSpec) or not position % spec.block_size:
                    continue
                block_id = table[position // tokens_per_entry(spec)]
                assert block_id not in step.held - step.rewritten.get(row, set())

    # Tokens

    def _drafts_of(self, plan: SchedulerOutput) -> defaultdict[int, list[int]]:
        """Drafts to verify by row; -1 stands for the worker's own proposal."""
        drafts: defaultdict[int, list[int]] = defaultdict(list)
        for row, token in zip(plan.draft_rows.tolist(), plan.draft_tokens.tolist(), strict=True):
            mine = self.rows[row].proposed
            drafts[row].append(mine[len(drafts[row])] if token == -1 else token)
        return drafts

    def _verify(self, row_index: int, drafts: list[int], *, is_invalid: bool) -> list[int]:
        """What a row samples: as many drafts as were right, and one token more."""
        row = self.rows[row_index]
        assert row.num_computed == len(row.tokens) + len(drafts), (
            f"{row.request_id} samples before its turn"
        )
        first = row.num_outputs
        tokens = [GARBAGE if is_invalid else self._sample(row.request_id, first)]
        while (
            not is_invalid and len(tokens) <= len(drafts) and drafts[len(tokens) - 1] == tokens[-1]
        ):
            tokens.append(self._sample(row.request_id, first + len(tokens)))
        row.tokens += tokens
        row.num_computed = len(row.tokens) - 1
        row.proposed = self._draft(row.request_id, row.num_outputs)
        return tokens

    def _output_of(
        self, step: Step, scores: Sequence[tuple[int, int, int, int]]
    ) -> ModelRunnerOutput:
        sampled = list(step.sampled.values())
        rows = {row: self.rows[row] for row in step.samples}
        pooled = [row for row in step.samples if rows[row].start.pooling is not None]
        is_one_each = all(len(tokens) == 1 for tokens in sampled)
        nan_rows = sorted(step.nan_rows)
        return ModelRunnerOutput(
            step.plan.epoch,
            step.plan.step,
            sampled_tokens=int32_array([token for tokens in sampled for token in tokens]),
            num_sampled=int32_array([] if is_one_each else [len(tokens) for tokens in sampled]),
            draft_rows=int32_array([row for row, each in rows.items() for _ in each.proposed]),
            draft_tokens=int32_array([token for row in rows.values() for token in row.proposed]),
            logprobs=token_logprobs(scores) if scores else None,
            pooled_rows=int32_array(pooled),
            pooled=tuple(np.array([rows[row].num_prompt], np.float32) for row in pooled),
            nan_rows=int32_array(nan_rows),
            num_nans=int32_array([3] * len(nan_rows)),
            failed_block_ids=int32_array(sorted(step.failing)),
        )
