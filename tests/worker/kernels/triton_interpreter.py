"""Corrects bfloat16 and fp8 in Triton's interpreter, which keeps them as integers: it cuts off what
a GPU rounds, multiplies the integers in `tl.dot`, and adds them elsewhere
(triton-lang/triton#11584). Also makes its calls of device functions faster.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_NARROW = {
    tl.bfloat16: (torch.bfloat16, torch.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
}
"""Types that the interpreter keeps as integers: the number and its bits in torch."""


def _widened(data: np.ndarray, dtype: Any) -> np.ndarray:
    """To float32."""
    return torch.from_numpy(np.array(data)).view(_NARROW[dtype][0]).float().numpy()


def _rounded(data: np.ndarray, dtype: Any) -> np.ndarray:
    """From float32."""
    number, bits = _NARROW[dtype]
    return torch.from_numpy(np.array(data, np.float32)).to(number).view(bits).numpy()


@contextmanager
def quick_calls() -> Iterator[None]:
    """Within the block, calls of device functions do not prepare `triton.language` again, as the
    launch has done; only the first call of each module does, because it may use other parts."""
    prepared: set[str] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ not in prepared:
            interpreter._patch_lang(self.fn)
            prepared.add(self.fn.__module__)
        return self.rewrite()(*args, **kwargs)

    with patch.object(interpreter.InterpretedFunction, "__call__", call):
        yield


@contextmanager
def exact_narrow_types() -> Iterator[None]:
    """Within the block, conversions to bfloat16 and fp8 round, `tl.dot` multiplies bfloat16, and
    all other arithmetic in these types raises TypeError: kernels compute in float32."""
    cast, dot, binary = (
        getattr(InterpreterBuilder, name) for name in ("cast_impl", "create_dot", "binary_op")
    )

    def exact_cast(self: Any, source: Any, dtype: Any) -> Any:
        before, after = source.dtype.scalar, dtype.scalar
        if before == tl.float32 and after in _NARROW:
            return TensorHandle(_rounded(source.data, after), after)
        if before in _NARROW and after == tl.float32:
            return TensorHandle(_widened(source.data, before), tl.float32)
        if before == tl.float8e4nv and after == tl.float16:  # holds every number in fp8
            return TensorHandle(_widened(source.data, before).astype(np.float16), tl.float16)
        assert before == after or not {before, after} & {*_NARROW}, "convert by way of float32"
        return cast(self, source, dtype)

    def exact_fp_to_fp(self: Any, source: Any, dtype: Any, rounding_mode: Any) -> Any:
        if {source.dtype.scalar, dtype.scalar} & {*_NARROW}:
            return exact_cast(self, source, dtype)
        return fp_to_fp(self, source, dtype, rounding_mode)

    def exact_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (
            TensorHandle(_widened(x.data, tl.bfloat16), tl.float32)
            if x.dtype.scalar == tl.bfloat16
            else x
            for x in (a, b)
        )
        return dot(self, a, b, *rest)

    def checked_binary(self: Any, lhs: Any, rhs: Any, operation: Any) -> Any:
        if lhs.dtype.scalar in _NARROW:
            raise TypeError(f"{operation} in {lhs.dtype.scalar}: convert the operands to float32")
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
