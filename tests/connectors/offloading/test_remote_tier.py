"""What the scheduler knows about a store that engines share: what the workers have said."""

import random
from typing import Any

import msgspec
import pytest

from longshore.connectors.offloading import remote_tier
from longshore.connectors.offloading.ledger import OffloadLedger
from longshore.connectors.offloading.policies.lru import LRU
from longshore.connectors.offloading.remote_tier import (
    RemoteAnswer,
    RemoteHealth,
    RemoteQuery,
    RemoteTier,
)
from longshore.connectors.offloading.tiered_manager import TieredManager
from longshore.connectors.offloading.tiers import (
    LoadSource,
    Spill,
    TierCommand,
    TierFaults,
    TierMessage,
    TierTask,
)


def keys_of(chain: int, first: int, last: int, group: int = 0) -> list[bytes]:
    return [bytes((chain, position, group)) for position in range(first, last)]


def ask(tier: RemoteTier, keys: list[bytes], *, is_new: bool = True) -> list[bool | None]:
    """What a request finds when it is looked up."""
    if is_new:
        tier.touch(keys, 0)
    return [tier.has(key) for key in keys]


def queries(tier: RemoteTier) -> list[RemoteQuery]:
    commands = tier.take_commands()
    return [msgspec.msgpack.decode(command, type=RemoteQuery) for command in commands]


def answer(tier: RemoteTier, rank: int, query: RemoteQuery, present: bytes) -> None:
    tier.receive(rank, msgspec.msgpack.encode(RemoteAnswer(query.query_id, present)))


def one_rank() -> RemoteTier:
    return RemoteTier(1, frozenset())


def two_ranks() -> RemoteTier:
    return RemoteTier(2, frozenset())


@pytest.mark.req("OFF-04")
def test_a_block_is_not_known_until_all_ranks_have_answered() -> None:
    tier = two_ranks()
    keys = keys_of(0, 0, 3)
    assert ask(tier, keys) == [None] * 3
    assert tier.has_commands
    (query,) = queries(tier)
    assert (query.keys, query.is_prefix) == (keys, True)
    assert not tier.has_commands
    assert ask(tier, keys, is_new=False) == [None] * 3
    assert not tier.has_commands, "they have been asked already"
    answer(tier, 1, query, b"\1\1\0")
    assert ask(tier, keys, is_new=False) == [None] * 3
    answer(tier, 1, query, b"\1\1\1")
    assert ask(tier, keys, is_new=False) == [None] * 3, "the same rank twice is not both"
    answer(tier, 0, query, b"\1\1\1")
    assert ask(tier, keys, is_new=False) == [True] * 3
    answer(tier, 0, query, b"\0")
    assert ask(tier, keys, is_new=False) == [True] * 3, "a repeated message is ignored"
    tier.check()


def test_a_block_that_one_rank_has_not_is_absent_for_all() -> None:
    tier = two_ranks()
    keys = keys_of(0, 0, 4)
    ask(tier, keys)
    (query,) = queries(tier)
    answer(tier, 0, query, b"\1\0")  # it did not look any further
    answer(tier, 1, query, b"\1\1\1\0")
    assert ask(tier, keys, is_new=False) == [True, False, None, False]
    (query,) = queries(tier)
    assert query.keys == [keys[2]], "what was not answered is asked again if it is of use"


def test_each_request_asks_anew() -> None:
    """Another engine may have stored the blocks, or the store may have evicted them."""
    tier = one_rank()
    keys = keys_of(0, 0, 2)
    for present in (b"\0", b"\1\1", b"\1\0"):
        assert None in ask(tier, keys)
        (query,) = queries(tier)
        answer(tier, 0, query, present)
        found = ask(tier, keys[: len(present)], is_new=False)
        assert found == [bool(each) for each in present]


def test_requests_are_asked_separately() -> None:
    """Absent blocks of one do not end the answer about another."""
    tier = one_rank()
    ask(tier, keys_of(0, 0, 3))
    ask(tier, keys_of(1, 0, 3))
    ask(tier, keys_of(1, 0, 4))
    assert [query.keys for query in queries(tier)] == [
        keys_of(0, 0, 3), keys_of(1, 0, 3), keys_of(1, 3, 4),
    ]  # fmt: skip


