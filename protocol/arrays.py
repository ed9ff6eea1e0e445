"""Array types in messages: one-dimensional, little-endian, with a few known element types."""

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np

Int32Array: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int32]]
UInt8Array: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]
Int64Array: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
Float32Array: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float32]]
BoolArray: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]

# The defaults of array fields, shared and read-only: `omit_defaults` compares by identity and omits
# a field that holds this very object.
EMPTY_INT32: Final[Int32Array] = np.empty(0, np.int32)
EMPTY_INT32.setflags(write=False)
EMPTY_UINT8: Final[UInt8Array] = np.empty(0, np.uint8)
EMPTY_UINT8.setflags(write=False)
EMPTY_FLOAT32: Final[Float32Array] = np.empty(0, np.float32)
EMPTY_FLOAT32.setflags(write=False)


def int32_array(values: Sequence[int] | Int64Array | Int32Array) -> Int32Array:
    """`values` as an array of a message; EMPTY_INT32 if there are none.

    Raises OverflowError if a Python int does not fit in 32 bits.
    """
    if len(values) == 0:
        return EMPTY_INT32
    return np.ascontiguousarray(values, np.int32)
