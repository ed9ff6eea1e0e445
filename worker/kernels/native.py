"""Loads the compiled CPU kernels, and chooses between them and plain torch.

`pip install` builds `native/` if there is a C++ compiler; without one the wrappers compute in
torch. The library does not depend on Python or torch: it is loaded with ctypes and gets addresses,
so it works with every version of both. It uses the OpenMP runtime that the process has loaded, so
torch must be imported first, as this module does.
"""

import ctypes
import logging
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1}
"""Dtypes that the kernels support, and their index in the function tables."""

MIN_THREAD_BYTES: Final = 1 << 15
"""Minimum work per thread: waking a thread takes about a microsecond."""

INTERFACE: Final = 8
"""Version of native/calls.h; raise both with every change."""

PANEL: Final = 32
"""Outputs of a matrix that are packed together, as in native/calls.h."""

INSTRUCTION_SETS: Final = ("generic", "avx2", "avx512", "avx512bf16", "amx")
"""In the order of library.cpp, each better than the one before."""


class _Variant(ctypes.Structure):
    """The functions of one instruction set, as in native/calls.h."""

    _one = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
    _two = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
    _graph = ctypes.CFUNCTYPE(
        None,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_int,
    )
    _fields_: ClassVar[Any] = [
        ("rms_norm", _one * 2),
        ("gate", _one * 2),
        ("rotary", _one * 2),
        ("paged_attention", _two * 2),
        ("argmax", _one * 1),
        ("linear", _one * 2),
        ("look_up", _one * 2),
        ("route", _one * 2),
        ("experts", _one * 2),
        ("delta_step", _one * 2),
        ("mamba_step", _one * 2),
        ("run_graph", _graph * 1),
    ]


FUNCTIONS: Final = tuple(name for name, _ in _Variant._fields_)


@dataclass(frozen=True)
class Native:
    """The loaded library, for one instruction set. Functions are indexed by `DTYPES`, and take the
    structures of native/calls.h as bytes."""

    instruction_set: str
    rms_norm: Any
    gate: Any
    rotary: Any
    paged_attention: Any
    argmax: Any
    linear: Any
    look_up: Any
    route: Any
    experts: Any
    delta_step: Any
    mamba_step: Any
    run_graph: Any
    plan_attention: Any

    @property
    def multiplies_bfloat16(self) -> bool:
        """Whether the instruction set has products of bfloat16, and plain panels of it."""
        return self.instruction_set in ("avx512bf16", "amx")

    def run(self, kernel: str, dtype: torch.dtype, *arguments: bytes) -> None:
        """Call a kernel. If a graph is being captured, the call is recorded; a kernel that cannot
        be has not run then."""
        if _thread.recorder is not None:
            _thread.recorder.record(kernel, dtype, arguments)
        getattr(self, kernel)[DTYPES[dtype]](*arguments)


class Recorder(Protocol):
    """Receives the kernel calls while a graph is captured (graph.py)."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory that keeps its address as long as the graph exists."""
        ...

    def record(self, kernel: str, dtype: torch.dtype, arguments: tuple[bytes, ...]) -> None: ...


# The layouts of native/calls.h.
RMS_NORM: Final = struct.Struct("@PPPPqqqqqfii")
GATE: Final = struct.Struct("@PPqqqiffi")
ARGMAX: Final = struct.Struct("@PPPqqqi")
LINEAR: Final = struct.Struct("@4P6qiii")
LOOK_UP: Final = struct.Struct("@3P3qii")
ROTARY: Final = struct.Struct("@PqqPPqqPPPqqqfii")
ROUTE: Final = struct.Struct("@7P7qfiii")
EXPERTS: Final = struct.Struct("@12P8qiiiffiii")
STATE_STEP: Final = struct.Struct("@11P13q")  # followed by the rest of one of these:
DELTA_STEP: Final = struct.Struct("@4P6qf")
MAMBA_STEP: Final = struct.Struct("@4P5q")
ATTENTION_STEP: Final = struct.Struct("@qqqqqqqqqqqPPPPPqffii")
ATTENTION_LAYER: Final = struct.Struct("@PPPPPqqqPPff")


