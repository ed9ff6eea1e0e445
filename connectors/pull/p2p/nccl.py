"""Links between GPUs: a communicator of NCCL for each, through CuPy.

A communicator that has failed, or that is not needed any more, is aborted and never destroyed in
the usual way, because that would wait for a peer which may be gone.
"""

import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

from longshore.connectors.offloading.copies import Copier, Int64s
from longshore.connectors.pull.p2p.communicator import CommunicatorError, Side, WaitUntil
from longshore.connectors.pull.p2p.messages import LibraryName
from longshore.connectors.pull.p2p.rendezvous import Rendezvous
from longshore.protocol.errors import ConfigError, shortened
from longshore.protocol.install_command import install_command

UNIQUE_ID: Final = "unique id"
"""Key of the rendezvous: NCCL's unique id of the communicator, which the reader makes."""

NUM_ID_BYTES: Final = 128
POLL_SHARE: Final = 0.1
MIN_POLL_S: Final = 20e-6
MAX_POLL_S: Final = 1e-3
"""A transfer is polled again after this share of its time so far, within these limits."""

ABORTED_S: Final = 2.0
"""How long the kernels of a communicator may take to end after it was aborted."""


class NcclLibrary:
    """copier: between staging memory and KV blocks of the device."""

    name: LibraryName = "nccl"

    def __init__(self, index: int, make_copier: Callable[[], Copier], device: torch.device) -> None:
        """index: of the GPU. make_copier: makes one that threads use one after the other. device:
        of staging memory; in tests a CPU. Raises ConfigError without CuPy or NCCL."""
        self._cuda, self._nccl = load_cupy()
        self._index, self._device = index, device
        self.copier: Copier = _ExclusiveCopier(make_copier())

    def allocate(self, num_bytes: int) -> Tensor:
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        if self._device.type == "cuda":  # work that is queued may still use this memory
            torch.cuda.current_stream(self._device).synchronize()
        return buffer

    def connect(self, side: Side, rendezvous: Rendezvous, timeout_s: float) -> "NcclCommunicator":
        """NCCL has no timeout of its own here. A thread that waits forever for a peer which died at
        this moment has no blocks and no staging memory."""
        self._cuda.Device(self._index).use()  # of this thread
        try:
            if side is Side.READER:
                unique_id = self._nccl.get_unique_id()
                rendezvous.set(UNIQUE_ID, bytes(each % 256 for each in unique_id))
            else:
                unique_id = _signed(rendezvous.get(UNIQUE_ID))
            communicator = self._nccl.NcclCommunicator(len(Side), unique_id, int(side))
        except RuntimeError as error:  # NcclError is one
            raise CommunicatorError(f"NCCL cannot connect: {shortened(str(error))}") from error
        stream = self._cuda.Stream(non_blocking=True)  # of the lowest priority
        return NcclCommunicator(self._cuda, self._nccl, communicator, stream, side)


def load_cupy() -> tuple[Any, Any]:
    """CuPy's modules for CUDA and NCCL, which a build of CuPy may lack. Raises ConfigError."""
    try:
        cuda: Any = import_module("cupy").cuda
    except ImportError as error:
        raise ConfigError(
            f"--kv-connector p2p_nccl needs CuPy, which cannot be imported ({error}). Install it: "
            f"{install_command('cuda')}"
        ) from error
    try:
        nccl: Any = getattr(cuda, "nccl", None) or import_module("cupy.cuda.nccl")
        if not nccl.available:
            raise ImportError("this build has no NCCL")
    except ImportError as error:
        raise ConfigError(
            f"--kv-connector p2p_nccl needs NCCL, which CuPy cannot load ({error}). Install it for "
            "the CUDA version of CuPy: pip install nvidia-nccl-cu13"
        ) from error
    return cuda, nccl


def _signed(unique_id: bytes) -> tuple[int, ...]:
    """As CuPy has it, which makes C's char a number."""
    if len(unique_id) != NUM_ID_BYTES:
        raise CommunicatorError(f"the reader sent a unique id of {len(unique_id)} bytes")
    return tuple(each - 256 if each > 127 else each for each in unique_id)


class NcclCommunicator:
    """cuda, nccl: modules of CuPy. communicator: CuPy's."""

    def __init__(self, cuda: Any, nccl: Any, communicator: Any, stream: Any, side: Side) -> None:
        self._cuda, self._nccl, self._communicator = cuda, nccl, communicator
        self._stream, self._peer = stream, int(side.other)
        self._aborting = threading.Lock()
        self._is_aborted = False

    def send(self, data: Tensor, number: int) -> WaitUntil:
        return self._begin(self._communicator.send, data)

    def receive(self, data: Tensor, number: int) -> WaitUntil:
        return self._begin(self._communicator.recv, data)

    def _begin(self, call: Any, data: Tensor) -> WaitUntil:
        """Each side calls alone, in the same order, and one only sends and the other only receives,
        so no group of calls is needed. The first call blocks until the peer makes its own."""
        try:
            call(data.data_ptr(), data.numel(), self._nccl.NCCL_UINT8, self._peer, self._stream.ptr)
            event = self._cuda.Event(disable_timing=True)
            event.record(self._stream)
        except RuntimeError as error:
            raise CommunicatorError(f"NCCL has failed: {shortened(str(error))}") from error

        def wait_until(deadline_s: float) -> None:
            began_s = time.monotonic()
            while not event.done:
                self._check()
                now = time.monotonic()
                if now >= deadline_s:
                    raise CommunicatorError("a transfer of NCCL is late")
                time.sleep(min(max((now - began_s) * POLL_SHARE, MIN_POLL_S), MAX_POLL_S))
            self._check()  # an aborted transfer is done, too

        return wait_until

    def _check(self) -> None:
        """Raise CommunicatorError for what NCCL's own threads have found, such as a closed
        connection; the transfer itself would wait forever."""
        with self._aborting:
            if self._is_aborted:
                raise CommunicatorError("NCCL was aborted")
            try:
                self._communicator.check_async_error()
            except RuntimeError as error:
                raise CommunicatorError(f"NCCL has failed: {shortened(str(error))}") from error

    def abort(self) -> None:
        with self._aborting:
            if self._is_aborted:
                return
            self._is_aborted = True
        self._communicator.abort()

    def close(self) -> bool:
        self.abort()
        deadline_s = time.monotonic() + ABORTED_S
        while not self._stream.done:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(MAX_POLL_S)
        return True


class _ExclusiveCopier:
    """A copier for several threads, one after the other."""

    def __init__(self, copier: Copier) -> None:
        self.name = copier.name
        self._copier = copier
        self._lock = threading.Lock()

    def copy(self, targets: Int64s, sources: Int64s, sizes: Int64s) -> None:
        with self._lock:
            self._copier.copy(targets, sources, sizes)

    def close(self) -> None:
        self._copier.close()
