"""A scheduler with a connector, workers whose steps and transfers run when the test says so, and
clients that know their answers.

Each rank's memory holds one number per slot that stands for a token and everything before it, so a
step that reads a block which somebody else wrote is noticed where it happens. What a failed load or
a NaN spoiled is marked with its step: a plan made after that step's answer must not read it.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np

from longshore.connectors.base import SchedulerConnector
from longshore.protocol.arrays import int32_array
from longshore.protocol.handshake import ToWorker
from longshore.protocol.outputs import (
    FinishedRequest,
    FinishReason,
    ModelRunnerOutput,
    TransferReport,
)
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.requests import AddRequest, StopFound
from longshore.protocol.rows import PlanFollower, RowTable
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.transport.codec import Decoder, Encoder
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.scheduler import Scheduler
from tests.scheduler.adversarial_connector import (
    AdversarialConnector,
    Commands,
    Load,
    Store,
    Transfers,
    prefixes_of,
)
from tests.scheduler.block_snapshot_oracle import check_block_map
from tests.scheduler.driver import VOCAB_SIZE, expected_output, kv_cache_config, steady_token

BLOCK_SIZE: Final = 4
GARBAGE: Final = 5
"""What a row samples that read spoiled KV; no `steady_token`."""
JUNK: Final = 1 << 40
"""What a failed background load leaves in some of its blocks: invalid KV."""

FailRule = Callable[[Load], Iterable[int]]


@dataclass
class Work:
    """A plan as the workers got it: tables and counts after its changes, per row.

    failing: blocks that the synchronous loads of this step will not fill.
    nan_ids: requests that sample in this step, from logits that will not be finite.
    """

    plan: SchedulerOutput
    commands: Commands
    tables: dict[int, list[list[int]]]
    num_scheduled: dict[int, int]
    num_computed: dict[int, int]
    samples: list[int]
    failing: set[int] = field(default_factory=set)
    nan_ids: set[str] = field(default_factory=set)


class Workers:
    """All ranks of one epoch. Plans are executed in order, later than they were received."""

    def __init__(self, *, num_ranks: int, max_num_seqs: int, epoch: int) -> None:
        self.memory: list[dict[tuple[int, int], int]] = [{} for _ in range(num_ranks)]
        self.received: deque[Work] = deque()
        self.tables: dict[int, list[list[int]]] = {}
        self.request_ids: dict[int, str] = {}  # by row, as of the last plan received
        self._rows = RowTable(max_num_seqs)
        self._follower = PlanFollower(self._rows, epoch=epoch)
        self._tokens: dict[int, list[int]] = {}  # by row, as of the last plan executed
        self._occupant: dict[int, tuple[str, int]] = {}  # request id and prompt length, likewise

    def receive(self, plan: SchedulerOutput, commands: Commands) -> Work:
        """Follow the plan's changes; nothing is computed yet."""
        for row in (*plan.finished_rows.tolist(), *plan.preempted_rows.tolist()):
            del self.tables[row], self.request_ids[row]
        num_scheduled = self._follower.apply(plan)
        for rewind in plan.rewound:
            num_blocks = -(-rewind.num_computed_tokens // BLOCK_SIZE)
            for ids in self.tables[rewind.row]:
                del ids[num_blocks:]
        for start in plan.added:
            assert start.row not in self.tables
            self.tables[start.row] = [ids.tolist() for ids in start.block_ids]
            self.request_ids[start.row] = start.request_id
        for blocks in plan.appended:
            for row, block_id in zip(blocks.rows.tolist(), blocks.block_ids.tolist(), strict=True):
                self.tables[row][blocks.group].append(block_id)
        for state in plan.full_state or ():
            held = [ids.tolist() for ids in state.block_ids]
            assert held == self.tables[state.row], f"step {plan.step}, row {state.row}"
        scheduled = np.flatnonzero(num_scheduled).tolist()
        work = Work(
            plan,
            commands,
            {row: [list(ids) for ids in groups] for row, groups in self.tables.items()},
            {row: int(num_scheduled[row]) for row in scheduled},
            {row: int(self._rows.num_computed[row]) for row in scheduled},
            np.flatnonzero(self._rows.samples(num_scheduled)).tolist(),
        )
        self.received.append(work)
        return work

    def execute(self, spoiled_ids: set[str]) -> ModelRunnerOutput:
        """Run the oldest plan; returns its answer. Adds those who read what was spoiled."""
        work = self.received.popleft()
        plan, step = work.plan, work.plan.step
        self._apply_rows(plan)
        for memory in self.memory:
            for block_id in plan.zero_block_ids.tolist():
                for offset in range(BLOCK_SIZE):
                    memory.pop((block_id, offset), None)
            for load in work.commands.loads:
                if not load.is_async:
                    write_load(memory, load, work.failing, -step)
        spoiled = self._compute(work)
        spoiled_ids |= {self._occupant[row][0] for row in spoiled}
        sampled, nan_rows = [], []
        for row in work.samples:
            request_id, num_prompt = self._occupant[row]
            tokens = self._tokens[row]
            assert len(tokens) == work.num_computed[row], f"{request_id} samples out of turn"
            token = steady_token(request_id, len(tokens) - num_prompt)
            tokens.append(GARBAGE if row in spoiled else token)
            sampled.append(tokens[-1])
            if request_id in work.nan_ids:
                nan_rows.append(row)
        return ModelRunnerOutput(
            plan.epoch,
            step,
            sampled_tokens=int32_array(sampled),
            nan_rows=int32_array(nan_rows),
            num_nans=int32_array([1] * len(nan_rows)),
            failed_block_ids=int32_array(sorted(work.failing)),
        )

    def _apply_rows(self, plan: SchedulerOutput) -> None:
        for row in (*plan.finished_rows.tolist(), *plan.preempted_rows.tolist()):
            del self._tokens[row], self._occupant[row]
        for rewind in plan.rewound:
            del self._tokens[rewind.row][rewind.num_known_tokens :]
        for start in plan.added:
            prompt, outputs = start.prompt_token_ids.tolist(), start.output_token_ids.tolist()
            self._tokens[start.row] = prompt + outputs
            self._occupant[start.row] = start.request_id, len(prompt)

    def _compute(self, work: Work) -> set[int]:
        """All KV of the step is written before any is read; returns the rows that read something
        spoiled, or whose logits are not finite. What they wrote is spoiled too."""
        step = work.plan.step
        prefixes = {
            row: prefixes_of(self._tokens[row][:end]) for row, end in work.num_computed.items()
        }
        for row, end in work.num_computed.items():
            for slot, position in self._slots(work, row, end - work.num_scheduled[row]):
                for memory in self.memory:
                    memory[slot] = prefixes[row][position]
        spoiled = {row for row in work.num_computed if self._occupant[row][0] in work.nan_ids}
        is_settled = False
        while not is_settled:
            is_settled = True
            for row in work.num_computed:
                since = self._spoiled_since(work, row, prefixes[row])
                if row in spoiled:
                    since = step if since is None else since
                elif since is None:
                    continue
                else:
                    spoiled.add(row)
                    is_settled = False
                for slot, _ in self._slots(
                    work, row, work.num_computed[row] - work.num_scheduled[row]
                ):
                    for memory in self.memory:
                        memory[slot] = -since
        return spoiled

    def _spoiled_since(self, work: Work, row: int, prefixes: list[int]) -> int | None:
        """The step whose failure spoiled what this row reads; None if all is well."""
        since = None
        for slot, position in self._slots(work, row, 0):
            for memory in self.memory:
                content = memory.get(slot)
                if content is not None and content < 0:
                    since = -content
                    assert work.plan.answered_step < since, (
                        f"step {work.plan.step} reads at position {position} of "
                        f"{self._occupant[row][0]} what step {since} spoiled"
                    )
                else:
                    assert content == prefixes[position], (
                        f"step {work.plan.step}: position {position} of {self._occupant[row][0]} "
                        f"in slot {slot} is somebody else's KV"
                    )
        return since

    def _slots(self, work: Work, row: int, first: int) -> Iterator[tuple[tuple[int, int], int]]:
        for position in range(first, work.num_computed[row]):
            for table in work.tables[row]:
                yield (table[position // BLOCK_SIZE], position % BLOCK_SIZE), position


def write_load(
    memory: dict[tuple[int, int], int], load: Load, failing: set[int], junk: int | None
) -> None:
    """A rank writes what the load brings; `junk` (None: nothing) where it fails."""
    begin = load.first // BLOCK_SIZE
    for position, prefix in enumerate(load.prefixes, load.first):
        for ids in load.block_ids:
            block_id = ids[position // BLOCK_SIZE - begin]
            if block_id not in failing:
                memory[block_id, position % BLOCK_SIZE] = prefix
            elif junk is not None:
                memory[block_id, position % BLOCK_SIZE] = junk


class TransferDriver:
    """Drives one Scheduler and everything around it.

    connector: an `AdversarialConnector` with these `rules`, unless another one is given.
    received, finished: by (client, handle); names: request id of each.
    fail_sync:  blocks that a synchronous load will not fill, by load.
    spoiled_ids: requests that a failed load or a NaN has touched; not_finite: those of a NaN.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 40,
        num_groups: int = 1,
        num_ranks: int = 1,
        rules: dict[str, Any] | None = None,
        connector: SchedulerConnector | None = None,
        cache: dict[str, Any] | None = None,
        fail_sync: FailRule = lambda load: (),
        **settings: Any,
    ) -> None:
        defaults = {
            "max_model_len": 64,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_steps_in_flight": 2,
        }
        self.config = SchedulerConfig(**(defaults | settings))
        self.num_blocks = num_blocks
        self.num_ranks = num_ranks
        self.transfers = Transfers(num_ranks)
        self.adversary = AdversarialConnector(
            self.transfers, block_size=BLOCK_SIZE, **(rules or {})
        )
        self.connector = connector or self.adversary
        self.scheduler = Scheduler(
            self.config,
            CacheConfig(block_size=BLOCK_SIZE, **({"watermark": 0.0} | (cache or {}))),
            kv_cache=kv_cache_config(num_blocks, BLOCK_SIZE, num_groups),
            hash_seed=b"seed",
            vocab_size=VOCAB_SIZE,
            verify_plan=True,
            connector=self.connector,
            num_ranks=num_ranks,
        )
        self.epoch = 1
        self.now = 0.0
        self.received: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.finished: dict[tuple[int, int], FinishedRequest] = {}
        self.names: dict[tuple[int, int], str] = {}
        self.plans: list[SchedulerOutput] = []
        self.answers: deque[ModelRunnerOutput] = deque()
        self.syncing: dict[int, list[Load]] = {}  # by step
        self.written: dict[tuple[str, int], set[int]] = {}  # (load, rank) -> blocks that failed
        self.spoiled_ids: set[str] = set()
        self.not_finite: set[str] = set()
        self.stored: dict[bytes, tuple[int | None, ...]] = {}
        self._num_added = 0
        self._fail_sync = fail_sync
        self._encoder: Encoder[ToWorker] = Encoder()
        self._decoder: Decoder[ToWorker] = Decoder(ToWorker)
        self.stores: list[Store] = []
        self._stores_reported: dict[int, set[int]] = defaultdict(set)
        self.workers = self._new_workers()

    def _new_workers(self) -> Workers:
        return Workers(
            num_ranks=self.num_ranks, max_num_seqs=self.config.max_num_seqs, epoch=self.epoch
        )

    # What clients do

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 4,
        outputs: Sequence[int] = (),
        client: int = 0,
        **fields: Any,
    ) -> tuple[int, int]:
        """Queue a request; returns its key in `received` and `finished`."""
        key = client, self._num_added
        self._num_added += 1
        self.names[key] = request_id
        self.received[key] += outputs
        message = AddRequest(
            request_id,
            key[1],
            int32_array(list(prompt)),
            SamplingParams(temperature=0.0, max_tokens=max_tokens),
            output_token_ids=int32_array(list(outputs)),
            **fields,
        )
        self.scheduler.add_request(message, client=client, now=self.now)
        self.collect()
        return key

    def abort(self, key: tuple[int, int]) -> None:
        """The client loses interest."""
        self.scheduler.abort_requests(key[0], int32_array([key[1]]), self.now)
        self.collect()

    def stop_found(self, key: tuple[int, int], num_tokens: int) -> None:
        """The gateway found a stop string."""
        self.scheduler.stop_found(key[0], StopFound(key[1], num_tokens), self.now)
        self.collect()

    def collect(self) -> None:
        """Take the outputs of clients; no request gets a token that is not its next one."""
        for client, outputs in self.scheduler.take_outputs():
            for handle, token in zip(
                outputs.handles.tolist(), outputs.tokens.tolist(), strict=True
            ):
                key = client, handle
                assert key not in self.finished, "a token after the end"
                tokens = self.received[key]
                tokens.append(token)
                assert token == steady_token(self.names[key], len(tokens) - 1), "a spoiled token"
            for end in outputs.finished:
                assert (client, end.handle) not in self.finished, "two ends"
                self.finished[client, end.handle] = end

    # Steps

    def plan(self, *, nan_ids: Iterable[str] = ()) -> SchedulerOutput | None:
        """Plan a step; the workers get it and run it later."""
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        self.collect()
        self.check_blocks()
        if plan is None:
            assert not self.adversary.has_untold_loads, "nobody tells the workers"
            if self.scheduler.num_steps_in_flight < self.config.max_steps_in_flight:
                assert not self.connector.has_pending_work, "nobody tells the workers"
            return None
        received = self._decoder.decode([bytes(frame) for frame in self._encoder.encode(plan)])
        assert isinstance(received, SchedulerOutput)
        commands = self.commands_of(received)
        work = self.workers.receive(received, commands)
        work.nan_ids = set(nan_ids) & {self.workers.request_ids[row] for row in work.samples}
        self.not_finite |= work.nan_ids
        self.syncing[plan.step] = [load for load in commands.loads if not load.is_async]
        for load in self.syncing[plan.step]:
            failing = set(self._fail_sync(load)) & load.targets
            work.failing |= failing
            self.spoiled_ids |= {load.request_id} if failing else set()
        self.transfers.check_plan(received, work.tables)
        self.transfers.unanswered[received.step] = {
            block_id for row in work.num_scheduled for ids in work.tables[row] for block_id in ids
        }
        self.stores += commands.stores
        self.plans.append(received)
        return received

    def commands_of(self, plan: SchedulerOutput) -> Commands:
        """What the connector tells its worker half with a plan."""
        if not plan.connector_metadata:
            return Commands()
        return msgspec.msgpack.decode(plan.connector_metadata, type=Commands)

    def execute(self) -> None:
        """The workers run the oldest plan they have not run."""
        self.answers.append(self.workers.execute(self.spoiled_ids))

    def answer(self) -> None:
        """Hand the oldest answer to the scheduler."""
        if not self.answers:
            self.execute()
        output = self.answers.popleft()
        self.scheduler.update_from_output(output, self.now)
        if output.epoch == self.epoch:
            self.transfers.unanswered.pop(output.step)
            for load in self.syncing.pop(output.step):
                self.transfers.syncing.remove(load)
        self.check_blocks()
        self.collect()

    @property
    def num_unanswered(self) -> int:
        return len(self.workers.received) + len(self.answers)

    def step(self) -> SchedulerOutput | None:
        """Plan, and answer the oldest plan if nothing more may be planned."""
        plan = self.plan()
        if self.num_unanswered and (
            plan is None or self.num_unanswered >= self.config.max_steps_in_flight
        ):
            self.answer()
        return plan

    def run(self, limit: int = 2000) -> None:
        """Step until nothing is planned and nothing is unanswered."""
        for _ in range(limit):
            was_busy = self.num_unanswered > 0
            if self.step() is None and not was_busy:
                return
        raise AssertionError("the scheduler does not come to rest")

    # Transfers

    def write(
        self, request_id: str, rank: int, failing: Iterable[int] = (), junk: bool = True
    ) -> None:
        """A rank writes what a background load brings; a second time changes nothing."""
        if (request_id, rank) not in self.written:
            load = self.transfers.loading[request_id]
            failed = set(failing) & load.targets
            write_load(self.workers.memory[rank], load, failed, JUNK if junk else None)
            self.written[request_id, rank] = failed

    def end_load(
        self, request_id: str, rank: int | None = None, failing: Iterable[int] = ()
    ) -> None:
        """A rank (all of them) has ended a background load, and says so."""
        for each in range(self.num_ranks) if rank is None else [rank]:
            self.write(request_id, each, failing)
            failed = self.written.pop((request_id, each))
            self.spoiled_ids |= {request_id} if failed else set()
            self.transfers.report("load", request_id, each)
            self.report(each, receiving=[request_id], failed=sorted(failed))

    def end_send(self, request_id: str, rank: int | None = None) -> None:
        """A rank (all of them) has read an ended request's blocks, and says so."""
        for each in range(self.num_ranks) if rank is None else [rank]:
            self.transfers.report("send", request_id, each)
            self.report(each, sending=[request_id])

    def end_store(self, store: Store) -> None:
        """All ranks have read the blocks; the connector lets go of them."""
        for memory in self.workers.memory:
            for block_id, name in zip(store.block_ids, store.names, strict=True):
                content = tuple(memory.get((block_id, offset)) for offset in range(BLOCK_SIZE))
                is_whole = all(value is not None and 0 <= value < JUNK for value in content)
                assert is_whole, f"{store} reads {content}"
                assert self.stored.setdefault(name, content) == content, "stored under a wrong name"
        self.stores.remove(store)
        self.adversary.release(store.hold_id)

    def report(
        self,
        rank: int,
        *,
        receiving: Sequence[str] = (),
        sending: Sequence[str] = (),
        failed: Sequence[int] = (),
        epoch: int | None = None,
        metadata: bytes = b"",
    ) -> None:
        """A rank sends a report, whatever it says."""
        message = TransferReport(
            self.epoch if epoch is None else epoch,
            rank,
            finished_sending=tuple(sending),
            finished_receiving=tuple(receiving),
            failed_block_ids=int32_array(list(failed)),
            connector_metadata=metadata,
        )
        self.scheduler.update_from_transfers(message, self.now)
        self.check_blocks()
        self.collect()

    def end_all_transfers(self) -> None:
        """Everything that has not ended ends well."""
        for request_id in list(self.transfers.loading):
            for rank in set(range(self.num_ranks)) - self.transfers.reported.get(
                ("load", request_id), set()
            ):
                self.end_load(request_id, rank)
        for request_id in list(self.transfers.sending):
            for rank in set(range(self.num_ranks)) - self.transfers.reported.get(
                ("send", request_id), set()
            ):
                self.end_send(request_id, rank)
        for store in list(self.stores):
            self.end_store(store)

    def new_epoch(self) -> None:
        """All workers die and are replaced; answers of the old ones may still come."""
        while self.workers.received:
            self.execute()
        self.epoch += 1
        self.scheduler.begin_epoch(self.epoch, self.now)
        self.workers = self._new_workers()
        self.transfers.__init__(self.num_ranks)  # type: ignore[misc]
        self.syncing.clear()
        self.written.clear()
        self.stores.clear()
        self.collect()

    # What must hold

    @property
    def num_free_blocks(self) -> int:
        return self.scheduler.kv_cache.num_free_blocks

    def reason(self, key: tuple[int, int]) -> FinishReason:
        """Why a request ended."""
        return self.finished[key].reason

    def check_blocks(self) -> None:
        """No block that has an owner can be allocated."""
        running = self.scheduler.running
        owned = {
            int(block_id)
            for row in running.order.tolist()
            for ids in self.scheduler.kv_cache.block_ids(row)
            for block_id in ids
        }
        for _, block_ids in self.transfers.owned():
            owned |= block_ids
        free = set(self.scheduler.kv_cache.pool.free_block_ids())
        assert not free & owned, f"owned blocks {free & owned} are free"
        check_block_map(self.scheduler, self.now)

    def check_idle(self) -> None:
        """Nobody runs, waits or transfers, so every block is free and every end was told once."""
        assert self.transfers.is_idle
        assert not self.scheduler.has_unfinished_requests()
        assert set(self.finished) == set(self.names)
        self.scheduler.check()
        assert self.num_free_blocks == self.num_blocks - 1
        adversary = self.adversary
        assert adversary.begun == adversary.ended
        for key, end in self.finished.items():
            if end.reason is FinishReason.LENGTH_CAPPED:
                assert len(self.received[key]) == end.num_output_tokens

    def check_complete(self, *keys: tuple[int, int], max_tokens: int = 4) -> None:
        """These requests got all their tokens."""
        for key in keys:
            assert self.reason(key) is FinishReason.LENGTH_CAPPED
            assert self.received[key] == expected_output(self.names[key], max_tokens)
