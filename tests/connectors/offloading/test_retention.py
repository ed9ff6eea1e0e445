"""Offload tiers evict what clients have asked to keep after everything else."""

from collections.abc import Sequence
from random import Random

import msgspec
import pytest

from longshore.connectors.offloading.disk_tier import DiskContents, DiskTier
from longshore.connectors.offloading.ledger import OffloadLedger
from longshore.connectors.offloading.policies.registry import POLICIES, load_eviction_policy
from longshore.connectors.offloading.spec import HintedKeys
from longshore.connectors.offloading.tiers import int64s
from longshore.protocol.requests import NO_TENANT, CacheHint, CachePrefix, Tenant
from tests.connectors.offloading.offload_driver import OffloadDriver
from tests.harness.tokens import prompt_of

ALL: Tenant = Tenant("all", cache_share=1.0)


def make(capacity: int, policy: str = "lru") -> OffloadLedger:
    return OffloadLedger(capacity, load_eviction_policy(policy, capacity))


def keys_of(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def store(ledger: OffloadLedger, text: str) -> list[bytes]:
    """Store these keys; returns the evicted ones."""
    ledger.touch(keys_of(text))
    prepared = ledger.prepare_store(keys_of(text))
    assert prepared is not None
    ledger.complete_store(prepared.keys)
    ledger.check()
    return prepared.evicted_keys


def make_disk(num_slots: int) -> DiskTier:
    disk = DiskTier(1, make)
    open_disk(disk, num_slots)
    return disk


def open_disk(disk: DiskTier, num_slots: int, found: str = "") -> None:
    """The rank has found these keys, in the first slots."""
    slots = int64s(range(len(found)))
    disk.receive(
        0, msgspec.msgpack.encode(DiskContents(num_slots, keys_of(found), slots, is_last=True))
    )


def write(disk: DiskTier, text: str) -> list[bytes]:
    """Write these keys to the disk; returns the evicted ones."""
    disk.touch(keys_of(text), 0)
    prepared = disk.begin_writes(keys_of(text))
    assert prepared is not None
    disk.end_writes(prepared.keys, [])
    disk.check()
    return sorted(prepared.evicted_keys)


def retain(
    ledger: OffloadLedger | DiskTier,
    keys: Sequence[bytes],
    hint: CacheHint,
    *prefixes: int,
    tenant: Tenant = ALL,
    now: float = 0.0,
) -> None:
    ledger.retain(HintedKeys(keys, prefixes, hint, tenant, now))


def test_hinted_entries_are_evicted_last_and_lower_priorities_first() -> None:
    ledger = make(6)
    store(ledger, "abcdef")
    retain(ledger, keys_of("ab"), CacheHint(10.0, priority=2))
    retain(ledger, keys_of("cd"), CacheHint(10.0, priority=1))
    assert store(ledger, "x") == keys_of("f")
    assert sorted(store(ledger, "yz")) == keys_of("ex")
    assert sorted(store(ledger, "uvw")) == sorted(keys_of("yz") + keys_of("d"))


def test_pressure_wins_over_hints_in_a_tier() -> None:
    ledger = make(4)
    store(ledger, "abcd")
    retain(ledger, keys_of("abcd"), CacheHint(10.0, priority=3))
    assert sorted(store(ledger, "wxyz")) == keys_of("abcd")


def test_a_hint_of_a_tier_ends_in_time_and_with_the_next_one_of_its_session() -> None:
    ledger = make(6)
    store(ledger, "abcdef")
    retain(ledger, keys_of("ab"), CacheHint(10.0, "s"))
    retain(ledger, keys_of("cd"), CacheHint(5.0, "s"), now=1.0)
    assert [ledger.priority(key) for key in keys_of("abcd")] == [0, 0, 1, 1]
    ledger.expire(6.0)
    assert [ledger.priority(key) for key in keys_of("abcd")] == [0, 0, 0, 0]


def priorities(ledger: OffloadLedger, text: str) -> list[int]:
    return [ledger.priority(key) for key in keys_of(text)]


def test_entries_that_come_after_their_hint_are_retained_as_well() -> None:
    ledger = make(8)
    store(ledger, "abx")
    retain(ledger, keys_of("abcdef"), CacheHint(10.0, prefixes=(CachePrefix(3, 20.0, 2),)), 3)
    assert priorities(ledger, "abx") == [2, 2, 0]
    store(ledger, "cd")
    store(ledger, "ef")
    assert priorities(ledger, "abcdefx") == [2, 2, 2, 1, 1, 1, 0]
    ledger.expire(10.0)
    assert priorities(ledger, "abcdef") == [2, 2, 2, 0, 0, 0]


def test_a_late_entry_is_not_retained_by_a_hint_that_has_ended() -> None:
    ledger = make(8)
    retain(ledger, keys_of("abc"), CacheHint(10.0, "s"))
    retain(ledger, keys_of("xy"), CacheHint(10.0, "s"), now=1.0)
    store(ledger, "abcx")
    assert priorities(ledger, "abcx") == [0, 0, 0, 1], "the session has another hint"
    ledger.expire(11.0)
    store(ledger, "y")
    assert priorities(ledger, "xy") == [0, 0]
    retain(ledger, keys_of("z"), CacheHint(10.0), now=12.0)
    ledger.clear()
    store(ledger, "z")
    assert priorities(ledger, "z") == [0]


def test_a_late_entry_follows_the_firmest_of_its_hints() -> None:
    """As one that was stored before the hints."""
    for is_late in (False, True):
        ledger = make(16)
        if not is_late:
            store(ledger, "abcdefgh")
        retain(ledger, keys_of("abcd"), CacheHint(1000.0, priority=3))
        retain(ledger, keys_of("abcdefgh"), CacheHint(5.0, priority=1), now=1.0)
        if is_late:
            store(ledger, "abcdefgh")
        assert priorities(ledger, "abcdefgh") == [3, 3, 3, 3, 1, 1, 1, 1]
        ledger.expire(6.0)
        assert priorities(ledger, "abcdefgh") == [3, 3, 3, 3, 0, 0, 0, 0]


def test_a_late_entry_is_retained_by_the_other_hints_when_one_has_ended() -> None:
    for session, ends in (("s", "session"), (None, "time")):
        ledger = make(16)
        retain(ledger, keys_of("abcd"), CacheHint(1000.0, priority=2))
        retain(ledger, keys_of("abcd"), CacheHint(5.0, session, priority=3), now=1.0)
        if ends == "session":
            retain(ledger, keys_of("x"), CacheHint(5.0, session), now=2.0)
        else:
            ledger.expire(6.0)
        store(ledger, "abcd")
        assert priorities(ledger, "abcd") == [2, 2, 2, 2], ends


def test_late_hints_end_when_all_their_entries_have_come() -> None:
    ledger = make(16)
    retain(ledger, keys_of("ab"), CacheHint(10.0))
    retain(ledger, keys_of("abc"), CacheHint(10.0))
    store(ledger, "ab")
    assert len(ledger._late_hints) == 1
    store(ledger, "c")
    assert len(ledger._late_hints) == 0


def test_a_late_entry_counts_once_for_each_of_its_hints() -> None:
    ledger = make(5)
    for priority, text in ((3, "ab"), (2, "ab"), (1, "ac")):
        retain(ledger, keys_of(text), CacheHint(10.0, priority=priority))
    store(ledger, "abc")
    assert priorities(ledger, "abc") == [2, 2, 1], "the oldest hint is forgotten"


def test_hints_whose_entries_never_come_are_forgotten_the_oldest_first() -> None:
    ledger = make(4)
    for text in ("ab", "cd", "e"):
        retain(ledger, keys_of(text), CacheHint(10.0))
    store(ledger, "acde")
    assert priorities(ledger, "acde") == [0, 1, 1, 1]


def test_what_a_disk_writes_after_the_end_of_a_request_is_retained_there() -> None:
    disk = make_disk(6)
    write(disk, "ab")
    retain(disk, keys_of("abcd"), CacheHint(10.0))
    write(disk, "cd")
    write(disk, "xy")
    assert write(disk, "uv") == keys_of("xy")


def test_prefixes_and_the_share_of_the_tenant_hold_in_a_tier() -> None:
    ledger = make(8)
    store(ledger, "abcdefgh")
    hint = CacheHint(0.0, prefixes=(CachePrefix(3, 10.0, 2),))
    retain(ledger, keys_of("abcd"), hint, 3)
    assert [ledger.priority(key) for key in keys_of("abcd")] == [2, 2, 2, 0]
    retain(ledger, keys_of("efgh"), CacheHint(10.0), tenant=NO_TENANT)
    assert [ledger.priority(key) for key in keys_of("efgh")] == [1, 1, 0, 0]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_evicts_an_entry_while_one_of_a_lower_priority_is_evictable(policy: str) -> None:
    for seed in range(30):
        random = Random(seed)
        ledger = make(12, policy)
        num_evicted = 0
        for now in range(40):
            first = random.randrange(30)
            keys = [bytes((position,)) for position in range(first, first + random.randrange(1, 5))]
            entries = {key: ledger.priority(key) for key in ledger}
            ledger.touch(keys)
            prepared = ledger.prepare_store(keys)
            if prepared is not None:
                evicted = prepared.evicted_keys
                num_evicted += len(evicted)
                spared = [entries[key] for key in entries if key not in (*evicted, *keys)]
                highest = max([entries[key] for key in evicted], default=0)
                assert highest <= min(spared, default=3)
                ledger.complete_store(prepared.keys, success=random.random() < 0.9)
            if random.random() < 0.5:
                hint = CacheHint(random.choice((2.0, 20.0)), priority=random.randrange(1, 4))
                tenant = random.choice((ALL, NO_TENANT))
                retain(ledger, keys, hint, tenant=tenant, now=float(now))
            if random.random() < 0.1:
                ledger.remove(keys[:1])
            ledger.expire(float(now))
            ledger.check()
        assert num_evicted


def test_a_disk_evicts_hinted_blocks_last_and_lower_priorities_first() -> None:
    disk = make_disk(6)
    write(disk, "abcdef")
    retain(disk, keys_of("ab"), CacheHint(10.0, priority=3))
    retain(disk, keys_of("cd"), CacheHint(10.0, priority=1))
    assert write(disk, "xy") == keys_of("ef")
    assert write(disk, "uvw") == keys_of("dxy")
    assert write(disk, "rstq") == keys_of("cuvw")


def test_pressure_wins_over_hints_on_a_disk() -> None:
    disk = make_disk(4)
    write(disk, "abcd")
    retain(disk, keys_of("abcd"), CacheHint(10.0, priority=3))
    assert write(disk, "wxyz") == keys_of("abcd")


def test_a_hint_of_a_disk_ends_in_time_and_with_the_next_one_of_its_session() -> None:
    disk = make_disk(4)
    write(disk, "abcd")
    retain(disk, keys_of("d"), CacheHint(10.0, "s"))
    retain(disk, keys_of("c"), CacheHint(5.0, "s"), now=1.0)
    assert write(disk, "x") == keys_of("d")
    disk.expire(5.9)
    assert write(disk, "y") == keys_of("b")
    disk.expire(6.0)
    assert write(disk, "z") == keys_of("c")


def test_each_key_has_a_share_of_the_blocks_of_a_disk() -> None:
    """A quarter of eight blocks; the beginning of a prefix is worth the most."""
    disk = make_disk(8)
    write(disk, "abcdefgh")
    for name, text in (("one", "abcd"), ("other", "ef")):
        retain(disk, keys_of(text), CacheHint(10.0), tenant=Tenant(name, cache_share=0.25))
    assert write(disk, "wxyz") == keys_of("cdgh")
    retain(disk, keys_of("wx"), CacheHint(10.0), tenant=Tenant("one", cache_share=0.25))
    assert write(disk, "rstu") == keys_of("abyz"), "the older hint of this key has ended"


def test_a_disk_has_no_hints_before_it_is_open_and_after_a_restart() -> None:
    disk = DiskTier(1, make)
    retain(disk, keys_of("ab"), CacheHint(10.0))
    disk.expire(1.0)
    open_disk(disk, 4, found="abcd")
    assert len(write(disk, "x")) == 1
    retain(disk, keys_of("x"), CacheHint(10.0))
    disk.begin_epoch()
    open_disk(disk, 4, found="xbcd")
    retain(disk, keys_of("bcd"), CacheHint(10.0))
    assert write(disk, "y") == keys_of("x")


@pytest.mark.parametrize(("hint", "num_kept"), [(None, 0), (CacheHint(1000.0), 8)])
def test_a_disk_keeps_the_blocks_that_it_has_when_a_request_with_a_hint_ends(
    hint: CacheHint | None, num_kept: int
) -> None:
    """Requests that need the whole disk follow."""
    driver = OffloadDriver(num_slots=20, num_disk_slots=40, num_blocks=20)
    driver.ask("first", prompt_of(33), max_tokens=1)
    keys = set(driver.stored_keys)
    driver.ask("hinted", prompt_of(33), cache_hint=hint, max_tokens=1)
    for index in range(6):
        driver.ask(f"other-{index}", prompt_of(60, 100 * (index + 1)))
    on_disk = {key for key, _ in driver.tiers[0].disk.values()}
    assert len(keys & on_disk) == num_kept


def test_the_tiers_keep_the_blocks_of_a_request_with_a_hint() -> None:
    """Requests that need all of host memory follow; what they evict depends on the hint."""
    found = []
    for hint in (None, CacheHint(1000.0), CacheHint(0.0, prefixes=(CachePrefix(9, 1000.0),))):
        driver = OffloadDriver(num_slots=40, num_blocks=20)
        driver.add("hinted", prompt_of(33), cache_hint=hint, max_tokens=1)
        driver.settle()
        keys = driver.stored_keys[:]
        for index in range(6):
            driver.ask(f"other-{index}", prompt_of(60, 100 * (index + 1)))
        found.append(driver.offloading._manager.lookup(keys))
    assert len(keys) == 8
    assert found == [0, 8, 3]