def library_path() -> Path | None:
    """The path of the library; None if it was not built."""
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"_native{suffix}"
        if path.exists():
            return path
    return None


def load(path: Path, instruction_set: str | None = None) -> Native:
    """Load the library. instruction_set: one of INSTRUCTION_SETS; None is the best one that this
    processor supports.

    Raises OSError if the library cannot be loaded, ValueError if the instruction set is unknown or
    not supported by this processor.
    """
    if instruction_set not in (None, *INSTRUCTION_SETS):
        raise ValueError(
            f"instruction set {instruction_set!r} is unknown; use {', '.join(INSTRUCTION_SETS)}"
        )
    library = ctypes.CDLL(str(path))
    if getattr(library, "longshore_interface", lambda: 1)() != INTERFACE:
        raise OSError("it was built from other sources. Reinstall Longshore")
    library.longshore_variant.restype = ctypes.POINTER(_Variant)
    plan = library.longshore_plan_attention
    plan.restype = ctypes.c_int64
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    plan.argtypes = [pointer, *[number] * 6, ctypes.c_int, ctypes.c_int, pointer, pointer]
    names = reversed(INSTRUCTION_SETS) if instruction_set is None else (instruction_set,)
    for name in names:
        variant = library.longshore_variant(INSTRUCTION_SETS.index(name))
        if variant:
            functions = {field: tuple(getattr(variant.contents, field)) for field in FUNCTIONS}
            return Native(name, plan_attention=plan, **functions)
    raise ValueError(f"this processor has no {instruction_set} instructions")


class _Selection:
    """The kernels that the wrappers use: one setting per process, like torch's thread count."""

    def __init__(self) -> None:
        self.native: Native | None = None
        self.is_made = False


_selection = _Selection()


class _Thread(threading.local):
    """The recorder of the current thread."""

    recorder: Recorder | None = None


_thread = _Thread()


def native() -> Native | None:
    """The selected kernels; None means plain torch. Loaded at the first call."""
    if not _selection.is_made:
        select(use_native=True)
    return _selection.native


def select(*, use_native: bool, instruction_set: str | None = None) -> Native | None:
    """Select the compiled kernels, if they were built, or plain torch for this process.

    Raises ValueError for an instruction set that this processor does not support.
    """
    _selection.native = _load(instruction_set) if use_native else None
    _selection.is_made = True
    return _selection.native


def _load(instruction_set: str | None) -> Native | None:
    path = library_path()
    if path is None:
        logger.warning(
            "the CPU kernels were not built (no C++ compiler at installation?), so plain torch is "
            "used, which is slower; install g++ and reinstall Longshore"
        )
        return None
    try:
        loaded = load(path, instruction_set)
    except OSError as error:
        logger.warning("%s cannot be loaded, so plain torch is used: %s", path, error)
        return None
    logger.debug("CPU kernels: %s", loaded.instruction_set)
    return loaded


def kernels_for(tensor: Tensor) -> Native | None:
    """The kernels if they support the tensor's dtype and device; None means plain torch."""
    if tensor.dtype not in DTYPES or tensor.device.type != "cpu":
        return None
    return native()


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """CPU memory for the output of a kernel."""
    if _thread.recorder is not None:
        return _thread.recorder.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Record all kernel calls of this thread within the block."""
    assert _thread.recorder is None, "a graph is being captured already"
    _thread.recorder = recorder
    try:
        yield
    finally:
        _thread.recorder = None


def num_threads(num_bytes: int) -> int:
    """Number of threads for an operation that reads or writes `num_bytes`."""
    return max(1, min(torch.get_num_threads(), num_bytes // MIN_THREAD_BYTES))
