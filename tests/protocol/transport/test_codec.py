"""Frames: which messages are decoded, and which are rejected with which error."""

import contextlib
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longshore.protocol.errors import (
    MalformedMessage,
    MessageTooLarge,
    ProtocolError,
    UnknownMessage,
)
from longshore.protocol.handshake import FromWorker, ToClient, ToEngine, ToWorker
from longshore.protocol.outputs import ModelRunnerOutput
from longshore.protocol.plan import SampleMask, Shutdown
from longshore.protocol.requests import (
    AbortRequests,
    AddRequest,
    StopFound,
)
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.transport.codec import (
    INLINE_BYTES,
    MAX_MESSAGE_BYTES,
    Decoder,
    Encoder,
)
from tests.protocol.messages import (
    FROM_WORKER,
    TO_CLIENT,
    TO_ENGINE,
    TO_WORKER,
    adds,
    as_received,
    plain,
)

DIRECTIONS = [
    (ToWorker, TO_WORKER),
    (FromWorker, FROM_WORKER),
    (ToEngine, TO_ENGINE),
    (ToClient, TO_CLIENT),
]
MESSAGES = [
    pytest.param(union, strategy, id=f"{number}-{message.__name__}")
    for number, (union, strategies) in enumerate(DIRECTIONS)
    for message, strategy in strategies.items()
]
pack = msgspec.msgpack.encode
STOP_FOUND = {"type": "stop_found", "handle": 1, "num_tokens": 1}


def small_frames() -> Encoder[Any]:
    """An encoder that makes a frame of each array of 129 or more numbers."""
    return Encoder(inline_bytes=512)


def encode(message: Any) -> list[bytes]:
    return as_received(small_frames().encode(message))


def abort(length: int) -> AbortRequests:
    return AbortRequests(np.arange(length, dtype=np.int32))


def assert_usable(decoder: Decoder[Any]) -> None:
    assert decoder.decode(encode(StopFound(1, 2))) == StopFound(1, 2)


def test_every_message_of_every_direction_has_a_strategy_here() -> None:
    for union, strategies in DIRECTIONS:
        assert set(get_args(union)) == set(strategies)


@pytest.mark.parametrize(("union", "strategy"), MESSAGES)
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_every_message_is_decoded_as_it_was_sent(
    union: Any, strategy: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    message = data.draw(strategy)
    decoder = Decoder[Any](union)
    assert plain(decoder.decode(encode(message))) == plain(message)
    for encoder in (small_frames(), Encoder[Any]()):  # frames as they leave the encoder
        assert plain(decoder.decode(encoder.encode(message))) == plain(message)


def test_small_arrays_are_in_the_header_and_large_ones_in_frames() -> None:
    limit = INLINE_BYTES // 4
    assert len(Encoder[Any]().encode(abort(limit))) == 1
    frames = Encoder[Any]().encode(abort(limit + 1))
    assert len(frames) == 2
    assert frames[1] == np.arange(limit + 1, dtype="<i4").tobytes()
    assert len(frames[0]) < 40


def test_frames_are_numbered_in_the_order_of_the_fields() -> None:
    first, second = np.arange(200, dtype=np.int32), np.arange(500, 900, dtype=np.int32)
    output = ModelRunnerOutput(1, 1, sampled_tokens=first, failed_block_ids=second)
    frames = encode(output)
    assert [len(frame) for frame in frames[1:]] == [800, 1600]
    received = Decoder[Any](FromWorker).decode(frames)
    np.testing.assert_array_equal(received.sampled_tokens, first)
    np.testing.assert_array_equal(received.failed_block_ids, second)


def test_a_large_array_is_mapped_without_a_copy_on_both_sides() -> None:
    array = np.arange(1000, dtype=np.int32)
    frames = small_frames().encode(AbortRequests(array))
    assert np.shares_memory(np.frombuffer(frames[1], np.int32), array)
    frame = bytearray(bytes(frames[1]))
    received = Decoder[Any](ToEngine).decode([bytes(frames[0]), memoryview(frame)])
    assert np.shares_memory(received.handles, np.frombuffer(frame, np.uint8))


def test_an_array_that_is_not_contiguous_arrives_as_its_values() -> None:
    array = np.arange(1000, dtype=np.int32)[::2]
    np.testing.assert_array_equal(
        Decoder[Any](ToEngine).decode(encode(AbortRequests(array))).handles, array
    )


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(3, np.int64),
        np.zeros(3, np.float64),
        np.zeros((2, 2), np.int32),
        np.array(["text"]),
        object(),
    ],
)
def test_other_arrays_and_objects_cannot_be_sent(value: Any) -> None:
    encoder = small_frames()
    with pytest.raises(TypeError, match="is not a type that messages can contain"):
        encoder.encode(AbortRequests(value))
    assert len(encoder.encode(abort(200))) == 2


