"""TieredManager: what it plans, carried out on slots of which each knows what it contains.

The model knows nothing of ledgers. It holds what every rank has in every slot, and which slots are
read or written right now: a slot that is written is in no other use, a slot that is read has the
block that the plan names until the read has ended.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from longshore.connectors.base import ConnectorConfig
from longshore.connectors.offloading.disk_tier import CLEAR, DiskContents
from longshore.connectors.offloading.ledger import OffloadLedger
from longshore.connectors.offloading.options import read_options
from longshore.connectors.offloading.policies.lru import LRU
from longshore.connectors.offloading.spec import load_spec
from longshore.connectors.offloading.spilling import MAX_SPILLING_SHARE
from longshore.connectors.offloading.tiered_manager import TieredManager
from longshore.connectors.offloading.tiers import (
    HOST_KEPT,
    HOST_NEW,
    HOST_TIER,
    LoadSource,
    Spill,
    Stage,
    TierCommand,
    TierMessage,
    TierTask,
)
from longshore.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored
from longshore.scheduler.kv_cache.block_pool import BlockPool
from tests.harness.kv_groups import full

NUM_CHAINS = 3
CHAIN_LENGTH = 6
KINDS = ["store", "load", "spill", "stage", "clear"]

Slot = tuple[str, int]
"""Tier ("host" or "disk") and slot."""


def make_manager(
    num_slots: int, *, num_ranks: int = 1, has_disk: bool = True, **options: Any
) -> TieredManager:
    """Blocks have one byte per rank."""
    if has_disk:
        options |= {"disk_path": "unused", "disk_bytes": 1 << 20}
    config = ConnectorConfig(
        {"cpu_bytes_to_use": num_slots * num_ranks} | options,
        specs=(full(4),),
        hash_block_size=4,
        num_ranks=num_ranks,
        rank_block_bytes=(1,) * num_ranks,
    )
    manager = load_spec(config, read_options(config.options)).make_manager()
    assert isinstance(manager, TieredManager)
    return manager


def said(contents: DiskContents) -> bytes:
    """As the disk tier of a rank says it."""
    return msgspec.msgpack.encode(TierMessage(0, msgspec.msgpack.encode(contents)))


def keys_of(chain: int, first: int, last: int) -> list[bytes]:
    return [bytes((chain, position, 0)) for position in range(first, last)]


def int64s(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int64).tolist()


@dataclass
class Copy:
    """Copies in progress. reads, writes: the slots that they use, by key."""

    keys: list[bytes]
    reads: dict[bytes, Slot] = field(default_factory=dict)
    writes: dict[bytes, Slot] = field(default_factory=dict)
    job_id: int = 0


class Slots:
    """The slots of all ranks.

    contents: by slot, what each rank has there.
    """

    def __init__(self, num_ranks: int, num_host: int, num_disk: int) -> None:
        self.num_ranks = num_ranks
        self.sizes = {"host": num_host, "disk": num_disk}
        self.contents: dict[Slot, list[bytes | None]] = {}
        self.readers: Counter[Slot] = Counter()
        self.writers: set[Slot] = set()

    def begin(self, copy: Copy) -> None:
        for key, slot in copy.writes.items():
            assert 0 <= slot[1] < self.sizes[slot[0]], key
            assert slot not in self.writers, f"{slot} is written twice at a time"
            assert not self.readers[slot], f"{slot} is written while it is read"
            self.writers.add(slot)
            self._clear(slot, key)
        for key, slot in copy.reads.items():
            assert slot not in self.writers, f"{slot} is read while it is written"
            assert self.contents[slot] == [key] * self.num_ranks, f"{slot} does not have {key!r}"
            self.readers[slot] += 1

    def _clear(self, slot: Slot, key: bytes) -> None:
        """A store on disk has one entry per slot and one per key."""
        self.contents[slot] = [None] * self.num_ranks
        for other, contents in self.contents.items():
            if slot[0] == other[0] == "disk":
                self.contents[other] = [None if each == key else each for each in contents]

    def end(self, copy: Copy, failed: dict[bytes, int]) -> None:
        """failed: keys that one rank could not copy, and the rank."""
        for key, slot in copy.reads.items():
            assert self.contents[slot] == [key] * self.num_ranks
            self.readers[slot] -= 1
        for key, slot in copy.writes.items():
            self.writers.remove(slot)
            self.contents[slot] = [key] * self.num_ranks
            if key in failed:
                self.contents[slot][failed[key]] = None
        for key in failed:
            slot = copy.reads.get(key, ("", 0))
            if slot[0] == "disk" and not self.readers[slot]:  # the store deletes a damaged entry
                self.contents[slot][failed[key]] = None

    def clear_disk(self) -> None:
        for slot in self.contents:
            if slot[0] == "disk":
                self.contents[slot] = [None] * self.num_ranks

    def clear_host(self, rank: int) -> None:
        for slot, contents in self.contents.items():
            if slot[0] == "host":
                contents[rank] = None

    def have(self, key: bytes) -> bool:
        """Whether a tier may contain the block."""
        return [key] * self.num_ranks in self.contents.values()


class Model(RuleBasedStateMachine):
    @initialize(
        num_host=st.integers(2, 9),
        num_disk=st.integers(1, 24),
        num_ranks=st.integers(1, 3),
        policy=st.sampled_from(["lru", "arc"]),
        threshold=st.sampled_from([0, 0, 0, 2]),
        write_policy=st.sampled_from(["through", "back"]),
        prefetch=st.sampled_from(["wait", "best_effort"]),
        is_quick=st.booleans(),
    )
    def begin(
        self,
        num_host: int,
        num_disk: int,
        num_ranks: int,
        policy: str,
        threshold: int,
        write_policy: str,
        prefetch: str,
        is_quick: bool,
    ) -> None:
        self.manager = make_manager(
            num_host,
            num_ranks=num_ranks,
            eviction_policy=policy,
            store_threshold=threshold,
            write_policy=write_policy,
            prefetch=prefetch,
        )
        self.num_queued = 0
        self.is_exclusive = write_policy == "back"
        self.slots = Slots(num_ranks, num_host, num_disk)
        self.copies: dict[str, list[Copy]] = {kind: [] for kind in KINDS}
        self.job_ids = count(1)
        self._begin_contents()
        if is_quick:
            self._say(list(range(num_ranks)))

    def _begin_contents(self) -> None:
        """Every rank says what is in its slots on disk, in messages of two entries."""
        self.num_found = 0
        self.to_say: list[list[bytes]] = []
        for rank in range(self.slots.num_ranks):
            found = [
                (contents[rank], slot)
                for (tier, slot), contents in self.slots.contents.items()
                if tier == "disk" and contents[rank] is not None
            ]
            self.num_found += len(found)
            parts = [found[first : first + 2] for first in range(0, max(len(found), 1), 2)]
            self.to_say.append(
                [
                    said(
                        DiskContents(
                            self.slots.sizes["disk"],
                            [key for key, _ in part if key is not None],
                            np.array([slot for _, slot in part], np.int64).tobytes(),
                            is_last=part is parts[-1],
                        )
                    )
                    for part in parts
                ]
            )

    @rule(data=st.data())
    def ranks_say_what_they_have(self, data: st.DataObject) -> None:
        ranks = [rank for rank, messages in enumerate(self.to_say) for _ in messages]
        self._say(data.draw(st.permutations(ranks))[: data.draw(st.integers(1, 20))])

    def _say(self, ranks: list[int]) -> None:
        for rank in ranks:
            self.manager.receive(rank, self.to_say[rank].pop(0))

    @property
    def knows_disk(self) -> bool:
        return not any(self.to_say)

    # Requests

    @rule(
        chain=st.integers(0, NUM_CHAINS - 1),
        first=st.sampled_from([0, 0, 0, 1, 4]),
        length=st.integers(1, CHAIN_LENGTH),
    )
    def a_request_loads(self, chain: int, first: int, length: int) -> None:
        """Whatever can be looked up can be loaded, unless host memory is full of blocks in use."""
        keys = keys_of(chain, first, min(first + length, CHAIN_LENGTH))
        self.manager.touch(keys, first)
        num_found = self.manager.lookup(keys)
        assert num_found == self.manager.lookup(keys)
        if num_found is None:
            assert not self.knows_disk or not self.being_written.isdisjoint(keys)
            return
        keys = keys[:num_found]
        assert all(map(self.slots.have, keys))
        if not keys:
            return
        while too_many := self.manager.num_without_room(keys):
            assert self.num_in_use + len(keys) > self.slots.sizes["host"]
            keys = keys[: len(keys) - too_many]
        prepared = self.manager.prepare_load(keys)
        source = msgspec.msgpack.decode(prepared.tier_data, type=LoadSource)
        slots = int64s(source.slots)
        assert prepared.num_keys == len(slots) == len(keys)
        reads = {index: slot for index, _, slot in source.reads}
        copy = Copy(keys[: len(slots)])
        for index, (key, slot) in enumerate(zip(copy.keys, slots, strict=True)):
            if index in reads:
                copy.reads[key] = "disk", reads[index]
                copy.writes[key] = "host", slot
            else:
                copy.reads[key] = "host", slot
        self.slots.begin(copy)
        self.copies["load"] += [copy] if copy.keys else []

    @rule(chain=st.integers(0, NUM_CHAINS - 1), length=st.integers(1, CHAIN_LENGTH))
    def a_request_is_queued(self, chain: int, length: int) -> None:
        """Its blocks are read ahead."""
        self.num_queued += 1
        keys = keys_of(chain, 0, length)
        self.manager.touch(keys)
        self.manager.read_ahead(f"r{self.num_queued}", keys)

    @rule(number=st.integers(1, 20), is_over=st.booleans())
    def a_queued_request_begins_or_ends(self, number: int, is_over: bool) -> None:
        self.manager.end_read_ahead(f"r{number}", is_over=is_over)

    @property
    def num_in_use(self) -> int:
        """Slots of host memory that no store can take."""
        used = {slot for slot, readers in self.slots.readers.items() if readers}
        return sum(tier == "host" for tier, _ in used | self.slots.writers)

    @property
    def being_written(self) -> set[bytes]:
        copies = [copy for copies in self.copies.values() for copy in copies]
        return {key for copy in copies for key, slot in copy.writes.items() if slot[0] == "host"}

    @rule(
        chain=st.integers(0, NUM_CHAINS - 1),
        first=st.sampled_from([0, 0, 0, 2]),
        length=st.integers(1, CHAIN_LENGTH),
    )
    def a_request_stores(self, chain: int, first: int, length: int) -> None:
        keys = keys_of(chain, first, min(first + length, CHAIN_LENGTH))
        in_use = self.num_in_use
        prepared = self.manager.prepare_store(keys, first)
        if prepared is None:
            assert in_use + len(keys) > self.slots.sizes["host"]
            return
        wanted = [keys[index] for index in prepared.indices]
        slots = int64s(prepared.tier_data)
        assert len(slots) == len(wanted) == len(set(wanted))
        if wanted:
            copy = Copy(wanted)
            copy.writes = {key: ("host", slot) for key, slot in zip(wanted, slots, strict=True)}
            self.slots.begin(copy)
            self.copies["store"].append(copy)

    @rule()
    def a_plan_is_made(self) -> None:
        had_jobs = self.manager.has_jobs
        jobs = self.manager.take_jobs(lambda: next(self.job_ids))
        assert had_jobs or not jobs
        assert not self.manager.has_jobs
        self.manager.end_step()
        for job in jobs:
            spill = msgspec.msgpack.decode(job.tier_data, type=TierTask)
            if isinstance(spill, Stage):
                copy = Copy(spill.keys, job_id=job.job_id)
                slots = zip(int64s(spill.host_slots), int64s(spill.slots), strict=True)
                for key, (target, source) in zip(spill.keys, slots, strict=True):
                    copy.reads[key] = "disk", source
                    copy.writes[key] = "host", target
                self.slots.begin(copy)
                self.copies["stage"].append(copy)
                continue
            if isinstance(spill, TierCommand):
                self.copies["clear"].append(Copy([], job_id=job.job_id))
                self.slots.clear_disk()  # before what is written there from now on
                continue
            copy = Copy(spill.keys, job_id=job.job_id)
            assert spill.groups == bytes(len(spill.keys))
            host, disk = int64s(spill.host_slots), int64s(spill.slots)
            for key, source, target in zip(spill.keys, host, disk, strict=True):
                copy.reads[key] = "host", source
                copy.writes[key] = "disk", target
            self.slots.begin(copy)
            self.copies["spill"].append(copy)

    # Ends

    @rule(kind=st.sampled_from(KINDS), data=st.data())
    def a_copy_ends(self, kind: str, data: st.DataObject) -> None:
        if self.copies[kind]:
            index = data.draw(st.integers(0, len(self.copies[kind]) - 1))
            keys = self.copies[kind][index].keys
            chosen = data.draw(st.one_of(st.just(set()), st.sets(st.integers(0, CHAIN_LENGTH))))
            failed = [key for at, key in enumerate(keys) if at in chosen]
            rank = data.draw(st.integers(0, self.slots.num_ranks - 1))
            self._end(kind, index, dict.fromkeys(failed, rank))

    def _end(self, kind: str, index: int, failed: dict[bytes, int]) -> None:
        copy = self.copies[kind].pop(index)
        self.slots.end(copy, failed)
        keys = list(failed)
        match kind:
            case "store":
                self.manager.complete_store(copy.keys, keys)
            case "load":
                self.manager.complete_load(copy.keys, keys)
                if self.manager.lookup(keys) is not None:
                    assert self.manager.lookup(keys) == 0 or not keys
            case _:
                self.manager.job_ended(copy.job_id, sorted(map(copy.keys.index, keys)))

    @rule()
    def all_copies_end(self) -> None:
        """So that blocks get to the disk and out of host memory."""
        while any(self.copies.values()) or self.manager.has_jobs:
            for kind, copies in self.copies.items():
                while copies:
                    self._end(kind, 0, {})
            self.a_plan_is_made()

    @rule(chance=st.integers(0, 9))
    def everything_is_evicted(self, chance: int) -> None:
        if chance:
            return
        is_idle = self.manager.reset()
        assert is_idle != any(self.copies.values())
        if is_idle:
            for chain in range(NUM_CHAINS):
                assert self.manager.lookup(keys_of(chain, 0, CHAIN_LENGTH)) in (0, None)

    @rule(seed=st.integers(0, 199))
    def the_workers_are_replaced(self, seed: int) -> None:
        """What was being written to disk is there or not, rank by rank. Host memory is kept, or
        lost on one rank."""
        if seed > 20:
            return
        chance = random.Random(seed)
        for copy in self.copies["spill"]:
            for key, slot in copy.writes.items():
                self.slots.contents[slot] = [
                    chance.choice([key, None]) for _ in range(self.slots.num_ranks)
                ]
        self.slots.readers.clear()
        self.slots.writers.clear()
        self.copies = {kind: [] for kind in KINDS}
        self.manager.begin_epoch()
        self.is_exclusive = False  # the disk may have what was taken from it
        self._begin_contents()
        lost = chance.choice([None, *range(self.slots.num_ranks)])
        for rank, messages in enumerate(self.to_say):
            host = TierMessage(HOST_TIER, HOST_NEW if rank == lost else HOST_KEPT)
            messages.insert(0, msgspec.msgpack.encode(host))
        if lost is not None:
            self.slots.clear_host(lost)

    # What must hold

    @invariant()
    @precondition(lambda self: hasattr(self, "manager"))
    def the_ledgers_agree(self) -> None:
        self.manager.check()

    @invariant()
    @precondition(lambda self: hasattr(self, "manager"))
    def a_block_is_in_one_tier_with_write_back(self) -> None:
        if self.is_exclusive:
            host, disk = self.manager._host, self.manager._below[0].tier
            chains = (keys_of(chain, 0, CHAIN_LENGTH) for chain in range(NUM_CHAINS))
            assert not any(key in host and disk.has(key) for keys in chains for key in keys)

    @invariant()
    @precondition(lambda self: hasattr(self, "manager"))
    def few_blocks_are_being_written_to_disk(self) -> None:
        num_spilling = sum(len(copy.keys) for copy in self.copies["spill"])
        assert num_spilling <= max(1, int(MAX_SPILLING_SHARE * self.slots.sizes["host"]))

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.all_copies_end()
        self.manager.check()
        assert self.manager.reset(), "something is pinned or in flight"


TestModel = pytest.mark.req("OFF-03", "OFF-05", "OFF-06", "OFF-07", "TIE-03")(Model.TestCase)
TestModel.settings = settings(max_examples=150, stateful_step_count=100, deadline=None)


def play(seed: int, num_actions: int = 1500) -> Counter[str]:
    """One long random run; how many blocks were copied, by kind."""
    chance = random.Random(seed)
    model = Model()
    model.begin(
        num_host=chance.randrange(2, 16),
        num_disk=chance.randrange(1, 30),
        num_ranks=chance.randrange(1, 4),
        policy=chance.choice(["lru", "arc"]),
        threshold=chance.choice([0, 0, 2]),
        write_policy=chance.choice(["through", "back"]),
        prefetch=chance.choice(["wait", "best_effort"]),
        is_quick=True,
    )
    seen: Counter[str] = Counter()
    for _ in range(num_actions):
        prefix = chance.randrange(NUM_CHAINS), chance.choice([0, 0, 0, 2])
        length = chance.randrange(1, CHAIN_LENGTH + 1)
        match chance.choices(
            ["load", "store", "plan", "end", "all", "rare", "queue"], [8, 8, 8, 16, 1, 1, 6]
        )[0]:
            case "load":
                model.a_request_loads(*prefix, length)
            case "store":
                model.a_request_stores(*prefix, length)
            case "plan":
                model.a_plan_is_made()
            case "end":
                kind = chance.choice(list(model.copies))
                if model.copies[kind]:
                    index = chance.randrange(len(model.copies[kind]))
                    copy = model.copies[kind][index]
                    seen[kind] += len(copy.keys)
                    seen["staged"] += len(copy.writes) if kind == "load" else 0
                    failed = [key for key in copy.keys if chance.random() < 0.1]
                    model._end(
                        kind,
                        index,
                        {key: chance.randrange(model.slots.num_ranks) for key in failed},
                    )
            case "queue":
                model.a_request_is_queued(prefix[0], length)
                model.a_queued_request_begins_or_ends(
                    chance.randrange(1, model.num_queued + 1), chance.random() < 0.8
                )
            case "all":
                model.all_copies_end()
            case _:
                model.everything_is_evicted(chance.randrange(6))
                model.the_workers_are_replaced(chance.randrange(40))
                seen["found"] += model.num_found
        model.the_ledgers_agree()
        model.few_blocks_are_being_written_to_disk()
        model.a_block_is_in_one_tier_with_write_back()
        ranks = [rank for rank, messages in enumerate(model.to_say) for _ in messages]
        chance.shuffle(ranks)
        model._say(ranks[: chance.choice([0, 0, 1, 3])])
    model.teardown()
    return seen


@pytest.mark.slow
@pytest.mark.req("OFF-03", "OFF-05", "OFF-06", "OFF-07", "TIE-01", "TIE-03")
def test_long_random_runs() -> None:
    seen = sum((play(seed) for seed in range(60)), Counter())
    least = min(seen[kind] for kind in ("store", "load", "staged", "spill", "found", "stage"))
    assert least > 200, seen


def with_blocks_on_disk(num_slots: int, keys: list[bytes], **options: Any) -> TieredManager:
    """These keys are on disk, but not in host memory."""
    manager = make_manager(num_slots, **options)
    manager.receive(0, said(contents_of(keys)))
    return manager


def contents_of(keys: list[bytes]) -> DiskContents:
    slots = np.arange(len(keys), dtype=np.int64)
    return DiskContents(len(keys) + 8, keys, slots.tobytes(), is_last=True)


def test_a_block_that_is_being_stored_is_not_read_from_disk_as_well() -> None:
    """Its slot in host memory is being written: a load would have got the bytes of another one."""
    keys = keys_of(0, 0, 3)
    manager = with_blocks_on_disk(4, keys)
    assert manager.lookup(keys) == 3
    assert manager.prepare_store(keys[1:2], 1) is not None
    assert manager.lookup(keys) == 1
    assert manager.prepare_load(keys).num_keys == 1
    manager.complete_load(keys[:1], [])
    manager.complete_store(keys[1:2], [])
    assert manager.lookup(keys) == 3


def test_a_load_is_as_long_as_host_memory_has_room_for() -> None:
    keys = keys_of(0, 0, 6)
    manager = with_blocks_on_disk(4, keys)
    pinned = keys_of(1, 0, 2)
    assert manager.prepare_store(pinned) is not None
    manager.complete_store(pinned, [])
    assert manager.prepare_load(pinned).num_keys == 2
    assert [manager.num_without_room(keys[:length]) for length in (2, 3, 6)] == [0, 1, 4]
    assert manager.num_without_room([*pinned, *keys[:2]]) == 0, "two loads can read one block"
    assert manager.prepare_load(keys[:2]).num_keys == 2
    manager.complete_load(keys[:2], [])
    manager.complete_load(pinned, [])
    assert manager.prepare_load(keys[:4]).num_keys == 4
    manager.complete_load(keys[:4], keys[2:3])
    assert manager.lookup(keys) == 2, "what cannot be read is removed from both tiers"


def test_a_block_that_is_being_read_from_disk_is_waited_for_unless_nobody_does() -> None:
    keys = keys_of(0, 0, 3)
    manager = with_blocks_on_disk(6, keys)
    assert manager.prepare_load(keys[1:2]).num_keys == 1
    assert manager.lookup(keys) is None
    manager.load_abandoned(keys[1:2])
    assert manager.lookup(keys) == 1, "the read may never end"
    manager.complete_load(keys[1:2], [])
    assert manager.lookup(keys) == 3


def test_a_tier_that_is_late_is_not_asked_until_it_has_ended_what_it_reads() -> None:
    keys, others = keys_of(0, 0, 3), keys_of(1, 0, 2)
    manager = with_blocks_on_disk(8, keys + others)
    assert manager.prepare_load(keys).num_keys == 3
    assert manager.lookup(others) == 2
    manager.load_expired(keys)
    assert manager.lookup(others) == 0, "what is asked for now would come even later"
    manager.complete_load(keys, [])
    assert manager.lookup(others) == 2
    assert manager.lookup(keys) == 3
    manager.check()


def test_a_load_that_its_client_has_given_up_says_nothing_about_the_tier() -> None:
    keys, others = keys_of(0, 0, 3), keys_of(1, 0, 2)
    manager = with_blocks_on_disk(8, keys + others)
    manager.prepare_load(keys)
    manager.load_abandoned(keys)
    assert manager.lookup(others) == 2


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_block_that_was_not_read_in_time_is_still_in_its_tier(num_ranks: int) -> None:
    keys = keys_of(0, 0, 3)
    manager = make_manager(8, num_ranks=num_ranks)
    for rank in range(num_ranks):
        manager.receive(rank, said(contents_of(keys)))
    manager.prepare_load(keys)
    late = msgspec.msgpack.encode(TierMessage(0, b"", keys[1:2]))
    manager.receive(num_ranks - 1, late)
    manager.complete_load(keys, keys[1:])
    assert manager.lookup(keys) == 2, "the last one was damaged"
    assert manager.prepare_load(keys[1:2]).num_keys == 1
    manager.complete_load(keys[1:2], keys[1:2])
    assert manager.lookup(keys) == 1, "this time, it was damaged"
    manager.receive(0, late)
    assert manager.lookup(keys) == 1
    manager.check()


def stored_in_host(num_ranks: int, keys: list[bytes], **options: Any) -> TieredManager:
    manager = make_manager(8, num_ranks=num_ranks, **options)
    assert manager.prepare_store(keys) is not None
    manager.complete_store(keys, [])
    return manager


def host_said(message: bytes) -> bytes:
    return msgspec.msgpack.encode(TierMessage(HOST_TIER, message))


def test_host_memory_that_new_workers_see_keeps_its_blocks() -> None:
    """Those whose stores had ended; transfers in progress have failed."""
    keys = keys_of(0, 0, 3)
    manager = stored_in_host(2, keys, has_disk=False)
    unfinished = keys_of(1, 0, 2)
    assert manager.prepare_store(unfinished) is not None
    assert manager.prepare_load(keys).num_keys == 3
    manager.begin_epoch()
    assert manager.lookup(keys) is None
    manager.receive(1, host_said(HOST_KEPT))
    assert manager.lookup(keys) is None
    manager.receive(0, host_said(HOST_KEPT))
    assert manager.lookup(keys) == 3
    assert manager.lookup(unfinished) == 0
    manager.receive(0, host_said(HOST_NEW))
    assert manager.lookup(keys) == 3, "it has said so before"
    manager.check()
    assert manager.reset(), "nothing is pinned"


def test_host_memory_that_one_new_worker_does_not_see_is_empty() -> None:
    keys = keys_of(0, 0, 3)
    manager = stored_in_host(2, keys, has_disk=False)
    manager.begin_epoch()
    manager.receive(0, host_said(HOST_KEPT))
    manager.receive(1, host_said(HOST_NEW))
    assert manager.lookup(keys) == 0
    assert manager.reset()


def test_a_new_epoch_reports_what_host_memory_keeps() -> None:
    """`AllBlocksCleared` voids everything that was reported before."""
    keys = keys_of(0, 0, 2)
    manager = stored_in_host(1, keys, has_disk=False)
    manager._publishes_events = True
    manager.begin_epoch()
    cleared, *stored = manager.take_events()
    assert cleared == AllBlocksCleared("CPU")
    assert [event.block_hash for event in stored] == [key[:-1] for key in keys]
    assert all(isinstance(event, BlockStored) and event.medium == "CPU" for event in stored)
    manager.receive(0, host_said(HOST_NEW))
    assert [type(event) for event in manager.take_events()] == [BlockRemoved] * 2


def jobs_of(manager: TieredManager) -> list[tuple[int, Spill | Stage | TierCommand]]:
    """The jobs of the next plan."""
    ids = count(100)
    return [
        (job.job_id, msgspec.msgpack.decode(job.tier_data, type=TierTask))
        for job in manager.take_jobs(lambda: next(ids))
    ]


def test_a_block_being_written_to_disk_is_written_again_after_a_new_epoch() -> None:
    keys = keys_of(0, 0, 2)
    manager = stored_in_host(1, keys)
    empty = said(DiskContents(9, [], b"", is_last=True))
    manager.receive(0, empty)
    ((_, spill),) = jobs_of(manager)
    assert isinstance(spill, Spill)
    assert spill.keys == keys
    manager.begin_epoch()
    manager.receive(0, empty)
    assert not manager.has_jobs, "it is not known yet whether host memory was kept"
    manager.receive(0, host_said(HOST_KEPT))
    ((job_id, spill),) = jobs_of(manager)
    assert isinstance(spill, Spill)
    assert sorted(spill.keys) == keys
    manager.job_ended(job_id, [])


def test_a_reset_empties_the_disks_of_all_ranks() -> None:
    """Also if the workers are replaced before they have done so."""
    keys = keys_of(0, 0, 3)
    manager = with_blocks_on_disk(4, keys)
    assert manager.reset()
    assert manager.lookup(keys) == 0
    assert manager.prepare_store(keys) is not None
    manager.complete_store(keys, [])
    assert jobs_of(manager) == [(100, TierCommand(0, CLEAR))], "nothing is written meanwhile"
    assert not manager.reset(), "the ranks are at it"
    manager.begin_epoch()
    manager.receive(0, host_said(HOST_NEW))
    manager.receive(0, said(contents_of(keys)))
    assert manager.lookup(keys) == 0
    assert jobs_of(manager) == [(100, TierCommand(0, CLEAR))]
    manager.job_ended(100, [])
    assert manager.reset()


def test_a_failed_reset_of_a_disk_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    manager = with_blocks_on_disk(4, keys_of(0, 0, 3))
    assert manager.reset()
    jobs_of(manager)
    manager.job_ended(100, [0])
    assert "the disk tier was reset, but a worker could not delete its blocks" in caplog.text


def test_a_block_that_the_disk_has_evicted_is_written_again_when_it_is_used() -> None:
    keys = keys_of(0, 0, 3)
    manager = stored_in_host(1, keys)
    manager.receive(0, said(DiskContents(2, [], b"", is_last=True)))
    while manager.has_jobs:
        for job_id, _ in jobs_of(manager):
            manager.job_ended(job_id, [])
    evicted = [key for key in keys if not manager._below[0].tier.has(key)]
    assert len(evicted) == 1
    assert manager.prepare_load(keys).num_keys == 3
    manager.complete_load(keys, [])
    ((_, spill),) = jobs_of(manager)
    assert isinstance(spill, Spill)
    assert spill.keys == evicted


def tasks_of(manager: TieredManager, kind: type) -> list[tuple[int, Any]]:
    return [(job_id, task) for job_id, task in jobs_of(manager) if isinstance(task, kind)]


def test_blocks_of_queued_requests_are_read_ahead_within_a_share_of_host_memory() -> None:
    """A quarter of eight slots, for all requests that have not begun."""
    first, second = keys_of(0, 0, 3), keys_of(1, 0, 3)
    manager = with_blocks_on_disk(8, [*first, *second])
    for number, keys in enumerate((first, second)):
        manager.touch(keys)
        manager.read_ahead(f"r{number}", keys)
    assert manager.has_jobs
    ((job_id, stage),) = tasks_of(manager, Stage)
    assert stage.keys == first[:2]
    assert manager.lookup(first) is None, "wait for the reads"
    manager.job_ended(job_id, [1])
    assert jobs_of(manager) == [], "these blocks count until the request begins"
    assert manager.lookup(first) == 1, "what could not be read is removed"
    manager.end_read_ahead("r0", is_over=False)
    ((job_id, stage),) = tasks_of(manager, Stage)
    assert stage.keys == second[:2]
    manager.end_read_ahead("r1", is_over=True)
    assert not manager.reset(), "a read is in progress"
    manager.job_ended(job_id, [])
    assert not manager.has_jobs
    assert manager.lookup(second) == 3
    assert manager.reset()


def test_reading_ahead_takes_no_slot_that_is_in_use() -> None:
    keys = keys_of(0, 0, 4)
    manager = with_blocks_on_disk(8, keys)
    busy = [*keys_of(1, 0, 6), *keys_of(2, 0, 2)]
    assert manager.prepare_store(busy) is not None
    manager.complete_store(busy, [])
    assert manager.prepare_load(busy).num_keys == 8
    manager.read_ahead("r", keys)
    assert tasks_of(manager, Stage) == []
    manager.complete_load(busy, [])
    assert all(key in manager._host for key in busy)


def test_nothing_behind_an_absent_block_is_read_ahead() -> None:
    keys = keys_of(0, 0, 4)
    manager = with_blocks_on_disk(16, [keys[0], *keys[2:]])
    manager.read_ahead("r", keys)
    ((_, stage),) = tasks_of(manager, Stage)
    assert stage.keys == keys[:1]


def test_best_effort_loads_what_host_memory_has_and_reads_the_rest_for_the_next() -> None:
    keys = keys_of(0, 0, 3)
    manager = with_blocks_on_disk(16, keys, prefetch="best_effort")
    manager.read_ahead("r", keys)
    assert manager.lookup(keys) == 0
    manager.end_read_ahead("r", is_over=False)
    ((job_id, stage),) = tasks_of(manager, Stage)
    assert stage.keys == keys
    assert manager.lookup(keys) == 0
    manager.job_ended(job_id, [])
    assert manager.lookup(keys) == 3


def test_with_a_timeout_a_request_waits_only_so_long() -> None:
    keys = keys_of(0, 0, 3)
    manager = with_blocks_on_disk(16, keys, prefetch="timeout", prefetch_timeout_ms=500)
    assert manager.prepare_store(keys[:1]) is not None
    manager.complete_store(keys[:1], [])
    manager.read_ahead("r", keys)
    assert manager.lookup(keys, 0.49) is None
    assert manager.lookup(keys, 0.5) == 1
    ((job_id, _),) = tasks_of(manager, Stage)
    assert manager.lookup(keys, 0.49) is None
    assert manager.lookup(keys, 0.5) == 1
    manager.job_ended(job_id, [])
    assert manager.lookup(keys, 0.0) == 3


def end_jobs(manager: TieredManager) -> list[list[bytes]]:
    """Carry out all jobs. The keys that were written."""
    written = []
    while manager.has_jobs:
        for job_id, task in jobs_of(manager):
            assert isinstance(task, Spill)
            written.append(task.keys)
            manager.job_ended(job_id, [])
    return written


@pytest.mark.req("TIE-01")
def test_with_write_back_a_block_is_on_disk_when_host_memory_has_evicted_it() -> None:
    """A load takes it from the disk."""
    keys = keys_of(0, 0, 6)
    manager = stored_in_host(1, keys, write_policy="back")
    manager.receive(0, said(DiskContents(20, [], b"", is_last=True)))
    disk = manager._below[0].tier
    assert end_jobs(manager) == [], "two of eight slots are free"
    others = keys_of(1, 0, 2)
    assert manager.prepare_store(others) is not None
    manager.complete_store(others, [])
    assert not any(disk.has(key) for key in (*keys, *others))
    evicted = [key for written in end_jobs(manager) for key in written]
    assert len(evicted) == 1
    assert disk.has(evicted[0])
    assert evicted[0] not in manager._host
    assert manager.lookup(keys) == 6
    assert manager.prepare_load(evicted).num_keys == 1
    manager.complete_load(evicted, [])
    assert not disk.has(evicted[0])
    assert evicted[0] in manager._host


@pytest.mark.req("TIE-03", "ERR-14")
def test_the_slot_of_a_block_written_back_is_free_when_it_has_been_written() -> None:
    keys = keys_of(0, 0, 8)
    manager = stored_in_host(1, keys, write_policy="back")
    manager.receive(0, said(DiskContents(20, [], b"", is_last=True)))
    ((job_id, task),) = jobs_of(manager)
    assert isinstance(task, Spill)
    source = int64s(task.host_slots)[0]
    other = keys_of(1, 0, 1)
    prepared = manager.prepare_store(other)
    assert prepared is not None
    assert int64s(prepared.tier_data) != [source], "another one was evicted"
    manager.job_ended(job_id, [])
    manager.complete_store(other, [])
    manager.check()


def test_blocks_that_a_large_store_displaces_are_counted_as_dropped_with_write_back() -> None:
    manager = stored_in_host(1, keys_of(0, 0, 6), write_policy="back")
    assert manager.prepare_store(keys_of(1, 0, 2)) is not None
    assert manager.stats().tiers[1].num_dropped_blocks == 0
    assert manager.prepare_store(keys_of(2, 0, 4)) is not None
    assert manager.stats().tiers[1].num_dropped_blocks == 4
    manager.check()
    behind = stored_in_host(1, keys_of(0, 0, 6))
    assert behind.prepare_store(keys_of(2, 0, 4)) is not None
    assert behind.stats().tiers[1].num_dropped_blocks == 0


def test_a_block_that_is_computed_again_is_removed_from_disk_with_write_back() -> None:
    manager = make_manager(8, write_policy="back")
    keys = keys_of(0, 0, 2)
    assert manager.prepare_store(keys) is not None
    manager.receive(0, said(contents_of(keys)))
    assert manager._below[0].tier.has(keys[0])
    manager.complete_store(keys, [])
    assert not manager._below[0].tier.has(keys[0])


@pytest.mark.req("REU-01", "REU-02")
@pytest.mark.parametrize("options", [{"write_policy": "selective"}, {"store_threshold": 2}])
def test_the_selective_policy_stores_what_is_used_again(options: dict[str, Any]) -> None:
    manager = make_manager(4, has_disk=False, **options)
    keys = keys_of(0, 0, 2)
    manager.touch(keys)
    assert manager.prepare_store(keys) == ([], b"")
    manager.touch(keys[:1])
    other = keys_of(1, 0, 2)
    manager.touch(other)
    manager.touch(other)
    prepared = manager.prepare_stores([(keys, 0), (other, 0)])
    assert prepared is not None
    assert list(prepared.indices) == [0, 2, 3]
    manager.complete_store([keys[0], *other], [])
    assert (manager.lookup(keys), manager.lookup(other)) == (1, 2)
    assert manager.stats().tiers[0].num_blocks == 3, "filtered blocks use no capacity"


@pytest.mark.req("ERR-27", "OFF-08")
def test_looking_up_again_does_not_count_as_use() -> None:
    manager = make_manager(4, has_disk=False, store_threshold=2)
    keys = keys_of(0, 0, 2)
    manager.touch(keys)
    for _ in range(5):
        assert manager.lookup(keys) == 0
    assert manager.prepare_store(keys) == ([], b"")
    manager.touch(keys)
    assert manager.prepare_store(keys) is not None
    manager.complete_store(keys, [])
    assert manager.lookup(keys) == 2


def test_a_disk_without_contents_from_all_ranks_is_not_known_yet() -> None:
    manager = make_manager(4, num_ranks=2)
    keys = keys_of(0, 0, 2)
    empty = said(DiskContents(9, [], b"", is_last=True))
    assert manager.lookup(keys) is None
    manager.receive(1, empty)
    assert manager.lookup(keys) is None
    assert manager.prepare_store(keys) is not None
    manager.complete_store(keys, [])
    assert manager.lookup(keys) == 2, "all of them are in host memory"
    assert not manager.has_jobs
    manager.receive(0, empty)
    assert manager.lookup(keys_of(1, 0, 2)) == 0
    assert manager.has_jobs


def test_a_block_counts_where_all_ranks_have_it_in_one_slot() -> None:
    manager = make_manager(4, num_ranks=2)
    first, second, third = keys = keys_of(0, 0, 3)
    for rank, found in enumerate(
        [{first: 3, second: 4, third: 8}, {first: 3, second: 5, third: 8}]
    ):
        slots = np.array(list(found.values()), np.int64).tobytes()
        message = DiskContents([9, 7][rank], list(found), slots, is_last=True)
        manager.receive(rank, said(message))
    assert manager.lookup(keys) == 1
    assert manager.lookup([third]) == 0, "the smaller disk has no such slot"


def test_the_statistics_tell_what_each_tier_has_and_what_it_was_good_for() -> None:
    keys = keys_of(0, 0, 3)
    manager = with_blocks_on_disk(4, keys)

    def tiers() -> list[tuple[object, ...]]:
        return [msgspec.structs.astuple(tier)[:5] for tier in manager.stats().tiers]

    assert tiers() == [("CPU", 0, 4, 0, 0), ("DISK", 3, 11, 0, 0)]
    manager.prepare_load(keys)
    assert manager.stats().queued_blocks == {("CPU", "DISK"): 0, ("DISK", "CPU"): 3}
    manager.complete_load(keys, [])
    manager.prepare_load(keys[:2])
    # Two tokens sets came from host memory, three from disk; a block has four tokens.
    assert tiers() == [("CPU", 3, 4, 8, 0), ("DISK", 3, 11, 12, 0)]
    manager.complete_load(keys[:2], [])

    others = keys_of(1, 0, 5)
    assert manager.prepare_store(others) is None, "there are four slots"
    assert tiers()[0] == ("CPU", 3, 4, 8, 5)
    assert manager.prepare_store(others[:2]) is not None
    manager.complete_store(others[:2], [])
    assert manager.stats().queued_blocks == {("CPU", "DISK"): 2, ("DISK", "CPU"): 0}
    assert manager.reset()
    manager.complete_store([], [])


def test_a_block_that_is_evicted_before_it_is_written_to_disk_counts_as_dropped() -> None:
    manager = with_blocks_on_disk(4, [])
    for chain in range(3):
        keys = keys_of(chain, 0, 2)
        assert manager.prepare_store(keys) is not None
        manager.complete_store(keys, [])
    numbers = count(1)
    while manager.has_jobs:
        for job in manager.take_jobs(lambda: next(numbers)):
            manager.job_ended(job.job_id, [])
    (_, disk) = manager.stats().tiers
    assert disk.num_dropped_blocks + disk.num_blocks == 6
    assert disk.num_blocks == 2, "two were evicted, and four were queued already"


@pytest.mark.req("NUM-24", "ERR-15")
def test_blocks_of_a_swapped_sequence_are_in_one_tier_at_a_time() -> None:
    """(free on the device, free on the host, sequences, blocks), and the data survives."""
    pool, ledger = BlockPool(1025), OffloadLedger(2048, LRU(2048))
    device = np.zeros((1025, 16), np.int64)
    host = np.zeros((2048, 16), np.int64)
    sequences: list[list[int]] = []

    def counts() -> tuple[int, int, int, int]:
        return pool.num_free, ledger.num_free, len(sequences), sum(map(len, sequences))

    assert counts() == (1024, 2048, 0, 0)
    num_blocks = -(-100 // 16)
    block_ids = pool.get_new_blocks(num_blocks)
    sequences.append(list(block_ids))
    assert counts() == (1017, 2048, 1, 7)
    data = np.random.default_rng(1).integers(1, 1 << 60, (7, 16))
    device[block_ids] = data
    keys = keys_of(0, 0, num_blocks)
    stored = ledger.prepare_store(keys)
    assert stored is not None
    host[stored.slots] = device[block_ids]
    ledger.complete_store(keys)
    pool.free_blocks(block_ids)
    device[:] = 0
    assert counts() == (1024, 2041, 1, 7)
    sequences[0] = list(pool.get_new_blocks(num_blocks))
    device[sequences[0]] = host[ledger.prepare_load(keys)]
    ledger.complete_load(keys, take=True)
    host[:] = 0
    assert counts() == (1017, 2048, 1, 7)
    np.testing.assert_array_equal(device[sequences[0]], data)
    pool.free_blocks(np.array(sequences.pop(), np.int32))
    assert counts() == (1024, 2048, 0, 0)
