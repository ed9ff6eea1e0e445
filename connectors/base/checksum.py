"""The checksum of a stored KV block, the same in every tier.

It covers the bytes, their length, the identity of the store and the key, so a block that is found
under another key, in another slot or in another model's store does not match. The hash is XXH3
(64 bits), which protects against damage, not against an attacker who can write to the store.
"""

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_digest, xxh3_64_intdigest

IDENTITY_DIGEST_BYTES: Final = 16

BlockBuffer: TypeAlias = bytes | bytearray | memoryview | NDArray[np.uint8]
"""Contiguous bytes."""


def block_checksum(buffer: BlockBuffer, identity_digest: bytes, key: bytes) -> int:
    """The checksum of a block, below 2**64. Releases the GIL while it reads `buffer`.

    buffer:          contiguous bytes of the block.
    identity_digest: `IDENTITY_DIGEST_BYTES` bytes, from `StoreIdentity.rank_digest`.
    """
    return xxh3_64_intdigest(identity_digest + key + xxh3_64_digest(buffer))
