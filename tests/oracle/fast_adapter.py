"""The scheduler under test, seen as the oracle sees itself.

Plans are encoded, decoded and applied as a worker would, and only what the worker then knows is
compared: so a delta that is wrong shows, as well as a decision that is.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from longshore.protocol.arrays import int32_array
from longshore.protocol.client import AddRequest, StopFound
from longshore.protocol.codec import Decoder, Encoder
from longshore.protocol.handshake import ToWorker
from longshore.protocol.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.results import ModelRunnerOutput
from longshore.protocol.rows import PlanFollower, RowTable
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.scheduler import Scheduler
from tests.oracle.plan import (
    Admission,
    Delivery,
    Finish,
    OraclePlan,
    Outputs,
    ScheduledRequest,
)


class FastAdapter:
    """Implements `SchedulerAdapter` over `longshore.scheduler.Scheduler`."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        num_blocks: int,
        eos_token_ids: tuple[int, ...],
        vocab_size: int = 1000,
        verify_plan: bool = False,
    ) -> None:
        spec = FullAttentionSpec(cache.block_size, 1, 4, 4)
        self.scheduler = Scheduler(
            config,
            cache,
            kv_cache=KVCacheConfig(
                num_blocks=num_blocks, groups=(KVCacheGroup(("layer",), spec),), dtype="float32"
            ),
            hash_seed=b"seed",
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            verify_plan=verify_plan,
        )
        self._num_blocks = num_blocks
        self._block_size = cache.block_size
        self._encoder: Encoder[ToWorker] = Encoder()
        self._decoder: Decoder[ToWorker] = Decoder(ToWorker)
        self._rows = RowTable(config.max_num_seqs)
        self._follower = PlanFollower(self._rows, epoch=1)
        self._ids: dict[int, str] = {}
        self._tables: dict[int, list[int]] = {}
        self._sampling_rows: dict[int, list[str]] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.scheduler.kv_cache.num_free_blocks

    def add_request(self, request: AddRequest, *, client: int, now: float) -> None:
        self.scheduler.add_request(request, client=client, now=now)

    def abort(self, handles: Sequence[int], *, client: int) -> None:
        self.scheduler.abort_requests(client, int32_array(handles), 0.0)

    def stop_found(self, handle: int, num_tokens: int, *, client: int) -> None:
        self.scheduler.stop_found(client, StopFound(handle, num_tokens), 0.0)

    def schedule(self, now: float) -> OraclePlan | None:
        plan = self.scheduler.schedule(now)
        if plan is None:
            return None
        frames = [bytes(frame) for frame in self._encoder.encode(plan)]
        received = self._decoder.decode(frames)
        assert isinstance(received, SchedulerOutput)
        return self._follow(received)

    def _follow(self, plan: SchedulerOutput) -> OraclePlan:
        finished = [self._drop(row) for row in plan.finished_rows.tolist()]
        preempted = [self._drop(row) for row in plan.preempted_rows.tolist()]
        new_blocks: dict[int, list[int]] = {}
        for start in plan.added:
            table = start.block_ids[0].tolist()
            num_hits = start.num_computed_tokens // self._block_size
            self._ids[start.row], self._tables[start.row] = start.request_id, table
            new_blocks[start.row] = table[num_hits:]
        for blocks in plan.appended:
            for row, block_id in zip(blocks.rows.tolist(), blocks.block_ids.tolist(), strict=True):
                self._tables[row].append(block_id)
                new_blocks.setdefault(row, []).append(block_id)
        num_scheduled = self._follower.apply(plan)
        samples = self._rows.samples(num_scheduled)
        for state in plan.full_state or ():
            assert state.block_ids[0].tolist() == self._tables[state.row]
        self._sampling_rows[plan.step] = [self._ids[r] for r in np.flatnonzero(samples).tolist()]
        rows = np.flatnonzero(num_scheduled)
        by_admission = rows[np.argsort(self._rows.generation[rows])].tolist()
        return OraclePlan(
            step=plan.step,
            scheduled=tuple(
                ScheduledRequest(
                    request_id=self._ids[row],
                    num_tokens=int(num_scheduled[row]),
                    samples=bool(samples[row]),
                    new_block_ids=tuple(new_blocks.get(row, ())),
                    block_ids=tuple(self._tables[row]),
                )
                for row in by_admission
            ),
            admitted=tuple(
                Admission(start.request_id, start.resumed, start.num_computed_tokens)
                for start in plan.added
            ),
            preempted=tuple(sorted(preempted)),
            finished=tuple(sorted(finished)),
        )

    def _drop(self, row: int) -> str:
        del self._tables[row]
        return self._ids.pop(row)

    def update_from_output(self, step: int, tokens: Mapping[str, int]) -> None:
        sampled = [tokens[request_id] for request_id in self._sampling_rows.pop(step)]
        output = ModelRunnerOutput(epoch=1, step=step, sampled_tokens=int32_array(sampled))
        self.scheduler.update_from_output(output, 0.0)

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
                )
                for finished in message.finished
            ]
        return Outputs(tuple(deliveries), tuple(finishes))

    def check_invariants(self) -> None:
        """Free and held blocks make up the pool, and the worker's tables are the scheduler's."""
        running = self.scheduler.running
        held: set[int] = set()
        for request in running.requests_in_order():
            held.update(self.scheduler.kv_cache.block_ids(request.row)[0].tolist())
        assert 0 not in held
        assert self.num_free_blocks + len(held) + 1 == self._num_blocks
        assert (running.num_placeholders >= 0).all()
        assert running.num_rows == len(running.requests_in_order())