def test_defaults_are_omitted_from_the_message() -> None:
    (header,) = encode(AddRequest("r", 1, np.zeros(1, np.int32), SamplingParams()))
    assert set(msgspec.msgpack.decode(header)) == {
        "type", "request_id", "handle", "prompt_token_ids", "sampling"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("frames", "error", "text"),
    [
        ([], MalformedMessage, "no frames"),
        ([b""], MalformedMessage, "not msgpack"),
        ([b"\xc1"], MalformedMessage, "not msgpack"),
        ([pack({"type": "abort", "handles": ["<i4", b""]})[:-3]], MalformedMessage, "truncated"),
        ([pack(STOP_FOUND) + b"x"], MalformedMessage, "trailing"),
        ([pack({"type": "nonsense"})], UnknownMessage, "'nonsense'; .*: abort, add, client_hello"),
        ([pack({"type": "plan"})], UnknownMessage, "unknown message 'plan'"),
        ([pack({"handle": 1})], MalformedMessage, "not a tagged message"),
        ([pack({"type": 7})], MalformedMessage, "not a tagged message"),
        ([pack([1, 2])], MalformedMessage, "not a tagged message"),
        ([pack(7)], MalformedMessage, "not a tagged message"),
        ([pack({"type": "stop_found", "handle": 1})], MalformedMessage, "num_tokens"),
        (
            [pack(STOP_FOUND | {"handle": "1"})],
            MalformedMessage,
            r"message 'stop_found': Expected `int`, got `str` - at `\$.handle`",
        ),
        (
            [pack(STOP_FOUND | {"extra": 1})],
            MalformedMessage,
            "extra",
        ),
        ([pack({"type": "abort", "handles": [1, 2, 3]})], MalformedMessage, "a pair"),
        ([pack({"type": "abort", "handles": 7})], MalformedMessage, "a pair"),
        ([pack({"type": "abort", "handles": ["<i8", b""]})], MalformedMessage, "'<i8', expected"),
        ([pack({"type": "abort", "handles": ["|u1", b""]})], MalformedMessage, "'|u1', expected"),
        ([pack({"type": "abort", "handles": [None, b""]})], MalformedMessage, "expected int32"),
        ([pack({"type": "abort", "handles": ["<i4", "text"]})], MalformedMessage, "neither bytes"),
        ([pack({"type": "abort", "handles": ["<i4", 1.0]})], MalformedMessage, "neither bytes"),
        ([pack({"type": "abort", "handles": ["<i4", b"123"]})], MalformedMessage, "3 bytes"),
        ([pack({"type": "abort", "handles": ["<i4", 0]})], MalformedMessage, "no array frame 0"),
        ([pack({"type": "abort", "handles": ["<i4", 1]})], MalformedMessage, "no array frame 1"),
        ([pack({"type": "abort", "handles": ["<i4", -1]}), b""], MalformedMessage, "frame -1"),
        ([pack({"type": "abort", "handles": ["<i4", 2]}), b""], MalformedMessage, "frame 2"),
        ([pack({"type": "abort", "handles": ["<i4", 1]}), b"12345"], MalformedMessage, "5 bytes"),
        ([b"\x91" * 5000 + b"\x01"], MalformedMessage, "header"),
        ([b"\xdd\xff\xff\xff\xff"], MalformedMessage, "header"),
    ],
)  # fmt: skip
def test_invalid_frames_are_rejected_with_an_error_and_the_decoder_stays_usable(
    frames: list[bytes], error: type[ProtocolError], text: str
) -> None:
    decoder = Decoder[Any](ToEngine)
    with pytest.raises(error, match=text):
        decoder.decode(frames)
    assert_usable(decoder)


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": -1.0}, {"top_p": 0}, {"max_tokens": 0}, {"stop_token_ids": [-1]}],
)
def test_sampling_parameters_are_checked_on_arrival_too(sampling: dict[str, Any]) -> None:
    header = {
        "type": "add",
        "request_id": "r",
        "handle": 1,
        "prompt_token_ids": ["<i4", b""],
        "sampling": sampling,
    }
    with pytest.raises(MalformedMessage, match=next(iter(sampling))):
        Decoder[Any](ToEngine).decode([pack(header)])


