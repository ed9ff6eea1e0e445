"""Which outputs an owner offers, and who reads them. No I/O, no clock.

Unlike the blocks of a request, an output is offered to any number of readers, until it is
withdrawn. A reader has a lease for each output that it reads.
"""

from collections.abc import Iterable

from longshore.connectors.pull.messages import (
    NOT_STORED,
    Claim,
    Granted,
    Held,
    Offer,
    Refused,
    Renew,
)


class Shelf:
    """A LeaseTable of outputs by their key. duration_s: of a lease without a renewal."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._offers: dict[str, Offer] = {}
        self._withdrawn: dict[int, Offer] = {}  # by slot, while they are read
        # By (key, reader), with their ends; the one that ends first is the first.
        self._leases: dict[tuple[str, str], tuple[float, Offer]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._offers

    def offer(self, offer: Offer, now: float) -> None:
        assert offer.transfer_id not in self._offers
        self._offers[offer.transfer_id] = offer

    def release(self, keys: Iterable[str]) -> list[Offer]:
        """Grant these to no other reader; returns those that none is reading."""
        offers = [self._offers.pop(key) for key in keys]
        self._withdrawn |= {offer.hold_id: offer for offer in offers}
        return self._unread(offers)

    def claim(self, claim: Claim, reader: str, now: float) -> Granted | Refused:
        key = claim.transfer_id
        offer = self._offers.get(key)
        if offer is None:
            return Refused(key, NOT_STORED)
        self._lease(key, reader, offer, now)
        return Granted(key, offer.num_tokens, offer.tables)

    def renew(self, renew: Renew, reader: str, now: float) -> Held:
        held, ended = [], []
        for key in renew.transfer_ids:
            lease = self._leases.get((key, reader))
            if lease is None:
                ended.append(key)
            else:
                self._lease(key, reader, lease[1], now)
                held.append(key)
        return Held(tuple(held), tuple(ended), renew.number)

    def end(self, transfer_ids: Iterable[str], reader: str) -> list[Offer]:
        ended = [self._leases.pop((key, reader), None) for key in transfer_ids]
        return self._unread(lease[1] for lease in ended if lease is not None)

    def expire(self, now: float) -> list[Offer]:
        late = []
        while (deadline := self.next_deadline) is not None and deadline <= now:
            late.append(self._leases.pop(next(iter(self._leases)))[1])
        return self._unread(late)

    @property
    def next_deadline(self) -> float | None:
        return next((end for end, _ in self._leases.values()), None)

    def _lease(self, key: str, reader: str, offer: Offer, now: float) -> None:
        self._leases.pop((key, reader), None)  # to the end
        self._leases[key, reader] = now + self._duration_s, offer

    def _unread(self, offers: Iterable[Offer]) -> list[Offer]:
        """Remove those of `offers` that are withdrawn and not read; returns them."""
        read = {offer.hold_id for _, offer in self._leases.values()}
        slots = {offer.hold_id for offer in offers} - read
        return [self._withdrawn.pop(slot) for slot in slots if slot in self._withdrawn]