def test_all_blocks_of_partial_groups_are_asked_at_once() -> None:
    """A window is looked up from the end of the prompt, a block at a time."""
    tier = RemoteTier(1, frozenset({1}))
    full, window = keys_of(0, 0, 3), keys_of(0, 0, 3, group=1)
    tier.touch(full, 0)
    tier.touch(window, 0)
    assert [tier.has(key) for key in full] == [None] * 3
    assert tier.has(window[2]) is None
    prefix, separate = queries(tier)
    assert (prefix.keys, prefix.is_prefix) == (full, True)
    assert (separate.keys, separate.is_prefix) == (window, False)
    answer(tier, 0, separate, b"\0\1\1")
    assert [tier.has(key) for key in window] == [False, True, True]


def test_a_command_that_fails_is_a_miss() -> None:
    tier = two_ranks()
    keys = keys_of(0, 0, 3)
    ask(tier, keys)
    (command,) = tier.take_commands()
    tier.command_ended(command, is_failed=False)
    assert tier.has(keys[0]) is None, "its answers may be on their way"
    tier.command_ended(command, is_failed=True)
    assert ask(tier, keys, is_new=False) == [False] * 3
    answer(tier, 0, msgspec.msgpack.decode(command, type=RemoteQuery), b"\1\1\1")
    tier.check()


def test_answers_are_forgotten_with_their_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = one_rank()
    keys = keys_of(0, 0, 3)
    ask(tier, keys)
    (query,) = queries(tier)
    answer(tier, 0, query, b"\1\1\1")
    tier.refresh(keys)
    assert not tier._known
    monkeypatch.setattr(remote_tier, "MAX_KNOWN", 4)
    monkeypatch.setattr(remote_tier, "MAX_QUERY_KEYS", 6)
    keys = keys_of(1, 0, 8)
    ask(tier, keys)
    (query,) = queries(tier)
    assert query.keys == keys[:6], "a query is not longer"
    answer(tier, 0, query, bytes([1] * 6))
    assert list(tier._known) == keys[2:6]
    tier.check()


def test_a_block_is_not_written_if_it_is_there_or_being_written() -> None:
    tier = one_rank()
    keys = keys_of(0, 0, 4)
    ask(tier, keys)
    (query,) = queries(tier)
    answer(tier, 0, query, b"\1\0")
    prepared = tier.begin_writes(keys)
    assert prepared is not None
    assert prepared.keys == keys[1:]
    again = tier.begin_writes(keys)
    assert again is not None
    assert again.keys == []
    tier.end_writes(keys[1:], [keys[2]])
    assert tier.has(keys[1]), "a waiting request finds it at once"
    assert tier.has(keys[2]) is None
    prepared = tier.begin_writes(keys[2:3])
    assert prepared is not None
    assert prepared.keys == keys[2:3], "one that failed can be written again"


def test_a_new_epoch_forgets_everything() -> None:
    tier = two_ranks()
    keys = keys_of(0, 0, 4)
    ask(tier, keys)
    (query,) = queries(tier)
    tier.begin_writes(keys)
    ask(tier, keys_of(1, 0, 2))
    tier.begin_epoch()
    tier.check()
    assert not tier.has_commands
    answer(tier, 0, query, b"\1\1\1\1")
    assert tier.has(keys[0]) is None


def test_faults_of_all_ranks_and_epochs_are_added_up() -> None:
    tier = two_ranks()
    for rank, faults in ((0, TierFaults(1, 0, 0, 0)), (1, TierFaults(5, 2, 1, 1))):
        tier.receive(rank, msgspec.msgpack.encode(RemoteHealth(faults)))
    tier.receive(0, msgspec.msgpack.encode(RemoteHealth(TierFaults(4, 0, 1, 2))))
    assert tier.faults == TierFaults(9, 2, 2, 3)
    tier.begin_epoch()
    assert tier.faults == TierFaults(9, 2, 2, 0), "counters go on, breakers begin closed"
    tier.receive(1, msgspec.msgpack.encode(RemoteHealth(TierFaults(1, 1, 1, 1))))
    assert tier.faults == TierFaults(10, 3, 3, 1)
    stats = TieredManager(OffloadLedger(4, LRU(4)), [tier]).stats().tiers[1]
    assert (stats.num_failed_operations, stats.num_rejected_operations) == (10, 3)


# With host memory above


class Ranks:
    """What each rank's store has; they answer as workers do."""

    def __init__(self, num_ranks: int) -> None:
        self.stored: list[set[bytes]] = [set() for _ in range(num_ranks)]

    def answer(self, manager: TieredManager, command: bytes) -> None:
        query = msgspec.msgpack.decode(command, type=RemoteQuery)
        for rank, stored in enumerate(self.stored):
            present = bytes(key in stored for key in query.keys)
            if query.is_prefix:
                present = present[: present.find(0) + 1] or present
            said = msgspec.msgpack.encode(RemoteAnswer(query.query_id, present))
            manager.receive(rank, msgspec.msgpack.encode(TierMessage(0, said)))


