"""The scheduler under test, seen as the oracle sees itself.

Plans are encoded, decoded and applied as a worker would, and only what the worker then knows is
compared: so a delta that is wrong shows, as well as a decision that is.
"""

from collections.abc import Sequence

import numpy as np

from longshore.connectors.base import SchedulerConnector
from longshore.protocol.arrays import Int64Array, int32_array
from longshore.protocol.handshake import Feature, ToWorker
from longshore.protocol.kv_cache_spec import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
)
from longshore.protocol.outputs import ModelRunnerOutput, TransferReport
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.requests import (
    AddRequest,
    ContinueSession,
    StopFound,
)
from longshore.protocol.rows import PlanFollower, RowTable
from longshore.protocol.transport.codec import Decoder, Encoder
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.scheduler import Scheduler
from longshore.scheduler.step.planner import PauseState
from tests.harness.grammar import FakeCompiler
from tests.oracle.plan import (
    Admission,
    Answer,
    Delivery,
    Finish,
    OraclePlan,
    Outputs,
    ScheduledRequest,
)


class SamplingRows:
    """The rows that sample in one step, in the order of its answer.

    generations: of the occupants; num_drafts: that each verifies.
    """

    def __init__(
        self, rows: Int64Array, ids: list[str], generations: Int64Array, num_drafts: list[int]
    ) -> None:
        self.rows = rows
        self.ids = ids
        self.generations = generations
        self.num_drafts = num_drafts


