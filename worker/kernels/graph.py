"""A fixed sequence of kernel calls, replayed in one call: a CUDA graph for the CPU.

Between short kernel calls the interpreter takes longer than the calls, while the other cores are
idle and other threads wait for the GIL. A replay is one call without the GIL, on one team of
threads. To capture a graph, a function is run once: its kernel calls are recorded, with memory that
the graph owns. A function that runs other torch operations cannot be captured.
"""

import ctypes
import logging
import math
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longshore.worker.kernels.native import (
    EXPERTS,
    GATE,
    LINEAR,
    RMS_NORM,
    ROTARY,
    ROUTE,
    Native,
    recording,
)

logger = logging.getLogger(__name__)

_ROWS: Final = {
    "rms_norm": (RMS_NORM, 4),
    "gate": (GATE, 2),
    "rotary": (ROTARY, 10),
    "paged_attention": None,
    "linear": (LINEAR, 4),
    "route": (ROUTE, 7),
    "experts": (EXPERTS, 12),
}
"""In the order of Kernel in native/calls.h: the layout of a call's arguments and the field with its
number of rows, which a replay scales with its tokens. Attention gets it from its step."""

_KERNELS: Final = tuple(_ROWS)
_CALL: Final = struct.Struct("@iiPq")
_ALIGNMENT_BYTES: Final = 64

_Result = TypeVar("_Result")


class NotCapturable(Exception):
    """The function runs an operation that cannot be recorded."""


class Graph:
    """Kernel calls recorded with `num_tokens` tokens, and the memory that they use."""

    def __init__(self, kernels: Native, num_tokens: int, calls: "Recording") -> None:
        self._run = kernels.run_graph[0]
        self._captured = num_tokens
        self._arguments = [ctypes.create_string_buffer(bytes_) for _, _, bytes_, _ in calls.calls]
        self._calls = b"".join(
            _CALL.pack(kernel, is_bfloat16, ctypes.addressof(arguments), step)
            for (kernel, is_bfloat16, _, step), arguments in zip(
                calls.calls, self._arguments, strict=True
            )
        )
        self._memory = calls.arena
        self.num_calls = len(calls.calls)

    @property
    def num_bytes(self) -> int:
        """Size of the graph's memory."""
        return self._memory.num_bytes

    def replay(self, num_tokens: int, steps: Sequence[bytes]) -> None:
        """Run the calls again, on new data in the same memory. steps: attention steps of
        `num_tokens` tokens, in the order of the captured ones."""
        pointers = (ctypes.c_char_p * len(steps))(*steps)
        threads = torch.get_num_threads()
        self._run(self._calls, self.num_calls, self._captured, num_tokens, pointers, threads)


class Recording:
    """Records the kernel calls of a function, which uses the attention steps `steps`."""

    def __init__(self, num_tokens: int, steps: Sequence[bytes]) -> None:
        self._num_tokens = num_tokens
        self.calls: list[tuple[int, bool, bytes, int]] = []
        self.arena = _Arena()
        self._steps = steps

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.arena.empty(shape, dtype)

    def record(self, kernel: str, dtype: torch.dtype, arguments: tuple[bytes, ...]) -> None:
        if kernel not in _KERNELS:
            raise NotCapturable(f"kernel {kernel} is not supported in graphs")
        step = -1
        if (rows := _ROWS[kernel]) is not None:
            layout, field = rows
            if layout.unpack(arguments[0])[field] % self._num_tokens:
                raise NotCapturable(
                    f"the rows of kernel {kernel} are not a multiple of the step's tokens"
                )
        else:
            indices = (i for i, one in enumerate(self._steps) if one is arguments[0])
            step = next(indices, -1)
            if step < 0:
                raise NotCapturable("an attention call does not belong to the step")
        call = (_KERNELS.index(kernel), dtype == torch.bfloat16, arguments[-1], step)
        self.calls.append(call)


def capture(
    kernels: Native, function: Callable[[], _Result], num_tokens: int, steps: Sequence[bytes]
) -> tuple[_Result, Graph]:
    """Run `function`, which computes `num_tokens` tokens. Returns its result, whose tensors every
    replay overwrites, and the graph.

    The memory that the function reads must stay at its address. Raises NotCapturable.
    """
    calls = Recording(num_tokens, steps)
    with recording(calls), _OnlyViews():
        result = function()
    return result, Graph(kernels, num_tokens, calls)


class _OnlyViews(TorchDispatchMode):
    """Raises NotCapturable for every torch operation that is not a view."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise torch imports its compiler, 800 modules in a second, to switch it off here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            raise NotCapturable(f"{func} is not a recorded kernel")
        return func(*args, **(kwargs or {}))


class _Arena:
    """Memory for the outputs of kernels. Unreferenced memory is reused, also within one capture,
    because a replay writes and reads in the same order."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._free: dict[int, list[npt.NDArray[np.uint8]]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        free = self._free.setdefault(size, [])
        block = free.pop() if free else self._new(size)
        memory = block[:]  # freed with the last tensor that uses it
        weakref.finalize(memory, free.append, block)
        return torch.from_numpy(memory).view(dtype).view(tuple(shape))

    def _new(self, size: int) -> npt.NDArray[np.uint8]:
        self.num_bytes += size
        memory = np.zeros(size + _ALIGNMENT_BYTES, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT_BYTES
        return memory[start : start + size]
