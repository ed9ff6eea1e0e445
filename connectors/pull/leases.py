"""Leases: which blocks an owner keeps for which reader, and for how long. No I/O, no clock.

A lease is a duration that the reader renews. The owner's first rank has the only table, so a lease
that holds when a reader asks after its read has held during the whole read, on all ranks.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from longshore.connectors.pull.messages import (
    Claim,
    Granted,
    Held,
    Offer,
    Refused,
    Renew,
    digest_blocks,
)

MAX_TOTAL_S: Final = 600.0
"""How long a lease may be renewed: requests that wait on two engines for blocks which each of them
leases to the other would renew forever."""


class LeaseTable(Protocol):
    """What an owner asks and tells. Methods that end leases return what is not kept any more."""

    def __contains__(self, transfer_id: str) -> bool: ...

    def offer(self, offer: Offer, now: float) -> None: ...

    def release(self, transfer_ids: Iterable[str]) -> list[Offer]: ...

    def claim(self, claim: Claim, reader: str, now: float) -> Granted | Refused: ...

    def renew(self, renew: Renew, reader: str, now: float) -> Held: ...

    def end(self, transfer_ids: Iterable[str], reader: str) -> list[Offer]: ...

    def expire(self, now: float) -> list[Offer]: ...

    @property
    def next_deadline(self) -> float | None:
        """When `expire` is to be called next."""


@dataclass(slots=True)
class _Lease:
    """reader: engine id of the first reader that has used it; no other reader may.
    ends_at: even if it is renewed."""

    offer: Offer
    ends_at: float
    expires_at: float
    reader: str | None = None


class Leases:
    """engine_id: of the owner, with its epoch. duration_s: without a renewal."""

    def __init__(self, engine_id: str, duration_s: float) -> None:
        self._engine_id = engine_id
        self._duration_s = duration_s
        self._max_total_s = max(MAX_TOTAL_S, duration_s)
        self._leases: dict[str, _Lease] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap; an entry may be out of date

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._leases

    def offer(self, offer: Offer, now: float) -> None:
        assert offer.transfer_id not in self._leases
        lease = self._leases[offer.transfer_id] = _Lease(offer, now + self._max_total_s, 0.0)
        self._extend(lease, now)

    def claim(self, claim: Claim, reader: str, now: float) -> Granted | Refused:
        reason = self._objection(claim, reader)
        if reason is not None:
            return Refused(claim.transfer_id, reason)
        lease = self._leases[claim.transfer_id]
        lease.reader = reader
        self._extend(lease, now)
        return Granted(claim.transfer_id, lease.offer.num_tokens, lease.offer.tables)

    def _objection(self, claim: Claim, reader: str) -> str | None:
        lease = self._leases.get(claim.transfer_id)
        if claim.engine_id != self._engine_id:
            return f"this is {self._engine_id}, not {claim.engine_id}: it was restarted"
        if lease is None:
            return "transfer_id is unknown: its lease has ended, or there was none"
        if lease.reader not in (None, reader):
            return "transfer_id is in use by another engine"
        if claim.request_id != lease.offer.request_id:
            return "transfer_id belongs to another request"
        if claim.token_digest != lease.offer.token_digest:
            return "the tokens of the request are not those whose KV is offered"
        if claim.blocks_digest != digest_blocks(lease.offer.tables):
            return "remote_block_ids are not those of the transfer"
        return None

    def renew(self, renew: Renew, reader: str, now: float) -> Held:
        held, ended = [], []
        for transfer_id in renew.transfer_ids:
            lease = self._leases.get(transfer_id)
            if lease is None or lease.reader not in (None, reader):
                ended.append(transfer_id)
                continue
            lease.reader = reader
            self._extend(lease, now)
            held.append(transfer_id)
        return Held(tuple(held), tuple(ended), renew.number)

    def end(self, transfer_ids: Iterable[str], reader: str) -> list[Offer]:
        """End leases of this reader; returns what they held."""
        ended = []
        for transfer_id in transfer_ids:
            lease = self._leases.get(transfer_id)
            if lease is not None and lease.reader in (None, reader):
                del self._leases[transfer_id]
                ended.append(lease.offer)
        return ended

    def release(self, transfer_ids: Iterable[str]) -> list[Offer]:
        """End leases on behalf of the owner's client; returns what they held. If a reader is
        reading, its check after the read fails."""
        found = [self._leases.pop(transfer_id, None) for transfer_id in transfer_ids]
        return [lease.offer for lease in found if lease is not None]

    def expire(self, now: float) -> list[Offer]:
        """End the leases that were not renewed in time; returns what they held."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, transfer_id = heapq.heappop(self._deadlines)
            lease = self._leases.get(transfer_id)
            if lease is None:
                continue
            if lease.expires_at > now:
                heapq.heappush(self._deadlines, (lease.expires_at, transfer_id))
                continue
            del self._leases[transfer_id]
            expired.append(lease.offer)
        return expired

    @property
    def next_deadline(self) -> float | None:
        """When `expire` is to be called next."""
        return self._deadlines[0][0] if self._deadlines else None

    def _extend(self, lease: _Lease, now: float) -> None:
        is_new = lease.expires_at == 0.0
        lease.expires_at = min(now + self._duration_s, lease.ends_at)
        if is_new:
            heapq.heappush(self._deadlines, (lease.expires_at, lease.offer.transfer_id))
