"""A scheduler with the world around it: a worker that follows its plans, and its clients.

The worker is fed the encoded and decoded plans. It keeps what a block holds as one number per
token that stands for that token and everything before it, so each step proves that every row's
table still holds the KV of exactly that row's tokens. It also proves that drafts are where it
verifies them, that items are encoded before a row computes their positions, that no more adapters
run than have a place, and that every mask comes before the tokens it is for and allows them.
"""

import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np

from longshore.protocol.arrays import EMPTY_INT32, int32_array
from longshore.protocol.handshake import Feature, ToWorker
from longshore.protocol.kv_cache_spec import (
    NULL_BLOCK,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
)
from longshore.protocol.outputs import (
    FinishedRequest,
    FinishReason,
    ModelRunnerOutput,
    TokenLogprobs,
)
from longshore.protocol.plan import RowStart, SampleMask, SchedulerOutput
from longshore.protocol.requests import (
    AddRequest,
    ContinueSession,
    StopFound,
)
from longshore.protocol.rows import PlanFollower, RowTable
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.transport.codec import Decoder, Encoder
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.request import Request
from longshore.scheduler.scheduler import Scheduler
from tests.scheduler.block_snapshot_oracle import check_block_map

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


@dataclass
class WorkerRow:
    """One row as the worker knows it, which learns of rejected drafts before the scheduler does.

    tokens:   known ids; num_computed: tokens whose KV is right.
    proposed: drafts for the next step.
    """

    start: RowStart
    tokens: list[int]
    tables: list[list[int]]
    num_computed: int
    proposed: list[int] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.start.request_id

    @property
    def num_prompt(self) -> int:
        return len(self.start.prompt_token_ids)


def scores(rows: Sequence[tuple[int, int, int, int]]) -> TokenLogprobs:
    """(owner, position, token, listed beside it) as a worker reports them: what is listed follows
    from the position and the token."""
    listed = [[token, *range(position, position + more)] for _, position, token, more in rows]
    return TokenLogprobs(
        int32_array([owner for owner, *_ in rows]),
        int32_array([position for _, position, *_ in rows]),
        int32_array([1 + token % 7 for _, _, token, _ in rows]),
        int32_array([len(ids) for ids in listed]),
        int32_array([token for ids in listed for token in ids]),
        np.array([-token / 8 for ids in listed for token in ids], np.float32),
    )


def no_drafts(request_id: str, position: int) -> list[int]:
    """A worker that speculates about nothing."""
    return []


