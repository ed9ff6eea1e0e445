"""Corrects bfloat16 in Triton's interpreter, which keeps it as 16-bit integers: it cuts off what a
GPU rounds, multiplies the integers in `tl.dot`, and adds them elsewhere (triton-lang/triton#11584).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _widened(data: np.ndarray) -> np.ndarray:
    """bfloat16, as uint16, to float32."""
    return (data.astype(np.uint32) << 16).view(np.float32)


def _rounded(data: np.ndarray) -> np.ndarray:
    """float32 to bfloat16, as uint16."""
    rounded = torch.from_numpy(np.array(data, np.float32)).bfloat16()
    return rounded.view(torch.uint16).numpy()


@contextmanager
def exact_bfloat16() -> Iterator[None]:
    """Within the block, conversions to bfloat16 round, `tl.dot` multiplies bfloat16, and all other
    arithmetic in bfloat16 raises TypeError: kernels compute in float32."""
    cast, dot, binary = (
        getattr(InterpreterBuilder, name) for name in ("cast_impl", "create_dot", "binary_op")
    )

    def exact_cast(self: Any, source: Any, dtype: Any) -> Any:
        kinds = source.dtype.scalar, dtype.scalar
        if kinds == (tl.float32, tl.bfloat16):
            return TensorHandle(_rounded(source.data), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            return TensorHandle(_widened(source.data), tl.float32)
        return cast(self, source, dtype)

    def exact_fp_to_fp(self: Any, source: Any, dtype: Any, rounding_mode: Any) -> Any:
        kinds = source.dtype.scalar, dtype.scalar
        if tl.bfloat16 in kinds and tl.float32 in kinds:
            return exact_cast(self, source, dtype)
        return fp_to_fp(self, source, dtype, rounding_mode)

    def exact_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (
            TensorHandle(_widened(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x
            for x in (a, b)
        )
        return dot(self, a, b, *rest)

    def checked_binary(self: Any, lhs: Any, rhs: Any, operation: Any) -> Any:
        if lhs.dtype.scalar == tl.bfloat16:
            raise TypeError(f"{operation} in bfloat16: convert the operands to float32")
        return binary(self, lhs, rhs, operation)

    fp_to_fp = InterpreterBuilder.create_fp_to_fp
    with ExitStack() as patches:
        for name, function in (
            ("cast_impl", exact_cast),
            ("create_fp_to_fp", exact_fp_to_fp),
            ("create_dot", exact_dot),
            ("binary_op", checked_binary),
        ):
            patches.enter_context(patch.object(InterpreterBuilder, name, function))
        yield
