"""Leases: bound to owner, request, tokens, blocks and the first reader; durations, not times."""

from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from longshore.connectors.base import RequestView
from longshore.connectors.pull.leases import MAX_TOTAL_S, Leases
from longshore.connectors.pull.messages import (
    Claim,
    Granted,
    Offer,
    Refused,
    Renew,
    digest_blocks,
    digest_input,
    tables_of,
)
from longshore.protocol.arrays import int32_array
from longshore.protocol.requests import MultimodalFeature

ITEM = MultimodalFeature("a", 1, 2)
TABLES = tables_of([int32_array([3, 4]), int32_array([0, 9])])


def view(num_tokens: int = 3, **fields: Any) -> RequestView:
    return RequestView("r", int32_array([1, 2, 3][:num_tokens]), num_tokens, (), **fields)


TOKENS = digest_input(view(), 3)


def offer(transfer_id: str = "t", hold_id: int = 1) -> Offer:
    return Offer(transfer_id, "request", hold_id, 30, TOKENS, TABLES)


CLAIM = Claim("t", "owner.1", "request", TOKENS, digest_blocks(TABLES))


def leases() -> Leases:
    made = Leases("owner.1", 10.0)
    made.offer(offer(), 0.0)
    return made


def test_a_claim_gets_the_blocks_of_its_transfer() -> None:
    assert leases().claim(CLAIM, "reader.1", 1.0) == Granted("t", 30, TABLES)


@pytest.mark.req("CON-08")
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"transfer_id": "u"}, "transfer_id is unknown"),
        ({"engine_id": "owner.2"}, "this is owner.1, not owner.2"),
        ({"request_id": "other"}, "belongs to another request"),
        ({"token_digest": digest_input(view(2), 2)}, "the tokens of the request"),
        (
            {"token_digest": digest_input(view(lora_name="adapter"), 3)},
            "the tokens of the request",
        ),
        (
            {"token_digest": digest_input(view(multimodal=(ITEM,)), 3)},
            "the tokens of the request",
        ),
        ({"blocks_digest": digest_blocks(TABLES[:1])}, "remote_block_ids are not those"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_claim_of_anything_else_gets_nothing(wrong: dict[str, object], reason: str) -> None:
    answer = leases().claim(msgspec.structs.replace(CLAIM, **wrong), "reader.1", 1.0)
    assert isinstance(answer, Refused)
    assert reason in answer.reason


def test_prompts_with_the_same_placeholders_and_other_images_differ() -> None:
    images = {
        (): view(),
        ("a", 1): view(multimodal=(ITEM,)),
        ("b", 1): view(multimodal=(MultimodalFeature("b", 1, 2),)),
        ("a", 0): view(multimodal=(MultimodalFeature("a", 0, 2),)),
        ("a", 1, "lora"): view(multimodal=(ITEM,), lora_name="lora"),
    }
    assert len({digest_input(each, 3) for each in images.values()}) == len(images)
    # An image after the tokens whose KV is offered has no effect on it.
    assert digest_input(view(multimodal=(ITEM,)), 1) == digest_input(view(), 1)


@pytest.mark.req("CON-08")
def test_the_owner_may_end_a_lease_that_is_in_use() -> None:
    table = leases()
    assert table.release(["t", "unknown"]) == [offer()]
    assert table.release(["t"]) == []
    table.offer(offer("u", 2), 0.0)
    table.renew(Renew(("u",), 1), "reader.1", 1.0)
    assert table.release(["u"]) == [offer("u", 2)]
    # What it has read meanwhile does not count.
    assert table.renew(Renew(("u",), 2), "reader.1", 1.0).ended == ("u",)
    assert table.expire(100.0) == []


@pytest.mark.req("CON-08")
def test_only_the_first_reader_may_use_a_transfer() -> None:
    table = leases()
    assert table.renew(Renew(("t",), 1), "reader.1", 1.0).transfer_ids == ("t",)
    answer = table.claim(CLAIM, "reader.2", 1.0)
    assert isinstance(answer, Refused)
    assert "in use by another engine" in answer.reason
    assert table.renew(Renew(("t",), 1), "reader.2", 1.0).ended == ("t",)
    assert table.end(["t"], "reader.2") == []
    assert isinstance(table.claim(CLAIM, "reader.1", 2.0), Granted)
    assert table.end(["t"], "reader.1") == [offer()]
    assert isinstance(table.claim(CLAIM, "reader.1", 3.0), Refused)  # a replay


def test_a_lease_ends_when_it_is_not_renewed() -> None:
    table = leases()
    assert table.next_deadline == 10.0
    table.renew(Renew(("t",), 1), "reader.1", 9.0)
    assert table.expire(10.0) == []
    assert table.next_deadline == 19.0
    assert table.expire(19.0) == [offer()]
    assert table.renew(Renew(("t",), 1), "reader.1", 19.0).ended == ("t",)
    assert table.next_deadline is None


def test_a_lease_ends_even_if_it_is_renewed_for_ever() -> None:
    """Or requests on two engines that wait for each other's blocks would wait for ever."""
    table, now = leases(), 0.0
    while now + 5.0 < MAX_TOTAL_S:
        now += 5.0
        assert table.expire(now) == []
        assert table.renew(Renew(("t",), 1), "reader.1", now).transfer_ids == ("t",)
    assert table.expire(MAX_TOTAL_S) == [offer()]
    assert table.renew(Renew(("t",), 1), "reader.1", MAX_TOTAL_S).ended == ("t",)


class LeaseMachine(RuleBasedStateMachine):
    """Each lease is held until it ends once, and never ends while it is renewed in time."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Leases("owner.1", 10.0)
        self.now = 0.0
        self.live: dict[str, tuple[int, float, str | None]] = {}
        self.num_offers = 0
        self.ended: list[int] = []

    @rule()
    def offer(self) -> None:
        self.num_offers += 1
        transfer_id = f"t{self.num_offers}"
        self.table.offer(offer(transfer_id, self.num_offers), self.now)
        self.live[transfer_id] = self.num_offers, self.now + 10.0, None

    @rule(number=st.integers(1, 8), reader=st.sampled_from(["a", "b"]), is_end=st.booleans())
    def use(self, number: int, reader: str, is_end: bool) -> None:
        transfer_id = f"t{number}"
        found = self.live.get(transfer_id)
        may = found is not None and found[2] in (None, reader)
        if is_end:
            ended = self.table.end([transfer_id], reader)
            assert bool(ended) == may
            if may:
                del self.live[transfer_id]
                self.ended += [each.hold_id for each in ended]
        else:
            held = self.table.renew(Renew((transfer_id,), 1), reader, self.now)
            assert bool(held.transfer_ids) == may
            if found is not None and may:
                self.live[transfer_id] = found[0], self.now + 10.0, reader

    @rule(seconds=st.floats(0.0, 12.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        expired = {each.transfer_id: each.hold_id for each in self.table.expire(self.now)}
        late = {key: value[0] for key, value in self.live.items() if value[1] <= self.now}
        assert expired == late
        for transfer_id in late:
            del self.live[transfer_id]
        self.ended += late.values()

    @invariant()
    def every_hold_ends_once(self) -> None:
        assert len(self.table) == len(self.live)
        assert len(self.ended) == len(set(self.ended))
        assert len(self.ended) + len(self.live) == self.num_offers


TestLeaseMachine = LeaseMachine.TestCase
