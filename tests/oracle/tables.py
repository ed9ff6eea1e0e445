"""The block tables of requests: what they need, find, take, name and give back."""

from longshore.protocol.kv_cache_spec import CrossAttentionSpec
from tests.oracle.block_pool import Block, BlockNames, TextbookBlockPool
from tests.oracle.request import TextbookRequest


class BlockTables:
    """Acts on the blocks of requests, and on the pool that all of them share.

    cross: what cross attention keeps; None if the model has none. Equal tokens need not have equal
           KV then, so blocks have no names.
    """

    def __init__(
        self,
        pool: TextbookBlockPool,
        names: BlockNames,
        *,
        block_size: int,
        caches_prefixes: bool,
        cross: CrossAttentionSpec | None = None,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.cross = cross
        self._names = names
        self._caches_prefixes = caches_prefixes and cross is None

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, request: TextbookRequest) -> list[Block]:
        """Leading cached blocks; the last token is never a hit, it must be computed to sample."""
        if not self._caches_prefixes or request.message.options.skip_reading_prefix_cache:
            return []
        hits: list[Block] = []
        for name in self.names_of(request)[: (request.num_tokens - 1) // self.block_size]:
            block = self.pool.find(name)
            if block is None:
                break
            hits.append(block)
        return hits

    def num_needed(self, request: TextbookRequest, hits: list[Block], end: int) -> int:
        """Free blocks that `allocate` would take, hits that nobody holds included (KVM-08)."""
        num_new = self.num_blocks_for(end) - len(request.blocks) - len(hits)
        num_unheld = sum(block.ref_count == 0 for block in hits)
        return max(num_new, 0) + num_unheld + self._num_encoder_blocks(request)

    def _num_encoder_blocks(self, request: TextbookRequest) -> int:
        """KVM-11: blocks that its item takes, and that it has not got."""
        if self.cross is None:
            return 0
        return -(-request.items[0].num_tokens // self.cross.block_size) - len(
            request.encoder_blocks
        )

    def fits(
        self,
        request: TextbookRequest,
        hits: list[Block],
        end: int,
        answered_step: int | None = None,
    ) -> bool:
        """Whether there are blocks for `end` tokens. DESIGN 9.3: with `answered_step`, because they
        are written outside the order of steps, new ones must be named by no later plan."""
        if self.num_needed(request, hits, end) > self.pool.num_free:
            return False
        num_new = self.num_blocks_for(end) - len(request.blocks) - len(hits)
        return num_new <= sum(block not in hits for block in self.pool.available(answered_step))

    def allocate(
        self,
        request: TextbookRequest,
        hits: list[Block],
        end: int,
        answered_step: int | None = None,
    ) -> list[Block] | None:
        """Extend the block table by `hits` and then by new blocks, to hold `end` tokens; behind
        them come those for what it hears, if it has none yet.

        Returns the new blocks, or None, with nothing changed, if they do not fit.
        """
        if not self.fits(request, hits, end, answered_step):
            return None
        num_new = self.num_blocks_for(end) - len(request.blocks) - len(hits)
        self.pool.touch(hits)
        new_blocks = self.pool.take(max(num_new, 0), answered_step=answered_step)
        request.blocks += hits + new_blocks
        request.encoder_blocks += self.pool.take(self._num_encoder_blocks(request))
        return new_blocks

    def name(self, request: TextbookRequest, end: int) -> None:
        """Name the blocks that the first `end` tokens fill, as far as their ids are verified."""
        if not self._caches_prefixes:
            return
        num_full = min(end, request.num_tokens) // self.block_size
        uncached = request.blocks[request.num_cached_blocks : num_full]
        names = self.names_of(request)[request.num_cached_blocks : num_full]
        for block, name in zip(uncached, names, strict=True):
            self.pool.set_name(block, name)
        request.num_cached_blocks = max(num_full, request.num_cached_blocks)

    def names_of(self, request: TextbookRequest) -> list[int]:
        """Of all its full blocks."""
        self._names.extend(request.names, request.token_ids, self.block_size, request.extra_key)
        return request.names

    def free(self, request: TextbookRequest, keep: int = 0, newest_plan: int | None = None) -> None:
        """Give back all blocks behind the first `keep`. newest_plan: of those that may name them,
        for a request that runs."""
        # Tail first: the oldest free block is reused first, and a prefix is worth more.
        freed = list(reversed(request.blocks[keep:]))
        if keep == 0 and self.cross is not None:
            freed = self._in_order_of_end(freed, list(reversed(request.encoder_blocks)))
            request.encoder_blocks = []
        if newest_plan is not None:
            for block in freed:
                block.fence = newest_plan
        self.pool.free(freed)
        request.blocks = request.blocks[:keep]
        request.num_cached_blocks = min(request.num_cached_blocks, keep)
        if keep == 0:
            request.num_computed = 0

    def _in_order_of_end(self, decoder: list[Block], encoder: list[Block]) -> list[Block]:
        """Whichever ends at a later token first, of two that end together that of the decoder."""
        assert self.cross is not None
        order: list[Block] = []
        while decoder and encoder:
            is_encoder = len(encoder) * self.cross.block_size > len(decoder) * self.block_size
            order.append((encoder if is_encoder else decoder).pop(0))
        return order + decoder + encoder
