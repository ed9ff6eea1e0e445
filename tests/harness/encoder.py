"""What the workers' encoder does: it fills a cache of outputs by item, or blocks of a group that
rows read by cross attention."""

import zlib
from collections.abc import Iterable, Iterator, Sequence

from longshore.protocol.kv_cache_spec import CrossAttentionSpec, KVCacheSpec
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.requests import MultimodalFeature
from longshore.scheduler.config import SchedulerConfig
from tests.harness.memory import RankMemory


class EncoderOutputs:
    """Outputs by item hash, of models whose encoder replaces tokens of the prompt."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._budget = config.max_num_encoder_input_tokens
        self._capacity = config.encoder_cache_size
        self._num_tokens: dict[str, int] = {}

    def encode(self, freed_hashes: Iterable[str], items: Sequence[MultimodalFeature]) -> None:
        """Evict, then encode what a step asks for."""
        for item_hash in freed_hashes:
            assert item_hash in self._num_tokens, f"{item_hash} is evicted, but not there"
            del self._num_tokens[item_hash]
        assert sum(item.num_tokens for item in items) <= self._budget, "too much to encode"
        for item in items:
            assert item.hash not in self._num_tokens, f"{item.hash} is encoded twice"
            self._num_tokens[item.hash] = item.num_tokens
        capacity = self._budget if self._capacity is None else self._capacity
        assert sum(self._num_tokens.values()) <= capacity, "too many encoder outputs"

    def check_computed(self, items: Iterable[MultimodalFeature], first: int, last: int) -> None:
        """Positions [first, last) of a row are computed: the outputs for them are there."""
        for item in items:
            if item.offset < last and item.offset + item.num_tokens > first:
                assert item.hash in self._num_tokens, f"{item.hash} is computed, not encoded"


class CrossEncoder:
    """Encodes the one item of each row that a step adds, and no other, into the row's blocks."""

    def __init__(
        self, config: SchedulerConfig, specs: Sequence[KVCacheSpec], memory: list[RankMemory]
    ) -> None:
        self._budget = config.max_num_encoder_input_tokens
        self._specs = specs
        self._memory = memory

    def check_plan(self, plan: SchedulerOutput) -> None:
        """It encodes what it adds, within the budget."""
        assert plan.freed_encoder_hashes == ()
        assert plan.encoder_inputs == tuple((start.row, 0) for start in plan.added)
        self.check_budget([start.multimodal[0] for start in plan.added])

    def check_budget(self, items: Iterable[MultimodalFeature]) -> None:
        """What a step encodes."""
        assert sum(item.num_tokens for item in items) <= self._budget, "too much to encode"

    def encode(self, owner: str, item: MultimodalFeature, tables: Sequence[Sequence[int]]) -> None:
        """Fill the blocks of the new row of `owner`."""
        for block_id, offset, content in self._slots(owner, item, tables):
            for memory in self._memory:
                memory.write(block_id, offset, content)

    def check_read(
        self, owner: str, item: MultimodalFeature, tables: Sequence[Sequence[int]]
    ) -> None:
        """A scheduled row reads its own encoder output."""
        for block_id, offset, content in self._slots(owner, item, tables):
            for memory in self._memory:
                assert memory.read(block_id, offset) == content, f"{owner} reads others' output"

    def _slots(
        self, owner: str, item: MultimodalFeature, tables: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, int, int]]:
        """Everything in the blocks of the group, which are as many as the item needs."""
        for spec, table in zip(self._specs, tables, strict=True):
            if isinstance(spec, CrossAttentionSpec):
                size = spec.block_size
                assert len(table) == -(-item.num_tokens // size)
                for position in range(len(table) * size):
                    content = zlib.crc32(f"{owner} {item.hash} {position}".encode())
                    yield table[position // size], position % size, content
