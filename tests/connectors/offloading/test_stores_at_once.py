"""Stores of several requests in one call equal one call for each."""

import random
from collections.abc import Sequence

import pytest

from longshore.connectors.offloading.ledger import LedgerEvent, OffloadLedger
from longshore.connectors.offloading.policies.policy import EvictionPolicy, PolicyError, Protected
from longshore.connectors.offloading.policies.registry import POLICIES, load_eviction_policy
from tests.connectors.offloading.offload_driver import OffloadDriver
from tests.harness.tokens import prompt_of

Run = tuple[list[bytes], int]
"""Keys of one prefix, and the position of the first."""


def chain(number: int, first: int, last: int) -> Run:
    return [b"%d/%d" % (number, index) for index in range(first, last)], first


class Side:
    """One of two ledgers that get the same calls."""

    def __init__(self, policy: str, capacity: int) -> None:
        self.policy = load_eviction_policy(policy, capacity)
        self.ledger = OffloadLedger(capacity, self.policy)

    def events(self) -> list[tuple[type[LedgerEvent], bytes]]:
        return [(type(event), key) for event in self.ledger.take_events() for key in event.keys]


def random_runs(chance: random.Random, fresh: int) -> list[Run]:
    """Of requests that share prompts, or of different ones, whose chains begin at `fresh`."""
    if chance.random() < 0.4:
        numbers = [chance.randrange(6) for _ in range(chance.randrange(2, 5))]
    else:
        numbers = list(range(fresh, fresh + chance.randrange(2, 7)))
    runs = []
    for number in numbers:
        first, length = chance.randrange(8), chance.choice((1, 1, 1, 0, 2, 4))
        runs.append(chain(number, first, first + length))
    return runs


@pytest.mark.req("POL-02", "POL-03", "OFF-05")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(20))
def test_the_same_keys_are_stored_and_evicted(policy: str, seed: int) -> None:
    """Which of the new keys gets which of the slots is the only difference."""
    chance = random.Random(seed)
    capacity = chance.randrange(6, 40)
    at_once, each = Side(policy, capacity), Side(policy, capacity)
    sides = (at_once, each)
    storing: list[list[bytes]] = []
    loading: list[list[bytes]] = []
    num_at_once = num_evicting = 0
    for step in range(150):
        runs = random_runs(chance, 10 * step + 10)
        for keys, position in runs if chance.random() < 0.5 else []:
            for side in sides:
                side.ledger.touch(keys, position)
        all_keys = [key for keys, _ in runs for key in keys]
        is_new = all(map(each.ledger.may_store, all_keys)) and len({*all_keys}) == len(all_keys)
        prepared = at_once.ledger.prepare_stores(runs)
        expected = [each.ledger.prepare_store(*run) for run in runs]
        assert (prepared is not None) == (is_new and None not in expected)
        if prepared is None:
            assert [run and run.keys for run in expected] == [
                run and run.keys for run in (at_once.ledger.prepare_store(*run) for run in runs)
            ]
        else:
            assert prepared.keys == all_keys
            parts = [run for run in expected if run is not None]
            assert prepared.evicted_keys == [key for run in parts for key in run.evicted_keys]
            assert len(set(prepared.slots)) == len(all_keys)
            num_at_once += 1
            num_evicting += len(prepared.evicted_keys) > 1
        storing += [run.keys for run in expected if run is not None and run.keys]
        random_ends(chance, sides, storing, loading)
        for side in sides:
            side.ledger.check()
        assert at_once.events() == each.events()
        assert list(at_once.policy) == list(each.policy)
    assert num_at_once > 20
    assert num_evicting > 10
    for keys in storing:
        for side in sides:
            side.ledger.complete_store(keys)
    for keys in loading:
        for side in sides:
            side.ledger.complete_load(keys)
    while len(each.policy):
        assert at_once.policy.evict(1, Protected()) == each.policy.evict(1, Protected())


def random_ends(
    chance: random.Random,
    sides: Sequence[Side],
    storing: list[list[bytes]],
    loading: list[list[bytes]],
) -> None:
    """Stores and loads begin and end, in both ledgers."""
    while storing and chance.random() < 0.8:
        keys, success = storing.pop(chance.randrange(len(storing))), chance.random() < 0.9
        for side in sides:
            side.ledger.complete_store(keys, success=success)
    while loading and chance.random() < 0.5:
        keys = loading.pop()
        for side in sides:
            side.ledger.complete_load(keys)
    ready = sorted(sides[0].ledger)
    if ready and chance.random() < 0.3:
        keys = chance.sample(ready, min(3, len(ready)))
        loading.append(keys)
        for side in sides:
            side.ledger.prepare_load(keys)
    if ready and chance.random() < 0.1:
        for side in sides:
            side.ledger.remove(ready[:2])


class Undecided(EvictionPolicy):
    """Says that it can evict, and then does not."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.entries: dict[bytes, None] = {}

    def __contains__(self, key: object) -> bool:
        return key in self.entries

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.entries)

    def touch(self, keys: Sequence[bytes], positions: Sequence[int]) -> None:
        pass

    def insert(self, keys: Sequence[bytes], positions: Sequence[int]) -> None:
        self.entries.update(dict.fromkeys(keys))

    def remove(self, keys: object) -> None:
        raise NotImplementedError

    def evict(self, num_blocks: int, protected: Protected) -> None:
        return None


def test_a_policy_that_does_not_evict_what_it_could_is_an_error() -> None:
    ledger = OffloadLedger(2, Undecided(2))
    ledger.prepare_store([b"a", b"b"])
    ledger.complete_store([b"a", b"b"])
    with pytest.raises(PolicyError, match="Undecided could evict"):
        ledger.prepare_stores([([b"c"], 0), ([b"d"], 0)])


def test_rows_that_complete_a_block_in_the_same_step_need_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = OffloadDriver(num_slots=64, num_blocks=60)
    calls: list[int] = []
    manager = driver.offloading._manager
    prepare_stores = manager.prepare_stores

    def counted(runs: Sequence[Run]) -> object:
        calls.append(len(runs))
        return prepare_stores(runs)

    def not_called(keys: list[bytes], position: int = 0) -> None:
        raise AssertionError("a call for one request")

    monkeypatch.setattr(manager, "prepare_stores", counted)
    monkeypatch.setattr(manager, "prepare_store", not_called)
    names = [driver.add(f"r{index}", prompt_of(8, 20 * index), max_tokens=9) for index in range(5)]
    driver.run_until_idle()
    driver.settle()
    driver.check_complete(*names)
    assert calls == [5, 5]
    assert len(driver.stored_keys) == 5 * 3
