"""Stores with small blocks, and blocks whose content follows from their key."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longshore.connectors.base.checksum import block_checksum
from longshore.connectors.offloading.disk.identity import StoreIdentity
from longshore.connectors.offloading.disk.index import HEADER_BYTES, RECORD_BYTES
from longshore.connectors.offloading.disk.io import IoBackend
from longshore.connectors.offloading.disk.results import BlockRead, BlockWrite, Outcome
from longshore.connectors.offloading.disk.segments import whole_pages
from longshore.connectors.offloading.disk.store import DiskStore

IDENTITY = StoreIdentity(
    model_name="tiny-llama",
    model_fingerprint="f1",
    kv_layout="heads, layers, 2, 16, 64",
    dtype="bfloat16",
    hash_seed="5eed",
    block_size=16,
    groups="one full group",
    parallel_layout="all heads and layers",
    num_ranks=1,
)
SLOT_BYTES = 8192


def capacity(num_slots: int, slot_bytes: int = SLOT_BYTES) -> int:
    """The bytes that hold this number of slots."""
    return HEADER_BYTES + num_slots * (whole_pages(slot_bytes) + RECORD_BYTES)


def open_store(
    path: Path,
    *,
    num_slots: int = 32,
    slot_bytes: int = SLOT_BYTES,
    identity: StoreIdentity = IDENTITY,
    io: str | IoBackend = "threads",
    rank: int = 0,
) -> DiskStore:
    return DiskStore.open(
        path,
        identity,
        slot_bytes=slot_bytes,
        capacity_bytes=capacity(num_slots, slot_bytes),
        rank=rank,
        io=io,
    )


def key(number: int) -> bytes:
    return hashlib.sha256(f"block {number}".encode()).digest()


def content(of: bytes, size: int = SLOT_BYTES) -> NDArray[np.uint8]:
    """Bytes that differ between keys."""
    return np.frombuffer(np.random.default_rng(list(of)).bytes(size), np.uint8)


def write(
    store: DiskStore, slots: Mapping[bytes, int], contents: Mapping[bytes, Any] | None = None
) -> list[Outcome]:
    """Write blocks; `contents` replaces the content that follows from the key."""
    batch = []
    for block_key, slot in slots.items():
        data = (contents or {}).get(block_key, content(block_key))
        checksum = block_checksum(data, store.identity_digest, block_key)
        batch.append(BlockWrite(block_key, slot, data, checksum))
    return store.write(batch)


def read(
    store: DiskStore, slots: Iterable[tuple[bytes, int]], size: int = SLOT_BYTES
) -> dict[bytes, bytes | Outcome]:
    """The content of each block, or why there is none."""
    batch = [BlockRead(k, slot, np.empty(size, np.uint8)) for k, slot in slots]
    outcomes = store.read(batch)
    return {
        block.key: bytes(block.buffer) if outcome is Outcome.OK else outcome
        for block, outcome in zip(batch, outcomes, strict=True)
    }


def read_all(store: DiskStore) -> dict[bytes, bytes | Outcome]:
    return read(store, store.entries())


def expected(keys: Iterable[bytes]) -> dict[bytes, bytes]:
    return {k: content(k).tobytes() for k in keys}


def rank_directory(path: Path, identity: StoreIdentity = IDENTITY, rank: int = 0) -> Path:
    return path / identity.digest / f"rank-{rank}"


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))
