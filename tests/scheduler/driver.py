"""A scheduler with the world around it: a worker that follows its plans, and its clients.

The worker is fed the encoded and decoded plans. It keeps what a block holds as one number per
token that stands for that token and everything before it, so each step proves that every row's
table still holds the KV of exactly that row's tokens.
"""

import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from longshore.protocol.arrays import EMPTY_INT32, int32_array
from longshore.protocol.client import AddRequest, FinishedRequest, FinishReason, StopFound
from longshore.protocol.codec import Decoder, Encoder
from longshore.protocol.handshake import ToWorker
from longshore.protocol.kv_cache_spec import (
    NULL_BLOCK,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
)
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.results import ModelRunnerOutput
from longshore.protocol.rows import PlanFollower, RowTable
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.request import Request
from longshore.scheduler.scheduler import Scheduler

VOCAB_SIZE: Final = 100
EOS: Final = 2


def steady_token(request_id: str, position: int) -> int:
    """Output token number `position` of a request; never one that ends it."""
    return 10 + zlib.crc32(f"{request_id}/{position}".encode()) % (VOCAB_SIZE - 10)


def kv_cache_config(num_blocks: int, block_size: int = 4, num_groups: int = 1) -> KVCacheConfig:
    """The smallest model with that many KV cache groups."""
    spec = FullAttentionSpec(block_size, num_kv_heads=1, head_size=8, dtype_bytes=4)
    groups = tuple(KVCacheGroup((f"layer.{index}",), spec) for index in range(num_groups))
    return KVCacheConfig(num_blocks, groups, "float32")


def prompt_of(length: int, start: int = 10) -> list[int]:
    """Token ids that count up; prompts of equal `start` share their beginning."""
    return [10 + (start + index) % (VOCAB_SIZE - 10) for index in range(length)]


def expected_output(request_id: str, count: int) -> list[int]:
    """The first `count` tokens that `steady_token` gives a request."""
    return [steady_token(request_id, position) for position in range(count)]


