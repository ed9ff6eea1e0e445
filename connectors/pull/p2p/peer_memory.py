"""Memory of another process on the same node, through CUDA IPC: a reader maps the owner's KV cache
and copies from it, with no staging memory and no work for the owner.

While it is mapped, the owner's memory is not free even after its process has ended. So a mapping
ends with its link, whose side channel notices the end of the owner.
"""

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from longshore.connectors.offloading.cuda_copies import check
from longshore.connectors.pull.layout import MAX_REGION_BYTES
from longshore.connectors.pull.transport import Memory

HANDLE_BYTES: Final = 64
DRIVER: Final = "libcuda.so.1"
_LAZY_PEER_ACCESS: Final = 1  # cudaIpcMemLazyEnablePeerAccess


class IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class ExportedMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the KV cache of a process is. node: of the process. handle: of the allocation that has
    it. offset: from there to the first block."""

    node: str
    handle: Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    offset: Annotated[int, msgspec.Meta(ge=0, lt=MAX_REGION_BYTES)]


def this_node() -> str:
    """An id of this machine, the same in all its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class PeerMemory:
    """runtime, driver: the CUDA runtime and the CUDA driver, ctypes libraries. on_device: makes the
    device of this rank current in the calling thread."""

    def __init__(
        self, runtime: Any, driver: Any, on_device: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._runtime, self._driver, self._on_device = runtime, driver, on_device

    def export(self, memory: Memory) -> ExportedMemory:
        """Raises RuntimeError for memory that cannot be exported, such as that of torch's
        expandable segments."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        status = self._driver.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(memory.address)
        )
        if status != 0:
            raise RuntimeError(f"the CUDA driver reported error {status}")
        handle = IpcHandle()
        with self._on_device():
            check(
                self._runtime,
                self._runtime.cudaIpcGetMemHandle(
                    ctypes.byref(handle), ctypes.c_void_p(base.value)
                ),
            )
        return ExportedMemory(this_node(), bytes(handle), memory.address - base.value)

    def map(self, exported: ExportedMemory) -> "Mapping":
        """Raises RuntimeError if it cannot be mapped: the devices have no access to each other, or
        the processes are in containers that do not share it."""
        base = ctypes.c_void_p()
        with self._on_device():
            check(
                self._runtime,
                self._runtime.cudaIpcOpenMemHandle(
                    ctypes.byref(base),
                    IpcHandle.from_buffer_copy(exported.handle),
                    ctypes.c_uint(_LAZY_PEER_ACCESS),
                ),
            )
        assert base.value is not None
        return Mapping(self, base.value, exported.offset)

    def unmap(self, base: int) -> None:
        with self._on_device():
            check(self._runtime, self._runtime.cudaIpcCloseMemHandle(ctypes.c_void_p(base)))


class Mapping:
    """address: of the owner's first block, in this process."""

    def __init__(self, peer_memory: PeerMemory, base: int, offset: int) -> None:
        self._peer_memory, self._base = peer_memory, base
        self.address = base + offset

    def close(self) -> None:
        """Unmap the memory, which nothing may read any more."""
        self._peer_memory.unmap(self._base)
