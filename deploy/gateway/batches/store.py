"""The files and batches that clients have stored: files in the server's state directory, which all
gateways of a machine share and which survives restarts.

Each API key has folders of its own, named as `ApiKey.owner`. A record, in JSON, is written under
another name and renamed, so that it is always complete; a file is visible once it has its record.
All methods do I/O, so they are called on another thread.
"""

import contextlib
import fcntl
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import msgspec

from longshore.deploy.gateway.api.errors import ApiError
from longshore.deploy.gateway.batches.bodies import ENDED, BatchRecord, FileObject

MAX_FILES: Final = 10_000
"""Of an API key. Their records are read to list them."""
MAX_BATCHES: Final = 1000
"""Of an API key, also those that have ended. All records are read to find work."""

_ID: Final = re.compile(r"(?:file|batch)[-_][0-9a-f]{32}")
_CANCEL: Final = ".cancel"
_LOCK: Final = ".lock"
_RECORD: Final = ".json"
_UNFINISHED_S: Final = 86_400.0
"""Age after which a file without a record is no upload that goes on."""

RecordT = TypeVar("RecordT", FileObject, BatchRecord)


def new_file_id() -> str:
    """An id that cannot be guessed."""
    return f"file-{uuid.uuid4().hex}"


class BatchStore:
    """directory: made if it does not exist. max_bytes: limit of the files of an API key together.
    ttl_s: seconds after which files and batches are deleted."""

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int,
        ttl_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._files = directory / "files"
        self._batches = directory / "batches"
        self.max_bytes = max_bytes
        self.ttl_s = ttl_s
        self.clock = clock

    def create(self, owner: str) -> tuple[str, BinaryIO]:
        """A new file, and its id. It is no file of the owner's until `publish`."""
        file_id = new_file_id()
        path = self.path(owner, file_id)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return file_id, open(path, "xb", opener=_private)

    def path(self, owner: str, file_id: str) -> Path:
        """Where the content of a file is."""
        return self._files / owner / file_id

    def publish(self, owner: str, file_id: str, *, filename: str, purpose: str) -> FileObject:
        """Make a complete file one of the owner's."""
        now_s = self.clock()
        record = FileObject(
            id=file_id,
            bytes=self.path(owner, file_id).stat().st_size,
            created_at=int(now_s),
            filename=filename,
            purpose=purpose,
            expires_at=int(now_s + self.ttl_s),
        )
        _write(self._files / owner / f"{file_id}{_RECORD}", record)
        return record

    def discard(self, owner: str, file_id: str) -> None:
        """Delete a file, whether it is published or not."""
        for path in (self._files / owner / f"{file_id}{_RECORD}", self.path(owner, file_id)):
            path.unlink(missing_ok=True)

    def file(self, owner: str, file_id: str) -> FileObject:
        """Raises ApiError (404) if the owner has no such file."""
        record = _read(self._files / owner, file_id, FileObject)
        if record is None or record.expires_at <= self.clock():
            raise ApiError(
                404,
                f"there is no file {file_id[:64]!r}; it may have expired, or belong to another API "
                "key",
                code="file_not_found",
            )
        return record

    def files(self, owner: str) -> list[FileObject]:
        """Newest first."""
        found = [each for each in _records(self._files / owner, FileObject) if each is not None]
        left = [each for each in found if each.expires_at > self.clock()]
        return sorted(left, key=lambda each: (each.created_at, each.id), reverse=True)

    def used_bytes(self, owner: str) -> int:
        """Of all files of the owner, also those that are written now."""
        return sum(self._sizes(owner))

    def check_room(self, owner: str) -> None:
        """Raise ApiError if the owner's files, also those that are written now, are too many or too
        large together."""
        sizes = list(self._sizes(owner))
        if sum(sizes) > self.max_bytes:
            raise ApiError(
                413,
                f"the files of this API key would have more than {self.max_bytes} bytes "
                "(--stored-files-mib); delete some",
                param="file",
                code="storage_limit_exceeded",
            )
        if len(sizes) > 2 * MAX_FILES:  # each has a record
            raise ApiError(
                429,
                f"this API key has {MAX_FILES} files, which is the limit; delete some",
                code="too_many_files",
            )

    def _sizes(self, owner: str) -> Iterator[int]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self._files / owner) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    yield entry.stat().st_size

    def put(self, owner: str, record: BatchRecord) -> None:
        """Store the state of a batch."""
        folder = self._batches / owner
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(folder / f"{record.batch.id}{_RECORD}", record)

    def batch(self, owner: str, batch_id: str) -> BatchRecord:
        """Raises ApiError (404) if the owner has no such batch."""
        record = _read(self._batches / owner, batch_id, BatchRecord)
        if record is None:
            raise ApiError(
                404,
                f"there is no batch {batch_id[:64]!r}; it may have expired, or belong to another "
                "API key",
                code="batch_not_found",
            )
        return record

    def batches(self, owner: str) -> list[BatchRecord]:
        """Newest first."""
        found = _records(self._batches / owner, BatchRecord)
        return sorted(found, key=lambda each: (each.batch.created_at, each.batch.id), reverse=True)

    def unfinished(self) -> list[tuple[str, BatchRecord]]:
        """The batches of all owners that have not ended, with their owners, oldest first."""
        found = [
            (folder.name, record)
            for folder in _folders(self._batches)
            for record in _records(folder, BatchRecord)
            if record.batch.status not in ENDED
        ]
        return sorted(found, key=lambda each: each[1].batch.created_at)

    def cancel(self, owner: str, batch_id: str) -> None:
        """Ask the gateway that runs the batch, or will run it, to end it."""
        (self._batches / owner / f"{batch_id}{_CANCEL}").touch(mode=0o600)

    def is_cancelled(self, owner: str, batch_id: str) -> bool:
        return (self._batches / owner / f"{batch_id}{_CANCEL}").exists()

    @contextlib.contextmanager
    def claim(self, owner: str, batch_id: str) -> Iterator[bool]:
        """Whether this process may run the batch meanwhile. A claim ends with its process."""
        descriptor = os.open(
            self._batches / owner / f"{batch_id}{_LOCK}", os.O_RDWR | os.O_CREAT, 0o600
        )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
        finally:
            os.close(descriptor)

    def delete_expired(self) -> None:
        """Delete what is older than `ttl_s`. Files of batches that have not ended stay."""
        now_s = self.clock()
        kept = set()
        for owner, record in self.unfinished():
            ids = (record.batch.input_file_id, record.output_id, record.error_id)
            kept |= {(owner, file_id) for file_id in ids}
        for folder in _folders(self._files):
            for path in folder.iterdir():
                file_id = path.name.partition(".")[0]
                is_published = (
                    path.suffix == _RECORD or path.with_name(path.name + _RECORD).exists()
                )
                limit_s = self.ttl_s if is_published else _UNFINISHED_S
                if (folder.name, file_id) not in kept and _age_s(path, now_s) > limit_s:
                    path.unlink(missing_ok=True)
        for folder in _folders(self._batches):
            for record in _records(folder, BatchRecord):
                batch = record.batch
                if batch.status in ENDED and now_s - batch.created_at > self.ttl_s:
                    for suffix in (_RECORD, _CANCEL, _LOCK):
                        (folder / f"{batch.id}{suffix}").unlink(missing_ok=True)


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def _write(path: Path, record: FileObject | BatchRecord) -> None:
    temporary = path.with_name(f"{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb", opener=_private) as file:
            file.write(msgspec.json.encode(record))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(folder: Path, name: str, kind: type[RecordT]) -> RecordT | None:
    if _ID.fullmatch(name) is None:
        return None
    try:
        return msgspec.json.decode((folder / f"{name}{_RECORD}").read_bytes(), type=kind)
    except FileNotFoundError:
        return None


def _records(folder: Path, kind: type[RecordT]) -> list[RecordT]:
    records = (_read(folder, path.stem, kind) for path in folder.glob(f"*{_RECORD}"))
    return [record for record in records if record is not None]


def _folders(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_dir()] if directory.exists() else []


def _age_s(path: Path, now_s: float) -> float:
    try:
        return now_s - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
