"""Opens the files of one rank's store, and makes them consistent with each other."""

import logging
import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from longshore.connectors.offloading.disk.capacity import lower_capacity
from longshore.connectors.offloading.disk.errors import DiskStoreError
from longshore.connectors.offloading.disk.identity import (
    IDENTITY_FILE,
    StoreIdentity,
    read_identity,
    write_identity,
)
from longshore.connectors.offloading.disk.index import (
    HEADER_BYTES,
    INDEX_FILE,
    RECORD_BYTES,
    Geometry,
    IndexDamaged,
    SlotIndex,
)
from longshore.connectors.offloading.disk.lock import LOCK_FILE, StoreLock
from longshore.connectors.offloading.disk.segments import (
    SegmentFiles,
    supports_direct_io,
    whole_pages,
)
from longshore.protocol.errors import ConfigError
from longshore.protocol.private_files import Folder

logger = logging.getLogger(__name__)

_MIN_SEGMENT_BYTES: Final = 64 << 20
_MAX_SEGMENTS: Final = 256


@dataclass(frozen=True)
class StoreFiles:
    """The open files of a store."""

    directory: Folder
    lock: StoreLock
    index: SlotIndex
    segments: SegmentFiles

    def close(self) -> None:
        self.segments.close()
        self.index.close()
        self.lock.close()
        self.directory.close()


def open_files(
    path: Path, identity: StoreIdentity, rank: int, slot_bytes: int, capacity_bytes: int
) -> StoreFiles:
    """Open or create the store. Raises ConfigError, StoreInUse or DiskStoreError."""
    stride = whole_pages(slot_bytes)
    num_slots = _num_slots(stride, capacity_bytes)
    try:
        with (
            Folder.make(path) as top,
            top.make_folder(identity.digest) as store,
            ExitStack() as cleanup,
        ):
            directory = store.make_folder(f"rank-{rank}")
            cleanup.callback(directory.close)
            _check_space(top, identity.num_ranks * capacity_bytes)
            lock = StoreLock(directory)
            cleanup.callback(lock.close)
            _check_identity(store, identity)
            index = _open_index(directory, stride, num_slots, capacity_bytes)
            cleanup.callback(index.close)
            segments = SegmentFiles(
                directory, index.geometry, index.num_slots, direct=supports_direct_io(directory)
            )
            cleanup.callback(segments.close)
            _clear_lost(directory.path, index, segments)
            if index.num_slots > num_slots:
                lower_capacity(directory.path, index, segments, num_slots)
            cleanup.pop_all()
    except OSError as error:
        raise DiskStoreError(
            f"the disk tier cannot use {path}: {error}. Give it a writable path with enough space."
        ) from error
    return StoreFiles(directory, lock, index, segments)


def check_path(path: Path, slot_bytes: int, capacity_bytes: int, num_ranks: int) -> None:
    """Raise ConfigError if `open_files` could not use this path, without creating anything.
    slot_bytes: at least. capacity_bytes: of all ranks."""
    _num_slots(whole_pages(slot_bytes), capacity_bytes // num_ranks)
    existing = path
    while not os.path.lexists(existing):
        existing = existing.parent
    try:
        if existing == path:
            with Folder.make(path) as folder:
                _check_space(folder, capacity_bytes)
            return
        with Folder.open(existing.resolve()) as folder:
            _check_space(folder, capacity_bytes)
    except OSError as error:
        raise ConfigError(f"the disk tier cannot use {path}: {error}") from error
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"the disk tier cannot use {path}: {existing} is not a folder that this user may write "
            "to"
        )


def _num_slots(stride: int, capacity_bytes: int) -> int:
    num_slots = (capacity_bytes - HEADER_BYTES) // (stride + RECORD_BYTES)
    if num_slots < 1:
        raise ConfigError(
            f"the disk tier's capacity of {capacity_bytes} bytes per rank holds no block of "
            f"{stride} bytes; give it at least {stride + RECORD_BYTES + HEADER_BYTES}"
        )
    return num_slots


def _check_space(folder: Folder, capacity_bytes: int) -> None:
    """capacity_bytes: of all ranks. Raises ConfigError if the whole disk is smaller."""
    disk_bytes = shutil.disk_usage(folder.descriptor).total
    if capacity_bytes > disk_bytes:
        raise ConfigError(
            f"the disk tier's capacity of {capacity_bytes} bytes is more than the disk "
            f"of {folder.path} has, {disk_bytes} bytes. Lower disk_bytes, or use another disk_path."
        )


def _check_identity(directory: Folder, identity: StoreIdentity) -> None:
    """The directory is named by the digest of the identity, so a damaged file can be replaced."""
    if read_identity(directory.path) is None:
        if directory.file_size(IDENTITY_FILE) is not None:
            path = directory.path / IDENTITY_FILE
            logger.warning("disk store: %s was damaged; written again", path)
        write_identity(directory, identity)


def _open_index(directory: Folder, stride: int, num_slots: int, capacity_bytes: int) -> SlotIndex:
    path = directory.path / INDEX_FILE
    try:
        index, num_damaged = SlotIndex.load(directory, stride, num_slots)
    except FileNotFoundError:
        pass
    except IndexDamaged as error:
        logger.warning("disk store: %s is unusable: %s; the store is emptied", path, error)
    else:
        if num_damaged:
            logger.warning("disk store: %s has %d damaged records; removed", path, num_damaged)
        return index
    for name in directory.names():
        if name != LOCK_FILE:
            directory.unlink(name)
    segment_bytes = max(_MIN_SEGMENT_BYTES, capacity_bytes // _MAX_SEGMENTS)
    geometry = Geometry(stride, max(1, segment_bytes // stride))
    return SlotIndex.create(directory, geometry, num_slots)


def _clear_lost(directory: Path, index: SlotIndex, segments: SegmentFiles) -> None:
    """Remove the entries whose segment is missing or cut off."""
    slots = index.slots()
    per_segment = index.geometry.slots_per_segment
    ends = (slots % per_segment + 1) * index.geometry.slot_bytes
    lost = slots[ends > segments.present_bytes()[slots // per_segment]]
    if len(lost):
        logger.warning(
            "disk store: %d blocks are lost, because segment files in %s are missing or cut off",
            len(lost),
            directory,
        )
        index.clear(lost.tolist())
