"""The interface of eviction policies: which entries of a full tier make place for new ones.

One policy belongs to one `OffloadLedger`, which decides what is stored and holds the slots; a
policy only orders keys. A key is the hash of a block and of all blocks before it, so a key is worth
something only as long as the keys before it are entries too. All calls pass keys of one prefix in
its order, without duplicates, which is why a policy can work on many keys at once.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import filterfalse
from typing import Any, Final

from longshore.protocol.errors import LongshoreError

consume: Final[Callable[[Iterable[Any]], None]] = deque[Any](maxlen=0).extend  # runs a map() in C


class PolicyError(LongshoreError):
    """A policy chose entries that must not be evicted, or too few of them."""


class Protected:
    """Entries that must not be evicted now, because a transfer or the current step uses them. It
    looks into the collections that it was created with, so it is always up to date."""

    def __init__(self, *collections: Collection[bytes]) -> None:
        self._collections = collections

    @classmethod
    def union(cls, protected: "Protected", *more: Collection[bytes]) -> "Protected":
        """The protected entries and `more`."""
        return cls(*protected._collections, *more)

    def __contains__(self, key: object) -> bool:
        return any(key in collection for collection in self._collections)

    def evictable(self, keys: Iterable[bytes]) -> Iterator[bytes]:
        """Those of `keys` that are not protected, in the same order. Much faster than asking for
        each key."""
        for collection in self._collections:
            if collection:
                keys = filterfalse(collection.__contains__, keys)
        return iter(keys)

    def at_most(self) -> int:
        """An upper bound of the number of protected keys, without counting them."""
        return sum(map(len, self._collections))


class EvictionPolicy(ABC):
    """Orders the entries of one ledger. Subclass it to write a policy of your own; the constructor
    is called with the capacity, and with the options that the user has set for the policy.

    capacity: number of blocks that the tier can hold.

    A policy does no I/O, reads no clock, and must be deterministic. Calls cost O(1) per key,
    amortised, and memory is bounded by a multiple of the capacity.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether the key is an entry. Remembered keys of evicted blocks are not."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of entries."""

    @abstractmethod
    def __iter__(self) -> Iterator[bytes]:
        """All entries."""

    @abstractmethod
    def touch(self, keys: Sequence[bytes], positions: Sequence[int]) -> None:
        """A request uses this prefix; called once per request, before its blocks are admitted.

        keys:      all that the request has so far, entries or not.
        positions: the index of each block in its prompt; a `range` in most calls.
        """

    def refresh(self, keys: Sequence[bytes]) -> None:  # noqa: B027 - optional to override
        """The same request has stored more of its blocks. This is not another use: it only tells
        that the first of `keys` is to be evicted last. Does nothing by default."""

    @abstractmethod
    def insert(self, keys: Sequence[bytes], positions: Sequence[int]) -> None:
        """Add entries. None of the keys is an entry, and there is space for all of them."""

    @abstractmethod
    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove entries whose contents are invalid or no longer wanted. All keys are entries."""

    @abstractmethod
    def evict(self, num_blocks: int, protected: Protected) -> list[bytes] | None:
        """Choose exactly `num_blocks` entries, and remove them. None, without any change, if fewer
        are unprotected."""

    def admit(
        self, keys: Sequence[bytes], positions: Sequence[int], num_evict: int, protected: Protected
    ) -> list[bytes] | None:
        """Evict `num_evict` entries and insert `keys`, in one operation; the evicted keys. None,
        without any change, if fewer are unprotected.

        Override it if the choice of the evicted entries depends on the new ones.
        """
        evicted = self.evict(num_evict, protected) if num_evict else []
        if evicted is not None:
            self.insert(keys, positions)
        return evicted

    def admit_each(
        self,
        runs: Sequence[tuple[Sequence[bytes], Sequence[int]]],
        num_evict: int,
        protected: Protected,
    ) -> list[bytes] | None:
        """As `admit` for each of several prefixes in turn, of which none evicts another.

        runs: keys and positions of each; no key is in two of them.

        Override it if that is faster, with the same result.
        """
        if len(runs) == 1:
            return self.admit(*runs[0], num_evict, protected)
        if num_evict and not self.can_evict(num_evict, protected):
            return None
        admitted: set[bytes] = set()
        protected = Protected.union(protected, admitted)
        num_free = sum(len(keys) for keys, _ in runs) - num_evict
        all_evicted: list[bytes] = []
        for keys, positions in runs:
            evicted = self.admit(keys, positions, max(0, len(keys) - num_free), protected)
            if evicted is None:
                raise PolicyError(f"{type(self).__name__} could evict, and then did not")
            num_free -= len(keys) - len(evicted)
            all_evicted += evicted
            admitted.update(keys)
        return all_evicted

    def check(self) -> None:  # noqa: B027 - optional to override
        """Raise LongshoreError if an invariant of the policy is violated. Called by tests and by
        `OffloadLedger.check`; may be slow."""

    def can_evict(self, num_blocks: int, protected: Protected) -> bool:
        """Whether at least `num_blocks` entries are unprotected. For policies that move entries
        while they choose, and so could not return None without any change."""
        if len(self) - protected.at_most() >= num_blocks:
            return True
        return sum(1 for _ in protected.evictable(self)) >= num_blocks
