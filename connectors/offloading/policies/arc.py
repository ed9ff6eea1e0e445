"""Adaptive replacement cache (Megiddo and Modha, FAST 2003), for many keys per call.

T1 has entries used once, T2 those used more often; B1 and B2 remember keys evicted from them. A new
key that is remembered has come back too late: it moves the target size of T1 and enters T2.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from math import ceil, floor

from longshore.connectors.offloading.policies.policy import EvictionPolicy, Protected, consume
from longshore.connectors.offloading.policies.runs import Index, RunQueue, parts_of, remove
from longshore.protocol.errors import LongshoreError

NOTHING = Protected()


class ARC(EvictionPolicy):
    """With one key per call and nothing protected, every decision is that of the published
    algorithm. With many keys per call, new keys are processed in reverse order, and none of them is
    evicted by the same call."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._index: Index = {}
        self._t1, self._t2, self._b1, self._b2 = (RunQueue(self._index) for _ in range(4))
        self._target = 0.0  # of the size of T1; `p` in the paper

    @property
    def target(self) -> float:
        """The size that T1 should have, 0 to capacity."""
        return self._target

    def num_remembered(self) -> int:
        """Number of keys in B1 and B2. Together with the entries at most twice the capacity."""
        return len(self._b1) + len(self._b2)

    def __contains__(self, key: object) -> bool:
        run = self._index.get(key)  # type: ignore[call-overload]  # any object is a valid question
        return run is not None and run.queue in (self._t1, self._t2)

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)

    def __iter__(self) -> Iterator[bytes]:
        return chain(self._t1, self._t2)

    def touch(self, keys: Sequence[bytes], positions: Sequence[int]) -> None:
        entries = (self._t1, self._t2)
        parts = parts_of(keys, self._index)
        self._t2.move([part for part in parts if part[0] is not None and part[0].queue in entries])

    def refresh(self, keys: Sequence[bytes]) -> None:
        parts = parts_of(keys, self._index)
        for queue in (self._t1, self._t2):
            queue.move([part for part in parts if part[0] is not None and part[0].queue is queue])

    def insert(self, keys: Sequence[bytes], positions: Sequence[int]) -> None:
        self.admit(keys, positions, 0, NOTHING)

    def remove(self, keys: Iterable[bytes]) -> None:
        remove(keys, self._index)

    def evict(self, num_blocks: int, protected: Protected) -> list[bytes] | None:
        if not self.can_evict(num_blocks, protected):
            return None
        num_from_t1 = min(num_blocks, max(0, ceil(len(self._t1) - self._target)))
        evicted = self._replace(num_from_t1, num_blocks - num_from_t1, protected)
        self._trim()
        return evicted

    def admit(
        self, keys: Sequence[bytes], positions: Sequence[int], num_evict: int, protected: Protected
    ) -> list[bytes] | None:
        if num_evict and not self.can_evict(num_evict, protected):
            return None
        num_free = len(keys) - num_evict
        if self._index.keys().isdisjoint(keys):
            return self._admit_new(keys, num_free, protected)
        evicted: list[bytes] = []
        admitted: set[bytes] = set()
        protected = Protected.union(protected, admitted)
        for is_remembered, group in groupby(reversed(keys), self._index.__contains__):
            if is_remembered:
                for key in group:
                    # What was admitted before it can have shortened B1 or B2 by this key.
                    if key in self._index:
                        evicted += self._admit_again(key, num_free <= 0, protected)
                    else:
                        evicted += self._admit_new([key], num_free, protected)
                    admitted.add(key)
                    num_free -= 1
            else:
                new = list(group)[::-1]
                evicted += self._admit_new(new, num_free, protected)
                admitted.update(new)
                num_free -= len(new)
        return evicted

    def check(self) -> None:
        lists = (self._t1, self._t2, self._b1, self._b2)
        for each in lists:
            each.check()
        if len(self._index) != sum(map(len, lists)):
            raise LongshoreError("ARC's index has keys that are in none of its lists")
        if not 0 <= self._target <= self.capacity:
            raise LongshoreError(f"ARC's target {self._target} is not in 0..{self.capacity}")
        if len(self._t1) + len(self._b1) > self.capacity or sum(map(len, lists)) > (
            2 * self.capacity
        ):
            raise LongshoreError(f"ARC's lists are too long: {[len(each) for each in lists]}")

    def _admit_new(self, keys: Sequence[bytes], num_free: int, protected: Protected) -> list[bytes]:
        """Case IV of the paper for each of `keys`, of which the first `num_free` need no space.

        Each new key makes T1 longer by one. So T2 is shortened until T1 exceeds its target, and
        after that T1, whose size then stays the same.
        """
        evicted: list[bytes] = []
        num_free = min(max(num_free, 0), len(keys))
        if num_evict := len(keys) - num_free:
            missing_in_t1 = self._target - len(self._t1) - num_free
            num_from_t2 = min(num_evict, max(0, floor(missing_in_t1) + 1))
            evicted = self._replace(num_evict - num_from_t2, num_from_t2, protected)
        self._t1.append(keys)
        self._trim()
        return evicted

    def _admit_again(self, key: bytes, is_full: bool, protected: Protected) -> list[bytes]:
        """Cases II and III of the paper: the key was evicted from T1 or from T2."""
        t1, b1, b2 = self._t1, self._b1, self._b2
        if self._index[key].queue is b1:
            self._target = min(self._target + max(1.0, len(b2) / len(b1)), self.capacity)
            from_t1 = len(t1) > self._target
        else:
            self._target = max(self._target - max(1.0, len(b1) / len(b2)), 0.0)
            from_t1 = len(t1) >= max(self._target, 1)
        evicted = self._replace(int(from_t1), int(not from_t1), protected) if is_full else []
        self._t2.move(parts_of([key], self._index))
        self._trim()
        return evicted

    def _replace(self, num_from_t1: int, num_from_t2: int, protected: Protected) -> list[bytes]:
        """Evict the oldest of T1 and of T2, and remember them. If one of the two has too few that
        are not protected, the other one has enough."""
        num_blocks = num_from_t1 + num_from_t2
        evicted = self._t1.pop(num_from_t1, protected, self._b1)
        evicted += self._t2.pop(num_blocks - len(evicted), protected, self._b2)
        if len(evicted) < num_blocks:
            evicted += self._t1.pop(num_blocks - len(evicted), protected, self._b1)
        return evicted

    def _trim(self) -> None:
        """Forget the oldest keys beyond the paper's bounds: |T1| + |B1| <= capacity, and twice the
        capacity for all four lists."""
        t1, b1, b2, capacity = self._t1, self._b1, self._b2, self.capacity
        excess = t1.num_keys + b1.num_keys - capacity
        if excess > 0:
            consume(map(self._index.pop, b1.pop(excess, NOTHING)))
        excess = t1.num_keys + self._t2.num_keys + b1.num_keys + b2.num_keys - 2 * capacity
        if excess > 0:
            consume(map(self._index.pop, b2.pop(excess, NOTHING)))
