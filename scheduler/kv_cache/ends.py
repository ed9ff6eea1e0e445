"""What requests leave when they end, for later ones that begin with all of it.

Kept states are after multiples of the block hash's tokens, and an answer ends anywhere. But when a
request ends, its pages are the state after the last token that it has computed, and its last blocks
hold what the other layers have of these tokens. So they stay where they are, cached under a name
for exactly these tokens. A request that begins with them, such as the next turn of a conversation,
gets copies of the state and of the last block, and the full blocks before them.
"""

from collections.abc import Iterator, Sequence
from itertools import compress

import numpy as np

from longshore.protocol.arrays import int32_array
from longshore.scheduler.kv_cache.block_pool import BlockPool
from longshore.scheduler.kv_cache.blocks import BlockIds, HeldBlocks
from longshore.scheduler.kv_cache.chains import ChainLink, EndName
from longshore.scheduler.kv_cache.full import SingleTypeManager
from longshore.scheduler.kv_cache.full_blocks import FullBlocks
from longshore.scheduler.kv_cache.states import KeptStates, StateManager
from longshore.scheduler.request import Request


class Ends:
    """Keeps and finds them. managers: of all groups; those without states keep every block."""

    def __init__(
        self,
        managers: Sequence[SingleTypeManager],
        pool: BlockPool,
        full_blocks: FullBlocks,
        kept_states: KeptStates,
    ) -> None:
        self._managers = tuple(managers)
        self._pool = pool
        self._full_blocks = full_blocks
        self.kept_states = kept_states
        self._chains = kept_states.chains
        self._tokens_per_hash = kept_states.tokens_per_hash

    def name(self, request: Request, num_tokens: int) -> EndName | None:
        """The name of the first `num_tokens` of a request's `token_ids`; None if they fill no
        block."""
        num_hashes = num_tokens // self._tokens_per_hash
        if not num_hashes:
            return None
        token_ids = request.token_ids[:num_tokens]
        self._full_blocks.extend_hashes(request, token_ids)
        after, first = request.block_hashes[num_hashes - 1], num_hashes * self._tokens_per_hash
        name = self._full_blocks.hasher.name_end(after, first, token_ids, request.extra_keys)
        return EndName(name, after, num_tokens)

    def is_prefix(self, end: EndName, request: Request) -> bool:
        """Whether a request begins with these tokens, and has more."""
        return request.num_tokens > end.num_tokens and self.name(request, end.num_tokens) == end

    def keep(
        self, request: Request, held: HeldBlocks, end: EndName, *, step: int
    ) -> ChainLink | None:
        """Keep what an ended request with this name leaves in these blocks, as plan `step` computes
        it. None if one of the blocks after those that are found has a hash of its own."""
        link = self._chains.get(end.name)
        if link is not None and self._chains.is_whole(link):
            return link
        self._full_blocks.cache_last(request, held, end.num_tokens, step)
        hashes = request.block_hashes[: end.num_tokens // self._tokens_per_hash]
        hits = [self._find(manager, hashes, end.num_tokens) for manager in self._managers]
        firsts = tuple(map(len, hits))
        own = np.concatenate(
            [
                table[first : manager.num_positions(end.num_tokens)]
                for manager, table, first in zip(
                    self._managers, held.block_ids, firsts, strict=True
                )
            ]
        )
        if self._pool.are_cached(own).any():
            return None
        found = [ids for ids, each in zip(hits, self._managers, strict=True) if not _is_state(each)]
        return self.kept_states.keep_end(hashes, end, own.tolist(), found, firsts, step=step)

    def find(self, request: Request, num_tokens: int) -> ChainLink | None:
        """What an earlier request has left of the first tokens of a waiting one, if these are more
        than `num_tokens`."""
        for end in self._ends(request, num_tokens):
            link = self._chains.get(end.name)
            if link is not None and self._chains.is_whole(link):
                found = tuple(map(len, self._before(link, request)))
                if found == link.firsts:
                    return link
        return None

    def hold(self, link: ChainLink, request: Request) -> HeldBlocks:
        """The blocks of all tokens of what was found for a request. The caller has a reference to
        each."""
        tables, first = [], 0
        for manager, found in zip(self._managers, self._before(link, request), strict=True):
            last = first + manager.num_positions(link.num_tokens) - len(found)
            own = int32_array(link.pages[first:last])
            tables.append(np.concatenate((int32_array(found), own)))
            self._pool.touch(tables[-1])
            first = last
        return HeldBlocks(tuple(tables))

    def _before(self, link: ChainLink, request: Request) -> list[BlockIds]:
        """Of each group, what the prefix cache has of the blocks before those of the link."""
        return [
            self._find(manager, request.block_hashes, first * manager.block_size)
            for manager, first in zip(self._managers, link.firsts, strict=True)
        ]

    @staticmethod
    def _find(manager: SingleTypeManager, hashes: Sequence[bytes], num_tokens: int) -> BlockIds:
        """What the prefix cache has of the full blocks of these tokens."""
        if _is_state(manager):
            return []
        return manager.find(manager.hashes_of_blocks(hashes, 0, num_tokens // manager.block_size))

    def _ends(self, request: Request, num_tokens: int) -> Iterator[EndName]:
        """Names under which something of more than `num_tokens` tokens of this request may be kept,
        but not of all of its tokens; the longest first."""
        ends, size, last = self._chains.ends, self._tokens_per_hash, request.num_tokens - 1
        first = num_tokens // size
        hashes = request.block_hashes[max(first - 1, 0) : last // size] if ends else []
        for block_hash in compress(reversed(hashes), map(ends.__contains__, reversed(hashes))):
            for each in sorted(ends[block_hash], reverse=True):
                if num_tokens < each <= last and (end := self.name(request, each)) is not None:
                    yield end


def _is_state(manager: SingleTypeManager) -> bool:
    return isinstance(manager, StateManager)
