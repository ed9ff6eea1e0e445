"""The responses that a deployment stores: files in its private runtime directory, which all its
gateways share and which is deleted when it ends.

A file is written under another name and renamed, so that it is always complete. Its name has its
owner, so that no API key finds the responses of another. A response that is computed in the
background also has a mark, an empty file: who removes it decides how the response ends.
"""

import asyncio
import contextlib
import math
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

from longshore.deploy.gateway.responses_api.bodies import (
    FAILED,
    FailureBody,
    ResponseBody,
    StoredResponse,
)
from longshore.deploy.gateway.responses_api.stored_files import StoredFiles

MAX_RESPONSES: Final = 4096
MAX_RECORD_BYTES: Final = 16 << 20
LIST_INTERVAL_S: Final = 10.0
"""How often a gateway that stores responses lists the files of all gateways. In between, it knows
its own ones, so that others can exceed the limits by what they store in this time."""
_TEMPORARY_S: Final = 60.0
_ID: Final = re.compile(r"resp_[0-9a-f]{32}")
_decode = msgspec.json.Decoder(StoredResponse).decode

T = TypeVar("T")


def new_response_id() -> str:
    """An id that cannot be guessed."""
    return f"resp_{uuid.uuid4().hex}"


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
        self._files = StoredFiles()
        self._listed_s = -math.inf
        self._marks.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fail_abandoned()

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return the response, or None if the owner has no such response, or it has expired."""
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
            self._files.discard(owner, path.name)
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
        self._make_room(owner, path, len(content))

    def _make_room(self, owner: str, path: Path, size_bytes: int) -> None:
        """Delete what has expired or exceeds a limit, after a file was stored."""
        now_s = self._clock()
        if 0 <= now_s - self._listed_s < LIST_INTERVAL_S:
            self._files.add(owner, path.name, size_bytes)
        else:
            self._files, self._listed_s = self._list_files(now_s), now_s
        for name in self._files.beyond(max_files=MAX_RESPONSES, max_bytes=self._max_bytes):
            _unlink(self._directory / name)

    def _list_files(self, now_s: float) -> StoredFiles:
        """The files of all gateways, without those that have expired, which are deleted."""
        found = []
        for entry in os.scandir(self._directory):
            if not entry.is_file():
                continue
            try:
                status = entry.stat()
            except FileNotFoundError:  # another gateway has deleted it
                continue
            is_temporary = entry.name.endswith(".tmp")
            if now_s - status.st_mtime > (_TEMPORARY_S if is_temporary else self._ttl_s):
                _unlink(Path(entry.path))
            elif not is_temporary:
                found.append((status.st_mtime_ns, entry.name, status.st_size))
        files = StoredFiles()
        for _, name, size_bytes in sorted(found):
            files.add(name.partition("-")[0], name, size_bytes)
        return files

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
