"""Encodes messages as frames: a msgpack header, then one raw frame per large array.

A small array is sent inside the header, a large one as a separate little-endian frame that the
receiver maps without a copy. Nothing is pickled, and only fields of known messages are decoded: an
unknown tag, a truncated frame or a wrong element type raises a ProtocolError.
"""

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, Generic, TypeAlias, TypeVar, get_args

import msgspec
import numpy as np

from longshore.protocol.errors import MalformedMessage, MessageTooLarge, UnknownMessage

Frame: TypeAlias = bytes | bytearray | memoryview
T = TypeVar("T")

# Up to this size a copy into the header is cheaper than another ZMQ frame.
INLINE_BYTES: Final = 64 << 10
MAX_MESSAGE_BYTES: Final = 256 << 20
MAX_FRAMES: Final = 16_384

_IS_LITTLE_ENDIAN: Final = sys.byteorder == "little"
_WIRE_TYPES: Final = {
    np.dtype(np.int32): "<i4",
    np.dtype(np.float32): "<f4",
    np.dtype(np.uint8): "|u1",
}


class Encoder(Generic[T]):
    """Encodes messages of one direction as frames. Not thread-safe.

    inline_bytes: maximum size of an array inside the header.
    """

    def __init__(self, *, inline_bytes: int = INLINE_BYTES) -> None:
        self._inline_bytes = inline_bytes
        self._frames: list[Frame] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_array)

    def encode(self, message: T) -> list[Frame]:
        """Returns [header, array frame, ...]. Array frames alias the message's arrays: do not write
        to those until the frames have been sent or copied."""
        self._frames = [b""]
        self._frames[0] = self._encoder.encode(message)
        return self._frames

    def _encode_array(self, value: Any) -> tuple[str, bytes | int]:
        if not isinstance(value, np.ndarray) or value.ndim != 1:
            raise TypeError(f"{type(value).__name__} is not a type that messages can contain")
        wire_type = _WIRE_TYPES.get(value.dtype)
        if wire_type is None:
            raise TypeError(f"an array of {value.dtype} is not a type that messages can contain")
        if not _IS_LITTLE_ENDIAN:
            value = value.astype(wire_type)
        if value.nbytes <= self._inline_bytes:
            return wire_type, value.tobytes()
        value = np.ascontiguousarray(value)
        self._frames.append(value.data.cast("B"))
        return wire_type, len(self._frames) - 1


class Decoder(Generic[T]):
    """Decodes frames as one of the message types of `union`. Not thread-safe.

    Raises UnknownMessage, MalformedMessage or MessageTooLarge; keeps no state between messages.
    """

    def __init__(
        self,
        union: Any,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_frames: int = MAX_FRAMES,
    ) -> None:
        self._frames: Sequence[Frame] = ()
        self._max_message_bytes = max_message_bytes
        self._max_frames = max_frames
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(
            union, dec_hook=self._decode_array
        )
        self._tags = {one.__struct_config__.tag for one in get_args(union) or (union,)}
        self._tag_decoder = msgspec.msgpack.Decoder(_Tagged)

    def decode(self, frames: Sequence[Frame]) -> T:
        if not frames:
            raise MalformedMessage("a message has no frames; it needs at least its header")
        if len(frames) > self._max_frames:
            raise MessageTooLarge(
                f"a message has {len(frames)} frames; the limit is {self._max_frames}"
            )
        size_bytes = sum(map(len, frames))
        if size_bytes > self._max_message_bytes:
            raise MessageTooLarge(
                f"a message has {size_bytes} bytes; the limit is {self._max_message_bytes}"
            )
        self._frames = frames
        try:
            return self._decoder.decode(frames[0])
        except msgspec.ValidationError as error:
            raise self._explain(frames[0], error) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedMessage(f"the header is not msgpack: {error}") from error
        finally:
            self._frames = ()

    def _explain(
        self, header: Frame, error: msgspec.ValidationError
    ) -> UnknownMessage | MalformedMessage:
        try:
            tag = self._tag_decoder.decode(header).type
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return MalformedMessage(f"the header is not a tagged message: {error}")
        if tag not in self._tags:
            known = ", ".join(sorted(self._tags))
            return UnknownMessage(f"unknown message {tag!r}; known messages: {known}")
        return MalformedMessage(f"message {tag!r}: {error}")

    def _decode_array(self, wanted: Any, value: Any) -> Any:
        if not (isinstance(value, list) and len(value) == 2):
            raise ValueError("an array must be a pair of element type and data")
        wire_type, data = value
        dtype = _element_type(wanted)
        if wire_type != _WIRE_TYPES[dtype]:
            raise ValueError(f"an array has element type {wire_type!r}, expected {dtype.name}")
        if isinstance(data, int):
            if not 1 <= data < len(self._frames):
                raise ValueError(f"there is no array frame {data} among {len(self._frames)} frames")
            data = self._frames[data]
        elif not isinstance(data, bytes):
            raise ValueError("array data is neither bytes nor a frame number")
        if len(data) % dtype.itemsize:
            raise ValueError(f"{len(data)} bytes are not a multiple of the size of {wire_type!r}")
        return np.frombuffer(data, wire_type)


@cache
def _element_type(array_type: Any) -> np.dtype[Any]:
    """The element type of an array type of `protocol.arrays`."""
    dtype: np.dtype[Any] = np.dtype(get_args(get_args(array_type)[1])[0])
    return dtype


class _Tagged(msgspec.Struct):
    type: str
