"""The ledger of one offload tier: which blocks it has, in which slots, and what is in flight.

It decides in the scheduler, and does no I/O: workers copy between blocks and the slots that it
names, and the connector reports when they are done. An entry is first stored (not ready, not
evictable), then idle, and pinned while it is loaded. Which idle entries are evicted is the policy's
choice. An illegal call raises LedgerError and changes nothing.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, filterfalse, repeat
from operator import indexOf
from typing import NamedTuple

from longshore.connectors.base.retention import RetainedPrefixes
from longshore.connectors.offloading.late_hints import LateHints
from longshore.connectors.offloading.policies.policy import (
    EvictionPolicy,
    PolicyError,
    Protected,
)
from longshore.connectors.offloading.spec import HintedKeys
from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import ConfigError, LongshoreError
from longshore.protocol.requests import MAX_CACHE_PRIORITY


class LedgerError(LongshoreError):
    """A call that does not fit the ledger's state, or a violated invariant."""


class PreparedStore(NamedTuple):
    """Copy block i of `keys` into slot i of `slots`, then call `complete_store`. The contents of
    `evicted_keys` are gone."""

    keys: list[bytes]
    slots: list[int]
    evicted_keys: list[bytes]


@dataclass(frozen=True, slots=True)
class KeysStored:
    """These keys can be loaded from now on."""

    keys: list[bytes]


@dataclass(frozen=True, slots=True)
class KeysRemoved:
    """These keys can no longer be loaded."""

    keys: list[bytes]


LedgerEvent = KeysStored | KeysRemoved


def capacity_blocks(size_bytes: int, block_bytes: int) -> int:
    """Number of blocks that fit into a tier.

    block_bytes: of one offloaded block, with all layers and of all ranks that share the tier.

    Raises ConfigError if not even one fits.
    """
    if block_bytes < 1:
        raise ConfigError(f"block_bytes={block_bytes} must be at least 1")
    if size_bytes < block_bytes:
        raise ConfigError(
            f"an offload tier of {size_bytes} bytes cannot hold one block of {block_bytes} bytes; "
            "make it larger"
        )
    return size_bytes // block_bytes


class _RetainedKeys(Collection[bytes]):
    """The entries that cache hints retain with at least this priority."""

    def __init__(self, slots: dict[bytes, int], retained: RetainedPrefixes, priority: int) -> None:
        self._slots = slots
        self._priorities = memoryview(retained.all_priorities)
        self._lowest = priority
        self._num_keys = retained.num_retained(priority)

    def __contains__(self, key: object) -> bool:
        slot = self._slots.get(key)  # type: ignore[call-overload]  # any object can be asked for
        return slot is not None and self._priorities[slot] >= self._lowest

    def __iter__(self) -> Iterator[bytes]:
        return filter(self.__contains__, self._slots)

    def __len__(self) -> int:
        return self._num_keys


