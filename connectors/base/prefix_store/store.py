"""The client of a prefix store, in one rank."""

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

from longshore.connectors.base.prefix_store.messages import Prefix, Store
from longshore.protocol.arrays import Int64Array
from longshore.protocol.errors import LongshoreError

HASH_NUMBERS: Final = 8
"""32-bit numbers in a block hash."""


class StoreError(LongshoreError):
    """The store did not do what it was asked for; the blocks of this transfer are a miss."""


class PrefixStore(Protocol):
    """Lookups, loads and stores are each called on a thread of their own, and may block for a
    bounded time. Each lookup is followed by one `load` or `release`. All of them raise StoreError,
    and transfers TransferStuck.
    """

    def lookup(self, lookup_id: int, prefix: Prefix) -> int:
        """The number of leading blocks that are stored. They are kept for the lookup."""

    def load(self, lookup_id: int, first_block: int, block_ids: Sequence[int]) -> Sequence[int]:
        """Fill the blocks; what is written is there when this returns, and nothing is written any
        more. Returns those that were not filled. Ends the lookup."""

    def release(self, lookup_id: int) -> None:
        """End the lookup without a load."""

    def store(self, store: Store) -> None:
        """Store blocks; when this returns or raises, they are not read any more."""

    def close(self) -> None:
        """The last call; all others have returned."""


def stand_in_tokens(hashes: Sequence[bytes], block_size: int) -> Int64Array:
    """(len(hashes) * block_size,) numbers below 2**32 that stand for the tokens of the blocks.

    They are taken from the block hashes, which also cover what equal tokens can differ in: LoRA,
    images, the cache salt. A store that hashes tokens finds equal blocks by them, and no others.
    """
    found = np.zeros((len(hashes), block_size), np.int64)
    num_numbers = min(HASH_NUMBERS, block_size)
    for row, block_hash in zip(found, hashes, strict=True):
        row[:num_numbers] = np.frombuffer(block_hash, ">u4", num_numbers)
    return found.ravel()
