"""The value that a remote store has for one rank's share of a block: a header and the bytes.

The header states whose bytes they are, their length and their checksum, so that a value that is
damaged, cut, of another format or of another model is recognized.
"""

import struct
from typing import Final

from longshore.connectors.base.checksum import (
    IDENTITY_DIGEST_BYTES,
    BlockBuffer,
    block_checksum,
)

MAGIC: Final = b"LSKV"
VERSION: Final = 1
_HEADER: Final = struct.Struct(f"<4sI{IDENTITY_DIGEST_BYTES}sQQ")
HEADER_BYTES: Final = _HEADER.size


def encode_record(payload: BlockBuffer, checksum: int, identity_digest: bytes) -> bytes:
    """checksum: `block_checksum` of the payload, the identity digest and the key."""
    payload = memoryview(payload)
    header = _HEADER.pack(MAGIC, VERSION, identity_digest, payload.nbytes, checksum)
    return b"".join((header, payload))


def decode_record(
    record: memoryview, num_bytes: int, identity_digest: bytes, key: bytes
) -> memoryview | str:
    """The payload of `num_bytes` bytes, a view of `record`, or what is wrong with the record."""
    if len(record) < HEADER_BYTES:
        return f"it has only {len(record)} bytes"
    magic, version, identity, length, checksum = _HEADER.unpack_from(record)
    if magic != MAGIC:
        return "it is not a KV block"
    if version != VERSION:
        return f"it has format version {version}, not {VERSION}"
    if identity != identity_digest:
        return "it was stored by another model, layout or rank"
    payload = record[HEADER_BYTES:]
    if length != num_bytes or len(payload) != num_bytes:
        return f"it has {len(payload)} bytes, not {num_bytes}"
    if block_checksum(payload, identity_digest, key) != checksum:
        return "its checksum does not match"
    return payload
