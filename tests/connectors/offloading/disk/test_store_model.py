"""A store behaves like a dictionary of slots, whatever is called in which order."""

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from longshore.connectors.base.checksum import block_checksum
from longshore.connectors.offloading.disk.results import BlockRead, BlockWrite, Outcome
from tests.connectors.offloading.disk.stores import SLOT_BYTES, content, flip, key, open_store
from tests.connectors.offloading.disk.stores import rank_directory as rank_directory_of

MAX_SLOTS = 12
NUMBERS = st.integers(0, 15)
SIZES = st.sampled_from([1, 4096, 5000, SLOT_BYTES])
BATCHES = st.lists(
    st.tuples(NUMBERS, st.integers(0, MAX_SLOTS - 1), SIZES),
    max_size=6,
    unique_by=(lambda block: block[0], lambda block: block[1]),
)


class StoreMachine(RuleBasedStateMachine):
    """entries: slot, content and whether it is damaged, by key, oldest first."""

    @initialize()
    def start(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="disk-store-"))
        self.entries: dict[bytes, tuple[int, bytes, bool]] = {}
        self.num_writes = 0
        self.num_slots = MAX_SLOTS
        self.store = open_store(self.path, num_slots=MAX_SLOTS)

    @rule(batch=BATCHES)
    def write(self, batch: list[tuple[int, int, int]]) -> None:
        blocks = []
        for number, slot, size in sorted(batch, key=lambda block: block[1]):
            if slot >= self.num_slots:
                continue
            self.num_writes += 1
            data = content(key(self.num_writes), size)
            checksum = block_checksum(data, self.store.identity_digest, key(number))
            blocks.append(BlockWrite(key(number), slot, data, checksum))
        assert self.store.write(blocks) == [Outcome.OK] * len(blocks)
        slots = {block.slot for block in blocks}
        keys = {block.key for block in blocks}
        self.entries = {
            k: entry for k, entry in self.entries.items() if k not in keys and entry[0] not in slots
        }
        for block in blocks:
            self.entries[block.key] = block.slot, bytes(block.buffer), False

    @rule(numbers=st.lists(NUMBERS, max_size=8))
    def read(self, numbers: list[int]) -> None:
        batch = []
        for number in numbers:
            slot, data, _ = self.entries.get(key(number), (0, b"x", False))
            batch.append(BlockRead(key(number), slot, np.empty(len(data), np.uint8)))
        outcomes = self.store.read(batch)
        for block, outcome in zip(batch, outcomes, strict=True):
            match self.entries.get(block.key):
                case None:
                    assert outcome is Outcome.MISSING
                case (_, _, True):
                    assert outcome is Outcome.CORRUPT
                case (_, data, _):
                    assert outcome is Outcome.OK
                    assert bytes(block.buffer) == data
        for k in {block.key for block in batch}:
            if k in self.entries and self.entries[k][2]:
                del self.entries[k]

    @rule(numbers=st.lists(NUMBERS, max_size=4))
    def delete(self, numbers: list[int]) -> None:
        self.store.delete([key(number) for number in numbers])
        for number in numbers:
            self.entries.pop(key(number), None)

    @rule(number=NUMBERS, position=st.integers(0, SLOT_BYTES - 1), bit=st.integers(0, 7))
    def damage(self, number: int, position: int, bit: int) -> None:
        if key(number) in self.entries:
            slot, data, damaged = self.entries[key(number)]
            if not damaged:
                segment = rank_directory_of(self.path) / "segment-000000.kv"
                flip(segment, slot * SLOT_BYTES + position % len(data), bit)
                self.entries[key(number)] = slot, data, True

    @rule(num_slots=st.integers(1, MAX_SLOTS))
    def restart(self, num_slots: int) -> None:
        self.store.close()
        self.store = open_store(self.path, num_slots=num_slots)
        self.num_slots = num_slots
        kept = list(self.entries)[-num_slots:]
        slots = dict(self.store.entries())
        for k in kept:
            slot, data, damaged = self.entries[k]
            assert slots[k] == slot or slot >= num_slots
            self.entries[k] = slots[k], data, damaged
        self.entries = {k: self.entries[k] for k in kept}

    @invariant()
    def the_entries_are_those_of_the_dictionary(self) -> None:
        wanted = [(k, slot) for k, (slot, _, _) in self.entries.items()]
        assert list(self.store.entries()) == wanted
        assert self.store.stats().num_entries == len(wanted)
        assert len({slot for _, slot in wanted}) == len(wanted)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.path)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=25)
