"""States instead of KV: the pages of a row's state, and the states that are kept for later
requests."""

from collections.abc import Sequence
from itertools import compress
from typing import Any, Final

import numpy as np

from longshore.protocol.arrays import EMPTY_INT32, Int32Array, Int64Array
from longshore.protocol.kv_cache_spec import LongestRequest, StateSpec, page_hashes
from longshore.scheduler.kv_cache.block_pool import BlockPool
from longshore.scheduler.kv_cache.blocks import BlockIds
from longshore.scheduler.kv_cache.chains import ChainLink, Chains, EndName
from longshore.scheduler.kv_cache.full import SingleTypeManager
from longshore.scheduler.kv_cache.habits import INSURANCE, StateKind

_NO_ROWS: Final[Int64Array] = np.empty(0, np.int64)


class StateManager(SingleTypeManager):
    """The pages of the state of each row, which its steps overwrite. They are given when the row
    starts, and no entry of a table belongs to particular tokens: `block_size` is the whole context,
    so that what is computed again begins at the first token, unless a state was kept."""

    caches_prefixes = False
    grows = False

    def __init__(
        self, spec: StateSpec, *args: Any, longest: LongestRequest, **settings: Any
    ) -> None:
        self.num_pages = spec.num_pages
        super().__init__(spec, *args, longest=longest, **settings)
        self.block_size = longest.num_tokens

    def _max_positions(self) -> int:
        return self.num_pages

    def num_positions(self, num_tokens: int, num_encoder_tokens: int = 0) -> int:
        return self.num_pages

    def rows_short(self, num_tokens: Int64Array) -> tuple[Int64Array, Int64Array, int]:
        return _NO_ROWS, _NO_ROWS, 0

    def truncate(self, row: int, num_tokens: int) -> Int32Array:
        return EMPTY_INT32

    def num_common_blocks(self, rows: Int64Array) -> int:
        return 0


class KeptStates:
    """The states that are kept in the prefix cache: each the state after a number of tokens that is
    a multiple of the block hash's, in `num_pages` blocks without an owner.

    Its pages are cached under the `page_hashes` of the block that ends there. The state is found
    while all are left.

    block_sizes: of the other groups, whose blocks lead to the states.

    chains:    in which order the states are evicted.
    num_kept:  states so far.
    num_found: rows so far that began with one.
    """

    def __init__(
        self,
        manager: StateManager,
        block_sizes: Sequence[int],
        pool: BlockPool,
        tokens_per_hash: int,
    ) -> None:
        self.num_pages, self.group = manager.num_pages, manager.group
        self._pool = pool
        self.chains = Chains(pool, self.num_pages, block_sizes, tokens_per_hash)
        self.tokens_per_hash = tokens_per_hash
        self.num_kept = self.num_found = 0
        self._of_generation: dict[int, list[tuple[int, bytes, list[int]]]] = {}
        self._sources: dict[int, tuple[int, int]] = {}  # by first page

    def find_last(self, hashes: Sequence[bytes], num_tokens: int) -> tuple[BlockIds, int]:
        """The last kept state within the first `num_tokens` tokens of a request with these block
        hashes, and the number of tokens before it; 0 if there is none."""
        prefix = hashes[: num_tokens // self.tokens_per_hash]
        are_kept = map(self._pool.cached_in(self.group), reversed(prefix))
        for number in compress(range(len(prefix), 0, -1), are_kept):
            pages = self._pool.find_cached_prefix(self._hashes(prefix[number - 1]), self.group)
            if len(pages) == self.num_pages:
                return pages, number * self.tokens_per_hash
        return [], 0

    def has(self, block_hash: bytes) -> bool:
        """Whether the state after the block with this hash is kept."""
        pages = self._pool.find_cached_prefix(self._hashes(block_hash), self.group)
        return len(pages) == self.num_pages

    def keep(
        self,
        hashes: Sequence[bytes],
        num_tokens: int,
        kind: StateKind,
        hits: Sequence[BlockIds],
        *,
        generation: int,
        step: int,
    ) -> list[int] | None:
        """Blocks for the state after `num_tokens` tokens with these block hashes, which plan `step`
        computes on the row of this generation; from now on the state is found. The caller has a
        reference to each, until all states of the plan have theirs. None if there are too few
        blocks; an insurance takes none that lead to a state of another kind.

        hits: what the other groups find of these tokens.
        """
        num_free = self._pool.num_free
        if kind == INSURANCE and not self.chains.has(INSURANCE):
            num_free = self._pool.free_queue.num_before_retained()
        if self.num_pages > num_free:
            return None
        block_hash = hashes[-1]
        pages = self._pool.get_new_blocks(self.num_pages)
        block_ids = pages if isinstance(pages, list) else pages.tolist()
        self._pool.cache_pages(block_ids, self._hashes(block_hash), self.group, step)
        kept = self._of_generation.setdefault(generation, [])
        kept.append((num_tokens, block_hash, block_ids))
        self.chains.add(hashes, num_tokens, block_ids, hits, kind)
        self._sources[block_ids[0]] = (generation, num_tokens)
        self.num_kept += 1
        return block_ids

    def keep_end(
        self,
        hashes: Sequence[bytes],
        end: EndName,
        block_ids: list[int],
        hits: Sequence[BlockIds],
        firsts: tuple[int, ...],
        *,
        step: int,
    ) -> ChainLink:
        """Keep a state and other blocks of a request, which has references to them, in order of the
        groups; see `Chains.add_end`."""
        names = page_hashes(end.name, len(block_ids))
        self._pool.cache_pages(block_ids, names, self.group, step, is_announced=False)
        self.num_kept += 1
        return self.chains.add_end(hashes, end, block_ids, hits, firsts, step=step)

    def source_of(self, pages: BlockIds) -> tuple[int, int] | None:
        """The generation of the row that has computed the state in these pages, and the number of
        tokens before it, unless no output of that generation can be wrong any more."""
        return self._sources.get(int(pages[0])) if len(pages) else None

    def kept_by(self, generation: int, after: int) -> list[int]:
        """The pages of states after more than `after` tokens that a row of this generation has
        computed, as far as they are cached."""
        return [
            page
            for num_tokens, block_hash, pages in self._of_generation.get(generation, ())
            if num_tokens > after
            for page, page_hash in zip(pages, self._hashes(block_hash), strict=True)
            if self._pool.block_hash(page) == page_hash
        ]

    def forget(self, generation: int) -> None:
        """No output of this generation can be wrong any more."""
        for _, _, pages in self._of_generation.pop(generation, ()):
            if self._sources.get(pages[0], (0,))[0] == generation:
                del self._sources[pages[0]]

    def begin_epoch(self) -> None:
        self._of_generation.clear()
        self.chains.prune(are_computed=True)
        self._sources.clear()

    def _hashes(self, block_hash: bytes) -> list[bytes]:
        return page_hashes(block_hash, self.num_pages)