def test_a_message_with_another_element_type_is_rejected_although_its_bytes_fit() -> None:
    mask = SampleMask(1, 1, np.zeros(2, np.int32), np.zeros(8, np.uint8))
    (header,) = encode(mask)
    fields = msgspec.msgpack.decode(header)
    fields["bits"][0] = "<i4"
    with pytest.raises(MalformedMessage, match="expected uint8"):
        Decoder[Any](ToWorker).decode([pack(fields)])


def test_too_many_frames_and_too_many_bytes_are_too_large() -> None:
    decoder = Decoder[Any](ToEngine, max_message_bytes=1000, max_frames=3)
    frames = encode(abort(200))
    assert len(decoder.decode([*frames, b""]).handles) == 200
    with pytest.raises(MessageTooLarge, match="4 frames; the limit is 3"):
        decoder.decode([*frames, b"", b""])
    with pytest.raises(MessageTooLarge, match="bytes; the limit is 1000"):
        decoder.decode([*frames, b"x" * 200])
    # bytes, not elements, are counted for frames as they leave the encoder, too
    with pytest.raises(MessageTooLarge):
        decoder.decode(small_frames().encode(abort(300)))
    assert_usable(decoder)


def test_the_default_limit_is_that_of_the_protocol() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return MAX_MESSAGE_BYTES + 1

    with pytest.raises(MessageTooLarge):
        Decoder[Any](ToEngine).decode([Huge()])


def test_a_decoder_of_one_message_type_knows_its_tag() -> None:
    decoder = Decoder[Any](Shutdown)
    assert decoder.decode(encode(Shutdown("bye"))) == Shutdown("bye")
    with pytest.raises(UnknownMessage, match="known messages: shutdown"):
        decoder.decode(encode(StopFound(1, 1)))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(st.binary(max_size=60), max_size=4), st.sampled_from(DIRECTIONS))
def test_random_bytes_raise_only_protocol_errors(
    frames: list[bytes], direction: tuple[Any, Any]
) -> None:
    decoder = Decoder[Any](direction[0])
    with contextlib.suppress(ProtocolError):
        decoder.decode(frames)


@pytest.mark.parametrize(("union", "strategies"), DIRECTIONS)
@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_mutated_messages_give_a_message_or_a_protocol_error(
    union: Any, strategies: dict[Any, st.SearchStrategy[Any]], data: st.DataObject
) -> None:
    message = data.draw(st.one_of(*strategies.values()))
    frames = [bytearray(frame) for frame in encode(message)]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = data.draw(st.sampled_from(frames))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "drop"]))
        position = data.draw(st.integers(0, max(len(frame) - 1, 0)))
        if kind == "flip" and frame:
            frame[position] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del frame[position:]
        elif kind == "insert":
            frame[position:position] = data.draw(st.binary(max_size=4))
        elif kind == "drop" and len(frames) > 1:
            frames.remove(frame)
    decoder = Decoder[Any](union)
    try:
        received = decoder.decode([bytes(frame) for frame in frames])
    except ProtocolError:
        pass
    else:
        assert isinstance(received, tuple(get_args(union)))
    assert plain(decoder.decode(encode(message))) == plain(message)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(adds, st.data())
def test_mutated_fields_give_a_request_or_a_protocol_error(
    message: AddRequest, data: st.DataObject
) -> None:
    header, *rest = encode(message)
    fields = msgspec.msgpack.decode(header)
    field = data.draw(st.sampled_from(sorted(fields)))
    fields[field] = data.draw(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
        | st.text(max_size=3) | st.binary(max_size=3) | st.lists(st.integers(0, 3), max_size=3)
        | st.just({}) | st.tuples(st.just("<i4"), st.integers(-3, 3))
    )  # fmt: skip
    try:
        received = Decoder[Any](ToEngine).decode([pack(fields), *rest])
    except ProtocolError:
        pass
    else:
        assert isinstance(received, AddRequest)


def test_an_unknown_message_with_a_second_tag_that_is_no_text_is_malformed() -> None:
    """Found with --long: the tag is read again, as a text, to name it."""
    header = b"\x82\xa4type\xa2st\xa4type\xa3op\xa4"
    with pytest.raises(MalformedMessage, match="not a tagged message"):
        Decoder[Any](ToEngine).decode([header])
