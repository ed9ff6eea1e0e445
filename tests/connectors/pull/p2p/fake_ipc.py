"""The calls of CUDA IPC, for host memory of this process."""

import ctypes
from typing import Any, Final

PREFIX_BYTES: Final = 512
"""The allocation begins so many bytes before the memory, as torch divides its allocations."""


class Driver:
    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: Any) -> int:
        base._obj.value = address.value - PREFIX_BYTES
        size._obj.value = 1 << 30
        return 0


class Runtime:
    """mapped: addresses of allocations that are mapped. num_opened: so far."""

    def __init__(self, *, can_export: bool = True, can_open: bool = True) -> None:
        self.can_export, self.can_open = can_export, can_open
        self.mapped: list[int] = []
        self.num_opened = 0
        self.last_error = 0

    def cudaIpcGetMemHandle(self, handle: Any, base: Any) -> int:
        if not self.can_export:
            self.last_error = 1
            return 1
        ctypes.memmove(handle, base.value.to_bytes(8, "little"), 8)
        return 0

    def cudaIpcOpenMemHandle(self, base: Any, handle: Any, flags: Any) -> int:
        assert flags.value == 1
        if not self.can_open:
            self.last_error = 217
            return 217
        base._obj.value = int.from_bytes(bytes(handle)[:8], "little")
        self.mapped.append(base._obj.value)
        self.num_opened += 1
        return 0

    def cudaIpcCloseMemHandle(self, base: Any) -> int:
        self.mapped.remove(base.value)
        return 0

    def cudaGetLastError(self) -> int:
        error, self.last_error = self.last_error, 0
        return error
