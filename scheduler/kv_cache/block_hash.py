"""Hashes of full blocks: a chain of stateless hashes over packed tokens.

block_hash = H(parent's hash ‖ the block's tokens as little-endian int32 ‖ framed extra keys). Two
blocks have the same hash only if their whole prefixes and extra keys are equal. The first parent is
a secret seed of the deployment, so its processes agree on hashes and outsiders cannot guess them.

Hash blocks may be smaller than the blocks of a group: a block of several hash blocks has the hash
of the last of them, which covers all of its tokens and everything before them.
"""

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

from xxhash import xxh3_128_digest

from longshore.protocol.arrays import Int32Array
from longshore.protocol.errors import ConfigError
from longshore.protocol.requests import MultimodalFeature, PromptEmbeds

_GROUP_BYTES: Final = 4
_END: Final = b"end of a request"


def block_key(block_hash: bytes, group: int) -> bytes:
    """A block's key outside the prefix cache: its hash, then its group, 4 bytes big-endian."""
    return block_hash + group.to_bytes(_GROUP_BYTES, "big")


class ExtraKeys:
    """What block hashes cover in addition to tokens.

    Salt and adapter are hashed with the first block, and so affect the whole chain. A multimodal
    item is hashed with each block that it overlaps, by its hash and start position. Embeddings in
    place of prompt tokens are hashed with their block, as a digest.

    num_tokens: blocks that begin at or after this many tokens have no extra keys.
    """

    def __init__(
        self,
        *,
        cache_salt: str | None = None,
        no_store: bool = False,
        lora_name: str | None = None,
        multimodal: Sequence[MultimodalFeature] = (),
        prompt_embeds: PromptEmbeds | None = None,
    ) -> None:
        self._first_block: list[bytes] = []
        if lora_name is not None:
            self._first_block += [b"lora", lora_name.encode()]
        if cache_salt is not None:
            self._first_block += [b"salt", cache_salt.encode()]
        if no_store:  # what others find, a connector must be able to have
            self._first_block.append(b"no store")
        self._items = sorted(multimodal, key=lambda item: item.offset)
        self._item_ends = [item.offset + item.num_tokens for item in self._items]
        self._embeds = prompt_embeds
        self._num_embeds = 0
        if prompt_embeds is not None:
            self._num_embeds = len(prompt_embeds.data) // prompt_embeds.row_size_bytes
        self.num_tokens = max([1, self._num_embeds, *self._item_ends])

    def frame(self, first: int, last: int) -> bytes:
        """Bytes to hash after the tokens at positions [first, last); empty if there are none."""
        parts = list(self._first_block) if first == 0 else []
        for item in self._items[bisect_right(self._item_ends, first) :]:
            if item.offset >= last:
                break
            parts += [b"item", item.hash.encode(), item.offset.to_bytes(8, "big")]
        if self._embeds is not None and first < self._num_embeds:
            rows = self._embeds.row_bytes(first, min(last, self._num_embeds))
            parts += [b"embeds", hashlib.sha256(rows).digest()]
        return _frame(parts)


class BlockHasher:
    """Hashes blocks of `block_size` tokens. Raises ConfigError for an unknown algorithm."""

    def __init__(self, block_size: int, seed: bytes, algorithm: str = "sha256") -> None:
        self.block_size = block_size
        self._packed_block = struct.Struct(f"{4 * block_size}s")
        self._algorithm = _algorithm(algorithm)
        (self.none_hash,) = self._algorithm.chain(b"", [(b"longshore block names\0" + seed,)])

    def extend(
        self, hashes: list[bytes], token_ids: Int32Array, extra_keys: ExtraKeys | None = None
    ) -> None:
        """Append the hashes of the full blocks of `token_ids` (contiguous) that `hashes` lacks."""
        size, first = self.block_size, len(hashes)
        num_full = len(token_ids) // size
        if first >= num_full:
            return
        packed = token_ids[first * size : num_full * size].tobytes()
        blocks: Iterable[tuple[bytes]] = self._packed_block.iter_unpack(packed)
        if extra_keys is not None and first * size < extra_keys.num_tokens:
            blocks = _with_keys(blocks, extra_keys, first * size, size)
        hashes += self._algorithm.chain(hashes[-1] if hashes else self.none_hash, blocks)

    def name_end(
        self, parent: bytes, first: int, token_ids: Int32Array, extra_keys: ExtraKeys | None
    ) -> bytes:
        """A name for these tokens, of which the first `first` fill blocks, the last one with the
        hash `parent`; no block has it."""
        last = len(token_ids)
        frame = b"" if extra_keys is None else extra_keys.frame(first, last)
        length = (last - first).to_bytes(8, "big")
        named = b"".join((_END, length, token_ids[first:].tobytes(), frame))
        return self._algorithm.chain(parent, [(named,)])[0]

    def extend_each(self, chains: Sequence[list[bytes]], token_ids: Int32Array) -> list[bytes]:
        """Append to each of `chains`, all different, the hash of its next block, whose tokens are
        `token_ids[i]` (len(chains), block_size), without extra keys; returns the new hashes."""
        blocks = self._packed_block.iter_unpack(token_ids.tobytes())
        parents = [hashes[-1] if hashes else self.none_hash for hashes in chains]
        added = self._algorithm.each(parents, blocks)
        for hashes, block_hash in zip(chains, added, strict=True):
            hashes.append(block_hash)
        return added


def _with_keys(
    blocks: Iterable[tuple[bytes]], extra_keys: ExtraKeys, start: int, size: int
) -> Iterator[tuple[bytes]]:
    for (packed,) in blocks:
        yield (packed + extra_keys.frame(start, start + size),)
        start += size


def _frame(parts: Iterable[bytes]) -> bytes:
    """Parts with their lengths, so that different lists of parts give different bytes."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


_Blocks = Iterable[tuple[Any, ...]]  # as struct.iter_unpack yields them: tuples of one bytes object


class _Algorithm(Protocol):
    """Hashes many blocks per call, because a call per block costs as much as a hash."""

    def chain(self, parent: bytes, blocks: _Blocks) -> list[bytes]:
        """Hashes of consecutive blocks, the first of which follows `parent`."""

    def each(self, parents: Iterable[bytes], blocks: _Blocks) -> list[bytes]:
        """Hashes of blocks that follow one parent each."""


class _Sha256:
    def chain(self, parent: bytes, blocks: _Blocks) -> list[bytes]:
        sha256 = hashlib.sha256
        return [parent := sha256(parent + data).digest() for (data,) in blocks]

    def each(self, parents: Iterable[bytes], blocks: _Blocks) -> list[bytes]:
        sha256 = hashlib.sha256
        pairs = zip(parents, blocks, strict=True)
        return [sha256(parent + data).digest() for parent, (data,) in pairs]


class _Xxh3:
    def chain(self, parent: bytes, blocks: _Blocks) -> list[bytes]:
        digest = xxh3_128_digest
        return [parent := digest(parent + data) for (data,) in blocks]

    def each(self, parents: Iterable[bytes], blocks: _Blocks) -> list[bytes]:
        digest = xxh3_128_digest
        return [digest(parent + data) for parent, (data,) in zip(parents, blocks, strict=True)]


_ALGORITHMS: Final[dict[str, Callable[[], _Algorithm]]] = {"sha256": _Sha256, "xxh3-128": _Xxh3}


def _algorithm(name: str) -> _Algorithm:
    if name not in _ALGORITHMS:
        raise ConfigError(f"hash_algorithm={name!r} is unknown; use 'sha256' or 'xxh3-128'")
    return _ALGORITHMS[name]()