class Driver:
    """Drives one Scheduler. Settings not given are small; `settings` go to SchedulerConfig, those
    in `cache` to CacheConfig, those in `world` to Scheduler.

    draft:              what the worker proposes for the outputs of a request from a position on.
    received, finished: by (client, handle), what the clients have been told.
    continued:          likewise, the ends of outputs behind which a session went on.
    scored:             likewise, (position, its listed tokens) in the order of arrival.
    scheduled:          request id -> tokens it got in the latest plan.
    num_copies:         blocks that plans have copied.
    masks:              by step, those that have come for unanswered plans.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 40,
        block_size: int = 4,
        num_groups: int = 1,
        enable_prefix_caching: bool = True,
        sample: Callable[[str, int], int] = steady_token,
        draft: Callable[[str, int], list[int]] = no_drafts,
        verify_plan: bool = False,
        cache: dict[str, Any] | None = None,
        world: dict[str, Any] | None = None,
        kv_cache: KVCacheConfig | None = None,
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
            CacheConfig(
                block_size=block_size,
                enable_prefix_caching=enable_prefix_caching,
                **(cache or {}),
            ),
            kv_cache=kv_cache or kv_cache_config(num_blocks, block_size, num_groups),
            hash_seed=b"seed",
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            verify_plan=verify_plan,
            features=frozenset(Feature) - {Feature.POOLING_ONLY},
            **(world or {}),
        )
        self.requests: dict[str, Request] = {}
        self.received: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.finished: dict[tuple[int, int], FinishedRequest] = {}
        self.continued: dict[tuple[int, int], list[FinishedRequest]] = defaultdict(list)
        self.scored: dict[tuple[int, int], list[tuple[int, list[int]]]] = defaultdict(list)
        self.plans: list[SchedulerOutput] = []
        self.scheduled: dict[str, int] = {}
        self.num_copies = 0
        self.now = 0.0
        self._num_added = 0
        self._sample = sample
        self._draft = draft
        self._block_size = block_size
        self._block_sizes = self.scheduler.kv_cache.block_sizes
        self._encoder: Encoder[ToWorker] = Encoder()
        self._decoder: Decoder[ToWorker] = Decoder(ToWorker)
        self._start_workers(epoch=1)

    def _start_workers(self, epoch: int) -> None:
        self._rows = RowTable(self.config.max_num_seqs)
        self._follower = PlanFollower(self._rows, epoch=epoch)
        self._held: dict[int, WorkerRow] = {}
        self._kv: dict[tuple[int, int], int] = {}
        self._encoded: dict[str, int] = {}
        self._masked: dict[int, dict[int, list[int]]] = {}  # by step: row -> tokens sampled
        self.masks: dict[int, SampleMask] = {}
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
        for request in self.scheduler.waiting:
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

    def continue_session(
        self,
        key: tuple[int, int],
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

    def restart_workers(self, epoch: int) -> None:
        """All workers are replaced; their answers are lost."""
        self.scheduler.begin_epoch(epoch, self.now)
        self._start_workers(epoch)
        self.collect()

    # Steps

    def plan(self) -> SchedulerOutput | None:
        """Plan a step and let the worker run it; its answer waits in `pending`."""
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        self.collect()
        self.check_blocks()
        if plan is None:
            return None
        received = self._decoder.decode([bytes(frame) for frame in self._encoder.encode(plan)])
        assert isinstance(received, SchedulerOutput)
        self.plans.append(received)
        if len(self.plans) % 4 == 0:
            check_block_map(self.scheduler, self.now)
        self._run(received)
        self._check_rows()
        self._take_masks()
        return received

    def answer(self, nan_rows: Sequence[int] = (), *, with_drafts: bool = True) -> None:
        """Hand the oldest answer to the scheduler."""
        output = self.pending.popleft()
        self._check_mask(output.step)
        if not with_drafts:
            output = msgspec.structs.replace(
                output, draft_rows=EMPTY_INT32, draft_tokens=EMPTY_INT32
            )
        if nan_rows:
            output = msgspec.structs.replace(
                output,
                nan_rows=int32_array(list(nan_rows)),
                num_nans=int32_array([3] * len(nan_rows)),
            )
        self.scheduler.update_from_output(output, self.now)
        self._take_masks()
        self.check_blocks()
        self.collect()

    def _take_masks(self) -> None:
        for mask in self.scheduler.take_masks():
            assert mask.step in self._masked, "a mask that no plan has announced, or a second one"
            assert self.pending[0].step == mask.step, "a mask before the tokens that it rests on"
            self.masks[mask.step] = mask

    def _check_mask(self, step: int) -> None:
        """What was sampled in the step, all of it, its mask allows."""
        sampled = self._masked.pop(step, {})
        if not sampled:
            return
        mask = self.masks.pop(step)
        bits = mask.bits.reshape(len(mask.rows), -1)
        for row, tokens in sampled.items():
            allowed = np.unpackbits(bits[mask.rows == row], axis=1, bitorder="little")
            assert len(tokens) <= len(allowed)
            assert all(allowed[index, token] for index, token in enumerate(tokens))

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
        num_scheduled = self._apply_changes(plan)
        scheduled = {row: int(num_scheduled[row]) for row in np.flatnonzero(num_scheduled).tolist()}
        self.scheduled = {self._held[row].request_id: count for row, count in scheduled.items()}
        self._encode(plan, scheduled)
        sampling = np.flatnonzero(self._rows.samples(num_scheduled)).tolist()
        drafts = self._drafts_of(plan)
        ids = {row: self._held[row].tokens + drafts[row] for row in scheduled}
        ends = {row: self._held[row].num_computed + count for row, count in scheduled.items()}
        self._copy_blocks(plan)
        self._check_targets(scheduled)
        # As in a layer: all KV of the step is written before anything attends to it.
        for row, end in ends.items():
            self.write_kv(self._held[row].tables, ids[row], end - scheduled[row], end)
        for row, end in ends.items():
            self._visit_kv(self._held[row].tables, ids[row], 0, end, self._check_kv)
            self._held[row].num_computed = end
        first = {row: len(self._held[row].tokens) for row in sampling}
        sampled = [self._verify(row, drafts[row]) for row in sampling]
        self._scores = [
            entry
            for row, end in ends.items()
            for entry in self._scores_of(row, end - scheduled[row], end, first.get(row))
        ]
        num_drafts = np.array([len(drafts[row]) for row in sampling])
        num_rejected = num_drafts + 1 - np.array([len(tokens) for tokens in sampled])
        if num_rejected.any():
            self._follower.note_rejected(
                plan.step, np.array(sampling), self._rows.generation[sampling], num_rejected
            )
        self.pending.append(self._answer_to(plan, sampling, sampled))

    def _check_targets(self, scheduled: dict[int, int]) -> None:
        """No row writes after tokens in a block that a waiting request or transfer holds."""
        held = [each.hold.blocks for each in self.scheduler.waiting if each.hold is not None]
        ids = {block_id for each in held for table in each.block_ids for block_id in table.tolist()}
        for row in scheduled if ids else ():
            position = self._held[row].num_computed
            for table, size in zip(self._held[row].tables, self._block_sizes, strict=True):
                assert not position % size or table[position // size] not in ids

    def _copy_blocks(self, plan: SchedulerOutput) -> None:
        sources, targets = plan.copy_source_ids.tolist(), plan.copy_target_ids.tolist()
        assert len(set(targets)) == len(targets)
        tables = Counter(
            block_id for held in self._held.values() for table in held.tables for block_id in table
        )
        copied = {
            (target, offset): self._kv[source, offset]
            for source, target, count in zip(
                sources, targets, plan.copy_num_tokens.tolist(), strict=True
            )
            for offset in range(count)
        }
        for target in targets:
            assert tables[target] == 1, "a copy is somebody's own"
            for offset in range(self._block_size):
                self._kv.pop((target, offset), None)
        self._kv |= copied
        self.num_copies += len(targets)

    def _scores_of(
        self, row: int, start: int, end: int, first_sampled: int | None
    ) -> Iterator[tuple[int, int, int, int]]:
        held = self._held[row]
        sampling = held.start.sampling
        if sampling.prompt_logprobs is not None:
            for position in range(start + 1, min(end + 1, held.num_prompt)):
                yield row, position, held.tokens[position], sampling.prompt_logprobs
        if sampling.logprobs is not None and first_sampled is not None:
            for position in range(first_sampled, len(held.tokens)):
                yield row, position, held.tokens[position], sampling.logprobs

    def _apply_changes(self, plan: SchedulerOutput) -> np.ndarray:
        for row in (*plan.finished_rows.tolist(), *plan.preempted_rows.tolist()):
            del self._held[row]
        num_scheduled = self._follower.apply(plan)
        for rewind in plan.rewound:
            held = self._held[rewind.row]
            held.num_computed = rewind.num_computed_tokens
            del held.tokens[int(self._rows.num_known[rewind.row]) :]
            for table, block_size in zip(held.tables, self._block_sizes, strict=True):
                del table[-(-held.num_computed // block_size) :]
        for start in plan.added:
            assert start.row not in self._held
            tokens = [*start.prompt_token_ids.tolist(), *start.output_token_ids.tolist()]
            tables = [ids.tolist() for ids in start.block_ids]
            self._held[start.row] = WorkerRow(start, tokens, tables, start.num_computed_tokens)
        for blocks in plan.appended:
            for row, block_id in zip(blocks.rows.tolist(), blocks.block_ids.tolist(), strict=True):
                self._held[row].tables[blocks.group].append(block_id)
        adapters = {held.start.lora.name for held in self._held.values() if held.start.lora}
        assert len(adapters) <= self.config.max_loras
        return num_scheduled

    def _encode(self, plan: SchedulerOutput, scheduled: dict[int, int]) -> None:
        for item_hash in plan.freed_encoder_hashes:
            del self._encoded[item_hash]
        items = [self._held[row].start.multimodal[index] for row, index in plan.encoder_inputs]
        assert sum(item.num_tokens for item in items) <= self.config.max_num_encoder_input_tokens
        for item in items:
            assert item.hash not in self._encoded
            self._encoded[item.hash] = item.num_tokens
        if self.config.encoder_cache_size is not None:
            assert sum(self._encoded.values()) <= self.config.encoder_cache_size
        for row, count in scheduled.items():
            held = self._held[row]
            for item in held.start.multimodal:
                is_before = item.offset + item.num_tokens <= held.num_computed
                if not is_before and item.offset < held.num_computed + count:
                    assert item.hash in self._encoded, f"{item.hash} is computed, not encoded"

    def _drafts_of(self, plan: SchedulerOutput) -> dict[int, list[int]]:
        """Drafts to verify by row; -1 is what the worker itself proposed."""
        drafts: dict[int, list[int]] = defaultdict(list)
        for row, token in zip(plan.draft_rows.tolist(), plan.draft_tokens.tolist(), strict=True):
            mine = self._held[row].proposed
            drafts[row].append(mine[len(drafts[row])] if token == -1 else token)
        return drafts

    def _verify(self, row: int, drafts: list[int]) -> list[int]:
        """What a row samples: as many drafts as were right, and one token more."""
        held = self._held[row]
        position = len(held.tokens)
        assert held.num_computed == position + len(drafts)
        tokens = [self._sample(held.request_id, position - held.num_prompt)]
        while len(tokens) <= len(drafts) and drafts[len(tokens) - 1] == tokens[-1]:
            position += 1
            tokens.append(self._sample(held.request_id, position - held.num_prompt))
        held.tokens += tokens
        held.num_computed = len(held.tokens) - 1
        held.proposed = self._draft(held.request_id, len(held.tokens) - held.num_prompt)
        return tokens

    def _answer_to(
        self, plan: SchedulerOutput, sampling: list[int], sampled: list[list[int]]
    ) -> ModelRunnerOutput:
        by_row = dict(zip(sampling, sampled, strict=True))
        masked = {
            row: tokens
            for row, tokens in by_row.items()
            if self._held[row].start.has_structured_output
        }
        assert plan.has_structured_output is bool(masked)
        if masked:
            self._masked[plan.step] = masked
        pooled = [row for row in sampling if self._held[row].start.pooling is not None]
        proposed = {row: self._held[row].proposed for row in sampling}
        is_one_each = all(len(tokens) == 1 for tokens in sampled)
        return ModelRunnerOutput(
            plan.epoch,
            plan.step,
            sampled_tokens=int32_array([token for tokens in sampled for token in tokens]),
            num_sampled=int32_array([] if is_one_each else [len(tokens) for tokens in sampled]),
            draft_rows=int32_array([row for row, ids in proposed.items() for _ in ids]),
            draft_tokens=int32_array([token for ids in proposed.values() for token in ids]),
            logprobs=scores(self._scores) if self._scores else None,
            pooled_rows=int32_array(pooled),
            pooled=tuple(np.array([self._held[row].num_prompt], np.float32) for row in pooled),
        )

    def write_kv(
        self, tables: Sequence[Sequence[int]], ids: Sequence[int], first: int, last: int
    ) -> None:
        """Put KV of the tokens `ids[first:last]` into the blocks of a table per group."""
        self._visit_kv(tables, ids, first, last, self._kv.__setitem__)

    def _visit_kv(
        self,
        tables: Sequence[Sequence[int]],
        ids: Sequence[int],
        first: int,
        last: int,
        visit: Callable[[tuple[int, int], int], None],
    ) -> None:
        prefix = zlib.crc32(np.array(ids[:first], np.int32))
        for position in range(first, last):
            prefix = zlib.crc32(np.array([ids[position]], np.int32), prefix)
            for table in tables:
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
        assert ours.num_rows == self._rows.num_rows == len(self._held)
        for row, held in self._held.items():
            tables = [ids.tolist() for ids in self.scheduler.kv_cache.block_ids(row)]
            assert held.tables == tables

    def check_blocks(self) -> None:
        """null + held + free = all, and as many references as holders."""
        if self.scheduler._transfers is not None:  # transfers hold blocks, too
            self.scheduler.check()
            return
        holders = Counter(
            int(block_id)
            for row in self.scheduler.running.order.tolist()
            for ids in self.scheduler.kv_cache.block_ids(row)
            for block_id in ids
        )
        for request in self.scheduler.waiting:
            if request.hold is not None:
                holders.update(np.concatenate(request.hold.blocks.block_ids).tolist())
        pool = self.scheduler.kv_cache.pool
        assert 1 + len(holders) + pool.num_free == self.num_blocks
        for block_id in range(1, self.num_blocks):
            assert pool.references()[block_id] == holders[block_id]

    def collect(self) -> None:
        """Take what the clients are sent."""
        for client, outputs in self.scheduler.take_outputs():
            for handle, token in zip(
                outputs.handles.tolist(), outputs.tokens.tolist(), strict=True
            ):
                assert (client, handle) not in self.finished, "a token after the end"
                self.received[client, handle].append(token)
            if outputs.logprobs is not None:
                self._collect_scores(client, outputs.logprobs)
            for end in outputs.finished:
                assert (client, end.handle) not in self.finished, "two ends"
                if end.session_continues:
                    self.continued[client, end.handle].append(end)
                else:
                    self.finished[client, end.handle] = end

    def _collect_scores(self, client: int, entries: TokenLogprobs) -> None:
        ends = np.cumsum(entries.num_listed).tolist()
        for index, handle in enumerate(entries.owners.tolist()):
            assert (client, handle) not in self.finished, "log probabilities after the end"
            listed = slice(ends[index] - int(entries.num_listed[index]), ends[index])
            ids = entries.token_ids[listed].tolist()
            assert entries.logprobs[listed].tolist() == [-token / 8 for token in ids]
            assert entries.ranks[index] == 1 + ids[0] % 7
            self.scored[client, handle].append((int(entries.positions[index]), ids))


def pressed(policy: str = "fcfs", **settings: Any) -> Driver:
    """A driver with eight usable blocks of four tokens."""
    return Driver(num_blocks=9, max_model_len=32, policy=policy, **settings)


def in_admission_order(driver: Driver, requests: Sequence[tuple[str, int, int]]) -> None:
    """Admit (name, prompt length, priority) one per step, whatever their priorities are."""
    for index, (name, length, priority) in enumerate(requests):
        driver.add(name, prompt_of(length, 25 * index), max_tokens=16, priority=priority)
        driver.step()
        assert driver.running[-1] == name
