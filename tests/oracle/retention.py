"""Hints to keep a prefix: which block is retained by which of them."""

from dataclasses import dataclass

from longshore.protocol.requests import CacheHint, Tenant
from tests.oracle.block_pool import Block, TextbookBlockPool


@dataclass(eq=False)
class Retention:
    """One request's hint for its first `num_tokens` tokens, until it is replaced or its time has
    passed."""

    tenant: str
    session: str | None
    num_tokens: float
    priority: int
    expires_at: float


class Retentions:
    """All hints, oldest first. A block of several is the one's of the highest priority, then the
    one's that expires last, the newest of equals; who loses it to another does not get it back."""

    def __init__(self, pool: TextbookBlockPool) -> None:
        self._pool = pool
        self._limits: dict[str, int] = {}
        self._hints: list[Retention] = []

    def add(
        self, blocks: list[Block], block_size: int, hint: CacheHint, *, owner: Tenant, now: float
    ) -> None:
        """A request ends that has asked to keep these blocks, as far as they can be found."""
        tenant, limit = owner.name, int(len(self._pool.blocks) * owner.cache_share)
        self._limits[tenant] = limit
        if hint.session is not None:
            for other in self._hints[:]:
                if (other.tenant, other.session) == (tenant, hint.session):
                    self._end(other)
        asked = [(float(each.num_tokens), each.priority, each.ttl_s) for each in hint.prefixes]
        if hint.ttl_s > 0:
            asked.append((float("inf"), hint.priority, hint.ttl_s))
        for length in sorted({num_tokens for num_tokens, _, _ in asked}, reverse=True):
            longer = [each for each in asked if each[0] >= length]
            priority, ttl_s = max(each[1] for each in longer), max(each[2] for each in longer)
            new = Retention(tenant, hint.session, length, priority, now + ttl_s)
            self._hints.append(new)
            covered = [block for i, block in enumerate(blocks) if i * block_size < length]
            for block in [block for block in covered if block.name is not None][:limit]:
                if block.retention is None or _rank(block.retention) <= _rank(new):
                    block.retention = new
        while self.num_blocks_of(tenant) > limit:
            mine = [other for other in self._hints if other.tenant == tenant]
            self._end(min(mine, key=lambda other: other.priority))  # the oldest of equals
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
            assert num_blocks <= self._limits[hint.tenant], (
                f"{hint.tenant!r} retains {num_blocks} blocks"
            )


def _rank(hint: Retention) -> tuple[int, float]:
    return hint.priority, hint.expires_at