def make_manager(num_slots: int = 8, num_ranks: int = 1) -> TieredManager:
    tier = RemoteTier(num_ranks, frozenset())
    return TieredManager(OffloadLedger(num_slots, LRU(num_slots)), [tier], num_ranks=num_ranks)


def jobs(manager: TieredManager) -> list[tuple[int, Any]]:
    numbers = iter(range(100, 1000))
    taken = manager.take_jobs(lambda: next(numbers))
    return [(job.job_id, msgspec.msgpack.decode(job.tier_data, type=TierTask)) for job in taken]


def find(manager: TieredManager, ranks: Ranks, keys: list[bytes]) -> int:
    """Look up until the number is known."""
    manager.touch(keys)
    for _ in range(4):
        found = manager.lookup(keys)
        if found is not None:
            return found
        for job_id, task in jobs(manager):
            if isinstance(task, TierCommand):
                ranks.answer(manager, task.command)
            manager.job_ended(job_id, [])
    raise AssertionError("the answer is never known")


@pytest.mark.req("TIE-01", "OFF-04")
def test_blocks_go_through_host_memory_to_the_store_and_back() -> None:
    ranks, keys = Ranks(2), keys_of(0, 0, 4)
    first = make_manager(num_ranks=2)
    prepared = first.prepare_store(keys)
    assert prepared is not None
    first.complete_store(keys, [])
    written = []
    while first.has_jobs:
        for job_id, spill in jobs(first):
            assert isinstance(spill, Spill)
            written += spill.keys
            for stored in ranks.stored:
                stored.update(spill.keys)
            first.job_ended(job_id, [])
    assert written == keys
    first.check()

    second = make_manager(num_ranks=2)
    assert find(second, ranks, keys) == 4
    load = second.prepare_load(keys)
    source = msgspec.msgpack.decode(load.tier_data, type=LoadSource)
    assert (load.num_keys, source.reads) == (4, [(index, 0, 0) for index in range(4)])
    second.complete_load(keys, [])
    assert second.lookup(keys) == 4
    assert not second.has_jobs, "they are in host memory now, and not written again"
    second.check()

    ranks.stored[1].discard(keys[1])
    third = make_manager(num_ranks=2)
    assert find(third, ranks, keys) == 1


@pytest.mark.req("TIE-01")
def test_a_block_is_read_from_the_fastest_tier_that_has_it() -> None:
    tiers = [one_rank(), one_rank()]
    manager = TieredManager(OffloadLedger(8, LRU(8)), tiers)
    keys = keys_of(0, 0, 3)
    for tier, present in zip(tiers, (b"\1\1\0", b"\1\1\1"), strict=True):
        ask(tier, keys)
        (query,) = queries(tier)
        answer(tier, 0, query, present)
    assert manager.lookup(keys) == 3
    source = msgspec.msgpack.decode(manager.prepare_load(keys).tier_data, type=LoadSource)
    assert sorted(source.reads) == [(0, 0, 0), (1, 0, 0), (2, 1, 0)]


def test_a_block_that_was_evicted_meanwhile_is_a_miss() -> None:
    ranks, keys = Ranks(1), keys_of(0, 0, 3)
    ranks.stored[0].update(keys)
    manager = make_manager()
    assert find(manager, ranks, keys) == 3
    manager.prepare_load(keys)
    manager.complete_load(keys, [keys[1]])
    assert manager.lookup(keys) == 1
    manager.check()


def test_a_slow_store_does_not_keep_host_memory_from_evicting() -> None:
    manager = make_manager(num_slots=8)
    for chain in range(4):
        keys = keys_of(chain, 0, 4)
        assert manager.prepare_store(keys) is not None
        manager.complete_store(keys, [])
        jobs(manager)  # they never end
    assert sum(below.num_spilling for below in manager._below) <= 2
    manager._host.check()


def test_random_lookups_agree_with_the_stores() -> None:
    chance = random.Random(5)
    for _ in range(200):
        num_ranks = chance.choice([1, 2, 3])
        ranks, manager = Ranks(num_ranks), make_manager(num_ranks=num_ranks)
        for stored in ranks.stored:
            stored.update(key for key in keys_of(0, 0, 6) if chance.random() < 0.8)
        for _ in range(5):
            keys = keys_of(0, 0, chance.randint(1, 6))
            expected = 0
            while expected < len(keys) and all(keys[expected] in each for each in ranks.stored):
                expected += 1
            assert find(manager, ranks, keys) == expected
            chance.choice(ranks.stored).symmetric_difference_update(keys_of(0, 3, 4))
