"""What the two ends of a link tell each other. One connection of the side channel is one link."""

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from longshore.connectors.pull.messages import Name
from longshore.protocol.arrays import Int64Array

MAX_RUNS: Final = 1 << 16
"""Limit of the runs of bytes in one chunk."""

MAX_VALUE_BYTES: Final = 1 << 16
"""Limit of an entry of the rendezvous: addresses of gloo, or the unique id of NCCL."""

LibraryName: TypeAlias = Literal["gloo", "nccl", "mapped"]
"""What moves the bytes of a link. mapped: the reader copies from the owner's memory, which CUDA IPC
has mapped into its process."""

_Array: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=8 * MAX_RUNS)]


def array_bytes(values: Int64Array) -> bytes:
    return values.astype("<i8").tobytes()


# From the reader to the owner


class Join(msgspec.Struct, tag="join", frozen=True, forbid_unknown_fields=True):
    """The first message of a link. session: from the owner's metadata, which only readers have."""

    session: Annotated[bytes, msgspec.Meta(max_length=64)]
    library: LibraryName


class Send(msgspec.Struct, tag="send", frozen=True, forbid_unknown_fields=True):
    """Send the next chunk: runs of bytes, one after the other. number: 0, 1, 2 … of the link.

    offsets, lengths: int64, little-endian. Offsets are from the start of the owner's memory.
    """

    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
    offsets: _Array
    lengths: _Array


class Leave(msgspec.Struct, tag="leave", frozen=True, forbid_unknown_fields=True):
    """The reader's end has ended."""


# In both directions


class Share(msgspec.Struct, tag="share", frozen=True, forbid_unknown_fields=True):
    """An entry of the rendezvous of the communicator."""

    key: Name
    value: Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_BYTES)]


class Alive(msgspec.Struct, tag="alive", frozen=True, forbid_unknown_fields=True):
    """The reader sends it at intervals, and the owner answers with the same."""


# From the owner to the reader


class Broken(msgspec.Struct, tag="broken", frozen=True, forbid_unknown_fields=True):
    """The owner's end has ended, or there is none."""

    reason: str


ToOwner: TypeAlias = Join | Send | Leave | Share | Alive
ToReader: TypeAlias = Share | Alive | Broken
