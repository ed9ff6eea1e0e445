"""Chains of kept states, and the order in which they are evicted.

A kept state is worth nothing without the KV before it, so blocks of the attention groups that lead
to a kept state are retained with it. A link of a chain is a state and the blocks between it and the
state before. What is behind the last state of a chain is of no use to a later request, so it is
evicted first; then the states go in an order that is learned:

- first those that are kept in case memory is left;
- then those whose own continuation has been computed, because later turns begin with its state;
- then the one with the lowest rate of tokens that it saves, per token of memory: the chance that
  the turn has a next one, times the tokens from the state before, over the mean time to the next
  turn and the age. Chance and time are learned from all turns of a kind, also those whose states
  are gone; counting only what was found would learn that turns come back soon or not at all.

Tokens over bytes is from Marconi (Pan et al., 2024); `benchmarks/hybrid_hits.py` measures what each
of these rules earns.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from longshore.protocol.arrays import EMPTY_INT32, Int32Array, int32_array
from longshore.protocol.errors import LongshoreError
from longshore.protocol.kv_cache_spec import page_hashes
from longshore.scheduler.kv_cache.block_pool import BlockPool
from longshore.scheduler.kv_cache.blocks import BlockIds
from longshore.scheduler.kv_cache.habits import FIRST_TO_GO, INSURANCE, Habits, StateKind


class EndName(NamedTuple):
    """The name of the first `num_tokens` tokens of a request, and the hash of its last block that
    they fill."""

    name: bytes
    after: bytes
    num_tokens: int


class ChainLink:
    """A part of a prompt, up to `num_tokens`, and the state that is kept there.

    block_hash: of the block that ends there, or the name of an end; see `add_end`.
    blocks:     the pages of the state, and what the attention groups have of this part, in pieces
                with the mark of each.
    pages:      of the state, and of an end the blocks that have no hash of their own; empty if the
                state is gone, and several chains share the blocks before.
    kind:       None: the state is gone.
    touched_s:  when the state was kept or last found.
    end:        its name, if it is an end; otherwise None.
    firsts:     of an end: how many blocks of each group are before its pages.
    step:       of an end: the plan that computes it.
    """

    __slots__ = (
        "block_hash", "blocks", "children", "end", "firsts", "kind", "num_tokens", "pages",
        "parent", "step", "touched_s",
    )  # fmt: skip

    def __init__(self, parent: "ChainLink | None", block_hash: bytes, num_tokens: int) -> None:
        self.parent = parent
        self.block_hash = block_hash
        self.num_tokens = num_tokens
        self.blocks: list[tuple[Int32Array, int]] = []
        self.pages: Sequence[int] = ()
        self.kind: StateKind | None = None
        self.touched_s = 0.0
        self.end: EndName | None = None
        self.firsts: tuple[int, ...] = ()
        self.step = 0
        self.children: dict[ChainLink, None] = {}

    @property
    def state_before(self) -> "ChainLink | None":
        """The last link before it with a state."""
        link = self.parent
        while link is not None and not link.pages:
            link = link.parent
        return link

    @property
    def num_to_replay(self) -> int:
        """Tokens from the state before."""
        before = self.state_before
        return self.num_tokens - (0 if before is None else before.num_tokens)


class Chains:
    """All links. Their blocks, when they are free, are allocated last, but for retained ones.

    num_pages:   of a state.
    block_sizes: of the other groups.
    tokens_per_hash: of their blocks.

    now_s:       the time, which the owner sets.
    num_evicted: states so far, without those that a reset or a new epoch removed.
    ends:        of those that are kept, by the last block that they fill, how many there are of
                 each number of tokens; see `add_end`.
    """

    def __init__(
        self, pool: BlockPool, num_pages: int, block_sizes: Sequence[int], tokens_per_hash: int
    ) -> None:
        self._pool = pool
        self._tokens_per_hash = tokens_per_hash
        self.ends: dict[bytes, Counter[int]] = {}
        self._num_pages, self._block_sizes = num_pages, block_sizes
        self._blocks_per_token = sum(1 / size for size in block_sizes)
        self._of_mark: dict[int, ChainLink] = {}
        self._links: dict[bytes, ChainLink] = {}
        self._queues: dict[StateKind, OrderedDict[ChainLink, None]] = {}
        self._num_marks = 0
        self.habits = Habits()
        self.now_s = 0.0
        self.num_evicted = 0
        pool.chain(self.make_room)

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[ChainLink]:
        return iter(self._links.values())

    @property
    def num_states(self) -> int:
        """How many states are kept. Those of a failed step count until they are evicted."""
        return sum(map(len, self._queues.values()))

    def get(self, block_hash: bytes) -> ChainLink | None:
        """The link up to the block with this hash."""
        return self._links.get(block_hash)

    def has(self, kind: StateKind) -> bool:
        """Whether a state of this kind is kept."""
        return kind in self._queues

    def add(
        self,
        hashes: Sequence[bytes],
        num_tokens: int,
        pages: Sequence[int],
        hits: Sequence[BlockIds],
        kind: StateKind,
        *,
        is_end: bool = False,
    ) -> None:
        """A state of this kind is kept in these pages, after `num_tokens` tokens with these hashes
        of their blocks. hits: what each of the other groups finds of them. is_end: see
        `add_end`."""
        link = self._links.get(hashes[-1])
        if link is None:
            found = list(map(int32_array, hits))
            link = self._insert(hashes, num_tokens, found, is_end=is_end)
        block_ids = np.concatenate([int32_array(ids) for ids in (pages, *hits)])
        is_new = self._pool.are_cached(block_ids) & (self._pool.marks(block_ids) == 0)
        self._mark(link, block_ids[is_new])
        link.pages = pages
        self.place(link, kind)

    def add_end(
        self,
        hashes: Sequence[bytes],
        end: EndName,
        pages: Sequence[int],
        hits: Sequence[BlockIds],
        firsts: tuple[int, ...],
        *,
        step: int,
    ) -> ChainLink:
        """What a request leaves of which plan `step` computes the last token: the state, and the
        blocks after the first `firsts` of each group. They are kept in `pages` under this name;
        until it is placed, as long as memory is left.

        hashes: of all blocks that its tokens fill.
        """
        self.add([*hashes, end.name], end.num_tokens, pages, hits, INSURANCE, is_end=True)
        link = self._links[end.name]
        if link.end is None:
            link.end = end
            self.ends.setdefault(end.after, Counter())[end.num_tokens] += 1
        link.firsts, link.step = firsts, step
        return link

    def _insert(
        self,
        hashes: Sequence[bytes],
        num_tokens: int,
        hits: Sequence[Int32Array],
        *,
        is_end: bool,
    ) -> ChainLink:
        """A link without a state, after its parent. Blocks that it shares with other links after
        that parent go to a link before all of them: to itself, if it shares all of its own, and
        others can find it by the hash of their block."""
        parent = next(filter(None, map(self._links.get, reversed(hashes))), None)
        link = ChainLink(parent, hashes[-1], num_tokens)
        shared, others, num_shared = self._shared(parent, hits)
        common = link
        if others and (num_shared < num_tokens or is_end):
            last = num_shared // self._tokens_per_hash - 1
            common = ChainLink(parent, hashes[last], num_shared)
        self._attach(common, parent)
        for other in others:
            self._attach(other, common)
        self._mark(common, shared)
        if common is not link:
            self._attach(link, common)
        return link

    def _shared(
        self, parent: ChainLink | None, hits: Sequence[Int32Array]
    ) -> tuple[Int32Array, list[ChainLink], int]:
        """Of blocks after a link, those that others after it have, these others, and up to how many
        tokens they share blocks."""
        first = 0 if parent is None else parent.num_tokens
        block_ids, num_shared = [EMPTY_INT32], 0
        others: dict[ChainLink, None] = {}
        for found, size in zip(hits, self._block_sizes, strict=True):
            marks = self._pool.marks(found)
            marks[: first // size] = 0
            for mark in np.unique(marks[marks != 0]).tolist():
                other = self._child(self._of_mark[mark], parent)
                if other is not None:
                    others[other] = None
                    at = np.flatnonzero(marks == mark)
                    block_ids.append(found[at])
                    num_shared = max(num_shared, (int(at[-1]) + 1) * size)
        return np.concatenate(block_ids), list(others), num_shared

    def _child(self, link: ChainLink, parent: ChainLink | None) -> ChainLink | None:
        """The link after `parent` that leads to this one, or None."""
        while link.parent is not None and link.parent is not parent:
            link = link.parent
        return link if link.parent is parent else None

    def _attach(self, link: ChainLink, parent: ChainLink | None) -> None:
        """Put a link after another one."""
        if link.parent is not None:
            link.parent.children.pop(link, None)
        self._links[link.block_hash] = link
        link.parent = parent
        if parent is not None:
            parent.children[link] = None

    def _mark(self, link: ChainLink, block_ids: Int32Array) -> None:
        """These blocks belong to the link now."""
        if len(block_ids):
            self._num_marks += 1
            self._pool.mark(block_ids, self._num_marks)
            self._of_mark[self._num_marks] = link
            link.blocks.append((block_ids, self._num_marks))

    def place(self, link: ChainLink, kind: StateKind) -> None:
        """The state was kept, or found, now; from now on it is of this kind."""
        self._leave_queue(link)
        link.kind, link.touched_s = kind, self.now_s
        self._queues.setdefault(kind, OrderedDict())[link] = None
        if kind.name != "end":
            self.habits.make(kind)

    def _leave_queue(self, link: ChainLink) -> None:
        if link.kind is not None:
            queue = self._queues[link.kind]
            del queue[link]
            if not queue:
                del self._queues[link.kind]
            link.kind = None

    # Eviction

    def make_room(self, count: int) -> None:
        """Let states go until `count` blocks can be allocated because of it, if there are any."""
        while count > 0 and self._queues:
            count -= self._drop(self._least_valuable())
            self.num_evicted += 1

    def _least_valuable(self) -> ChainLink:
        first = next(filter(None, map(self._queues.get, FIRST_TO_GO)), None)
        if first is not None:
            return next(iter(first))
        return min((next(iter(queue)) for queue in self._queues.values()), key=self._value)

    def _value(self, link: ChainLink) -> float:
        """Tokens saved per second and block of memory."""
        assert link.kind is not None
        num_to_replay = link.num_to_replay
        size = self._num_pages + (0 if link.children else num_to_replay * self._blocks_per_token)
        gap_s = self.habits.gap_s(link.kind) + self.now_s - link.touched_s
        return self.habits.probability(link.kind) * num_to_replay / (size * gap_s)

    def _drop(self, link: ChainLink) -> int:
        """Let a state go, and what is behind the last one of its chain then. Returns how many
        blocks can be allocated because of it."""
        self._leave_queue(link)
        hashes = page_hashes(link.block_hash, len(link.pages))
        pages = [
            page
            for page, page_hash in zip(link.pages, hashes, strict=True)
            if self._pool.block_hash(page) == page_hash
        ]
        num_freed = self._pool.num_unheld(pages)
        self._pool.uncache_blocks(pages)
        link.pages = ()
        if link.end is not None:
            self._forget_end(link.end)
            link.end = None
        above: ChainLink | None = link
        while above is not None and not above.pages and not above.children:
            num_freed += sum([self._pool.unmark(*piece) for piece in above.blocks])
            above = self._remove(above)
        if above is not None and not above.pages and len(above.children) == 1:
            self._merge(above, next(iter(above.children)))
        return num_freed

    def _forget_end(self, end: EndName) -> None:
        counts = self.ends[end.after]
        counts[end.num_tokens] -= 1
        if not counts[end.num_tokens]:
            del counts[end.num_tokens]
        if not counts:
            del self.ends[end.after]

    def _remove(self, link: ChainLink) -> ChainLink | None:
        """Remove a link without children; returns the one before."""
        del self._links[link.block_hash]
        for _, mark in link.blocks:
            del self._of_mark[mark]
        if link.parent is not None:
            del link.parent.children[link]
        return link.parent

    def _merge(self, link: ChainLink, child: ChainLink) -> None:
        """A link without a state becomes a part of its only child."""
        del self._links[link.block_hash]
        self._attach(child, link.parent)
        if link.parent is not None:
            del link.parent.children[link]
        for _, mark in link.blocks:
            self._of_mark[mark] = child
        child.blocks += link.blocks

    def prune(self, *, are_computed: bool = False) -> None:
        """Let all states go of which a page is not cached any more. are_computed: no plan of this
        epoch computes what is left."""
        for link in list(self._links.values()):
            link.step = 0 if are_computed else link.step
            if link.pages and not self.is_whole(link):
                self._drop(link)

    def is_whole(self, link: ChainLink) -> bool:
        """Whether a state is kept, and all of its pages are cached."""
        if not link.pages:
            return False
        hashes = page_hashes(link.block_hash, len(link.pages))
        return list(map(self._pool.block_hash, link.pages)) == hashes

    # Checks

    def check(self) -> None:
        """Raise LongshoreError unless links, queues and chains agree. O(links)."""
        queued = {link for queue in self._queues.values() for link in queue}
        links = set(self._links.values())
        with_state = {link for link in links if link.pages}
        if queued != with_state or any(link.kind is None for link in with_state):
            raise LongshoreError("the states that can be evicted are not those that are kept")
        for link in links:
            if link.parent is not None and (
                link.parent not in links or link not in link.parent.children
            ):
                raise LongshoreError("a link of a chain is not known to the one before")
            if not link.pages and len(link.children) < 2:
                raise LongshoreError("a link without a state is not between several chains")
            if any(child.parent is not link for child in link.children):
                raise LongshoreError("a link of a chain has a child that has another parent")
        ends = [link.end for link in with_state if link.end is not None]
        if Counter((end.after, end.num_tokens) for end in ends) != Counter(
            {(after, each): n for after, counts in self.ends.items() for each, n in counts.items()}
        ):
            raise LongshoreError("an end that is kept is not found, or one is found that is not")
        marks = {mark: link for link in links for _, mark in link.blocks}
        if marks != self._of_mark:
            raise LongshoreError("a mark of blocks is not that of their link")
