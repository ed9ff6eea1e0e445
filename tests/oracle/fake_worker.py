"""A worker without a model: it keeps what each slot of the KV cache would hold, and refuses plans
that would attend to anything but the request's own prefix.

The token it samples depends on request and output position alone, so a request's whole output is
known in advance, however it is scheduled. Where a load failed, KV is tainted: it may be computed
on, but then tokens are wrong, and whoever delivers them is found out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final
from zlib import crc32

from longshore.protocol.kv_cache_spec import NULL_BLOCK, CrossAttentionSpec
from longshore.protocol.requests import MultimodalFeature
from longshore.scheduler.config import SchedulerConfig
from tests.oracle.plan import Answer, OraclePlan, ScheduledRequest

TAINTED: Final = "tainted"
REJECTED: Final = "rejected"


def sample_token(token_key: str, position: int, vocab_size: int) -> int:
    """The output token of a request at an output position (0 is the first). The key is the
    request's id, and another one for each further output of a session."""
    digest = blake2b(f"{token_key}/{position}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % vocab_size


def propose_token(token_key: str, position: int, vocab_size: int) -> int:
    """The draft for an output position: right three times in four, or by luck."""
    token = sample_token(token_key, position, vocab_size)
    is_wrong = crc32(f"{token_key}?{position}".encode()) % 4 == 0
    return (token + 1) % vocab_size if is_wrong else token


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
    root:          what the KV depends on beside tokens: salt and adapter.
    items:         multimodal items.
    prefixes:      per computed or hit position, the identity of the prefix that ends there.
    """

    token_key: str
    num_prompt: int
    last_computed: int
    token_ids: list[int]
    root: str = ""
    items: tuple[MultimodalFeature, ...] = ()
    lora_name: str | None = None
    is_pooling: bool = False
    num_known: int = field(init=False)
    num_computed: int = 0
    block_ids: tuple[int, ...] = ()
    heard_block_ids: tuple[int, ...] = ()
    prefixes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_known = len(self.token_ids)

    def extend_prefixes(self, num_tokens: int) -> None:
        """Fill `prefixes` up to `num_tokens` positions."""
        for position in range(len(self.prefixes), num_tokens):
            before = self.prefixes[-1] if self.prefixes else crc32(self.root.encode())
            self.prefixes.append(hash((before, self.token_ids[position], self._item_at(position))))

    def _item_at(self, position: int) -> str | None:
        for item in self.items:
            if item.offset <= position < item.offset + item.num_tokens:
                return item.hash
        return None


class FakeWorker:
    """Executes plans in order; every broken promise is an AssertionError.

    num_blocks: with the null block.
    cross:      it has an encoder, whose outputs it keeps so in blocks of rows.
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
        self._cross = cross
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._last_step = 0
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """A new process: nothing is left of the old one."""
        self.rows: dict[str, WorkerRow] = {}
        self._slots: dict[int, int | str] = {}  # the prefix whose last token's KV it holds
        self._encoder_outputs: dict[str, int] = {}  # tokens by hash
        self._heard: dict[int, tuple[str, int]] = {}  # by block: of whom, and which part

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
            self._encode(plan)
        else:
            self._hear(plan, self._cross)
        tokens: dict[str, tuple[int, ...]] = {}
        for entry in plan.scheduled:
            tokens[entry.request_id] = self._write(self.rows[entry.request_id], entry)
        for entry in plan.scheduled:  # reads come after all writes of the step, layer by layer
            self._attend(self.rows[entry.request_id], entry)
        sampled = {id_: tokens[id_] for id_ in plan.sampling}
        return Answer(
            plan.step,
            tokens=sampled,
            drafts={id_: drafts for id_ in sampled if (drafts := self._propose(id_))},
            pooled={id_: self._pool(id_) for id_ in sampled if self.rows[id_].is_pooling},
        )

    def write_load(
        self,
        block_ids: tuple[int, ...],
        prefixes: Mapping[int, int],
        failed_block_ids: Iterable[int],
    ) -> None:
        """KV comes from elsewhere. prefixes: by position."""
        for position, prefix in prefixes.items():
            block_id = block_ids[position // self._block_size]
            slot = block_id * self._block_size + position % self._block_size
            self._slots[slot] = TAINTED if block_id in failed_block_ids else prefix

    def _change_rows(self, plan: OraclePlan, fresh: Mapping[str, WorkerRow]) -> None:
        for request_id in (*plan.finished, *plan.preempted):
            assert self.rows.pop(request_id, None), f"{request_id} is dropped without a row"
        for request_id, num_computed in plan.rewound:
            old = self.rows[request_id]
            row = fresh[request_id]
            row.num_computed = num_computed
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

    def _encode(self, plan: OraclePlan) -> None:
        for hash_ in plan.freed_hashes:
            assert self._encoder_outputs.pop(hash_, None), f"{hash_} is freed, but not there"
        num_encoded = 0
        for request_id, index in plan.encoder_inputs:
            item = self.rows[request_id].items[index]
            assert item.hash not in self._encoder_outputs, f"{item} is encoded twice"
            self._encoder_outputs[item.hash] = item.num_tokens
            num_encoded += item.num_tokens
        assert num_encoded <= self._config.max_num_encoder_input_tokens, "too much to encode"
        capacity = self._config.encoder_cache_size
        if capacity is None:
            capacity = self._config.max_num_encoder_input_tokens
        assert sum(self._encoder_outputs.values()) <= capacity, "too many encoder outputs"

    def _hear(self, plan: OraclePlan, cross: CrossAttentionSpec) -> None:
        """Whoever takes a row is heard in this step, and nobody else."""
        assert not plan.freed_hashes
        admitted = [admission.request_id for admission in plan.admitted]
        assert plan.encoder_inputs == tuple((request_id, 0) for request_id in sorted(admitted))
        assert [request_id for request_id, _ in plan.heard_tables] == admitted
        num_encoded = 0
        for request_id, block_ids in plan.heard_tables:
            row = self.rows[request_id]
            row.heard_block_ids = block_ids
            assert len(block_ids) == -(-row.items[0].num_tokens // cross.block_size)
            num_encoded += row.items[0].num_tokens
            for part, block_id in enumerate(block_ids):
                assert NULL_BLOCK < block_id < self._num_blocks
                self._heard[block_id] = (row.token_key, part)
                for offset in range(self._block_size):
                    self._slots.pop(block_id * self._block_size + offset, None)
        assert num_encoded <= self._config.max_num_encoder_input_tokens, "too much to encode"

    def _write(self, row: WorkerRow, entry: ScheduledRequest) -> tuple[int, ...]:
        start, end = row.num_computed, row.num_computed + entry.num_tokens
        num_new = end - len(entry.drafts)
        assert entry.num_tokens > len(entry.drafts), f"{entry} computes nothing"
        assert end <= row.last_computed, f"{entry} computes beyond its last token"
        assert num_new <= len(row.token_ids), f"{entry} computes a token nobody sampled"
        assert not entry.drafts or num_new == len(row.token_ids), f"{entry} has a gap"
        assert entry.samples == (end >= row.num_known), f"{entry} samples wrongly"
        for item in row.items if self._cross is None else ():
            if item.offset < end and item.offset + item.num_tokens > start:
                assert item.hash in self._encoder_outputs, f"{item} is not encoded"
        self._check_table(row, entry, end)
        row.block_ids = entry.block_ids
        sampled = self._sample(row, start, num_new, entry)
        row.num_computed = num_new + max(len(sampled) - 1, 0)
        row.extend_prefixes(row.num_computed)
        is_tainted = self._is_tainted(row, start)
        for position in range(start, end):
            is_right = position < row.num_computed
            content = row.prefixes[position] if is_right else REJECTED
            self._slots[self._slot(row, position)] = TAINTED if is_tainted else content
            self._heard.pop(row.block_ids[position // self._block_size], None)
        return sampled

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
        self, row: WorkerRow, start: int, num_new: int, entry: ScheduledRequest
    ) -> tuple[int, ...]:
        """The tokens that the step brings: drafts as far as they are right, and one more."""
        if row.is_pooling or not entry.samples:
            return ()
        sampled: list[int] = []
        for index in range(len(entry.drafts) + 1):
            position = num_new + index - row.num_prompt
            token = sample_token(row.token_key, position, self._vocab_size)
            if self._is_tainted(row, start):
                token = (token + 1) % self._vocab_size
            sampled.append(token)
            if index == len(entry.drafts):
                break
            draft = entry.drafts[index]
            if draft == -1:
                draft = propose_token(row.token_key, position, self._vocab_size)
            if draft != token:
                break
        if num_new == len(row.token_ids):
            row.token_ids += sampled
        return tuple(sampled)

    def _is_tainted(self, row: WorkerRow, start: int) -> bool:
        return any(self._slots.get(self._slot(row, p)) is TAINTED for p in range(start))

    def _attend(self, row: WorkerRow, entry: ScheduledRequest) -> None:
        for position in range(row.num_computed):
            held = self._slots.get(self._slot(row, position))
            is_known = held is TAINTED or held == row.prefixes[position]
            assert is_known, f"{entry}: wrong KV at position {position}"
        for part, block_id in enumerate(row.heard_block_ids):
            assert self._heard.get(block_id) == (row.token_key, part), f"{entry} hears others"

    def _slot(self, row: WorkerRow, position: int) -> int:
        block_id = row.block_ids[position // self._block_size]
        return block_id * self._block_size + position % self._block_size

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

    def _pool(self, request_id: str) -> tuple[float, ...]:
        row = self.rows[request_id]
        is_tainted = self._is_tainted(row, row.num_computed)
        return (-1.0,) if is_tainted else pooled_vector(request_id)
