"""Compiles the launches of Triton operators for a GPU that is not there, and runs none of them.

    python -m tests.worker.kernels.compiled

The interpreter accepts kernels that the compiler rejects. Needs a process without TRITON_INTERPRET.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from longshore.worker.kernels.gpu.experts import experts
from longshore.worker.kernels.gpu.rms_norm import rms_norm
from longshore.worker.kernels.gpu.route import route

MAX_SHARED_BYTES: Final = 227 << 10
"""Of a program on an H100."""

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class Hopper:
    """What Triton asks its driver before a launch."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@contextmanager
def compiling() -> Iterator[set[str]]:
    """Within the block, launches compile only. The result has the names of the kernels."""
    run, names = JITFunction.run, set()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        assert kernel.metadata.shared <= MAX_SHARED_BYTES, (kernel.metadata, kwargs)
        names.add(f"{self.fn.__module__.rpartition('.')[2]}.{self.fn.__name__}")

    driver.set_active(Hopper())
    with patch.object(JITFunction, "run", compile_only):
        yield names


def compile_rms_norm() -> None:
    for dtype in DTYPES:
        x, weight = torch.zeros(2, 4096, dtype=dtype), torch.zeros(4096)
        rms_norm(x, None, weight, 1e-5)
        rms_norm(x, x.clone(), weight.to(dtype), 1e-5)


def compile_route() -> None:
    scores = torch.zeros(2, 256)
    route(scores, None, 8, 1, 1, 1.0, False, True)
    route(scores, scores[0], 8, 8, 4, 2.5, True, True)
    route(scores[:, :20].contiguous(), None, 3, 4, 2, 1.0, False, False)


def compile_experts() -> None:
    for dtype in DTYPES:
        zeros = partial(torch.zeros, dtype=dtype)
        # One tiling each; sizes that end with a whole block and others.
        for num_tokens, size, width in ((1, 128, 64), (60, 72, 40), (120, 128, 64), (250, 72, 40)):
            for activation in range(4) if num_tokens == 1 else (3,):
                is_odd = activation % 2 == 1
                experts(
                    zeros(num_tokens, size),
                    torch.zeros(num_tokens, 2),
                    torch.zeros(num_tokens, 2, dtype=torch.int64),
                    zeros(4, 2 * width, size),
                    zeros(4, size, width),
                    zeros(4, 2 * width) if is_odd else None,
                    zeros(4, size) if is_odd else None,
                    zeros(num_tokens, size) if is_odd else None,
                    activation,
                    1.5,
                    float("inf"),
                    is_odd,
                    activation == 2,
                )


def main() -> None:
    assert not triton.knobs.runtime.interpret
    with compiling() as names:
        compile_rms_norm()
        compile_route()
        compile_experts()
    print(*sorted(names), sep="\n")


if __name__ == "__main__":
    main()
