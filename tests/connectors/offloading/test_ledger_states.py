"""Random calls to a ledger, with every built-in policy, beside a model that only keeps states."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from longshore.connectors.offloading.ledger import (
    KeysRemoved,
    KeysStored,
    LedgerError,
    OffloadLedger,
)
from longshore.connectors.offloading.policies.registry import POLICIES, load_eviction_policy

# Prompts are branches of a tree, so that they share prefixes.
PROMPTS = [
    [f"{branch[:depth]}/{depth}".encode() for depth in range(1, len(branch) + 1)]
    for branch in ("aaaaaaaa", "aaaabbbb", "aabbccdd", "ffffff", "g", "hh", "iiiiiiiiiiii")
]


@dataclass
class Entry:
    """What the model knows of one key."""

    slot: int
    is_ready: bool = False
    loads: int = 0
    is_removed: bool = False  # it goes when its transfers have ended


class LedgerAndModel(RuleBasedStateMachine):
    """`entries` is the model. It leaves only one choice to the policy: which idle entries go."""

    policy = "lru"

    @initialize(capacity=st.integers(1, 16))
    def begin(self, capacity: int) -> None:
        self.capacity = capacity
        self.ledger = OffloadLedger(capacity, load_eviction_policy(self.policy, capacity))
        self.entries: dict[bytes, Entry] = {}
        self.loads: list[list[bytes]] = []
        self.stores: list[list[bytes]] = []
        self.loadable: set[bytes] = set()  # by the events

    prompts = st.builds(
        lambda prompt, first, last: prompt[min(first, last) : max(first, last)],
        st.sampled_from(PROMPTS),
        st.integers(0, 12),
        st.integers(0, 12),
    )

    def can_be_evicted(self, key: bytes) -> bool:
        entry = self.entries[key]
        return entry.is_ready and not entry.loads and not entry.is_removed

    def ready(self, keys: list[bytes]) -> list[bytes]:
        """The leading run of keys that can be loaded."""
        run = []
        for key in keys:
            entry = self.entries.get(key)
            if entry is None or not entry.is_ready or entry.is_removed:
                break
            run.append(key)
        return run

    @rule(keys=prompts)
    def lookup_and_touch(self, keys: list[bytes]) -> None:
        assert self.ledger.lookup(keys) == len(self.ready(keys))
        self.ledger.touch(keys)

    @rule(keys=prompts)
    def prepare_load(self, keys: list[bytes]) -> None:
        keys = self.ready(keys)
        assert self.ledger.prepare_load(keys) == [self.entries[key].slot for key in keys]
        for key in keys:
            self.entries[key].loads += 1
        self.loads.append(keys)

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), take=st.booleans())
    def complete_load(self, data: st.DataObject, take: bool) -> None:
        keys = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        self.ledger.complete_load(keys, take=take)
        for key in keys:
            entry = self.entries[key]
            entry.loads -= 1
            entry.is_removed |= take
            self.forget_removed(key)

    @rule(keys=prompts, position=st.integers(0, 40))
    def prepare_store(self, keys: list[bytes], position: int) -> None:
        new = [key for key in keys if key not in self.entries]
        idle = [key for key in self.entries if key not in keys and self.can_be_evicted(key)]
        num_evict = max(0, len(new) - (self.capacity - len(self.entries)))
        prepared = self.ledger.prepare_store(keys, position)
        if num_evict > len(idle):
            assert prepared is None
            return
        assert prepared is not None
        assert prepared.keys == new
        assert len(set(prepared.evicted_keys)) == len(prepared.evicted_keys) == num_evict
        assert set(prepared.evicted_keys) <= set(idle)
        for key in prepared.evicted_keys:
            del self.entries[key]
        for key, slot in zip(new, prepared.slots, strict=True):
            self.entries[key] = Entry(slot)
        self.stores.append(new)

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), success=st.booleans())
    def complete_store(self, data: st.DataObject, success: bool) -> None:
        keys = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        self.ledger.complete_store(keys, success=success)
        for key in keys:
            self.entries[key].is_ready = True
            self.entries[key].is_removed |= not success
            self.forget_removed(key)

    @rule(num_blocks=st.integers(1, 5))
    def begin_evictions(self, num_blocks: int) -> None:
        """Their slots are free when the blocks have been read."""
        idle = [key for key in self.entries if self.can_be_evicted(key)]
        num_expected = min(num_blocks, self.ledger.num_evictable)
        keys, slots = self.ledger.begin_evictions(num_blocks)
        assert len(set(keys)) == len(keys) == num_expected
        assert set(keys) <= set(idle)
        for key, slot in zip(keys, slots, strict=True):
            assert self.entries[key].slot == slot
            self.entries[key].is_removed = True
            self.entries[key].loads = 1
        self.loads.append(keys)

    @rule(is_drawn=st.integers(0, 9).map(lambda number: number == 0))
    def end_transfers(self, is_drawn: bool) -> None:
        if not is_drawn:
            return
        self.ledger.end_transfers()
        for key, entry in list(self.entries.items()):
            if entry.is_removed or not entry.is_ready:
                del self.entries[key]
            entry.loads = 0
        self.loads, self.stores = [], []

    @rule(keys=prompts)
    def remove(self, keys: list[bytes]) -> None:
        self.ledger.remove(keys)
        self.model_remove(keys)

    @rule(is_drawn=st.integers(0, 9).map(lambda number: number == 0))
    def clear(self, is_drawn: bool) -> None:
        if is_drawn:  # seldom, because it ends what makes a run interesting
            self.ledger.clear()
            self.model_remove(list(self.entries))

    @rule(keys=prompts, data=st.data())
    def insert_ready(self, keys: list[bytes], data: st.DataObject) -> None:
        used = {entry.slot for entry in self.entries.values()}
        free = [slot for slot in range(self.capacity) if slot not in used]
        keys = [key for key in keys if key not in self.entries][: len(free)]
        slots = data.draw(st.permutations(free))[: len(keys)]
        self.ledger.insert_ready(keys, slots)
        for key, slot in zip(keys, slots, strict=True):
            self.entries[key] = Entry(slot, is_ready=True)

    @rule(keys=prompts)
    def illegal_calls_change_nothing(self, keys: list[bytes]) -> None:
        if len(self.ready(keys)) < len(keys):
            with pytest.raises(LedgerError, match="not ready"):
                self.ledger.prepare_load(keys)
        loading = {key for load in self.loads for key in load}
        if not loading.issuperset(keys):
            with pytest.raises(LedgerError, match="no load"):
                self.ledger.complete_load(keys)
        if not {key for store in self.stores for key in store}.issuperset(keys):
            with pytest.raises(LedgerError, match="no store"):
                self.ledger.complete_store(keys)

    def model_remove(self, keys: list[bytes]) -> None:
        for key in keys:
            if key in self.entries:
                self.entries[key].is_removed = True
                self.forget_removed(key)

    def forget_removed(self, key: bytes) -> None:
        entry = self.entries[key]
        if entry.is_removed and entry.is_ready and not entry.loads:
            del self.entries[key]

    @invariant()
    def ledger_is_consistent_and_agrees(self) -> None:
        self.ledger.check()
        ready = {k for k, entry in self.entries.items() if entry.is_ready and not entry.is_removed}
        assert set(self.ledger) == ready
        assert self.ledger.num_ready == len(ready)
        assert self.ledger.num_free == self.capacity - len(self.entries)
        in_use = sum(e.loads > 0 or not e.is_ready for e in self.entries.values())
        assert self.ledger.num_unused == self.capacity - in_use
        assert self.ledger.num_storing == sum(not e.is_ready for e in self.entries.values())
        assert self.ledger.num_loading == sum(e.loads > 0 for e in self.entries.values())
        for event in self.ledger.take_events():
            match event:
                case KeysStored(keys):
                    assert self.loadable.isdisjoint(keys)
                    self.loadable.update(keys)
                case KeysRemoved(keys):
                    assert self.loadable.issuperset(keys)
                    self.loadable.difference_update(keys)
        assert self.loadable == ready


@pytest.mark.req("OFF-03", "OFF-04", "OFF-05", "OFF-06", "OFF-07", "OFF-09", "POL-02", "POL-03")
@pytest.mark.parametrize("policy", POLICIES)
def test_random_calls_keep_the_ledger_consistent(policy: str, long_run: bool) -> None:
    machine = type("Machine", (LedgerAndModel,), {"policy": policy})
    examples = 2000 if long_run else 75
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=60)
    )
