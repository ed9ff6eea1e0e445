"""Numbers of messages: what a faulty connection may deliver, and what the receiver makes of it."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.protocol.errors import MalformedMessage, MessagesLost, RepeatedMessage
from longshore.protocol.transport.codec import Frame
from longshore.protocol.transport.numbering import OVER, PING, Numbering

FRAMES = st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=3)


def receive(end: Numbering, frames: Sequence[Frame]) -> list[bytes] | None:
    contents = end.check(frames)
    return None if contents is None else [bytes(frame) for frame in contents]


def test_messages_arrive_as_they_were_and_pings_have_no_contents() -> None:
    here, there = Numbering(), Numbering()
    for frames in ([b"a"], [b"a"], [b"", b"b"], [b"c", b"", b"d"]):
        assert receive(there, here.add(frames)) == frames
    assert receive(there, here.add(PING)) is None
    assert receive(here, there.add([b"an answer"])) == [b"an answer"]


def test_a_repeated_message_changes_nothing() -> None:
    here, there = Numbering(), Numbering()
    first, second = here.add([b"a"]), here.add([b"b"])
    for frames in (first, second):
        there.check(frames)
    for frames in (second, first):
        with pytest.raises(RepeatedMessage):
            there.check(frames)
    assert receive(there, here.add([b"c"])) == [b"c"]


def test_a_message_behind_a_lost_one_is_not_delivered() -> None:
    here, there = Numbering(), Numbering()
    here.add([b"lost"])
    with pytest.raises(MessagesLost, match="message 1 arrived instead of 0"):
        there.check(here.add([b"b"]))


def test_a_message_without_one_of_its_frames_is_not_delivered() -> None:
    first, *_ = Numbering().add([b"a", b"b"])
    with pytest.raises(MessagesLost, match="message 0 has 1 of its 2 frames"):
        Numbering().check([first])


def test_the_last_message_of_a_connection_has_the_reason() -> None:
    with pytest.raises(MessagesLost, match="did not get all messages of this one"):
        Numbering().check([OVER])


def test_a_message_that_is_too_short_is_malformed() -> None:
    end = Numbering()
    with pytest.raises(MalformedMessage, match="4 bytes has no number"):
        end.check([b"junk"])
    assert receive(end, Numbering().add([b"a"])) == [b"a"]


@given(
    messages=st.lists(FRAMES, min_size=1, max_size=8),
    sent=st.lists(st.integers(0, 7), max_size=16),
    cut=st.integers(0, 15),
)
def test_what_is_delivered_is_the_beginning_of_what_was_sent(
    messages: list[list[bytes]], sent: list[int], cut: int
) -> None:
    """`sent`: which messages the connection delivers, in which order; number `cut` without its last
    frame."""
    here, there = Numbering(), Numbering()
    numbered = [here.add(frames) for frames in messages]
    delivered: list[list[bytes] | None] = []
    arriving = [numbered[index] for index in sent if index < len(numbered)]
    for position, frames in enumerate(arriving):
        if position == cut and len(frames) > 1:
            frames = frames[:-1]
        try:
            delivered.append(receive(there, frames))
        except RepeatedMessage:
            continue
        except MessagesLost:
            break
    assert delivered == messages[: len(delivered)]