class OffloadLedger:
    """
    A key is a block hash with its group, `bytes`; it is opaque here. Calls take keys of one prefix
    in its order; `position` is the index of the first of them in the prompt. Slots are
    0..capacity-1.

    A request's calls: `lookup`, `touch`, and `prepare_load` once when it is admitted, then
    `prepare_store` whenever it has computed blocks.
    """

    def __init__(self, capacity: int, policy: EvictionPolicy) -> None:
        if capacity < 1 or policy.capacity != capacity:
            raise ConfigError(
                f"a ledger of {capacity} blocks needs a policy of the same capacity, at least 1; "
                f"the policy has {policy.capacity}"
            )
        self.capacity = capacity
        self._policy = policy
        self._slots: dict[bytes, int] = {}  # of all entries
        self._storing: set[bytes] = set()  # entries whose store is in flight; the others are ready
        self._loads: dict[bytes, int] = {}  # number of loads in flight
        self._leaving: dict[bytes, int] = {}  # slots of entries removed during their last loads
        self._unwanted: set[bytes] = set()  # stores in flight whose contents are not to be kept
        self._pins: Counter[bytes] = Counter()
        self._protected = Protected(self._loads, self._storing, self._pins)
        self._retained = RetainedPrefixes(capacity)  # by slot
        self._late_hints = LateHints(capacity)
        self._free = list(range(capacity - 1, -1, -1))  # the last one is used first
        self._events: list[LedgerEvent] = []

    @property
    def num_ready(self) -> int:
        """Number of entries that can be loaded."""
        return len(self._slots) - len(self._storing)

    @property
    def num_storing(self) -> int:
        """Number of entries whose store is in flight."""
        return len(self._storing)

    @property
    def num_loading(self) -> int:
        """Number of different entries with loads in flight."""
        return len(self._loads)

    @property
    def num_unused(self) -> int:
        """Number of slots that are in no store or load, and not pinned: they are free, or can be
        evicted. A lower bound."""
        num_used = len(self._storing) + len(self._loads) + len(self._pins)
        return max(self.capacity - num_used, 0)

    @property
    def num_evictable(self) -> int:
        """Number of entries that are in no store or load, and not pinned. A lower bound."""
        num_idle = self.num_ready - len(self._loads) + len(self._leaving)
        return max(num_idle - len(self._pins), 0)

    @property
    def num_free(self) -> int:
        """Number of slots that a store can use without an eviction."""
        return len(self._free)

    def __contains__(self, key: object) -> bool:
        """Whether the key can be loaded."""
        return key in self._slots and key not in self._storing

    def may_store(self, key: bytes) -> bool:
        """Whether the tier does not have the key, and `prepare_store` would give it a slot."""
        return key not in self._slots and key not in self._leaving

    def is_loading(self, key: bytes) -> bool:
        """Whether the key is pinned by a load."""
        return key in self._loads

    def __iter__(self) -> Iterator[bytes]:
        """The keys that can be loaded, in no particular order."""
        return filterfalse(self._storing.__contains__, self._slots)

    def lookup(self, keys: Sequence[bytes]) -> int | None:
        """Number of leading `keys` that can be loaded. Changes nothing.

        None is reserved for tiers that know the answer only later: ask again in the next step.
        """
        is_ready = map(self._slots.__contains__, keys)
        if self._storing and not self._storing.isdisjoint(keys):
            is_ready = map(self.__contains__, keys)
        try:
            return indexOf(is_ready, False)
        except ValueError:
            return len(keys)

    def touch(self, keys: Sequence[bytes], position: int = 0) -> None:
        """A request uses these keys, in this tier or not. To be called once per request, with all
        of its keys, before they are stored; a call in each step would count as many uses."""
        self._policy.touch(keys, range(position, position + len(keys)))

    def refresh(self, keys: Sequence[bytes]) -> None:
        """A request has ended that had these keys: the last of them are evicted first, because a
        block is of use only with those before it. Not another use; unknown keys are ignored."""
        self._policy.refresh(list(filter(self._slots.__contains__, keys)))

    def retain(self, hinted: HintedKeys) -> None:
        """Evict those of these keys that are entries after all others, by the rules of
        `RetainedPrefixes`; and those that are not, when they are stored."""
        self._retained.expire(hinted.now)
        self._late_hints.add(hinted, list(filterfalse(self._slots.__contains__, hinted.keys)))
        self._retain_entries(hinted)

    def _retain_entries(self, hinted: HintedKeys) -> None:
        keys, prefixes, hint, tenant, now = hinted
        slots = list(map(self._slots.get, keys, repeat(-1)))
        parts = [[slot for slot in slots[:end] if slot >= 0] for end in (len(keys), *prefixes)]
        whole, *leading = map(int32_array, parts)
        self._retained.add(whole, hint, leading, tenant=tenant, now=now)

    def expire(self, now: float) -> None:
        """End the hints whose time to live has passed."""
        self._late_hints.expire(now)
        if now >= self._retained.next_expiry_s:
            self._retained.expire(now)

    def priority(self, key: bytes) -> int:
        """With which priority an entry is retained; 0: not."""
        return int(self._retained.all_priorities[self._slots[key]])

    def has_slots(self, keys: Iterable[bytes]) -> bool:
        """Whether all of these keys are stored, or being stored."""
        return all(map(self._slots.__contains__, keys))

    def pin(self, keys: Iterable[bytes]) -> None:
        """Do not evict these keys before `unpin`, called as often. `remove` removes them still."""
        self._pins.update(keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """End a `pin` of these keys."""
        for key in keys:
            if not self._pins[key]:
                raise LedgerError(f"{_hex(key)} is not pinned")
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]

    def prepare_load(self, keys: Sequence[bytes]) -> list[int]:
        """Pin entries; the slots to load from. Ends with `complete_load`."""
        slots = list(map(self._slots.get, keys, repeat(-1)))
        if -1 in slots or (self._storing and not self._storing.isdisjoint(keys)):
            missing = next(key for key in keys if key not in self)
            raise LedgerError(f"cannot load {_hex(missing)}: it is not ready")
        loads = self._loads
        pins = dict.fromkeys(keys, 1)
        if len(pins) != len(keys):
            raise LedgerError("cannot load: the same key is given twice")
        if loads and not loads.keys().isdisjoint(pins):
            pins = {key: loads.get(key, 0) + 1 for key in keys}
        loads.update(pins)
        return slots

    def begin_evictions(self, num_blocks: int) -> tuple[list[bytes], list[int]]:
        """Remove entries by the policy, at most `num_blocks`, of which the content is still to be
        read: their keys and slots. The slots are free after `complete_load`."""
        num_blocks = min(num_blocks, self.num_evictable)
        evicted = self._evict(num_blocks, self._protected) if num_blocks > 0 else []
        if not evicted:
            return [], []
        if len(list(self._protected.evictable(evicted))) != num_blocks:
            raise self._wrong_policy(evicted, num_blocks)
        slots = self._vacate(evicted)
        self._leaving.update(zip(evicted, slots, strict=True))
        self._loads.update(dict.fromkeys(evicted, 1))
        self._events.append(KeysRemoved(evicted))
        return evicted, slots

    def complete_load(self, keys: Sequence[bytes], *, take: bool = False) -> None:
        """Unpin entries.

        take: remove the entries, because the blocks live in the destination now (exclusive tiers).
              One that is still pinned by other loads is removed when the last of them ends.
        """
        loads = self._loads
        counts = list(map(loads.pop, keys, repeat(0)))
        if counts.count(1) != len(counts):
            if 0 in counts:
                loads.update((key, n) for key, n in zip(keys, counts, strict=True) if n)
                raise LedgerError(
                    f"no load of {_hex(keys[counts.index(0)])} is in flight, or it is given twice"
                )
            loads.update((key, n - 1) for key, n in zip(keys, counts, strict=True) if n > 1)
        if take:
            self.remove(keys)
        if self._leaving:
            left = [key for key in keys if key in self._leaving and key not in loads]
            self._free += map(self._leaving.pop, left)

    def prepare_store(self, keys: Sequence[bytes], position: int = 0) -> PreparedStore | None:
        """Allocate slots for those of `keys` that are not stored yet, evicting others if the tier
        is full. None, without any change, if not enough entries can be evicted.

        Keys that are stored already, or in flight, are left out. Pass all keys that the request has
        so far, at least when it ends: it makes the policy evict the last of them first. Ends with
        `complete_store`.
        """
        new = list(filterfalse(self._slots.__contains__, keys))
        if self._leaving:
            new = list(filterfalse(self._leaving.__contains__, new))
        if len(set(new)) != len(new):
            raise LedgerError("cannot store: the same key is given twice")
        evicted: list[bytes] = []
        if new:
            protected = self._protected
            if len(new) < len(keys):
                protected = Protected.union(protected, set(keys))
            admitted = self._admit([(new, _positions(new, keys, position))], len(new), protected)
            if admitted is None:
                return None
            evicted = admitted
        if len(new) < len(keys):
            self._policy.refresh(keys)
        return PreparedStore(new, self._begin_store(new), evicted)

    def prepare_stores(self, runs: Sequence[tuple[Sequence[bytes], int]]) -> PreparedStore | None:
        """`prepare_store` for each of several prefixes at once, if all of their keys are new and
        there is room for all of them: the same keys are stored and evicted. Else None, without any
        change; `prepare_store` has then to be called for each.

        runs: keys of each, and the position of the first.
        """
        new = list(chain.from_iterable(keys for keys, _ in runs))
        known = (self._slots, self._leaving)
        if not all(each.keys().isdisjoint(new) for each in known) or len(set(new)) != len(new):
            return None
        placed = [(keys, range(first, first + len(keys))) for keys, first in runs if keys]
        evicted = self._admit(placed, len(new), self._protected)
        return None if evicted is None else PreparedStore(new, self._begin_store(new), evicted)

    def _begin_store(self, new: list[bytes]) -> list[int]:
        """Slots of admitted keys."""
        first = len(self._free) - len(new)
        slots = self._free[first:]
        del self._free[first:]
        slots.sort()  # neighbouring blocks in neighbouring slots make larger copies
        self._slots.update(zip(new, slots, strict=True))
        self._storing.update(new)
        if self._late_hints:
            for hinted in self._late_hints.came(new):
                self._retain_entries(hinted)
        return slots

    def complete_store(self, keys: Sequence[bytes], *, success: bool = True) -> None:
        """Make stored entries ready; without success, remove them and free their slots."""
        if not self._storing.issuperset(keys):
            unknown = next(key for key in keys if key not in self._storing)
            raise LedgerError(f"no store of {_hex(unknown)} is in flight")
        self._storing.difference_update(keys)
        stored = list(keys)
        unwanted: list[bytes] = []
        if not success:
            unwanted, stored = stored, unwanted
        elif not self._unwanted.isdisjoint(keys):
            unwanted = list(filter(self._unwanted.__contains__, keys))
            stored = list(filterfalse(self._unwanted.__contains__, keys))
        if unwanted:
            self._unwanted.difference_update(unwanted)
            self._policy.remove(unwanted)
            self._free += self._vacate(unwanted)
        if stored:
            self._events.append(KeysStored(stored))

    def insert_ready(
        self, keys: Sequence[bytes], slots: Sequence[int], positions: Sequence[int] | None = None
    ) -> None:
        """Add entries that the tier has contained since before this process started.

        positions: of the blocks in their prompts, if known.

        Takes time in proportion to the capacity, so insert many at once.
        """
        taken = set(slots)
        if not taken.issubset(self._free) or len(taken) != len(slots) or len(keys) != len(slots):
            raise LedgerError("cannot insert: the slots are not as many different free slots")
        known = chain(self._slots, self._leaving)
        if len(set(keys)) != len(keys) or not set(keys).isdisjoint(known):
            raise LedgerError("cannot insert: a key is known already, or given twice")
        self._free = list(filterfalse(taken.__contains__, self._free))
        self._policy.insert(keys, [0] * len(keys) if positions is None else positions)
        self._slots.update(zip(keys, slots, strict=True))
        if keys:
            self._events.append(KeysStored(list(keys)))

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove entries, for example because a checksum is wrong. They cannot be looked up any
        more; their slots are free when their last load ends. Keys that are being stored are removed
        when that ends; others are ignored."""
        keys = list(dict.fromkeys(keys))
        if self._storing:
            self._unwanted.update(filter(self._storing.__contains__, keys))
        removed = list(filter(self.__contains__, keys))
        if not removed:
            return
        self._policy.remove(removed)
        for key, slot in zip(removed, self._vacate(removed), strict=True):
            if key in self._loads:
                self._leaving[key] = slot
            else:
                self._free.append(slot)
        self._events.append(KeysRemoved(removed))

    def clear(self) -> None:
        """Remove everything, as `remove` does."""
        self._late_hints.clear()
        self.remove(list(self._slots))

    def end_transfers(self) -> None:
        """All stores in flight have failed, and all loads and pins have ended."""
        self.complete_store(list(self._storing), success=False)
        self._loads.clear()
        self._pins.clear()
        self._free += self._leaving.values()
        self._leaving.clear()

    def take_events(self) -> list[LedgerEvent]:
        """What has been stored and removed since the last call, in order. To be called regularly:
        the list grows until then."""
        events, self._events = self._events, []
        return events

    def check(self) -> None:
        """Raise LedgerError unless every slot is in one place and all parts agree."""
        slots = [*self._free, *self._slots.values(), *self._leaving.values()]
        if sorted(slots) != list(range(self.capacity)):
            raise LedgerError(f"slots are lost or used twice: {sorted(slots)}")
        entries = self._slots.keys()
        if not self._storing <= entries or not self._leaving.keys().isdisjoint(entries):
            raise LedgerError("a key is in two states, or is stored without a slot")
        if len(self._policy) != len(entries) or set(self._policy) != entries:
            raise LedgerError("the policy's entries are not those of the ledger")
        if any(count < 1 for count in (*self._loads.values(), *self._pins.values())):
            raise LedgerError("an entry is protected without a load or a pin")
        if not self._loads.keys() <= (entries - self._storing) | self._leaving.keys():
            raise LedgerError("a load is in flight of a key that has no slot")
        if not self._leaving.keys() <= self._loads.keys():
            raise LedgerError("a removed entry without a load keeps its slot")
        unused = int32_array([*self._free, *self._leaving.values()])
        if self._retained.priorities(unused).any():
            raise LedgerError("a slot is retained that has no entry")
        if not self._unwanted <= self._storing:
            raise LedgerError("a store that has ended is still to be removed")
        self._policy.check()

    def _admit(
        self,
        runs: Sequence[tuple[Sequence[bytes], Sequence[int]]],
        num_new: int,
        protected: Protected,
    ) -> list[bytes] | None:
        """Let the policy evict and insert; the evicted keys, whose slots are free then."""
        num_evict = max(0, num_new - len(self._free))
        if num_evict > self.num_ready:
            return None
        if num_evict and self._retained.prefixes:
            evicted = self._evict(num_evict, protected)
            if evicted is not None and self._policy.admit_each(runs, 0, protected) is None:
                raise self._wrong_policy([], 0)
        else:
            evicted = self._policy.admit_each(runs, num_evict, protected)
        if not evicted and (evicted is None or not num_evict):
            return evicted
        if len(list(protected.evictable(evicted))) != num_evict:
            raise self._wrong_policy(evicted, num_evict)
        if not all(map(self._slots.__contains__, evicted)) or len(set(evicted)) != num_evict:
            raise self._wrong_policy(evicted, num_evict)
        self._free += self._vacate(evicted)
        self._events.append(KeysRemoved(evicted))
        return evicted

    def _evict(self, num_blocks: int, protected: Protected) -> list[bytes] | None:
        """As the policy's `evict`, but what cache hints retain is evicted last, the lowest priority
        first."""
        policy = self._policy
        if not self._retained.prefixes:
            return policy.evict(num_blocks, protected)
        if not policy.can_evict(num_blocks, protected):
            return None
        evicted: list[bytes] = []
        for priority in range(1, MAX_CACHE_PRIORITY + 1):
            spared = Protected.union(
                protected, _RetainedKeys(self._slots, self._retained, priority)
            )
            missing = num_blocks - len(evicted)
            if not policy.can_evict(missing, spared):
                missing = sum(1 for _ in spared.evictable(policy))
            evicted += (missing and policy.evict(missing, spared)) or []
        missing = num_blocks - len(evicted)
        return evicted + ((missing and policy.evict(missing, protected)) or [])

    def _vacate(self, keys: Sequence[bytes]) -> list[int]:
        """The slots of entries that are removed."""
        slots = list(map(self._slots.pop, keys))
        if self._retained.prefixes:
            self._retained.evicted(slots)
        return slots

    def _wrong_policy(self, evicted: list[bytes], num_evict: int) -> PolicyError:
        return PolicyError(
            f"eviction policy {type(self._policy).__name__} returned {len(evicted)} keys, not "
            f"{num_evict} different entries that may be evicted"
        )


def complete_stores(ledger: OffloadLedger, keys: Sequence[bytes], failed: Sequence[bytes]) -> None:
    """End stores, of which some have failed."""
    bad = set(failed)
    ledger.complete_store([key for key in keys if key not in bad])
    ledger.complete_store([key for key in keys if key in bad], success=False)


def _positions(new: list[bytes], keys: Sequence[bytes], position: int) -> Sequence[int]:
    """Positions of `new`, some of `keys`, which begin at `position`."""
    first = len(keys) - len(new)
    if not first or new[0] == keys[first]:  # the last ones, as nearly always
        return range(position + first, position + len(keys))
    positions = dict(zip(keys, range(position, position + len(keys)), strict=True))
    return list(map(positions.__getitem__, new))


def _hex(key: bytes) -> str:
    return key.hex()[:16] or "an empty key"
