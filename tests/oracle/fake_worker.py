"""A worker without a model, which rejects plans that would attend to anything but the request's own
prefix.

It has the memory, the encoder and the tokens of tests/harness, but executes an `OraclePlan`: the
textbook scheduler makes no messages of the protocol, has no rows, and its worker learns the tokens
of an admitted request from the driver. Where a load failed, KV is invalid: it may be computed on,
but then tokens are wrong, and the driver finds them when they are delivered.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from zlib import crc32

from longshore.protocol.kv_cache_spec import NULL_BLOCK, CrossAttentionSpec
from longshore.scheduler.config import SchedulerConfig
from tests.harness.encoder import CrossEncoder, EncoderOutputs
from tests.harness.kv_cache import FakeKVCache, RowWork
from tests.harness.kv_groups import full
from tests.harness.tokens import Content, Prefixes, propose_token, sample_token
from tests.harness.transfers import Load
from tests.oracle.plan import Answer, OraclePlan, ScheduledRequest

INVALID = -1
"""What a failed load leaves in its blocks."""


def pooled_vector(request_id: str) -> tuple[float, ...]:
    """What a request for a vector gets."""
    return (float(crc32(request_id.encode()) % 1000), 0.5)


@dataclass
class WorkerRow:
    """What the worker knows of one running request.

    token_key:     see `sample_token`.
    num_prompt:    prompt tokens, from which output positions count.
    last_computed: tokens that may be computed at most; the last one is only sampled.
    token_ids:     prompt, outputs known at admission, then what was sampled since.
    content:       what its KV depends on beside tokens.
    prefixes:      the KV of its positions.
    """

    token_key: str
    num_prompt: int
    last_computed: int
    token_ids: list[int]
    content: Content = field(default_factory=Content)
    lora_name: str | None = None
    is_pooling: bool = False
    num_known: int = field(init=False)
    num_computed: int = 0
    block_ids: tuple[int, ...] = ()
    encoder_block_ids: tuple[int, ...] = ()
    prefixes: Prefixes = field(init=False)

    def __post_init__(self) -> None:
        self.num_known = len(self.token_ids)
        self.prefixes = Prefixes(self.content)


class FakeWorker:
    """Executes plans in order; every broken promise is an AssertionError.

    num_blocks: with the null block.
    cross:      it has an encoder, whose outputs it keeps like this in blocks of rows.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        block_size: int,
        num_blocks: int,
        vocab_size: int,
        cross: CrossAttentionSpec | None = None,
    ) -> None:
        self._config = config
        self._specs = (full(block_size),) if cross is None else (full(block_size), cross)
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._last_step = 0
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """A new process: nothing is left of the old one."""
        self.rows: dict[str, WorkerRow] = {}
        self._kv_cache = FakeKVCache(self._specs, num_ranks=1)
        self._encoder_outputs = EncoderOutputs(self._config)
        self._cross: CrossEncoder | None = None
        if len(self._specs) > 1:
            self._cross = CrossEncoder(self._config, self._specs, self._kv_cache.memory)

    def execute(self, plan: OraclePlan, fresh: Mapping[str, WorkerRow]) -> Answer:
        """Run one step; return what it brings.

        fresh: a row for each request that the plan admits or rewinds, with its tokens so far.
        """
        assert plan.step == self._last_step + 1, f"step {plan.step} follows {self._last_step}"
        self._last_step = plan.step
        self._change_rows(plan, fresh)
        total = sum(entry.num_tokens for entry in plan.scheduled)
        assert total <= self._config.token_budget, f"{total} tokens are over the budget"
        self._check_order(plan)
        if self._cross is None:
            items = [self.rows[id_].content.items[index] for id_, index in plan.encoder_inputs]
            self._encoder_outputs.encode(plan.freed_hashes, items)
        else:
            self._encode_added(plan, self._cross)
        drafts = {entry.request_id: self._drafts_of(entry) for entry in plan.scheduled}
        work = {
            entry.request_id: self._begin(entry, drafts[entry.request_id])
            for entry in plan.scheduled
        }
        # The driver sees wrong tokens of rows that read invalid KV, whenever that is reported.
        invalid = self._kv_cache.compute(work, step=plan.step, answered_step=-1, nan_rows=set())
        tokens = {
            entry.request_id: self._sample(
                entry, drafts[entry.request_id], is_invalid=entry.request_id in invalid
            )
            for entry in plan.scheduled
        }
        sampled = {id_: tokens[id_] for id_ in plan.sampling}
        return Answer(
            plan.step,
            tokens=sampled,
            drafts={id_: proposed for id_ in sampled if (proposed := self._propose(id_))},
            pooled={
                id_: (-1.0,) if id_ in invalid else pooled_vector(id_)
                for id_ in sampled
                if self.rows[id_].is_pooling
            },
        )

    def write_load(self, load: Load, failed_block_ids: tuple[int, ...]) -> None:
        """KV comes from elsewhere."""
        self._kv_cache.load(load, set(failed_block_ids), junk=INVALID)

    def _change_rows(self, plan: OraclePlan, fresh: Mapping[str, WorkerRow]) -> None:
        for request_id in (*plan.finished, *plan.preempted):
            assert self.rows.pop(request_id, None), f"{request_id} is dropped without a row"
        for request_id, num_computed in plan.rewound:
            old = self.rows[request_id]
            row = fresh[request_id]
            row.num_computed = num_computed
            row.encoder_block_ids = old.encoder_block_ids
            row.block_ids = old.block_ids[: -(-num_computed // self._block_size)]
            self.rows[request_id] = row
        for admission in plan.admitted:
            assert admission.request_id not in self.rows, f"{admission} has a row already"
            row = fresh[admission.request_id]
            row.num_computed = admission.num_cached_tokens
            assert row.num_computed < len(row.token_ids), f"{admission} has nothing to compute"
            self.rows[admission.request_id] = row
        assert len(self.rows) <= self._config.max_num_seqs, f"{len(self.rows)} rows are held"
        names = {row.lora_name for row in self.rows.values()} - {None}
        assert len(names) <= self._config.max_loras, f"{names} are too many adapters"

    def _check_order(self, plan: OraclePlan) -> None:
        request_ids = [entry.request_id for entry in plan.scheduled]
        in_admission_order = [id_ for id_ in self.rows if id_ in request_ids]
        assert request_ids == in_admission_order, f"{request_ids} are out of order"
        admitted = {admission.request_id for admission in plan.admitted}
        assert admitted <= set(request_ids), "a request is admitted without tokens"

    def _encode_added(self, plan: OraclePlan, cross: CrossEncoder) -> None:
        """Each admitted request's item is encoded in this step, and no other."""
        assert not plan.freed_hashes
        admitted = [admission.request_id for admission in plan.admitted]
        assert plan.encoder_inputs == tuple((request_id, 0) for request_id in sorted(admitted))
        assert [request_id for request_id, _ in plan.encoder_tables] == admitted
        rows = [self.rows[request_id] for request_id in admitted]
        cross.check_budget([row.content.items[0] for row in rows])
        for row, (_, block_ids) in zip(rows, plan.encoder_tables, strict=True):
            assert all(NULL_BLOCK < block_id < self._num_blocks for block_id in block_ids)
            row.encoder_block_ids = block_ids
            cross.encode(row.token_key, row.content.items[0], ((), block_ids))

    def _drafts_of(self, entry: ScheduledRequest) -> list[int]:
        """The drafts that the step verifies; -1 stands for the worker's own proposal."""
        row = self.rows[entry.request_id]
        first = row.num_computed + entry.num_tokens - len(entry.drafts) - row.num_prompt
        return [
            propose_token(row.token_key, first + index, self._vocab_size) if draft == -1 else draft
            for index, draft in enumerate(entry.drafts)
        ]

    def _begin(self, entry: ScheduledRequest, drafts: list[int]) -> RowWork:
        row = self.rows[entry.request_id]
        start, end = row.num_computed, row.num_computed + entry.num_tokens
        num_new = end - len(drafts)
        assert entry.num_tokens > len(drafts), f"{entry} computes nothing"
        assert end <= row.last_computed, f"{entry} computes beyond its last token"
        assert num_new <= len(row.token_ids), f"{entry} computes a token that was not sampled"
        assert not drafts or num_new == len(row.token_ids), f"{entry} has a gap"
        assert entry.samples == (end >= row.num_known), f"{entry} samples wrongly"
        if self._cross is None:
            self._encoder_outputs.check_computed(row.content.items, start, end)
        else:
            tables = ((), row.encoder_block_ids)
            self._cross.check_read(row.token_key, row.content.items[0], tables)
        self._check_table(row, entry, end)
        row.block_ids = entry.block_ids
        known = row.prefixes.up_to(num_new, row.token_ids)[:num_new]
        prefixes = Prefixes(row.content, known).up_to(end, [*row.token_ids[:num_new], *drafts])
        tables = (row.block_ids, row.encoder_block_ids)[: len(self._specs)]
        return RowWork(entry.request_id, start, end, tables, prefixes)

    def _check_table(self, row: WorkerRow, entry: ScheduledRequest, end: int) -> None:
        num_slots = len(entry.block_ids) * self._block_size
        assert end <= num_slots < self._config.max_model_len + self._block_size, f"{entry}: slots"
        assert all(NULL_BLOCK < id_ < self._num_blocks for id_ in entry.block_ids)
        num_old = len(entry.block_ids) - len(entry.new_block_ids)
        assert entry.block_ids[num_old:] == entry.new_block_ids
        if row.block_ids:
            assert entry.block_ids[:num_old] == row.block_ids, f"{entry} changes its table"
        else:
            assert num_old == row.num_computed // self._block_size, f"{entry} has other hits"

    def _sample(
        self, entry: ScheduledRequest, drafts: list[int], *, is_invalid: bool
    ) -> tuple[int, ...]:
        """The tokens that the step brings: drafts as far as they are right, and one more."""
        row = self.rows[entry.request_id]
        num_new = row.num_computed + entry.num_tokens - len(drafts)
        row.num_computed = num_new
        if row.is_pooling or not entry.samples:
            return ()
        sampled: list[int] = []
        for index in range(len(drafts) + 1):
            position = num_new + index - row.num_prompt
            token = sample_token(row.token_key, position, self._vocab_size)
            if is_invalid:
                token = (token + 1) % self._vocab_size
            sampled.append(token)
            if index == len(drafts) or drafts[index] != token:
                break
        if num_new == len(row.token_ids):
            row.token_ids += sampled
        row.num_computed += len(sampled) - 1
        return tuple(sampled)

    def _propose(self, request_id: str) -> tuple[int, ...]:
        """Drafts for the next positions."""
        if self._config.num_speculative_tokens == 0 or self._config.max_steps_in_flight > 1:
            return ()
        row = self.rows[request_id]
        if row.is_pooling:
            return ()
        first = len(row.token_ids) - row.num_prompt
        num_drafts = crc32(f"{row.token_key}#{first}".encode()) % (
            self._config.num_speculative_tokens + 1
        )
        return tuple(
            propose_token(row.token_key, first + index, self._vocab_size)
            for index in range(num_drafts)
        )
