"""Which engines have which KV blocks, as far as a gateway knows from their KV events.

One entry per block hash: a mask with one bit per engine, medium and KV cache group. So the search
for a prompt's prefix looks at each of its blocks once, however many engines there are.

Memory is bounded by the number of hashes. Beyond it, the hash that was stored or found longest ago
is evicted, so a prefix that is used stays; what is evicted counts as a miss.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from longshore.protocol.events import Medium

MEDIA: Final[tuple[Medium, ...]] = ("GPU", "CPU", "DISK", "STORAGE")
_EXPECTED: Final = len(MEDIA)
_NUM_MEDIA: Final = len(MEDIA) + 1
MAX_GROUPS: Final = 64
MAX_REMEMBERED: Final = 4096
MIN_WIDTH: Final = 16
"""Slots of a mask: enough for 8 engines, the GPUs of most hosts."""


class GroupInfo(NamedTuple):
    """A KV cache group.

    block_size: in tokens.
    num_needed: a prefix of the group needs only the blocks of this many tokens at its end; None: it
                needs all blocks.
    """

    block_size: int
    num_needed: int | None = None


class BlockIndex:
    """The index of one gateway. What is reported of an engine that was not added, or was removed,
    is ignored.

    tokens_per_hash: tokens that a block hash covers, beyond those of its parent.
    max_hashes: limit of the number of entries.
    is_known:  whether it is known what an engine has, by engine.
    """

    def __init__(self, num_engines: int, *, tokens_per_hash: int, max_hashes: int) -> None:
        # Two slots per engine: when an engine has cleared its blocks, it gets another slot, and the
        # bits of the former one are removed later, in parts. One that is cleared again before that
        # may have to wait for a slot (`has_slot`).
        self._width = max(MIN_WIDTH, 2 * num_engines)
        self._slots: dict[int, int] = {}
        self._has_any: dict[int, bool] = {}
        self.is_known: dict[int, bool] = {}
        self._free_slots = list(reversed(range(self._width)))
        self._dead = 0  # bits of slots that are being removed
        self._dead_slots: list[int] = []
        self._num_uncollected = 0
        self._tokens_per_hash = tokens_per_hash
        self._max_hashes = max_hashes
        self._masks: OrderedDict[bytes, int] = OrderedDict()
        # Entries, all older than those of `_masks`, whose masks have a former width.
        self._narrow: OrderedDict[bytes, int] = OrderedDict()
        self._former_width = 0
        self._groups: dict[int, GroupInfo] = {}
        self._search = _Search({}, self._width, tokens_per_hash)
        self.num_evicted = 0
        for engine in range(num_engines):
            self.add_engine(engine)

    def __len__(self) -> int:
        """Number of hashes."""
        return len(self._masks) + len(self._narrow)

    def add_engine(self, engine: int) -> None:
        """A new engine, of which nothing is known yet."""
        if 2 * (len(self._has_any) + 1) > self._width:
            self._widen()
        self._has_any[engine] = self.is_known[engine] = False
        self._give_slots()

    def remove_engine(self, engine: int) -> None:
        """The engine is gone. Its bits are removed in parts, as by `clear`."""
        self.clear(engine)
        if (slot := self._slots.pop(engine, None)) is not None:
            self._free_slots.append(slot)
        del self._has_any[engine], self.is_known[engine]
        self._give_slots()

    def has_slot(self, engine: int) -> bool:
        """Whether what the engine stores is noted. If it was cleared several times in a row, that
        may not be so until `collect` has looked at all entries."""
        return engine in self._slots

    def describe_group(self, group: int, info: GroupInfo) -> None:
        """An engine has blocks of this group; all engines have equal groups. A group that is out of
        bounds, or whose blocks do not consist of whole hash blocks, is ignored."""
        if self._groups.get(group) == info:
            return
        is_valid = 0 <= group < MAX_GROUPS and info.block_size > 0
        if is_valid and info.block_size % self._tokens_per_hash == 0:
            self._groups[group] = info
            self._search = _Search(self._groups, self._width, self._tokens_per_hash)

    def store(self, engine: int, hashes: Sequence[bytes], group: int, medium: Medium) -> None:
        """An engine has stored these blocks, the first of a prefix first."""
        if group in self._groups and engine in self._slots:
            self._has_any[engine] = True
            self._add(hashes, self._bit(engine, group, MEDIA.index(medium)))

    def remove(self, engine: int, hashes: Iterable[bytes], group: int, medium: Medium) -> None:
        """An engine has removed these blocks. Unknown ones are ignored."""
        if group in self._groups and engine in self._slots:
            self._subtract(hashes, self._bit(engine, group, MEDIA.index(medium)))

    def expect(self, engine: int, hashes: Sequence[bytes]) -> None:
        """The engine is about to compute these blocks."""
        if self._groups and engine in self._slots:
            self._has_any[engine] = True
            self._add(hashes, self._expected(engine))

    def end_expecting(self, engine: int, hashes: Iterable[bytes]) -> None:
        """The engine has stored these blocks, or never will."""
        if engine in self._slots:
            self._subtract(hashes, self._expected(engine))

    def clear(self, engine: int) -> None:
        """The engine has no blocks any more, or they are not known."""
        if not self._has_any.get(engine, False):
            return
        self._has_any[engine] = False
        self._dead_slots.append(self._slots.pop(engine))
        self._give_slots()
        self._mark_dead()

    @property
    def has_garbage(self) -> bool:
        """Whether `collect` has something to do."""
        return bool(self._dead_slots or self._narrow)

    def collect(self, max_hashes: int) -> bool:
        """Remove what engines had that were cleared, and widen masks for more engines, in up to
        `max_hashes` entries. Returns whether entries remain to be looked at."""
        if self._narrow:
            for _ in range(min(max_hashes, len(self._narrow))):  # the newest first
                block_hash, mask = self._narrow.popitem()
                if mask := self._widened(mask):
                    self._masks[block_hash] = mask
                    self._masks.move_to_end(block_hash, last=False)
            return True
        count = min(max_hashes, self._num_uncollected, len(self._masks))
        for _ in range(count):  # a full turn of the entries leaves them in their order
            block_hash, mask = self._masks.popitem(last=False)
            if mask := mask & ~self._dead:
                self._masks[block_hash] = mask
        self._num_uncollected -= count
        if self._num_uncollected and self._masks:
            return True
        self._free_slots += self._dead_slots
        self._dead, self._num_uncollected = 0, 0
        self._dead_slots.clear()
        self._give_slots()
        return False

    def _give_slots(self) -> None:
        for engine in self._has_any:
            if engine not in self._slots and self._free_slots:
                self._slots[engine] = self._free_slots.pop()

    def _mark_dead(self) -> None:
        self._dead = sum(
            1 << (field * self._width + slot)
            for field in range(self._num_fields)
            for slot in self._dead_slots
        )
        self._num_uncollected = len(self)

    def _widen(self) -> None:
        """Twice as many slots. `collect` rewrites the masks; until then, old ones are widened when
        they are used."""
        while self._narrow:
            self.collect(len(self._narrow))
        self._former_width, self._width = self._width, 2 * self._width
        self._free_slots += reversed(range(self._former_width, self._width))
        self._narrow, self._masks = self._masks, OrderedDict()
        self._search = _Search(self._groups, self._width, self._tokens_per_hash)
        self._mark_dead()

    def _widened(self, mask: int) -> int:
        """A mask of the former width, without the bits of slots that are being removed."""
        wide, low, field = 0, (1 << self._former_width) - 1, 0
        while mask:
            wide |= (mask & low) << (field * self._width)
            mask >>= self._former_width
            field += 1
        return wide & ~self._dead

    def _get(self, block_hash: bytes, default: int) -> int:
        mask = self._masks.get(block_hash)
        return self._widened(self._narrow.get(block_hash, default)) if mask is None else mask

    def _bring(self, hashes: Iterable[bytes]) -> None:
        """These entries are about to change: widen their masks."""
        for block_hash in hashes:
            if (mask := self._narrow.pop(block_hash, None)) is not None:
                self._masks[block_hash] = self._widened(mask)

    def match(self, chain: "PromptHashes", engines: Iterable[int]) -> dict[int, int]:
        """How many leading tokens of a prompt each of `engines` has, or is about to have. Engines
        that have none are left out."""
        engine_of = {self._slots[each]: each for each in engines if each in self._slots}
        if not self._groups:
            return {}
        get = self._get if self._narrow else self._masks.get
        found = self._search.longest(get, chain, engine_of)
        if len(self) >= self._max_hashes and found:
            self._touch(chain.hashes[: max(found.values()) // self._tokens_per_hash])
        return {engine_of[slot]: num_tokens for slot, num_tokens in found.items() if num_tokens}

    @property
    def _num_fields(self) -> int:
        return _NUM_MEDIA * (max(self._groups, default=0) + 1)

    def _bit(self, engine: int, group: int, medium: int) -> int:
        return 1 << ((group * _NUM_MEDIA + medium) * self._width + self._slots[engine])

    def _expected(self, engine: int) -> int:
        return sum(self._bit(engine, group, _EXPECTED) for group in self._groups)

    def _add(self, hashes: Sequence[bytes], bits: int) -> None:
        if self._narrow:
            self._bring(hashes)
        masks, alive = self._masks, ~self._dead
        # The last first, so that of one prefix the end is evicted first. Those that were there are
        # moved to the end, so `collect` may not come to them.
        for block_hash in reversed(hashes):
            masks[block_hash] = masks.pop(block_hash, 0) & alive | bits
        while len(self) > self._max_hashes:
            (self._narrow or masks).popitem(last=False)
            self.num_evicted += 1

    def _subtract(self, hashes: Iterable[bytes], bits: int) -> None:
        if self._narrow:
            hashes = list(hashes)
            self._bring(hashes)
        masks = self._masks
        for block_hash in hashes:
            mask = masks.get(block_hash, 0)
            if left := mask & ~bits:
                masks[block_hash] = left
            elif mask:
                del masks[block_hash]

    def _touch(self, hashes: Sequence[bytes]) -> None:
        """Evict these after all others. They leave the turn of `collect`, so they are cleaned."""
        if self._narrow:
            self._bring(hashes)
        masks = self._masks
        for block_hash in reversed(hashes):
            if left := masks.pop(block_hash, 0) & ~self._dead:
                masks[block_hash] = left


_Lookup: TypeAlias = Callable[[bytes, int], int]


class PromptHashes:
    """The chain of a prompt's block hashes, hashed in parts, as far as a search needs it.

    hash_more: appends the hashes of up to this many leading blocks to a list that has the first of
               them.
    num_blocks: full blocks that a hit can have.
    """

    PART: Final = 64

    def __init__(self, num_blocks: int, hash_more: Callable[[list[bytes], int], None]) -> None:
        self.hashes: list[bytes] = []
        self.num_blocks = num_blocks
        self._hash_more = hash_more

    def extend(self) -> bool:
        """Hash some more blocks. False: there are none."""
        num_hashed = len(self.hashes)
        if num_hashed == self.num_blocks:
            return False
        self._hash_more(self.hashes, min(num_hashed + self.PART, self.num_blocks))
        return True

    def at(self, index: int) -> bytes:
        """The hash of block `index`, which must be below `num_blocks`."""
        while len(self.hashes) <= index:
            self.extend()
        return self.hashes[index]


class _Search:
    """Searches prefixes in entries of certain groups.

    Masks are folded: the media of a group, and groups with blocks of equal size that need all of
    them, become one bit per slot. Few different masks exist at a time, so the results are
    remembered.
    """

    def __init__(self, groups: Mapping[int, GroupInfo], width: int, tokens_per_hash: int) -> None:
        sizes = {group: info.block_size // tokens_per_hash for group, info in groups.items()}
        self._tokens_per_hash = tokens_per_hash
        self._alignment = math.lcm(*sizes.values())
        keeping = [group for group, info in groups.items() if info.num_needed is None]
        self._keeping = [
            (size, _Fold([group for group in keeping if sizes[group] == size], width))
            for size in sorted({sizes[group] for group in keeping})
        ]
        self._ending = [
            (sizes[group], info.num_needed, _Fold([group], width))
            for group, info in groups.items()
            if info.num_needed is not None
        ]

    def longest(self, get: "_Lookup", chain: PromptHashes, slots: Iterable[int]) -> dict[int, int]:
        """The longest prefix per slot, in tokens. get: returns the mask of a hash."""
        limit = chain.num_blocks
        runs = {slot: limit for slot in slots}
        for size, fold in self._keeping:
            runs = self._leading(get, chain, size, fold, runs)
        found = {}
        for slot, run in runs.items():
            end = run - run % self._alignment
            if self._ending and end:
                end = self._shorten(get, chain, 1 << slot, end)
            found[slot] = end * self._tokens_per_hash
        return found

    @staticmethod
    def _leading(
        get: "_Lookup",
        chain: PromptHashes,
        size: int,
        fold: "_Fold",
        runs: Mapping[int, int],
    ) -> dict[int, int]:
        """The leading blocks of `size` hash blocks that each slot has, at most `runs` hash blocks.
        Slots that have none are left out."""
        alive = sum(1 << slot for slot in runs)
        ended: dict[int, int] = {}
        hashes, known = chain.hashes, fold.known
        index, limit = size - 1, max(runs.values(), default=0)
        while alive and index < limit:
            if index >= len(hashes):
                chain.extend()
                continue
            mask = get(hashes[index], 0)
            held = known.get(mask)
            if held is None:
                held = fold(mask)
            if lost := alive & ~held:
                alive &= held
                ended |= {slot: index + 1 - size for slot in _bits(lost)}
            index += size
        ended |= {slot: index + 1 - size for slot in _bits(alive)}
        return {
            slot: min(run, count) for slot, count in ended.items() if count and (run := runs[slot])
        }

    def _shorten(self, get: "_Lookup", chain: PromptHashes, slot_bit: int, end: int) -> int:
        """The longest prefix of at most `end` hash blocks whose last blocks the slot has in the
        groups that need no others.

        If a block is missing, so is every prefix that ends after it, because shorter prefixes do
        not need fewer leading blocks.
        """
        while end > 0:
            for size, num_needed, fold in self._ending:
                missing = self._last_missing(get, chain, size, num_needed, fold, slot_bit, end)
                if missing is not None:
                    end = missing * size // self._alignment * self._alignment
                    break
            else:
                return end
        return 0

    def _last_missing(
        self,
        get: "_Lookup",
        chain: PromptHashes,
        size: int,
        num_needed: int,
        fold: "_Fold",
        slot_bit: int,
        end: int,
    ) -> int | None:
        """The last block that a prefix of `end` hash blocks needs and the slot lacks."""
        block_size = size * self._tokens_per_hash
        first = max(end * self._tokens_per_hash - num_needed, 0) // block_size
        for block in range(end // size - 1, first - 1, -1):
            if not fold(get(chain.at((block + 1) * size - 1), 0)) & slot_bit:
                return block
        return None


class _Fold:
    """The slots that have a block in all of these groups, in any medium. known: results."""

    def __init__(self, groups: Sequence[int], width: int) -> None:
        self._shifts = [
            [(group * _NUM_MEDIA + medium) * width for medium in range(_NUM_MEDIA)]
            for group in groups
        ]
        self._low = (1 << width) - 1
        self.known: dict[int, int] = {}

    def __call__(self, mask: int) -> int:
        held = self.known.get(mask)
        if held is None:
            held = self._low
            for shifts in self._shifts:
                of_group = 0
                for shift in shifts:
                    of_group |= mask >> shift
                held &= of_group
            if len(self.known) >= MAX_REMEMBERED:
                self.known.clear()
            self.known[mask] = held
        return held


def _bits(mask: int) -> Iterable[int]:
    """The positions of the bits that are set."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
