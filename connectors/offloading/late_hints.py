"""Cache hints for blocks that are still on their way to a tier.

A request ends when its last blocks are on their way to host memory, and a lower tier writes them
later, or when it has time. So a tier remembers the hint, and retains such blocks when they come.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from longshore.connectors.offloading.spec import HintedKeys

MAX_HINTS: Final = 256


class _LateHint(msgspec.Struct):
    """num_missing: keys that have not come. num_new: keys that came since it was last applied."""

    hinted: HintedKeys
    expires_at_s: float
    num_missing: int
    num_new: int = 0


class LateHints:
    """The newest hints of which keys are missing, with at most this number of missing keys and
    `MAX_HINTS` hints; older ones are forgotten. A key counts once for each hint that it is missing
    from."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._hints: dict[int, _LateHint] = {}  # by number, oldest first
        self._numbers_of_key: dict[bytes, list[int]] = {}  # of hints, oldest first
        self._last_number = 0
        self._next_expiry_s = math.inf  # or earlier

    def __len__(self) -> int:
        """The number of hints."""
        return len(self._hints)

    def add(self, hinted: HintedKeys, missing: Sequence[bytes]) -> None:
        """A hint that begins, with the keys that the tier does not have. It takes the place of the
        former one of its session."""
        hint = hinted.hint
        if hint.session is not None:
            session = (hinted.tenant.name, hint.session)
            for number, late in list(self._hints.items()):
                if (late.hinted.tenant.name, late.hinted.hint.session) == session:
                    self._forget(number)
        if not missing:
            return
        self._last_number += 1
        ttl_s = max(hint.ttl_s, *(part.ttl_s for part in hint.prefixes), 0.0)
        late = _LateHint(hinted, hinted.now + ttl_s, len(missing))
        self._next_expiry_s = min(self._next_expiry_s, late.expires_at_s)
        self._hints[self._last_number] = late
        for key in missing:
            self._numbers_of_key.setdefault(key, []).append(self._last_number)
        num_missing = sum(late.num_missing for late in self._hints.values())
        while num_missing > self._max_keys or len(self._hints) > MAX_HINTS:
            num_missing -= self._forget(next(iter(self._hints)))

    def came(self, keys: Sequence[bytes]) -> Iterator[HintedKeys]:
        """The tier has these keys now. Yields hints to be applied again, oldest first, each only
        when as many keys have come as are still missing, so that it is applied few times."""
        numbers: set[int] = set()
        for key in keys:
            of_key = self._numbers_of_key.pop(key, ())
            numbers.update(of_key)
            for number in of_key:
                late = self._hints[number]
                late.num_missing -= 1
                late.num_new += 1
        for number in sorted(numbers):
            late = self._hints[number]
            if late.num_new >= late.num_missing:
                late.num_new = 0
                yield late.hinted
                if not late.num_missing:
                    del self._hints[number]

    def expire(self, now: float) -> None:
        """Forget the hints whose time to live has passed."""
        if now < self._next_expiry_s:
            return
        for number, late in list(self._hints.items()):
            if late.expires_at_s <= now:
                self._forget(number)
        self._next_expiry_s = min(
            (late.expires_at_s for late in self._hints.values()), default=math.inf
        )

    def clear(self) -> None:
        self._hints.clear()
        self._numbers_of_key.clear()

    def _forget(self, number: int) -> int:
        """Returns how many keys this hint was missing."""
        late = self._hints.pop(number)
        for key in late.hinted.keys:
            of_key = self._numbers_of_key.get(key, [])
            if number in of_key:
                of_key.remove(number)
                if not of_key:
                    del self._numbers_of_key[key]
        return late.num_missing
