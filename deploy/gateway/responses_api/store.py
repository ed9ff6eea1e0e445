"""The responses that a deployment stores: files in its private runtime directory, which all its
gateways share and which is deleted when it ends.

A file is written under another name and renamed, so that it is always complete. Its name has its
owner, so that no API key finds the responses of another. A response that is computed in the
background also has a mark, an empty file: who removes it decides how the response ends.
"""

import asyncio
import contextlib
import hashlib
import os
import re
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from longshore.deploy.gateway.api_keys import ApiKey
from longshore.deploy.gateway.responses_api.bodies import (
    FAILED,
    FailureBody,
    ResponseBody,
    StoredResponse,
)

MAX_RESPONSES: Final = 4096
MAX_RECORD_BYTES: Final = 16 << 20
_TEMPORARY_S: Final = 60.0
_ID: Final = re.compile(r"resp_[0-9a-f]{32}")
_decode = msgspec.json.Decoder(StoredResponse).decode

T = TypeVar("T")


def new_response_id() -> str:
    """An id that cannot be guessed."""
    return f"resp_{uuid.uuid4().hex}"


def owner_of(key: ApiKey) -> str:
    """Whose responses a key's are, as a part of a file's name."""
    return hashlib.sha256(key.digest.encode()).hexdigest()[:32]


class ResponseStore:
    """All methods may be called by any gateway of the deployment. Files are read and written on one
    thread. Raises OSError if the disk fails.

    directory:    of the deployment; made if it does not exist.
    number:       of this gateway.
    num_gateways: of the deployment.
    max_bytes:    limit of the files together; there are at most MAX_RESPONSES. Beyond a limit, the
                  oldest response of the owner that has most is deleted.
    ttl_s:        seconds after which a response is deleted.
    """

    def __init__(
        self,
        directory: Path,
        *,
        number: int = 0,
        num_gateways: int = 1,
        max_bytes: int = 256 << 20,
        ttl_s: float = 86_400.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory = directory
        self._marks = directory / "running"
        self._number = number
        self._num_gateways = num_gateways
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "stored responses")
        self._marks.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fail_abandoned()

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """None if the owner has no such response, or it has expired."""
        return await self._run(partial(self._get, owner, response_id))

    async def put(self, owner: str, record: StoredResponse) -> None:
        """Store, in place of a former state. Raises ValueError if it is too large."""
        await self._run(partial(self._put, owner, record))

    async def delete(self, owner: str, response_id: str) -> bool:
        """False if there was none. Ends its computation."""

        def remove() -> bool:
            path = self._path(owner, response_id)
            if path is None:
                return False
            self._unmark(owner, response_id)
            return _unlink(path)

        return await self._run(remove)

    async def begin(self, owner: str, record: StoredResponse) -> None:
        """Store a response that this gateway computes in the background."""

        def store() -> None:
            self._put(owner, record)
            self._mark(owner, record.response.id).touch(mode=0o600)

        await self._run(store)

    async def is_running(self, owner: str, response_id: str) -> bool:
        """Whether a response that this gateway computes is still wanted."""
        return await self._run(self._mark(owner, response_id).exists)

    async def end(self, owner: str, response_id: str) -> bool:
        """End a computation, of any gateway. True to one caller only, who stores the last state."""
        return await self._run(partial(self._unmark, owner, response_id))

    async def _run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def _path(self, owner: str, response_id: str) -> Path | None:
        if _ID.fullmatch(response_id) is None:
            return None
        return self._directory / f"{owner}-{response_id}.json"

    def _mark(self, owner: str, response_id: str, number: int | None = None) -> Path:
        return self._marks / f"{owner}-{response_id}-{self._number if number is None else number}"

    def _unmark(self, owner: str, response_id: str) -> bool:
        marks = (self._mark(owner, response_id, number) for number in range(self._num_gateways))
        return any(_unlink(mark) for mark in marks)

    def _get(self, owner: str, response_id: str) -> StoredResponse | None:
        path = self._path(owner, response_id)
        if path is None:
            return None
        try:
            with path.open("rb") as file:
                if self._clock() - os.fstat(file.fileno()).st_mtime > self._ttl_s:
                    return None
                return _decode(file.read(MAX_RECORD_BYTES + 1))
        except FileNotFoundError:
            return None

    def _put(self, owner: str, record: StoredResponse) -> None:
        path = self._path(owner, record.response.id)
        assert path is not None
        content = msgspec.json.encode(record)
        if len(content) > min(MAX_RECORD_BYTES, self._max_bytes):
            raise ValueError(
                f"the response has {len(content)} bytes with its conversation; at most "
                f"{min(MAX_RECORD_BYTES, self._max_bytes)} can be stored. Send store=false"
            )
        temporary = self._directory / f"{uuid.uuid4().hex}.tmp"
        try:
            with open(
                temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)
            ) as file:
                file.write(content)
            temporary.replace(path)
        except OSError:
            _unlink(temporary)
            raise
        self._make_room()

    def _make_room(self) -> None:
        """Delete what has expired or exceeds a limit."""
        now_s = self._clock()
        by_owner: dict[str, list[tuple[float, int, Path]]] = {}
        for entry in os.scandir(self._directory):
            if not entry.is_file():
                continue
            try:
                status = entry.stat()
            except FileNotFoundError:  # another gateway has deleted it
                continue
            path = Path(entry.path)
            limit_s = _TEMPORARY_S if path.suffix == ".tmp" else self._ttl_s
            if now_s - status.st_mtime > limit_s:
                _unlink(path)
            elif path.suffix == ".json":
                owner = path.name.partition("-")[0]
                by_owner.setdefault(owner, []).append((status.st_mtime, status.st_size, path))
        for files in by_owner.values():
            files.sort(reverse=True)
        num_files = sum(map(len, by_owner.values()))
        sizes = {owner: sum(size for _, size, _ in files) for owner, files in by_owner.items()}
        while num_files > MAX_RESPONSES or sum(sizes.values()) > self._max_bytes:
            has_most = (lambda o: len(by_owner[o])) if num_files > MAX_RESPONSES else sizes.get
            owner = max(by_owner, key=has_most)  # type: ignore[arg-type]
            _, size, path = by_owner[owner].pop()
            _unlink(path)
            num_files -= 1
            sizes[owner] -= size

    def _fail_abandoned(self) -> None:
        """A former process of this gateway has ended without completing these."""
        for mark in self._marks.glob(f"*-{self._number}"):
            owner, response_id, _ = mark.name.split("-")
            record = self._get(owner, response_id)
            if _unlink(mark) and record is not None:
                failure = FailureBody("server_error", "the gateway that computed it has ended")
                self._put(owner, with_response(record, status=FAILED, error=failure))


def with_response(record: StoredResponse, **changes: object) -> StoredResponse:
    """The record with a changed response."""
    response: ResponseBody = msgspec.structs.replace(record.response, **changes)
    return msgspec.structs.replace(record, response=response)


def _unlink(path: Path) -> bool:
    """Whether it was this call that removed the file."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        return True
    return False
