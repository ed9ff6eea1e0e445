"""Which outputs an owner grants, and when the slot of a withdrawn one is free."""

from longshore.connectors.pull.messages import NOT_STORED, Claim, Granted, Offer, Refused, Renew
from longshore.connectors.pull_encoder.shelf import Shelf

DURATION_S = 10.0


def offer_of(key: str, slot: int) -> Offer:
    return Offer(key, "", slot, 100, b"", (slot.to_bytes(4, "little"),))


def claim_of(key: str) -> Claim:
    return Claim(key, "*", key, b"", b"")


def shelf_with(*keys: str) -> Shelf:
    shelf = Shelf(DURATION_S)
    for slot, key in enumerate(keys, 1):
        shelf.offer(offer_of(key, slot), 0.0)
    return shelf


def test_an_output_is_granted_to_several_readers_and_a_missing_one_is_a_miss() -> None:
    shelf = shelf_with("a")
    for reader in ("one", "two"):
        answer = shelf.claim(claim_of("a"), reader, 0.0)
        assert answer == Granted("a", 100, offer_of("a", 1).tables)
    assert shelf.claim(claim_of("b"), "one", 0.0) == Refused("b", NOT_STORED)


def test_a_withdrawn_output_is_free_when_its_last_reader_has_ended() -> None:
    shelf = shelf_with("a", "b")
    assert shelf.release(["b"]) == [offer_of("b", 2)]
    shelf.claim(claim_of("a"), "one", 0.0)
    shelf.claim(claim_of("a"), "two", 0.0)
    assert shelf.release(["a"]) == []
    assert isinstance(shelf.claim(claim_of("a"), "three", 0.0), Refused)
    assert shelf.renew(Renew(("a",), 7), "two", 1.0).transfer_ids == ("a",)
    assert shelf.end(["a"], "one") == []
    assert shelf.end(["a"], "two") == [offer_of("a", 1)]
    assert shelf.renew(Renew(("a",), 8), "two", 2.0).ended == ("a",)


def test_a_lease_that_is_not_renewed_ends_and_frees_its_slot() -> None:
    shelf = shelf_with("a", "b")
    shelf.claim(claim_of("a"), "one", 0.0)
    shelf.claim(claim_of("b"), "one", 1.0)
    shelf.release(["a"])
    shelf.release(["b"])
    shelf.renew(Renew(("a",), 1), "one", 5.0)
    assert shelf.next_deadline == 11.0
    assert shelf.expire(10.9) == []
    assert shelf.expire(11.0) == [offer_of("b", 2)]
    assert shelf.expire(15.0) == [offer_of("a", 1)]
    assert shelf.next_deadline is None


def test_an_output_offered_again_does_not_free_the_slot_of_the_old_one() -> None:
    shelf = shelf_with("a")
    shelf.claim(claim_of("a"), "one", 0.0)
    assert shelf.release(["a"]) == []
    shelf.offer(offer_of("a", 5), 1.0)
    answer = shelf.claim(claim_of("a"), "two", 1.0)
    assert isinstance(answer, Granted)
    assert answer.tables == offer_of("a", 5).tables
    assert shelf.end(["a"], "two") == []
    assert shelf.end(["a"], "one") == [offer_of("a", 1)]
    assert "a" in shelf
