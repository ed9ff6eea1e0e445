"""A worker without a model: it keeps what each slot of the KV cache would hold, and refuses plans
that would attend to anything but the request's own prefix.

The token it samples depends on request and output position alone, so a request's whole output is
known in advance, however it is scheduled.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from zlib import crc32

from longshore.protocol.kv_cache_spec import NULL_BLOCK
from longshore.scheduler.config import SchedulerConfig
from tests.oracle.plan import OraclePlan, ScheduledRequest


def sample_token(request_id: str, position: int, vocab_size: int) -> int:
    """The output token of a request at an output position (0 is the first)."""
    digest = blake2b(f"{request_id}/{position}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % vocab_size


@dataclass
class WorkerRow:
    """What the worker knows of one running request.

    num_prompt:    prompt tokens, from which output positions count.
    last_computed: tokens that may be computed at most; the last one is only sampled.
    token_ids:     prompt, outputs known at admission, then what was sampled since.
    salt:          as in `AddRequest.cache_salt`.
    prefixes:      per computed or hit position, the identity of the prefix that ends there.
    """

    num_prompt: int
    last_computed: int
    token_ids: list[int]
    salt: str | None
    num_known: int = field(init=False)
    num_computed: int = 0
    block_ids: tuple[int, ...] = ()
    prefixes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_known = len(self.token_ids)

    def extend_prefixes(self, num_tokens: int) -> None:
        """Fill `prefixes` up to `num_tokens` positions."""
        for position in range(len(self.prefixes), num_tokens):
            before = self.prefixes[-1] if self.prefixes else crc32((self.salt or "").encode())
            self.prefixes.append(hash((before, self.token_ids[position])))


class FakeWorker:
    """Executes plans in order; every broken promise is an AssertionError.

    num_blocks: with the null block.
    """

    def __init__(
        self, config: SchedulerConfig, *, block_size: int, num_blocks: int, vocab_size: int
    ) -> None:
        self.rows: dict[str, WorkerRow] = {}
        self._config = config
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._last_step = 0
        self._slots: dict[int, int] = {}  # identity of the prefix whose last token's KV it holds

    def execute(self, plan: OraclePlan, admitted: Mapping[str, WorkerRow]) -> dict[str, int]:
        """Run one step; return the sampled tokens by request id.

        admitted: a fresh row for each request that the plan admits.
        """
        assert plan.step == self._last_step + 1, f"step {plan.step} follows {self._last_step}"
        self._last_step = plan.step
        for request_id in (*plan.finished, *plan.preempted):
            assert self.rows.pop(request_id, None), f"{request_id} is dropped without a row"
        for admission in plan.admitted:
            assert admission.request_id not in self.rows, f"{admission} has a row already"
            row = admitted[admission.request_id]
            row.num_computed = admission.num_cached_tokens
            self.rows[admission.request_id] = row
        assert len(self.rows) <= self._config.max_num_seqs, f"{len(self.rows)} rows are held"
        total = sum(entry.num_tokens for entry in plan.scheduled)
        assert total <= self._config.token_budget, f"{total} tokens are over the budget"
        self._check_order(plan)
        for entry in plan.scheduled:
            self._write(self.rows[entry.request_id], entry)
        for entry in plan.scheduled:  # reads come after all writes of the step, layer by layer
            self._attend(self.rows[entry.request_id], entry)
        return {
            entry.request_id: self._sample(entry.request_id)
            for entry in plan.scheduled
            if entry.samples
        }

    def _check_order(self, plan: OraclePlan) -> None:
        request_ids = [entry.request_id for entry in plan.scheduled]
        in_admission_order = [id_ for id_ in self.rows if id_ in request_ids]
        assert request_ids == in_admission_order, f"{request_ids} are out of order"
        admitted = {admission.request_id for admission in plan.admitted}
        assert admitted <= set(request_ids), "a request is admitted without tokens"

    def _write(self, row: WorkerRow, entry: ScheduledRequest) -> None:
        start, end = row.num_computed, row.num_computed + entry.num_tokens
        assert entry.num_tokens > 0, f"{entry} computes nothing"
        assert end <= row.last_computed, f"{entry} computes beyond its last token"
        assert end <= len(row.token_ids), f"{entry} computes a token nobody sampled"
        assert entry.samples == (end >= row.num_known), f"{entry} samples wrongly"
        assert len(entry.block_ids) == -(-end // self._block_size), f"{entry} holds other blocks"
        assert all(NULL_BLOCK < id_ < self._num_blocks for id_ in entry.block_ids)
        num_old = len(entry.block_ids) - len(entry.new_block_ids)
        assert entry.block_ids[num_old:] == entry.new_block_ids
        if row.block_ids:
            assert entry.block_ids[:num_old] == row.block_ids, f"{entry} changes its table"
        else:
            assert num_old * self._block_size == start, f"{entry} has other prefix hits"
        row.block_ids = entry.block_ids
        row.extend_prefixes(end)
        for position in range(start, end):
            self._slots[self._slot(row, position)] = row.prefixes[position]
        row.num_computed = end

    def _attend(self, row: WorkerRow, entry: ScheduledRequest) -> None:
        for position in range(row.num_computed):
            held = self._slots.get(self._slot(row, position))
            assert held == row.prefixes[position], f"{entry}: wrong KV at position {position}"

    def _slot(self, row: WorkerRow, position: int) -> int:
        block_id = row.block_ids[position // self._block_size]
        return block_id * self._block_size + position % self._block_size

    def _sample(self, request_id: str) -> int:
        row = self.rows[request_id]
        position = row.num_computed - row.num_prompt
        token = sample_token(request_id, position, self._vocab_size)
        if row.num_computed == len(row.token_ids):
            row.token_ids.append(token)
        return token
