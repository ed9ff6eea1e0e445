"""A fixed sequence of kernel calls, replayed in one: what a CUDA graph is to a GPU.

Between two short calls the interpreter takes longer than the calls, the other cores wait for it,
and so does whoever else needs its lock. A replay is one call without the lock, on one team of
threads. Captured by running a function once: its kernels are recorded as they run, in memory that
the graph keeps. A function that computes anything else, in torch, cannot be captured.
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
"""In the order of Kernel in native/calls.h: where a call's number of rows is, which follows the
tokens of a replay. Attention has its own, in its step."""

_KERNELS: Final = tuple(_ROWS)
_CALL: Final = struct.Struct("@iiPq")
_ALIGNMENT_BYTES: Final = 64

_Result = TypeVar("_Result")


class NotCapturable(Exception):
    """The function computes something that is no recorded kernel."""


class Graph:
    """Calls that were recorded with `num_tokens` tokens, and the memory that they use."""

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
        """What its memory takes."""
        return self._memory.num_bytes

    def replay(self, num_tokens: int, steps: Sequence[bytes]) -> None:
        """The same with other numbers, in the same places. steps: those of attention, of
        `num_tokens` tokens, in the order of the capture's."""
        pointers = (ctypes.c_char_p * len(steps))(*steps)
        threads = torch.get_num_threads()
        self._run(self._calls, self.num_calls, self._captured, num_tokens, pointers, threads)


class Recording:
    """What runs while a function is captured, on `steps` of attention."""

    def __init__(self, num_tokens: int, steps: Sequence[bytes]) -> None:
        self._num_tokens = num_tokens
        self.calls: list[tuple[int, bool, bytes, int]] = []
        self.arena = _Arena()
        self._steps = steps

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.arena.empty(shape, dtype)

    def record(self, kernel: str, dtype: torch.dtype, arguments: tuple[bytes, ...]) -> None:
        if kernel not in _KERNELS:
            raise NotCapturable(f"{kernel} is no kernel for graphs")
        step = -1
        if (rows := _ROWS[kernel]) is not None:
            layout, field = rows
            if layout.unpack(arguments[0])[field] % self._num_tokens:
                raise NotCapturable(f"{kernel} of rows that are no multiple of the tokens")
        else:
            places = (i for i, one in enumerate(self._steps) if one is arguments[0])
            step = next(places, -1)
            if step < 0:
                raise NotCapturable("this attention is no part of the step")
        call = (_KERNELS.index(kernel), dtype == torch.bfloat16, arguments[-1], step)
        self.calls.append(call)


def capture(
    kernels: Native, function: Callable[[], _Result], num_tokens: int, steps: Sequence[bytes]
) -> tuple[_Result, Graph]:
    """Run `function`, which computes `num_tokens` tokens; returns its result, whose tensors every
    replay fills again, and the graph.

    What the function reads must stay where it is. Raises NotCapturable.
    """
    calls = Recording(num_tokens, steps)
    with recording(calls), _OnlyViews():
        result = function()
    return result, Graph(kernels, num_tokens, calls)


class _OnlyViews(TorchDispatchMode):
    """Raises NotCapturable for an operation of torch that does more than look."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            raise NotCapturable(f"{func} is no recorded kernel")
        return func(*args, **(kwargs or {}))


class _Arena:
    """Memory for what kernels make. What nothing refers to any more is given out again, also
    within one capture: a replay writes and reads in the same order."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._free: dict[int, list[npt.NDArray[np.uint8]]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        free = self._free.setdefault(size, [])
        block = free.pop() if free else self._new(size)
        memory = block[:]  # dies with the last tensor that uses it
        weakref.finalize(memory, free.append, block)
        return torch.from_numpy(memory).view(dtype).view(tuple(shape))

    def _new(self, size: int) -> npt.NDArray[np.uint8]:
        self.num_bytes += size
        memory = np.zeros(size + _ALIGNMENT_BYTES, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT_BYTES
        return memory[start : start + size]