class Driver:
    """Drives one Scheduler. Settings not given are small; `settings` go to SchedulerConfig.

    received, finished: by (client, handle), what the clients have been told.
    scheduled:          request id -> tokens it got in the latest plan.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 40,
        block_size: int = 4,
        num_groups: int = 1,
        enable_prefix_caching: bool = True,
        sample: Callable[[str, int], int] = steady_token,
        verify_plan: bool = True,
        **settings: Any,
    ) -> None:
        defaults = {
            "max_model_len": 64,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_steps_in_flight": 1,
        }
        self.config = SchedulerConfig(**(defaults | settings))
        self.num_blocks = num_blocks
        self.scheduler = Scheduler(
            self.config,
            CacheConfig(block_size=block_size, enable_prefix_caching=enable_prefix_caching),
            kv_cache=kv_cache_config(num_blocks, block_size, num_groups),
            hash_seed=b"seed",
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            verify_plan=verify_plan,
        )
        self.requests: dict[str, Request] = {}
        self.received: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.finished: dict[tuple[int, int], FinishedRequest] = {}
        self.plans: list[SchedulerOutput] = []
        self.scheduled: dict[str, int] = {}
        self.now = 0.0
        self._num_added = 0
        self._sample = sample
        self._block_size = block_size
        self._encoder: Encoder[ToWorker] = Encoder()
        self._decoder: Decoder[ToWorker] = Decoder(ToWorker)
        self._rows = RowTable(self.config.max_num_seqs)
        self._follower = PlanFollower(self._rows, epoch=1)
        self._request_id: dict[int, str] = {}
        self._num_prompt: dict[int, int] = {}
        self._tokens: dict[int, list[int]] = {}
        self._tables: dict[int, list[list[int]]] = {}
        self._kv: dict[tuple[int, int], int] = {}
        self.pending: deque[ModelRunnerOutput] = deque()

    # What clients do

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        outputs: Sequence[int] = (),
        client: int = 0,
        handle: int | None = None,
        max_tokens: int | None = 8,
        sampling: dict[str, Any] | None = None,
        **fields: Any,
    ) -> tuple[int, int]:
        """Queue a request; returns its key in `received` and `finished`."""
        handle = self._num_added if handle is None else handle
        self._num_added += 1
        self.now += 1.0
        message = AddRequest(
            request_id,
            handle,
            int32_array(list(prompt)),
            SamplingParams(temperature=0.0, max_tokens=max_tokens, **(sampling or {})),
            output_token_ids=int32_array(list(outputs)),
            **fields,
        )
        self.scheduler.add_request(message, client=client, now=self.now)
        for request in self.scheduler.waiting._waiting:
            self.requests[request.request_id] = request
        self.collect()
        return client, handle

    def abort(self, *keys: tuple[int, int]) -> None:
        """The clients lose interest."""
        for client, handle in keys:
            self.scheduler.abort_requests(client, int32_array([handle]), self.now)
        self.collect()

    def stop_found(self, key: tuple[int, int], num_tokens: int) -> None:
        """The gateway found a stop string."""
        self.scheduler.stop_found(key[0], StopFound(key[1], num_tokens), self.now)
        self.collect()

    # Steps

    def plan(self) -> SchedulerOutput | None:
        """Plan a step and let the worker run it; its answer waits in `pending`."""
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        self.check_blocks()
        if plan is None:
            return None
        received = self._decoder.decode([bytes(frame) for frame in self._encoder.encode(plan)])
        assert isinstance(received, SchedulerOutput)
        self.plans.append(received)
        self._run(received)
        self._check_rows()
        return received

    def answer(self, nan_rows: Sequence[int] = ()) -> None:
        """Hand the oldest answer to the scheduler."""
        output = self.pending.popleft()
        if nan_rows:
            output = ModelRunnerOutput(
                output.epoch,
                output.step,
                sampled_tokens=output.sampled_tokens,
                nan_rows=int32_array(list(nan_rows)),
            )
        self.scheduler.update_from_output(output, self.now)
        self.check_blocks()
        self.collect()

    def step(self) -> SchedulerOutput | None:
        """Plan, and answer the oldest plan if nothing more may be planned."""
        plan = self.plan()
        is_full = len(self.pending) >= self.config.max_steps_in_flight
        if self.pending and (plan is None or is_full):
            self.answer()
        return plan

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def run(self, limit: int = 5000) -> None:
        """Until everybody has an answer and the workers know of every end."""
        for _ in range(limit):
            had_pending = bool(self.pending)
            if self.step() is None and not had_pending:
                assert not self.scheduler.has_unfinished_requests(), "nothing is planned any more"
                return
        raise AssertionError("the requests did not finish")

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

    def reason(self, key: tuple[int, int]) -> FinishReason:
        """Why a request ended."""
        return self.finished[key].reason

    @property
    def running(self) -> list[str]:
        """Request ids in admission order."""
        return [request.request_id for request in self.scheduler.running.requests_in_order()]

    @property
    def num_free_blocks(self) -> int:
        return self.scheduler.kv_cache.num_free_blocks

    # The worker

    def _run(self, plan: SchedulerOutput) -> None:
        for row in (*plan.finished_rows.tolist(), *plan.preempted_rows.tolist()):
            del self._request_id[row], self._num_prompt[row], self._tokens[row], self._tables[row]
        num_scheduled = self._follower.apply(plan)
        for start in plan.added:
            row = start.row
            assert row not in self._tables
            self._request_id[row] = start.request_id
            self._num_prompt[row] = len(start.prompt_token_ids)
            self._tokens[row] = [*start.prompt_token_ids.tolist(), *start.output_token_ids.tolist()]
            self._tables[row] = [ids.tolist() for ids in start.block_ids]
        for blocks in plan.appended:
            for row, block_id in zip(blocks.rows.tolist(), blocks.block_ids.tolist(), strict=True):
                self._tables[row][blocks.group].append(block_id)
        scheduled = {row: int(num_scheduled[row]) for row in np.flatnonzero(num_scheduled).tolist()}
        self.scheduled = {self._request_id[row]: count for row, count in scheduled.items()}
        # As in a layer: all KV of the step is written before anything attends to it.
        for row, count in scheduled.items():
            last = int(self._rows.num_computed[row])
            self._visit_kv(row, last - count, last, self._kv.__setitem__)
        for row in scheduled:
            self._visit_kv(row, 0, int(self._rows.num_computed[row]), self._check_kv)
        sampled = []
        for row in np.flatnonzero(self._rows.samples(num_scheduled)).tolist():
            position = int(self._rows.num_computed[row])
            assert position == len(self._tokens[row])
            token = self._sample(self._request_id[row], position - self._num_prompt[row])
            self._tokens[row].append(token)
            sampled.append(token)
        self.pending.append(
            ModelRunnerOutput(
                plan.epoch,
                plan.step,
                sampled_tokens=np.array(sampled, np.int32) if sampled else EMPTY_INT32,
            )
        )

    def _visit_kv(
        self, row: int, first: int, last: int, visit: Callable[[tuple[int, int], int], None]
    ) -> None:
        prefix = zlib.crc32(np.array(self._tokens[row][:first], np.int32))
        for position in range(first, last):
            prefix = zlib.crc32(np.array([self._tokens[row][position]], np.int32), prefix)
            for table in self._tables[row]:
                block_id = table[position // self._block_size]
                assert block_id != NULL_BLOCK
                visit((block_id, position % self._block_size), prefix)

    def _check_kv(self, slot: tuple[int, int], prefix: int) -> None:
        assert self._kv.get(slot) == prefix, f"slot {slot} holds somebody else's KV"

    # Invariants

    def _check_rows(self) -> None:
        ours = self.scheduler.running
        for column in ("generation", "num_computed", "num_known", "last_computed"):
            np.testing.assert_array_equal(getattr(ours, column), getattr(self._rows, column))
        assert ours.num_rows == self._rows.num_rows == len(self._tables)
        for row, tables in self._tables.items():
            held = [ids.tolist() for ids in self.scheduler.kv_cache.block_ids(row)]
            assert held == tables

    def check_blocks(self) -> None:
        """null + held + free = all, and as many references as holders."""
        holders = Counter(
            int(block_id)
            for row in self.scheduler.running.order.tolist()
            for ids in self.scheduler.kv_cache.block_ids(row)
            for block_id in ids
        )
        pool = self.scheduler.kv_cache._pool
        assert 1 + len(holders) + pool.num_free == self.num_blocks
        for block_id in range(1, self.num_blocks):
            assert pool.ref_count(block_id) == holders[block_id]

    def collect(self) -> None:
        """Take what the clients are sent."""
        for client, outputs in self.scheduler.take_outputs():
            for handle, token in zip(
                outputs.handles.tolist(), outputs.tokens.tolist(), strict=True
            ):
                assert (client, handle) not in self.finished, "a token after the end"
                self.received[client, handle].append(token)
            for end in outputs.finished:
                assert (client, end.handle) not in self.finished, "two ends"
                self.finished[client, end.handle] = end


def pressed(policy: str = "fcfs", **settings: Any) -> Driver:
    """A driver with eight usable blocks of four tokens."""
    return Driver(num_blocks=9, max_model_len=32, policy=policy, **settings)


def in_admission_order(driver: Driver, requests: Sequence[tuple[str, int, int]]) -> None:
    """Admit (name, prompt length, priority) one per step, whatever their priorities are."""
    for index, (name, length, priority) in enumerate(requests):
        driver.add(name, prompt_of(length, 25 * index), max_tokens=16, priority=priority)
        driver.step()
        assert driver.running[-1] == name
