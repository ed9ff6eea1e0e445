"""Hints to keep a prefix: which block is retained by which of them."""

from dataclasses import dataclass

from longshore.protocol.requests import CacheHint
from tests.oracle.block_pool import Block, TextbookBlockPool

SHARE = 0.25
"""Of all blocks, the null block included, that a tenant may retain."""


@dataclass(eq=False)
class Retention:
    """One request's hint, until it is replaced or its time has passed."""

    tenant: str
    session: str | None
    expires_at: float


class Retentions:
    """All hints, oldest first. A block of several is the one's that expires last, the newest of
    equals; who loses it to another does not get it back."""

    def __init__(self, pool: TextbookBlockPool) -> None:
        self._pool = pool
        self._limit = int(len(pool.blocks) * SHARE)
        self._hints: list[Retention] = []

    def add(self, blocks: list[Block], hint: CacheHint, *, tenant: str, now: float) -> None:
        """A request ends that has asked to keep these blocks, as far as they can be found."""
        if hint.session is not None:
            for other in self._hints[:]:
                if (other.tenant, other.session) == (tenant, hint.session):
                    self._end(other)
        new = Retention(tenant, hint.session, now + hint.ttl_s)
        self._hints.append(new)
        for block in [block for block in blocks if block.name is not None][: self._limit]:
            if block.retention is None or block.retention.expires_at <= new.expires_at:
                block.retention = new
        while self.num_blocks_of(tenant) > self._limit:
            self._end(next(other for other in self._hints if other.tenant == tenant))
        self._pool.requeue()

    def expire(self, now: float) -> None:
        for hint in self._hints[:]:
            if hint.expires_at <= now:
                self._end(hint)
        self._pool.requeue()

    def num_blocks_of(self, tenant: str) -> int:
        """Blocks that its hints retain."""
        retentions = (block.retention for block in self._pool.blocks)
        return sum(hint is not None and hint.tenant == tenant for hint in retentions)

    def _end(self, hint: Retention) -> None:
        self._hints.remove(hint)
        for block in self._pool.blocks:
            if block.retention is hint:
                block.retention = None

    def check_invariants(self) -> None:
        """Raises AssertionError."""
        found = {block.retention for block in self._pool.blocks} - {None}
        assert found <= set(self._hints), "a block is retained by a hint that has ended"
        for hint in self._hints:
            num_blocks = self.num_blocks_of(hint.tenant)
            assert num_blocks <= self._limit, f"{hint.tenant!r} retains {num_blocks} blocks"
