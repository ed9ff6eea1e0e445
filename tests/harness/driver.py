"""A scheduler with everything around it: clients, workers that follow its plans, a connector.

A test decides what happens when. Plans go to the workers at once, encoded and decoded; they are
executed when the test says so, at the latest when they are answered. What must always hold is
checked on the way: by the workers (`worker`), the connector, the clients, and after each call by
the driver (`block_checks`).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from longshore.connectors.base import SchedulerConnector
from longshore.protocol.arrays import EMPTY_INT32, int32_array
from longshore.protocol.handshake import Feature, ToWorker
from longshore.protocol.kv_cache_spec import KVCacheSpec
from longshore.protocol.outputs import FinishReason, ModelRunnerOutput, TransferReport
from longshore.protocol.plan import SampleMask, SchedulerOutput
from longshore.protocol.requests import AddRequest, ContinueSession, StopFound
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.transport.codec import Decoder, Encoder
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.request import Request
from longshore.scheduler.scheduler import Scheduler
from tests.harness.block_checks import (
    check_owned,
    check_references,
    check_rows,
    held_by_waiting,
    used_blocks,
)
from tests.harness.block_snapshots import check_block_map
from tests.harness.clients import Clients, RequestKey
from tests.harness.connector import AdversarialConnector
from tests.harness.grammar import FakeCompiler
from tests.harness.kv_groups import config_of, full
from tests.harness.rank_transfers import RankTransfers
from tests.harness.tokens import (
    EOS,
    VOCAB_SIZE,
    Content,
    Draft,
    Sample,
    no_drafts,
    prompt_of,
    steady_token,
)
from tests.harness.transfers import Commands, Load, Transfers
from tests.harness.worker import Workers
from tests.harness.worker_rows import Step

CONNECTED: Final[dict[str, Any]] = {
    "verify_plan": True,
    "max_steps_in_flight": 2,
    "max_tokens": 4,
    "cache": {"watermark": 0.0},
}
"""Settings of a driver in whose tests the connector has the main part."""

FailRule = Callable[[Load], Iterable[int]]


class Driver:
    """Drives one Scheduler. Settings not given are small; `settings` go to SchedulerConfig, those
    in `cache` to CacheConfig, those in `scheduler` to Scheduler.

    specs:      of the KV cache groups; else `num_groups` of full attention.
    rules:      of an `AdversarialConnector`; `connector` is another one, or one that is made.
    sample:     the output tokens of a request by position.
    draft:      what the workers propose for the outputs of a request from a position on.
    max_tokens: of requests for which no other number is given.
    fail_sync:  blocks that a synchronous load will not fill, by load.

    scheduled:  request id -> tokens it got in the latest plan.
    unanswered: plans whose output the scheduler does not have, oldest first.
    masks:      by step, those that have come for unanswered plans.
    stored:     content of each block that was stored, by KV cache group and block hash.
    spoiled_ids: requests that read what a failed load or a NaN spoiled; not_finite: those of a NaN.
    """

    def __init__(
        self,
        *specs: KVCacheSpec,
        num_blocks: int = 40,
        block_size: int = 4,
        num_groups: int = 1,
        num_ranks: int = 1,
        enable_prefix_caching: bool = True,
        sample: Sample = steady_token,
        draft: Draft = no_drafts,
        max_tokens: int = 8,
        verify_plan: bool = False,
        cache: dict[str, Any] | None = None,
        grammars: FakeCompiler | None = None,
        connector: SchedulerConnector | None = None,
        rules: dict[str, Any] | None = None,
        fail_sync: FailRule = lambda load: (),
        scheduler: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        defaults = {
            "max_model_len": 64,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_steps_in_flight": 1,
        }
        self.config = SchedulerConfig(**(defaults | settings))
        self.specs = specs or (full(block_size),) * num_groups
        self.num_blocks = num_blocks
        self.num_ranks = num_ranks
        self.contents: dict[str, Content] = {}
        self.transfers = Transfers(num_ranks)
        self.connector = connector
        if connector is None and rules is not None:
            self.connector = AdversarialConnector(**rules)
        if isinstance(self.connector, AdversarialConnector):
            sizes = [spec.block_size for spec in self.specs]
            self.connector.bind(self.transfers, sizes, self.contents)
        self.scheduler = Scheduler(
            self.config,
            CacheConfig(
                block_size=block_size,
                **({"enable_prefix_caching": enable_prefix_caching} | (cache or {})),
            ),
            kv_cache=config_of(num_blocks, *self.specs),
            hash_seed=b"seed",
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            verify_plan=verify_plan,
            features=frozenset(Feature) - {Feature.POOLING_ONLY},
            grammars=grammars,
            connector=self.connector,
            num_ranks=num_ranks,
            **(scheduler or {}),
        )
        self.requests: dict[str, Request] = {}
        self.clients = Clients(sample)
        self.received, self.finished = self.clients.received, self.clients.finished
        self.continued, self.scored = self.clients.continued, self.clients.scored
        self.names = self.clients.names
        self.plans: list[SchedulerOutput] = []
        self.scheduled: dict[str, int] = {}
        self.epoch = 1
        self.now = 0.0
        self._num_added = 0
        self._max_tokens = max_tokens
        self._sample, self._draft = sample, draft
        self._fail_sync = fail_sync
        self._encoder: Encoder[ToWorker] = Encoder()
        self._decoder: Decoder[ToWorker] = Decoder(ToWorker)
        self.spoiled_ids: set[str] = set()
        self.not_finite: set[str] = set()
        self.stored: dict[tuple[int, bytes], tuple[int, ...]] = {}
        self._start_workers()

    def _start_workers(self) -> None:
        self.unanswered: deque[Step] = deque()
        self.masks: dict[int, SampleMask] = {}
        self._syncing: dict[int, list[Load]] = {}
        self.workers = Workers(
            self.config,
            self.specs,
            epoch=self.epoch,
            num_ranks=self.num_ranks,
            contents=self.contents,
            spoiled_ids=self.spoiled_ids,
            sample=self._sample,
            draft=self._draft,
        )
        self.ranks = RankTransfers(
            self.transfers,
            self.workers.kv_cache,
            epoch=self.epoch,
            spoiled_ids=self.spoiled_ids,
            stored=self.stored,
            send=self._apply_report,
            release=lambda hold_id: self.adversary.release(hold_id),
        )

    @property
    def adversary(self) -> AdversarialConnector:
        assert isinstance(self.connector, AdversarialConnector)
        return self.connector

    # What clients do

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        outputs: Sequence[int] = (),
        client: int = 0,
        handle: int | None = None,
        max_tokens: int | None = -1,
        sampling: dict[str, Any] | None = None,
        **fields: Any,
    ) -> RequestKey:
        """Queue a request; returns its key in `received` and `finished`."""
        key = client, self._num_added if handle is None else handle
        max_tokens = self._max_tokens if max_tokens == -1 else max_tokens
        self._num_added += 1
        self.now += 1.0
        message = AddRequest(
            request_id,
            key[1],
            int32_array(list(prompt)),
            SamplingParams(temperature=0.0, max_tokens=max_tokens, **(sampling or {})),
            output_token_ids=int32_array(list(outputs)),
            **fields,
        )
        is_new = self.scheduler._lifecycle.get(*key) is None
        self.scheduler.add_request(message, client=client, now=self.now)
        request = self.scheduler._lifecycle.get(*key)
        if is_new:
            self.clients.add(key, request_id, outputs, max_tokens)
        if is_new and request is not None:
            lora_name = message.lora.name if message.lora is not None else None
            root = f"{message.cache_salt}/{lora_name}"
            self.contents[request_id] = Content(root, message.multimodal)
            self.requests[request_id] = request
        self.collect()
        return key

    def abort(self, *keys: RequestKey) -> None:
        """The clients lose interest."""
        for client, handle in keys:
            self.scheduler.abort_requests(client, int32_array([handle]), self.now)
        self.collect()

    def stop_found(self, key: RequestKey, num_tokens: int) -> None:
        """The gateway found a stop string."""
        self.scheduler.stop_found(key[0], StopFound(key[1], num_tokens), self.now)
        self.collect()

    def continue_session(
        self,
        key: RequestKey,
        prompt: Sequence[int],
        *,
        max_tokens: int = 8,
        resumable: bool = True,
    ) -> None:
        """More input for a session."""
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        message = ContinueSession(key[1], int32_array(list(prompt)), sampling, resumable)
        self.scheduler.continue_session(key[0], message, self.now)
        self.collect()

    def collect(self, *, is_ours: bool = True) -> None:
        """Clients get their outputs; see `Clients.collect`."""
        self.clients.collect(self.scheduler.take_outputs(), is_ours=is_ours)

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
        step = self.workers.receive(
            received,
            commands,
            self.scheduler.kv_cache._pool.references(),
            set(held_by_waiting(self.scheduler)).union(*self.transfers.sending.values()),
        )
        check_rows(self.scheduler, self.workers)
        self.unanswered.append(step)
        self.scheduled = {step.request_ids[row]: count for row, count in step.num_scheduled.items()}
        self._spoil_rows(step, {row for row in step.samples if step.request_ids[row] in nan_ids})
        self._begin_sync_loads(step)
        used = used_blocks(self.scheduler, step.tables)
        self.transfers.check_plan(received, set().union(*used.values()))
        self.transfers.unanswered[plan.step] = set().union(
            *(used[row] for row in step.num_scheduled)
        )
        self.ranks.stores += commands.stores
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

    def _begin_sync_loads(self, step: Step) -> None:
        loads = [load for load in step.commands.loads if not load.is_async]
        self._syncing[step.plan.step] = loads
        for load in loads:
            if failing := set(self._fail_sync(load)) & load.targets:
                step.failing |= failing
                self.spoiled_ids.add(load.request_id)

    def _spoil_rows(self, step: Step, nan_rows: set[int]) -> None:
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
            self._check_mask(step)
            del self.transfers.unanswered[step.plan.step]
        return step.output

    def answer(self, nan_rows: Sequence[int] = (), *, with_drafts: bool = True) -> None:
        """Hand the oldest output to the scheduler."""
        step = self.unanswered[0]
        self._spoil_rows(step, set(nan_rows))
        output = self.take_output()
        if not with_drafts:
            output = msgspec.structs.replace(
                output, draft_rows=EMPTY_INT32, draft_tokens=EMPTY_INT32
            )
        self.scheduler.update_from_output(output, self.now)
        if output.epoch == self.epoch:
            for load in self._syncing.pop(output.step):
                self.transfers.syncing.remove(load)
        self._take_masks()
        self.check_blocks()
        self.collect()

    def _take_masks(self) -> None:
        for mask in self.scheduler.take_masks():
            oldest = next(step for step in self.unanswered if step.plan.epoch == self.epoch)
            assert mask.step == oldest.plan.step, "a mask before the tokens that it depends on"
            assert mask.step not in self.masks, "a second mask"
            assert set(mask.rows.tolist()) == oldest.masked
            self.masks[mask.step] = mask

    def _check_mask(self, step: Step) -> None:
        """The mask of the step allows all that was sampled in it."""
        if not step.masked:
            return
        mask = self.masks.pop(step.plan.step)
        bits = mask.bits.reshape(len(mask.rows), -1)
        for row in step.masked:
            tokens = step.sampled[row]
            allowed = np.unpackbits(bits[mask.rows == row], axis=1, bitorder="little")
            assert len(tokens) <= len(allowed)
            assert all(allowed[index, token] for index, token in enumerate(tokens))

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

    def restart_workers(self, epoch: int | None = None, *, late_outputs: bool = False) -> None:
        """All workers are replaced. late_outputs: those of the old ones still come."""
        while late_outputs and self.workers.received:
            self.execute()
        late = self.unanswered if late_outputs else ()
        self.epoch = self.epoch + 1 if epoch is None else epoch
        self.scheduler.begin_epoch(self.epoch, self.now)
        self.transfers.clear()
        self._start_workers()
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

    def table(self, request_id: str) -> list[int]:
        """Block table of a running request, first group."""
        row = self.requests[request_id].row
        assert row >= 0, f"{request_id} does not run"
        return self.scheduler.kv_cache.block_ids(row)[0].tolist()

    def num_held(self, request_id: str) -> list[int]:
        """Blocks per group that a running request holds."""
        tables = self.scheduler.kv_cache.block_ids(self.requests[request_id].row)
        return [int(np.count_nonzero(table)) for table in tables]

    def reason(self, key: RequestKey) -> FinishReason:
        """Why a request ended."""
        return self.finished[key].reason

    @property
    def running(self) -> list[str]:
        """Request ids in admission order."""
        return [request.request_id for request in self.scheduler.running.requests_in_order()]

    @property
    def num_free_blocks(self) -> int:
        return self.scheduler.kv_cache.num_free_blocks

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

    def check_complete(self, *keys: RequestKey) -> None:
        """These requests got all their tokens."""
        self.clients.check_complete(keys)


def connected(*specs: KVCacheSpec, **settings: Any) -> Driver:
    """A driver with an `AdversarialConnector` and the settings `CONNECTED`."""
    cache = CONNECTED["cache"] | settings.pop("cache", {})
    return Driver(*specs, **({"rules": {}} | CONNECTED | {"cache": cache} | settings))


def pressed(policy: str = "fcfs", **settings: Any) -> Driver:
    """A driver with eight usable blocks of four tokens."""
    return Driver(num_blocks=9, max_model_len=32, policy=policy, **settings)


def in_admission_order(driver: Driver, requests: Sequence[tuple[str, int, int]]) -> None:
    """Admit (name, prompt length, priority) one per step, whatever their priorities are."""
    for index, (name, length, priority) in enumerate(requests):
        driver.add(name, prompt_of(length, 25 * index), max_tokens=16, priority=priority)
        driver.step()
        assert driver.running[-1] == name
