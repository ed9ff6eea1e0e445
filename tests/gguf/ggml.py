"""llama.cpp's own quantisation, compiled from its sources."""

import ctypes
import subprocess
from pathlib import Path
from typing import Final

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

_BACKENDS: Final = """
void ggml_backend_buffer_get_usage(void) {}
void ggml_backend_tensor_memset(void) {}
void ggml_backend_tensor_set(void) {}
void ggml_critical_section_start(void) {}
void ggml_critical_section_end(void) {}
"""
"""What is not called here, and a lock: there is one thread."""


class _Traits(ctypes.Structure):
    """The first fields of `struct ggml_type_traits`."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


class Ggml:
    def __init__(self, llama_cpp: Path, folder: Path) -> None:
        """folder: for the library."""
        (folder / "ggml-version.h").write_text("")
        (folder / "backends.c").write_text(_BACKENDS)
        sources = llama_cpp / "ggml" / "src"
        library = folder / "ggml.so"
        # Without fused products, so that all machines make the same file.
        options = ["-O1", "-shared", "-fPIC", "-ffp-contract=off", "-D_GNU_SOURCE"]
        options += ['-DGGML_VERSION=""', '-DGGML_COMMIT=""']
        options += [f"-I{each}" for each in (folder, sources, llama_cpp / "ggml" / "include")]
        files = [sources / "ggml.c", sources / "ggml-quants.c", folder / "backends.c"]
        subprocess.run(["cc", *options, *files, "-o", library, "-lm"], check=True)
        self._library = ctypes.CDLL(str(library))
        self._library.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
        quantise = self._library.ggml_quantize_chunk
        quantise.restype = ctypes.c_size_t
        quantise.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3]
        quantise.argtypes += [ctypes.c_void_p]

    def quantise(self, values: np.ndarray, name: str) -> np.ndarray:
        """values: (rows, columns) in float32. All are equally important."""
        kind = GGMLQuantizationType[name]
        rows, columns = values.shape
        block, block_bytes = GGML_QUANT_SIZES[kind]
        stored = np.zeros((rows, columns // block * block_bytes), np.uint8)
        importance = np.ones(columns, np.float32)
        arrays = values.ctypes.data, stored.ctypes.data
        counts = 0, rows, columns
        self._library.ggml_quantize_init(int(kind))
        written = self._library.ggml_quantize_chunk(
            int(kind), *arrays, *counts, importance.ctypes.data
        )
        assert written == stored.nbytes
        return stored

    def dequantise(self, stored: np.ndarray, name: str) -> np.ndarray:
        kind = GGMLQuantizationType[name]
        traits = self._library.ggml_get_type_traits(int(kind)).contents
        if kind is GGMLQuantizationType.F32:
            return stored.view(np.float32)
        columns = stored.shape[1] // traits.type_size * traits.blck_size
        values = np.empty((len(stored), columns), np.float32)
        traits.to_float(stored.ctypes.data, values.ctypes.data, values.size)
        return values
