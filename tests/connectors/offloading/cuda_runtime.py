"""A CUDA runtime that copies host memory, for tests of what a copier submits."""

import ctypes
from contextlib import nullcontext
from typing import Any, Literal

import torch

from longshore.connectors.offloading.cuda_copies import (
    BatchSubmission,
    CudaCopier,
    KernelSubmission,
    RunSubmission,
    Submission,
)


class Runtime:
    """The calls of the CUDA runtime that copiers make, for addresses in host memory. A copy takes
    place when the stream is synchronised."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.calls: list[str] = []
        self.pending: list[tuple[int, int, int]] = []

    def cudaRuntimeGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0

    def cudaMemcpyAsync(self, target: Any, source: Any, size: Any, kind: Any, stream: Any) -> int:
        assert (kind.value, stream.value) == (4, 77)
        self.calls.append("one")
        self.pending.append((target.value, source.value, size.value))
        return 0

    def cudaMemcpyBatchAsync(
        self,
        targets: Any,
        sources: Any,
        sizes: Any,
        count: Any,
        attributes: Any,
        first: Any,
        num_attributes: Any,
        *others: Any,
    ) -> int:
        *failed, stream = others
        assert len(failed) == (self.version < 13_000)
        assert (num_attributes.value, first._obj.value, stream.value) == (1, 0, 77)
        assert (attributes._obj.order, attributes._obj.flags) == (1, 1)
        self.calls.append("batch")
        lists = [
            list((ctypes.c_int64 * count.value).from_address(each.value))
            for each in (targets, sources, sizes)
        ]
        self.pending += zip(*lists, strict=True)
        return 0

    def cudaGetLastError(self) -> int:
        self.calls.append("last error")
        return 0

    def synchronize(self) -> None:
        for copy in self.pending:
            ctypes.memmove(*copy)
        self.pending.clear()

    def copier(self, kind: Literal["batch", "runs", "kernel"]) -> CudaCopier:
        submission: Submission
        match kind:
            case "batch":
                submission = BatchSubmission(self, 77)
            case "runs":
                submission = RunSubmission(self, 77)
            case "kernel":
                submission = KernelSubmission(torch.device("cpu"), self.synchronize)
        return CudaCopier(submission, nullcontext, self.synchronize)


class Library:
    """Registers ranges, at most `limit` bytes together."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit = limit
        self.registered: dict[int, int] = {}
        self.last_error = 0

    def cudaHostRegister(self, address: Any, size: Any, flags: Any) -> int:
        assert flags.value == 3
        if sum(self.registered.values()) + size.value > self.limit:
            self.last_error = 2
            return 2
        assert address.value not in self.registered
        self.registered[address.value] = size.value
        return 0

    def cudaHostUnregister(self, address: Any) -> int:
        self.last_error = 0 if self.registered.pop(address.value, None) else 713
        return self.last_error

    def cudaGetLastError(self) -> int:
        error, self.last_error = self.last_error, 0
        return error
