"""I/O through NIXL's POSIX backend: io_uring if the kernel permits it, else asynchronous I/O."""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from longshore.connectors.base.nixl_library import load_nixl
from longshore.connectors.offloading.disk.io import (
    Bytes,
    Direction,
    Transfer,
    address_of,
    run_all,
)
from longshore.connectors.offloading.disk.segments import PAGE_BYTES, aligned_memory

_QUEUES: Final[tuple[tuple[str, dict[str, str]], ...]] = (
    ("io_uring", {"use_uring": "true"}),
    ("Linux AIO", {"use_aio": "true"}),
    ("POSIX AIO", {}),
)
_ALL_MEMORY: Final = (4096, (1 << 47) - 8192, 0, "")
"""Address and length of all that a process can map."""

_ALL_OF_A_FILE: Final = 1 << 46
_POLL_S: Final = 20e-6
_IN_PROGRESS: Final = "PROC"
_DONE: Final = "DONE"
_FAILED: Final = "ERR"


class NixlUnusable(Exception):
    """NIXL is not installed, or its POSIX backend cannot be created."""


class NixlIo:
    """The POSIX backend neither pins memory nor opens files, so the whole address space is
    registered once, and each file descriptor at its first use."""

    def __init__(self) -> None:
        try:
            api, self._errors, _ = load_nixl()
        except ImportError as error:
            raise NixlUnusable(str(error)) from error
        self._lock = threading.Lock()  # an agent is not thread-safe
        self._agent_name = f"longshore-disk-{os.getpid()}-{id(self)}"
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent: Any = api.nixl_agent(self._agent_name, config)
        self.name = f"NIXL with {self._create_queue()}"
        self._agent.register_memory([_ALL_MEMORY], "DRAM")
        self._known_fds: set[int] = set()
        self._test()

    def submit(self, direction: Direction, transfers: Sequence[Transfer]) -> "_NixlPending":
        memory: list[tuple[int, int, int]] = []
        files: list[tuple[int, int, int]] = []
        for fd, offset, pieces, addresses in transfers:
            for address, num_bytes in _joined(pieces, addresses):
                memory.append((address, num_bytes, 0))
                files.append((offset, num_bytes, fd))
                offset += num_bytes
        handle, state = None, _FAILED
        with self._lock:
            try:
                self._register({transfer.fd for transfer in transfers})
                handle = self._agent.initialize_xfer(
                    direction.value,
                    self._agent.get_xfer_descs(memory, "DRAM"),
                    self._agent.get_xfer_descs(files, "FILE"),
                    self._agent_name,
                )
                state = self._agent.transfer(handle)
            except self._errors:
                pass  # the transfers are repeated one by one
        return _NixlPending(self, direction, transfers, handle, state)

    def close(self) -> None:
        self._agent = None

    def _create_queue(self) -> str:
        reasons = []
        for name, options in _QUEUES:
            try:
                self._agent.create_backend("POSIX", options)
            except self._errors as error:
                reasons.append(f"{name}: {error}")
            else:
                return name
        raise NixlUnusable("; ".join(reasons))

    def _test(self) -> None:
        """Write a page to a file in memory. Raises NixlUnusable."""
        page = aligned_memory(PAGE_BYTES)
        with open(os.memfd_create("longshore-disk"), "wb") as file:
            transfer = Transfer(file.fileno(), 0, [page], [address_of(page)])
            pending = self.submit(Direction.WRITE, [transfer])
            if self._wait(pending.handle, pending.state) != _DONE:
                raise NixlUnusable("its POSIX backend cannot write to a file")

    def _register(self, fds: set[int]) -> None:
        for fd in fds - self._known_fds:  # still valid if the number is later another file's
            self._agent.register_memory([(0, _ALL_OF_A_FILE, fd, "")], "FILE")
            self._known_fds.add(fd)

    def _wait(self, handle: Any, state: str) -> str:
        while state == _IN_PROGRESS:
            with self._lock:
                try:
                    state = self._agent.check_xfer_state(handle)
                except self._errors:
                    state = _FAILED
            if state == _IN_PROGRESS:
                time.sleep(_POLL_S)
        if handle is not None:
            with self._lock:
                self._agent.release_xfer_handle(handle)
        return state


@dataclass(frozen=True)
class _NixlPending:
    io: NixlIo
    direction: Direction
    transfers: Sequence[Transfer]
    handle: Any
    state: str

    def wait(self) -> list[OSError | None]:
        if self.io._wait(self.handle, self.state) == _DONE:
            return [None] * len(self.transfers)
        # NIXL reports one failure for all transfers, when the last of them has ended (since 1.5):
        # repeat them one by one to find the ones that fail, and why.
        return run_all(self.direction, self.transfers)


def _joined(pieces: Sequence[Bytes], addresses: Sequence[int]) -> list[tuple[int, int]]:
    """Address and length of the pieces; pieces that are neighbours in memory are one."""
    joined: list[tuple[int, int]] = []
    for piece, address in zip(pieces, addresses, strict=True):
        if joined and sum(joined[-1]) == address:
            joined[-1] = joined[-1][0], joined[-1][1] + len(piece)
        else:
            joined.append((address, len(piece)))
    return joined
