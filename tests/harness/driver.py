"""A scheduler with everything around it: clients, workers that follow its plans, a connector.

A test decides what happens when. Plans go to the workers at once, encoded and decoded; they are
executed when the test says so, at the latest when they are answered. What must always hold is
checked on the way: by the workers (`worker`), the connector, the clients, and after each call by
the driver (`block_checks`).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from longshore.protocol.arrays import EMPTY_INT32
from longshore.protocol.handshake import ToWorker
from longshore.protocol.kv_cache_spec import NULL_BLOCK, KVCacheSpec
from longshore.protocol.outputs import ModelRunnerOutput, TransferReport
from longshore.protocol.plan import SampleMask, SchedulerOutput
from longshore.protocol.transport.codec import Decoder, Encoder
from tests.harness.block_checks import (
    check_owned,
    check_references,
    check_rows,
    held_by_waiting,
    used_blocks,
)
from tests.harness.block_snapshots import check_block_map
from tests.harness.clients import RequestKey
from tests.harness.connector import AdversarialConnector
from tests.harness.engine import Engine
from tests.harness.kv_cache import FakeKVCache
from tests.harness.masks import check_mask, take_masks
from tests.harness.rank_transfers import RankTransfers, split_by_rank
from tests.harness.tokens import (
    Draft,
    no_drafts,
)
from tests.harness.transfers import Commands, Load, SwapCopy
from tests.harness.worker import Workers
from tests.harness.worker_rows import Step

FailRule = Callable[[Load], Iterable[int]]


class Driver(Engine):
    """An engine with workers and ranks. Takes the arguments of `Engine`, and these:

    draft:      what the workers propose for the outputs of a request from a position on.
    fail_sync:  blocks that a synchronous load will not fill, by load.

    scheduled:  request id -> tokens it got in the latest plan.
    unanswered: plans whose output the scheduler does not have, oldest first.
    stored:     content of each block that was stored, by KV cache group and block hash.
    invalid_ids: requests that read invalid KV, or hold blocks of a failed load; not_finite: those
            whose logits were not finite.
    """

    def __init__(
        self,
        *specs: KVCacheSpec,
        draft: Draft = no_drafts,
        fail_sync: FailRule = lambda load: (),
        **options: Any,
    ) -> None:
        super().__init__(*specs, **options)
        self.plans: list[SchedulerOutput] = []
        self.scheduled: dict[str, int] = {}
        self.epoch = 1
        self._draft = draft
        self._fail_sync = fail_sync
        self._encoder: Encoder[ToWorker] = Encoder()
        self._decoder: Decoder[ToWorker] = Decoder(ToWorker)
        self.invalid_ids: set[str] = set()
        self.not_finite: set[str] = set()
        self.stored: dict[tuple[int, bytes], tuple[int, ...]] = {}
        self._start_workers()

    def _start_workers(self, kv_cache: FakeKVCache | None = None) -> None:
        self.unanswered: deque[Step] = deque()
        self.masks: dict[int, SampleMask] = {}  # of unanswered plans, by step
        self._syncing: dict[int, list[Load]] = {}
        self.workers = Workers(
            self.config,
            self.specs,
            epoch=self.epoch,
            num_ranks=self.num_ranks,
            contents=self.contents,
            invalid_ids=self.invalid_ids,
            sample=self._sample,
            draft=self._draft,
            kv_cache=kv_cache,
        )
        self.ranks = RankTransfers(
            self.transfers,
            self.workers.kv_cache,
            epoch=self.epoch,
            invalid_ids=self.invalid_ids,
            stored=self.stored,
            send=self._apply_report,
            release=lambda hold_id: self.adversary.release(hold_id),
        )

    # Steps

    def plan(self, *, nan_ids: Iterable[str] = ()) -> SchedulerOutput | None:
        """Plan a step; the workers get it and run it later. nan_ids: requests whose logits will
        not be finite, if they sample in it."""
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        self.collect()
        self.check_blocks()
        if plan is None:
            self._check_nothing_unsent()
            return None
        received = self._decoder.decode([bytes(frame) for frame in self._encoder.encode(plan)])
        assert isinstance(received, SchedulerOutput)
        self.plans.append(received)
        commands = self.commands_of(received)
        self._check_swapped(commands.swaps)
        step = self.workers.receive(
            received,
            commands,
            self.scheduler.kv_cache.pool.references(),
            set(held_by_waiting(self.scheduler)).union(*self.transfers.sending.values()),
        )
        check_rows(self.scheduler, self.workers)
        self.unanswered.append(step)
        self.scheduled = {step.request_ids[row]: count for row, count in step.num_scheduled.items()}
        self._mark_invalid(step, {row for row in step.samples if step.request_ids[row] in nan_ids})
        self._begin_sync_loads(step)
        used = used_blocks(self.scheduler, step.tables)
        self.transfers.check_plan(received, set().union(*used.values()))
        self.transfers.unanswered[plan.step] = set().union(
            *(used[row] for row in step.num_scheduled)
        )
        self.ranks.stores += commands.stores
        self.ranks.swaps += commands.swaps
        self._take_masks()
        return received

    def commands_of(self, plan: SchedulerOutput) -> Commands:
        """What the connector sends to its worker half with a plan."""
        if not plan.connector_metadata or not isinstance(self.connector, AdversarialConnector):
            return Commands()
        return msgspec.msgpack.decode(plan.connector_metadata, type=Commands)

    def _check_nothing_unsent(self) -> None:
        if isinstance(self.connector, AdversarialConnector):
            assert not self.connector.has_unsent_loads, "no plan takes the loads to the workers"
        if self.connector and self.scheduler.num_steps_in_flight < self.config.max_steps_in_flight:
            assert not self.connector.has_pending_work, "no plan takes the work to the workers"

    def _check_swapped(self, swaps: Iterable[SwapCopy]) -> None:
        """A request is swapped out when all plans that compute it are answered."""
        unanswered = [step for step in self.unanswered if step.plan.epoch == self.epoch]
        computed = {step.request_ids[row] for step in unanswered for row in step.num_scheduled}
        swapped = {swap.request_id for swap in swaps}
        assert not swapped & computed, f"{swapped & computed} are swapped out and computed"

    def _begin_sync_loads(self, step: Step) -> None:
        loads = [load for load in step.commands.loads if not load.is_async]
        self._syncing[step.plan.step] = loads
        for load in loads:
            if failing := set(self._fail_sync(load)) & load.targets:
                step.failing |= failing
                self.invalid_ids.add(load.request_id)

    def _mark_invalid(self, step: Step, nan_rows: set[int]) -> None:
        assert not nan_rows or step.output is None, "it was executed with finite logits"
        step.nan_rows |= nan_rows
        self.not_finite |= {step.request_ids[row] for row in nan_rows}

    def execute(self) -> None:
        """The workers run the oldest plan that they have not run."""
        self.workers.execute()

    def take_output(self) -> ModelRunnerOutput:
        """The output of the oldest unanswered plan, for a test that hands it over itself."""
        step = self.unanswered.popleft()
        while step.output is None:
            self.execute()
        if step.plan.epoch == self.epoch:
            check_mask(step, self.masks)
            del self.transfers.unanswered[step.plan.step]
        return step.output

    def answer(self, nan_rows: Sequence[int] = (), *, with_drafts: bool = True) -> None:
        """Hand the oldest output to the scheduler."""
        step = self.unanswered[0]
        self._mark_invalid(step, set(nan_rows))
        output = self.take_output()
        if not with_drafts:
            output = msgspec.structs.replace(
                output, draft_rows=EMPTY_INT32, draft_tokens=EMPTY_INT32
            )
        self._mark_dependent(set(output.failed_block_ids.tolist()))
        reports: list[TransferReport] = []
        if step.plan.has_loads and output.epoch == self.epoch:
            output, reports = split_by_rank(output, self.num_ranks)
        middle = output.step % (len(reports) + 1)  # some ranks report before rank 0, some after
        for report in reports[:middle]:
            self._apply_report(report)
        self.scheduler.update_from_output(output, self.now)
        for report in reports[middle:]:
            self._apply_report(report)
        if output.epoch == self.epoch:
            for load in self._syncing.pop(output.step):
                self.transfers.syncing.remove(load)
        self._take_masks()
        self.check_blocks()
        self.collect()

    def _mark_dependent(self, failed: set[int]) -> None:
        """Requests that hold a block of a failed load, or of such a request, may fail with it, even
        if what they read of it was written."""
        bad = {
            block_id
            for loads in self._syncing.values()
            for load in loads
            if load.targets & failed
            for block_id in load.targets
        }
        tables = {
            request.request_id: {
                block_id
                for ids in self.scheduler.kv_cache.block_ids(request.row)
                for block_id in ids.tolist()
                if block_id != NULL_BLOCK
            }
            for request in self.scheduler.running.requests_in_order()
        }
        found = {""}
        while found:
            found = {name for name, ids in tables.items() if ids & bad} - self.invalid_ids
            self.invalid_ids |= found
            bad.update(*[tables[name] for name in found])

    def _take_masks(self) -> None:
        unanswered = [step for step in self.unanswered if step.plan.epoch == self.epoch]
        take_masks(self.scheduler.take_masks(), unanswered, self.masks)

    def step(self) -> SchedulerOutput | None:
        """Plan, and answer the oldest plan if nothing more may be planned."""
        plan = self.plan()
        is_full = len(self.unanswered) >= self.config.max_steps_in_flight
        if self.unanswered and (plan is None or is_full):
            self.answer()
        return plan

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def run_until_idle(self, limit: int = 5000) -> None:
        """Until nothing is planned and nothing is unanswered."""
        for _ in range(limit):
            was_busy = bool(self.unanswered)
            if self.step() is None and not was_busy:
                return
        raise AssertionError("the scheduler does not become idle")

    def run(self, limit: int = 5000) -> None:
        """Until every request has ended, and the workers have the plan that says so."""
        self.run_until_idle(limit)
        assert not self.scheduler.has_unfinished_requests(), "nothing is planned any more"

    def restart_workers(
        self, epoch: int | None = None, *, late_outputs: bool = False, keeps_kv: bool = False
    ) -> None:
        """All workers are replaced. late_outputs: those of the old ones still come. keeps_kv: what
        they have answered remains in the memory of their KV."""
        while (late_outputs or keeps_kv) and self.workers.received:
            self.execute()
        late = self.unanswered if late_outputs else ()
        torn = [step.plan.step for step in self.unanswered if step.plan.epoch == self.epoch]
        self.workers.kv_cache.tear(min(torn, default=1 << 40) - 1)
        self.epoch = self.epoch + 1 if epoch is None else epoch
        self.scheduler.begin_epoch(self.epoch, self.now, keeps_kv=keeps_kv)
        self.transfers.clear()
        self._start_workers(self.workers.kv_cache if keeps_kv else None)
        self.unanswered.extend(late)
        self.collect()

    def _apply_report(self, report: TransferReport) -> None:
        self.scheduler.update_from_transfers(report, self.now)
        self.check_blocks()
        self.collect()

    # What can be looked at

    def tokens_per_step(self, request_id: str, limit: int = 1000) -> list[int]:
        """Tokens that this request gets in each step, one in flight, until all have finished."""
        counts = []
        for _ in range(limit):
            if self.step() is None:
                break
            counts.append(self.scheduled.get(request_id, 0))
        while counts and counts[-1] == 0:
            counts.pop()
        return counts

    @property
    def num_copies(self) -> int:
        """Blocks that plans have copied."""
        return sum(len(plan.copy_target_ids) for plan in self.plans)

    # What must hold

    def check_blocks(self) -> None:
        """See `block_checks`. The whole picture of blocks costs more, so it is compared after every
        call only where transfers own some."""
        check_references(self.scheduler)
        check_owned(self.scheduler, self.transfers)
        if self.connector is not None or len(self.specs) > 1:
            self.scheduler.check()
        if self.connector is not None or len(self.plans) % 4 == 0:
            check_block_map(self.scheduler, self.now)

    def check_idle(self) -> None:
        """No request runs, waits or transfers, so every block is free, and each request has one
        end."""
        assert self.transfers.is_idle
        assert not self.scheduler.has_unfinished_requests()
        assert set(self.finished) == set(self.names)
        self.scheduler.check()
        assert self.num_free_blocks == self.num_blocks - 1
        if isinstance(self.connector, AdversarialConnector):
            assert self.connector.begun == self.connector.ended
            assert not self.connector.swapped

    def check_complete(self, *keys: RequestKey) -> None:
        """These requests got all their tokens."""
        self.clients.check_complete(keys)
