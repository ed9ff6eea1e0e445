"""The offload ledger, call by call."""

import gc
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.connectors.offloading.ledger import (
    KeysRemoved,
    KeysStored,
    LedgerError,
    OffloadLedger,
    PreparedStore,
    capacity_blocks,
)
from longshore.connectors.offloading.policies.lru import LRU
from longshore.connectors.offloading.policies.policy import PolicyError, Protected
from longshore.connectors.offloading.policies.registry import POLICIES, load_eviction_policy
from longshore.protocol.errors import ConfigError


def keys_of(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def make(capacity: int) -> OffloadLedger:
    return OffloadLedger(capacity, LRU(capacity))


def prepare(ledger: OffloadLedger, text: str) -> PreparedStore:
    prepared = ledger.prepare_store(keys_of(text))
    assert prepared is not None
    return prepared


def store(ledger: OffloadLedger, text: str) -> PreparedStore:
    prepared = prepare(ledger, text)
    ledger.complete_store(prepared.keys)
    return prepared


@pytest.mark.req("OFF-04")
def test_lookup_counts_the_leading_keys_that_are_present_and_ready() -> None:
    ledger = make(8)
    store(ledger, "abc")
    prepare(ledger, "de")
    assert ledger.lookup(keys_of("abcdef")) == 3
    assert ledger.lookup(keys_of("abxc")) == 2
    assert ledger.lookup(keys_of("xabc")) == 0
    assert ledger.lookup([]) == 0
    ledger.complete_store(keys_of("de"))
    assert ledger.lookup(keys_of("abcdef")) == 5
    assert (b"a" in ledger, b"f" in ledger) == (True, False)


@pytest.mark.req("OFF-03", "OFF-05", "POL-03")
def test_a_pinned_entry_is_not_evicted_until_its_last_load_ends() -> None:
    ledger = make(2)
    slots = store(ledger, "ab").slots
    assert ledger.prepare_load(keys_of("ab")) == slots
    assert ledger.prepare_load(keys_of("a")) == slots[:1]
    assert ledger.prepare_store(keys_of("c")) is None
    ledger.complete_load(keys_of("ab"))
    assert ledger.prepare_store(keys_of("cd")) is None  # `a` is still pinned
    assert prepare(ledger, "c") == ([b"c"], slots[1:], [b"b"])
    ledger.complete_load(keys_of("a"))
    assert prepare(ledger, "d") == ([b"d"], slots[:1], [b"a"])
    ledger.check()


@pytest.mark.req("OFF-06")
def test_what_is_stored_or_in_flight_is_left_out_of_a_store() -> None:
    ledger = make(8)
    store(ledger, "ab")
    prepare(ledger, "c")
    assert prepare(ledger, "abcd").keys == [b"d"]
    assert prepare(ledger, "abcd") == ([], [], [])


@pytest.mark.req("OFF-06", "POL-03")
def test_a_store_does_not_evict_the_prefix_that_it_continues() -> None:
    ledger = make(4)
    store(ledger, "ab")
    store(ledger, "xy")  # newer than `ab`
    assert prepare(ledger, "abcd").evicted_keys == [b"y", b"x"]
    assert ledger.lookup(keys_of("ab")) == 2
    assert prepare(make(3), "abc").slots == [0, 1, 2]


@pytest.mark.req("OFF-06", "POL-02")
def test_a_store_that_does_not_fit_changes_nothing() -> None:
    ledger = make(4)
    store(ledger, "abcd")
    ledger.prepare_load(keys_of("ab"))
    ledger.take_events()
    assert ledger.prepare_store(keys_of("wxyz")) is None
    assert ledger.prepare_store(keys_of("vwxyz")) is None  # more than the capacity
    assert ledger.lookup(keys_of("abcd")) == 4
    assert ledger.take_events() == []
    ledger.check()


@pytest.mark.req("OFF-07")
def test_a_failed_store_frees_its_slots() -> None:
    ledger = make(4)
    prepare(ledger, "abc")
    assert (ledger.num_storing, ledger.num_free) == (3, 1)
    ledger.complete_store(keys_of("bc"), success=False)
    ledger.complete_store(keys_of("a"))
    assert (ledger.num_ready, ledger.num_storing, ledger.num_free) == (1, 0, 3)
    assert ledger.lookup(keys_of("abc")) == 1
    assert ledger.take_events() == [KeysStored([b"a"])]
    ledger.check()


@pytest.mark.req("OFF-08", "POL-04")
def test_touch_counts_hits_that_need_no_transfer_and_ignores_unknown_keys() -> None:
    ledger = make(4)
    store(ledger, "ab")
    store(ledger, "cd")
    ledger.touch(keys_of("abxy"))
    assert prepare(ledger, "efg").evicted_keys == [b"d", b"c", b"b"]


@pytest.mark.req("OFF-08")
def test_touch_of_a_key_that_was_evicted_makes_it_worth_keeping() -> None:
    ledger = OffloadLedger(4, load_eviction_policy("reuse_rate", 4))
    store(ledger, "abcd")
    store(ledger, "efgh")  # evicts all of them
    ledger.touch(keys_of("abx"))  # a miss
    store(ledger, "ab")
    ledger.touch(keys_of("ghx"))
    store(ledger, "yz")
    assert ledger.lookup(keys_of("ab")) == 2


@pytest.mark.req("OFF-09")
def test_events_are_taken_once_and_in_order() -> None:
    ledger = make(2)
    store(ledger, "ab")
    store(ledger, "c")
    ledger.remove([b"a"])
    assert ledger.take_events() == [
        KeysStored(keys_of("ab")),
        KeysRemoved([b"b"]),
        KeysStored([b"c"]),
        KeysRemoved([b"a"]),
    ]
    assert ledger.take_events() == []


def test_a_removed_entry_that_is_pinned_keeps_its_slot_until_its_last_load_ends() -> None:
    ledger = make(2)
    (slot, _) = store(ledger, "ab").slots
    ledger.prepare_load(keys_of("a"))
    ledger.prepare_load(keys_of("ab"))
    ledger.remove(keys_of("abz"))
    assert ledger.lookup(keys_of("a")) == 0
    assert ledger.num_free == 0
    assert prepare(ledger, "a") == ([], [], [])  # not stored anew while it is being read
    with pytest.raises(LedgerError, match="not ready"):
        ledger.prepare_load(keys_of("a"))
    ledger.complete_load(keys_of("ab"))
    assert ledger.num_free == 1
    ledger.complete_load(keys_of("a"))
    assert ledger.num_free == 2
    assert slot in prepare(ledger, "ab").slots
    ledger.check()


def test_an_entry_removed_while_it_is_stored_is_never_ready() -> None:
    ledger = make(4)
    prepare(ledger, "ab")
    ledger.remove(keys_of("b"))
    ledger.complete_store(keys_of("ab"))
    assert ledger.lookup(keys_of("ab")) == 1
    assert ledger.num_free == 3
    assert ledger.take_events() == [KeysStored([b"a"])]
    store(ledger, "b")  # a later store is not affected
    assert ledger.lookup(keys_of("ab")) == 2


def test_an_exclusive_tier_removes_what_has_been_loaded() -> None:
    ledger = make(4)
    store(ledger, "abc")
    ledger.prepare_load(keys_of("abc"))
    ledger.prepare_load(keys_of("a"))
    ledger.complete_load(keys_of("ab"), take=True)
    assert ledger.lookup(keys_of("abc")) == 0
    assert ledger.num_free == 2  # b's slot; `a` is still loaded by another request
    ledger.complete_load(keys_of("a"))
    ledger.complete_load(keys_of("c"))  # failed, so it is kept
    assert ledger.num_free == 3
    assert list(ledger) == [b"c"]
    assert ledger.take_events()[1:] == [KeysRemoved(keys_of("ab"))]
    ledger.check()


def test_contents_found_at_start_take_their_slots() -> None:
    ledger = make(6)
    ledger.insert_ready(keys_of("ab"), [4, 1])
    ledger.insert_ready(keys_of("c"), [5], positions=[2])
    assert ledger.prepare_load(keys_of("abc")) == [4, 1, 5]
    ledger.complete_load(keys_of("abc"))
    assert prepare(ledger, "def").slots == [0, 2, 3]
    ledger.complete_store(keys_of("def"))
    with pytest.raises(LedgerError, match="different free slots"):
        ledger.insert_ready([b"g"], [4])
    ledger.remove(keys_of("de"))
    for slots in ([0], [0, 0], [0, 9]):
        with pytest.raises(LedgerError, match="different free slots"):
            ledger.insert_ready(keys_of("gh"), slots)
    for keys in ("gg", "ga"):
        with pytest.raises(LedgerError, match="known already, or given twice"):
            ledger.insert_ready(keys_of(keys), [0, 2])
    ledger.check()


def test_clear_removes_everything_when_its_transfers_have_ended() -> None:
    ledger = make(6)
    store(ledger, "abc")
    ledger.prepare_load(keys_of("a"))
    prepare(ledger, "de")
    ledger.clear()
    assert list(ledger) == []
    assert ledger.num_free == 3
    ledger.complete_store(keys_of("de"))
    ledger.complete_load(keys_of("a"))
    assert ledger.num_free == 6
    ledger.check()


@pytest.mark.parametrize("twice", ["aa", "aba"])
def test_the_same_key_twice_in_a_call_changes_nothing(twice: str) -> None:
    ledger = make(4)
    with pytest.raises(LedgerError, match="given twice"):
        ledger.prepare_store(keys_of(twice))
    assert ledger.num_free == 4
    store(ledger, "ab")
    with pytest.raises(LedgerError, match="given twice"):
        ledger.prepare_load(keys_of(twice))
    ledger.prepare_load(keys_of("ab"))
    with pytest.raises(LedgerError, match="given twice"):
        ledger.complete_load(keys_of(twice))
    assert ledger.num_loading == 2
    ledger.complete_load(keys_of("ab"))
    ledger.check()


def test_neighbouring_blocks_get_neighbouring_slots_again_after_an_eviction() -> None:
    ledger = make(12)
    for text in ("abcd", "efgh", "ijkl", "mnop"):
        slots = store(ledger, text).slots
        assert slots == list(range(slots[0], slots[0] + 4))
    ledger.remove(keys_of("moenp"))  # freed in any order, they are used in theirs
    slots = store(ledger, "vwxyz").slots
    assert slots == sorted(slots)


@pytest.mark.req("OFF-11")
@given(st.integers(0, 1 << 50), st.integers(1, 1 << 30))
def test_capacity_is_the_number_of_whole_blocks(size_bytes: int, block_bytes: int) -> None:
    if size_bytes < block_bytes:
        with pytest.raises(ConfigError, match="cannot hold one block"):
            capacity_blocks(size_bytes, block_bytes)
    else:
        capacity = capacity_blocks(size_bytes, block_bytes)
        assert capacity * block_bytes <= size_bytes < (capacity + 1) * block_bytes


def test_sizes_that_make_no_sense_are_rejected() -> None:
    with pytest.raises(ConfigError, match="block_bytes=0 must be at least 1"):
        capacity_blocks(100, 0)
    with pytest.raises(ConfigError, match="a policy of the same capacity"):
        OffloadLedger(4, LRU(5))
    with pytest.raises(ConfigError, match="at least 1"):
        OffloadLedger(0, LRU(0))


class Wrong(LRU):
    """Evicts what its test tells it."""

    answer: list[bytes]

    def evict(self, num_blocks: int, protected: Protected) -> list[bytes] | None:
        return self.answer


@pytest.mark.parametrize("answer", ["", "a", "cd", "zy", "bb", "bcd"])
def test_a_policy_that_evicts_wrongly_is_named(answer: str) -> None:
    policy = Wrong(4)
    ledger = OffloadLedger(4, policy)
    store(ledger, "abcd")
    ledger.prepare_load(keys_of("cd"))
    policy.answer = keys_of(answer)
    with pytest.raises(PolicyError, match=r"eviction policy Wrong returned \d keys, not 2"):
        ledger.prepare_store(keys_of("xy"))


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_of_a_long_prompt_stored_in_parts_are_evicted_from_the_end(policy: str) -> None:
    """The prompt is passed as a whole at the end, which puts its parts in order."""
    ledger = OffloadLedger(30, load_eviction_policy(policy, 30))
    prompt = [bytes([number]) for number in range(20)]
    ledger.touch(prompt)
    for first in range(0, 20, 5):
        part = prompt[first : first + 5]
        ledger.prepare_store(part, first)
        ledger.complete_store(part)
    assert ledger.prepare_store(prompt) == ([], [], [])
    other = [b"other %d" % number for number in range(20)]
    prepared = ledger.prepare_store(other)
    assert prepared is not None
    if policy != "s3fifo":  # its queues do not reorder entries
        assert prepared.evicted_keys == prompt[:9:-1]


@pytest.mark.req("OFF-03")
def test_the_ledger_needs_neither_torch_nor_the_scheduler() -> None:
    program = (
        "import sys, longshore.connectors.offloading.ledger as ledger\n"
        "import longshore.connectors.offloading.policies.registry\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not names & {'torch'}, names\n"
        "assert 'longshore.scheduler' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.req("ERR-25")
@pytest.mark.parametrize("policy", POLICIES)
def test_there_is_no_record_per_block(policy: str) -> None:
    """A record of an int32 and an int64 has 16 bytes, not 12, unless it is packed; here the state
    of an entry is its slot in a dict, so the garbage collector has nothing to do per block."""
    assert (struct.calcsize("@iq"), struct.calcsize("=iq")) == (16, 12)
    ledger = OffloadLedger(20_000, load_eviction_policy(policy, 20_000))
    gc.collect()
    before = len(gc.get_objects())
    for first in range(0, 40_000, 1000):  # the second half evicts the first one
        keys = [number.to_bytes(4, "big") for number in range(first, first + 1000)]
        ledger.touch(keys)
        ledger.prepare_store(keys)
        ledger.complete_store(keys)
        ledger.take_events()
    assert ledger.num_ready == 20_000
    assert len(gc.get_objects()) - before < 1000


@pytest.mark.req("TIE-04")
def test_a_pinned_entry_is_not_evicted_until_each_pin_has_ended() -> None:
    ledger = make(4)
    store(ledger, "abc")
    prepare(ledger, "d")
    ledger.pin(keys_of("ab"))
    ledger.pin(keys_of("bd"))  # d is being stored
    ledger.complete_store(keys_of("d"))
    assert ledger.prepare_store(keys_of("xy")) is None, "only c may be evicted"
    assert ledger.num_evictable <= 1, "a lower bound"
    ledger.unpin(keys_of("ab"))
    assert prepare(ledger, "xy").evicted_keys == keys_of("ca"), "b was pinned twice"
    ledger.unpin(keys_of("bd"))
    assert ledger.num_evictable == 2
    with pytest.raises(LedgerError, match="is not pinned"):
        ledger.unpin(keys_of("b"))
    ledger.check()


def test_with_pinned_entries_only_others_are_written_back() -> None:
    """An eviction of more than there are would be refused as a whole, again and again."""
    ledger = make(4)
    store(ledger, "abcd")
    ledger.pin(keys_of("abc"))
    assert ledger.begin_evictions(4)[0] == keys_of("d")
    assert ledger.begin_evictions(4)[0] == []