class FastAdapter:
    """Implements `SchedulerAdapter` over `longshore.scheduler.Scheduler`.

    drafts_apart: drafts come in a message of their own instead of with the answer.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        num_blocks: int,
        eos_token_ids: tuple[int, ...],
        vocab_size: int = 1000,
        verify_plan: bool = False,
        drafts_apart: bool = False,
        connector: SchedulerConnector | None = None,
        grammars: FakeCompiler | None = None,
        num_ranks: int = 1,
        cross: CrossAttentionSpec | None = None,
    ) -> None:
        groups = [KVCacheGroup(("layer",), FullAttentionSpec(cache.block_size, 1, 4, 4))]
        if cross is not None:
            groups.append(KVCacheGroup(("layer.cross",), cross))
        self.scheduler = Scheduler(
            config,
            cache,
            kv_cache=KVCacheConfig(num_blocks, tuple(groups), dtype="float32"),
            hash_seed=b"seed",
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            verify_plan=verify_plan,
            features=frozenset(Feature) - {Feature.POOLING_ONLY, Feature.BIDIRECTIONAL},
            connector=connector,
            grammars=grammars,
            num_ranks=num_ranks,
        )
        self._num_ranks = num_ranks
        self._drafts_apart = drafts_apart
        self._max_num_seqs = config.max_num_seqs
        self._block_size = cache.block_size
        self._encoder: Encoder[ToWorker] = Encoder()
        self._decoder: Decoder[ToWorker] = Decoder(ToWorker)
        self._num_steps = 0
        self._now = 0.0  # of the latest call that says it
        self._begin_epoch(1)

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._first_step = self._num_steps  # the scheduler's steps count from 1 in each epoch
        self._rows = RowTable(self._max_num_seqs)
        self._follower = PlanFollower(self._rows, epoch=epoch)
        self._ids: dict[int, str] = {}
        self._tables: dict[int, list[int]] = {}
        self._sampling: dict[int, SamplingRows] = {}
        self._loading_steps: set[int] = set()

    @property
    def num_free_blocks(self) -> int:
        return self.scheduler.kv_cache.num_free_blocks

    def add_request(self, request: AddRequest, *, client: int, now: float) -> None:
        self._now = now
        self.scheduler.add_request(request, client=client, now=now)

    def continue_session(self, message: ContinueSession, *, client: int, now: float) -> None:
        self._now = now
        self.scheduler.continue_session(client, message, now)

    def abort(self, handles: Sequence[int], *, client: int) -> None:
        self.scheduler.abort_requests(client, int32_array(handles), self._now)

    def stop_found(self, handle: int, num_tokens: int, *, client: int) -> None:
        self.scheduler.stop_found(client, StopFound(handle, num_tokens), self._now)

    def set_pause(self, state: PauseState) -> None:
        self.scheduler.set_pause(state)

    def begin_epoch(self, epoch: int, now: float) -> None:
        self._now = now
        self.scheduler.begin_epoch(epoch, now)
        self._begin_epoch(epoch)

    def schedule(self, now: float) -> OraclePlan | None:
        self._now = now
        plan = self.scheduler.schedule(now)
        if plan is None:
            return None
        frames = [bytes(frame) for frame in self._encoder.encode(plan)]
        received = self._decoder.decode(frames)
        assert isinstance(received, SchedulerOutput)
        if received.has_loads:
            self._loading_steps.add(received.step)
        return self._follow(received)

    def _follow(self, plan: SchedulerOutput) -> OraclePlan:
        finished = [self._drop(row) for row in plan.finished_rows.tolist()]
        preempted = [self._drop(row) for row in plan.preempted_rows.tolist()]
        for rewind in plan.rewound:
            num_blocks = -(-rewind.num_computed_tokens // self._block_size)
            del self._tables[rewind.row][num_blocks:]
        new_blocks: dict[int, list[int]] = {}
        for start in plan.added:
            table = start.block_ids[0].tolist()
            num_hits = start.num_computed_tokens // self._block_size
            self._ids[start.row], self._tables[start.row] = start.request_id, table
            new_blocks[start.row] = table[num_hits:]
        for blocks in plan.appended:
            assert blocks.group == 0, "encoder output does not grow"
            for row, block_id in zip(blocks.rows.tolist(), blocks.block_ids.tolist(), strict=True):
                self._tables[row].append(block_id)
                new_blocks.setdefault(row, []).append(block_id)
        drafts: dict[int, list[int]] = {}
        for row, token in zip(plan.draft_rows.tolist(), plan.draft_tokens.tolist(), strict=True):
            drafts.setdefault(row, []).append(token)
        num_scheduled = self._follower.apply(plan)
        samples = self._rows.samples(num_scheduled)
        for state in plan.full_state or ():
            assert state.block_ids[0].tolist() == self._tables[state.row]
        self._num_steps = self._first_step + plan.step
        sampling = np.flatnonzero(samples)
        self._sampling[plan.step] = SamplingRows(
            sampling,
            [self._ids[row] for row in sampling.tolist()],
            self._rows.generation[sampling],
            [len(drafts.get(row, ())) for row in sampling.tolist()],
        )
        rows = np.flatnonzero(num_scheduled)
        by_admission = rows[np.argsort(self._rows.generation[rows])].tolist()
        return OraclePlan(
            step=self._num_steps,
            scheduled=tuple(
                ScheduledRequest(
                    request_id=self._ids[row],
                    num_tokens=int(num_scheduled[row]),
                    samples=bool(samples[row]),
                    new_block_ids=tuple(new_blocks.get(row, ())),
                    block_ids=tuple(self._tables[row]),
                    drafts=tuple(drafts.get(row, ())),
                )
                for row in by_admission
            ),
            admitted=tuple(
                Admission(start.request_id, start.resumed, start.num_computed_tokens)
                for start in plan.added
            ),
            preempted=tuple(sorted(preempted)),
            finished=tuple(sorted(finished)),
            rewound=tuple(
                sorted(
                    (self._ids[rewind.row], rewind.num_computed_tokens) for rewind in plan.rewound
                )
            ),
            encoder_inputs=tuple(sorted((self._ids[r], index) for r, index in plan.encoder_inputs)),
            encoder_tables=tuple(
                (start.request_id, tuple(start.block_ids[1].tolist()))
                for start in plan.added
                if len(start.block_ids) > 1
            ),
            freed_hashes=tuple(sorted(plan.freed_encoder_hashes)),
            num_invalid_drafts=plan.num_invalid_draft_tokens,
            has_structured_output=plan.has_structured_output,
        )

    def _drop(self, row: int) -> str:
        del self._tables[row]
        return self._ids.pop(row)

    def take_masks(self) -> tuple[int, ...]:
        return tuple(self._first_step + mask.step for mask in self.scheduler.take_masks())

    def update_from_output(self, answer: Answer) -> None:
        step = answer.step - self._first_step
        sampling = self._sampling.pop(step)
        tokens = [answer.tokens[id_] or (0,) for id_ in sampling.ids]
        num_sampled = [len(some) for some in tokens]
        rows = dict(zip(sampling.ids, sampling.rows.tolist(), strict=True))
        draft_rows = [rows[id_] for id_, drafts in answer.drafts.items() for _ in drafts]
        draft_tokens = [token for drafts in answer.drafts.values() for token in drafts]
        in_answer = not self._drafts_apart
        self.scheduler.update_from_output(
            ModelRunnerOutput(
                epoch=self._epoch,
                step=step,
                sampled_tokens=int32_array([token for some in tokens for token in some]),
                num_sampled=int32_array(num_sampled if max(num_sampled, default=1) > 1 else []),
                draft_rows=int32_array(draft_rows if in_answer else []),
                draft_tokens=int32_array(draft_tokens if in_answer else []),
                pooled_rows=int32_array([rows[id_] for id_ in answer.pooled]),
                pooled=tuple(np.array(vector, "<f4") for vector in answer.pooled.values()),
                failed_block_ids=int32_array(answer.failed_block_ids),
            ),
            self._now,
        )
        if step in self._loading_steps:
            for rank in range(1, self._num_ranks):
                report = TransferReport(self._epoch, rank, step)
                self.scheduler.update_from_transfers(report, self._now)
        if draft_rows and not in_answer:
            self.scheduler.update_drafts(int32_array(draft_rows), int32_array(draft_tokens))

    def update_from_transfers(self, report: TransferReport, now: float) -> None:
        self._now = now
        self.scheduler.update_from_transfers(report, now)

    def take_outputs(self) -> Outputs:
        deliveries: list[Delivery] = []
        finishes: list[Finish] = []
        for client, message in self.scheduler.take_outputs():
            deliveries += [
                Delivery(client, handle, token)
                for handle, token in zip(
                    message.handles.tolist(), message.tokens.tolist(), strict=True
                )
            ]
            finishes += [
                Finish(
                    client,
                    finished.handle,
                    finished.reason,
                    finished.num_output_tokens,
                    finished.num_cached_tokens,
                    finished.num_preemptions,
                    tuple(finished.pooled.tolist()),
                    finished.session_continues,
                )
                for finished in message.finished
            ]
        return Outputs(tuple(deliveries), tuple(finishes))

    def check_invariants(self) -> None:
        """The scheduler's own check: conservation of blocks, and its rows."""
        self.scheduler.check()
