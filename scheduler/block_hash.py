"""Names of full blocks: a chain of stateless hashes over packed tokens.

name = H(parent's name ‖ the block's tokens as little-endian int32 ‖ framed extra keys). Two blocks
have the same name only if their whole prefixes and extra keys are equal. The first parent is a
seed that the deployment keeps to itself, so names can be shared inside it and not guessed outside.
"""

import hashlib
from collections.abc import Callable, Iterable
from typing import Final

from longshore.protocol.arrays import Int32Array
from longshore.protocol.errors import ConfigError

_GROUP_BYTES: Final = 4


def block_key(name: bytes, group: int) -> bytes:
    """What the prefix map looks up: the name, then the KV cache group, 4 bytes big-endian."""
    return name + group.to_bytes(_GROUP_BYTES, "big")


def split_block_key(key: bytes) -> tuple[bytes, int]:
    """(name, group) of a key made by `block_key`."""
    return key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "big")


class BlockHasher:
    """Names blocks of `block_size` tokens. Raises ConfigError for an algorithm it does not have."""

    def __init__(self, block_size: int, seed: bytes, algorithm: str = "sha256") -> None:
        self._block_size = block_size
        self._hash = _hash_function(algorithm)
        self.none_hash = self._hash(b"longshore block names\0" + seed)

    def extend(
        self, names: list[bytes], token_ids: Int32Array, *, cache_salt: str | None = None
    ) -> None:
        """Append the names of the full blocks of `token_ids` (contiguous) that `names` lacks.

        A salt enters the first block, and through the chain every other.
        """
        size = self._block_size
        first, num_full = len(names), len(token_ids) // size
        if first >= num_full:
            return
        hash_bytes, width = self._hash, 4 * size
        packed = token_ids[first * size : num_full * size].tobytes()
        name = names[-1] if names else self.none_hash
        begin = 0
        if first == 0 and cache_salt is not None:
            name = hash_bytes(name + packed[:width] + _frame([b"salt", cache_salt.encode()]))
            names.append(name)
            begin = width
        for start in range(begin, len(packed), width):
            name = hash_bytes(name + packed[start : start + width])
            names.append(name)


def _frame(parts: Iterable[bytes]) -> bytes:
    """Parts with their lengths, so that no two lists of parts give the same bytes."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _hash_function(algorithm: str) -> Callable[[bytes], bytes]:
    if algorithm == "sha256":
        return lambda data: hashlib.sha256(data).digest()
    if algorithm == "xxh3-128":
        try:
            import xxhash
        except ImportError:
            raise ConfigError(
                "hash_algorithm=xxh3-128 needs the package xxhash; install it, or use sha256"
            ) from None
        return lambda data: xxhash.xxh3_128_digest(data)
    raise ConfigError(f"hash_algorithm={algorithm!r} is unknown; use 'sha256' or 'xxh3-128'")
