"""Looks at stores on disk without opening them for writing: lists, checks and removes them."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

from longshore.connectors.base.checksum import block_checksum
from longshore.connectors.offloading.disk.errors import DiskStoreError, StoreInUse
from longshore.connectors.offloading.disk.identity import (
    IDENTITY_FILE,
    StoreIdentity,
    rank_digest,
    read_identity,
)
from longshore.connectors.offloading.disk.index import (
    HEADER_BYTES,
    INDEX_FILE,
    RECORD_BYTES,
    Entry,
    IndexDamaged,
    block_bytes,
    entry_in,
    intact_and_damaged,
    read_image,
)
from longshore.connectors.offloading.disk.lock import StoreLock, is_locked
from longshore.connectors.offloading.disk.segments import SegmentFiles
from longshore.protocol.private_files import Folder

_IDENTITY_DIRECTORY: Final = re.compile(r"[0-9a-f]{32}")
_RANK_DIRECTORY: Final = re.compile(r"rank-(?P<rank>\d+)")


@dataclass(frozen=True)
class RankReport:
    """One rank's share. index_problem: why its index cannot be read; the store will be emptied when
    it is opened. size_bytes: bytes on disk; entry_bytes: without unused slots and padding."""

    rank: int
    directory: Path
    num_entries: int
    num_damaged_records: int
    entry_bytes: int
    size_bytes: int
    slot_bytes: int
    last_write_s: float
    in_use: bool
    index_problem: str = ""


@dataclass(frozen=True)
class StoreReport:
    """The stores of all ranks of one identity, which is None if its file is damaged."""

    directory: Path
    identity: StoreIdentity | None
    ranks: Sequence[RankReport]

    @property
    def name(self) -> str:
        """What an operator calls this store."""
        if self.identity is None:
            return f"{self.directory.name[:12]} ({IDENTITY_FILE} is damaged)"
        return self.identity.model_name

    @property
    def size_bytes(self) -> int:
        return sum(rank.size_bytes for rank in self.ranks)

    @property
    def last_write_s(self) -> float:
        return max((rank.last_write_s for rank in self.ranks), default=0.0)

    @property
    def in_use(self) -> bool:
        return any(rank.in_use for rank in self.ranks)


@dataclass(frozen=True)
class BlockCheck:
    """The result for one entry. problem: empty if its bytes match."""

    entry: Entry
    path: Path
    problem: str


def identity_directories(path: Path) -> list[Path]:
    """The directories of all identities below `path`. Raises DiskStoreError."""
    try:
        return sorted(
            entry
            for entry in path.iterdir()
            if _IDENTITY_DIRECTORY.fullmatch(entry.name)
            and entry.is_dir()
            and not entry.is_symlink()
        )
    except OSError as error:
        raise DiskStoreError(
            f"the disk tier's path cannot be read: {error}. Give the folder that is disk_path of "
            "the offloading connector."
        ) from error


def stores(path: Path) -> list[StoreReport]:
    """All stores below `path`, without those that are deleted meanwhile. Raises DiskStoreError."""
    found = []
    for directory in identity_directories(path):
        try:
            found.append(StoreReport(directory, read_identity(directory), _ranks(directory)))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise DiskStoreError(f"{directory} cannot be read: {error}") from error
    return found


def size_on_disk(directory: Path) -> int:
    """Bytes that all files below a directory take up. Files that vanish meanwhile do not count."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(parent) / name).lstat().st_blocks * 512
    return total


def check_blocks(rank: RankReport) -> Iterator[BlockCheck]:
    """Read all blocks of one rank and compare their checksums, segment by segment. The store may be
    in use: a block that is replaced meanwhile is skipped. Raises DiskStoreError."""
    digest = rank_digest(rank.directory.parent.name, rank.rank)
    index_path = rank.directory / INDEX_FILE
    try:
        with Folder.open(rank.directory) as directory, _open(directory, INDEX_FILE) as index:
            geometry, image = read_image(index.fileno())
            segments = SegmentFiles(directory, geometry, len(image), direct=False)
            intact, _ = intact_and_damaged(image)
            for slot in sorted(intact.tolist()):
                entry = entry_in(image, slot)
                assert entry is not None
                path = segments.path(segments.segment_of(slot))
                problem = _problem(directory, path.name, segments.offset_of(slot), entry, digest)
                if problem and _has_changed(index.fileno(), image, slot):
                    continue
                yield BlockCheck(entry, path, problem)
    except (OSError, IndexDamaged) as error:
        raise DiskStoreError(f"{index_path} cannot be read: {error}") from error


def remove(store: StoreReport) -> None:
    """Delete a store. Raises StoreInUse, and DiskStoreError if files cannot be deleted."""
    with contextlib.ExitStack() as locks:  # no engine may begin to use it meanwhile
        try:
            for rank in store.ranks:
                directory = locks.enter_context(Folder.open(rank.directory))
                locks.callback(StoreLock(directory).close)
            shutil.rmtree(store.directory)
        except StoreInUse as error:
            raise StoreInUse(f"{store.name}: {error}") from None
        except OSError as error:
            raise DiskStoreError(f"{store.directory} cannot be deleted: {error}") from error


def _ranks(directory: Path) -> list[RankReport]:
    found = [
        (int(name["rank"]), entry)
        for entry in directory.iterdir()
        if (name := _RANK_DIRECTORY.fullmatch(entry.name))
    ]
    return [_rank(rank, entry) for rank, entry in sorted(found)]


def _rank(rank: int, directory: Path) -> RankReport:
    slot_bytes = num_entries = num_damaged = entry_bytes = 0
    problem, in_use = "", False
    try:
        with Folder.open(directory) as folder:
            in_use = is_locked(folder)
            with _open(folder, INDEX_FILE) as index:
                geometry, image = read_image(index.fileno())
        intact, damaged = intact_and_damaged(image)
        slot_bytes, entry_bytes = geometry.slot_bytes, block_bytes(image, intact)
        num_entries, num_damaged = len(intact), len(damaged)
    except (OSError, IndexDamaged) as error:
        problem = str(error)
    return RankReport(
        rank=rank,
        directory=directory,
        num_entries=num_entries,
        num_damaged_records=num_damaged,
        entry_bytes=entry_bytes,
        size_bytes=size_on_disk(directory),
        slot_bytes=slot_bytes,
        last_write_s=_last_write_s(directory),
        in_use=in_use,
        index_problem=problem,
    )


def _last_write_s(directory: Path) -> float:
    times = [0.0]
    for segment in directory.glob("segment-*.kv"):
        with contextlib.suppress(FileNotFoundError):
            times.append(segment.stat().st_mtime)
    return max(times)


def _open(directory: Folder, name: str) -> FileIO:
    return FileIO(directory.open_file(name, os.O_RDONLY))


def _problem(directory: Folder, name: str, offset: int, entry: Entry, digest: bytes) -> str:
    try:
        with _open(directory, name) as segment:
            segment.seek(offset)
            content = segment.read(entry.size_bytes)
    except OSError as error:
        return str(error)
    if len(content) < entry.size_bytes:
        return "the file ends before the block"
    if block_checksum(content, digest, entry.key) != entry.checksum:
        return "the bytes do not match the checksum"
    return ""


def _has_changed(index_fd: int, image: bytearray, slot: int) -> bool:
    """Whether the store replaced the entry since `image` was read."""
    start = slot * RECORD_BYTES
    now = os.pread(index_fd, RECORD_BYTES, HEADER_BYTES + start)
    return now != bytes(image[start : start + RECORD_BYTES])
