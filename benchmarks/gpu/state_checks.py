"""The kernels of layers with states against float64. What belongs to no sequence's state is NaN."""

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.gpu.exactness import assert_near, poisoned_memory
from benchmarks.gpu.results import Run
from longshore.worker.kernels import carry_state, gated_norm
from tests.worker.kernels import test_conv_step, test_delta_step, test_state_step
from tests.worker.kernels.placed_states import ANY_LENGTHS

EPS: Final = 1e-5
UNIT: Final = {"unit_bytes": 16 << 10, "num_pages": 40}
STEPS: Final[list[tuple[Any, Any]]] = [
    # the module of a kernel's tests, and sizes
    (test_state_step, test_state_step.Shape(num_heads=2)),
    (test_delta_step, test_delta_step.Shape(num_heads=2)),
    (test_conv_step, test_conv_step.Shape()),
    (test_state_step, test_state_step.Shape(3, 50, 1, state_size=33, conv_width=3)),
    (test_delta_step, test_delta_step.Shape(3, 1, 33, value_dim=50, conv_width=3)),
    (test_state_step, test_state_step.Shape(128, 64, 8, state_size=128, **UNIT)),
    (test_delta_step, test_delta_step.Shape(32, 16, 128, value_dim=128, **UNIT)),
    (test_conv_step, test_conv_step.Shape(2048, **UNIT)),
]


def check(run: Run) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        for kernel, shape in STEPS[:3] if run.is_dry else STEPS:
            run.check(
                f"one token of {kernel.__name__.rpartition('test_')[2]}, {shape}, {name}",
                partial(_check_step, run.device, kernel, shape, dtype),
            )
        run.check(f"gated norm, {name}", partial(_check_gated_norm, run, dtype))
    run.check("states carried from piece to piece", partial(_check_carry, run))


def _check_step(device: str, kernel: Any, shape: Any, dtype: torch.dtype) -> None:
    with poisoned_memory():
        got, wanted, states = kernel.run(shape, ANY_LENGTHS, dtype, device=device)
    heads = (shape.num_heads, -1)
    assert_near(got.unflatten(1, heads), wanted.unflatten(1, heads), dtype)
    for values, exact in states.results():
        assert_near(values.flatten(1), exact.flatten(1).double(), dtype)
    states.check_other_bytes()


def _check_carry(run: Run) -> None:
    num_active = [3, 2, 1] if run.is_dry else [4] * 100 + [1] * 28
    heads, size = (2, (20, 33)) if run.is_dry else (128, (64, 128))
    state = torch.randn(num_active[0], heads, *size, device=run.device)
    added = torch.randn(sum(num_active), heads, *size, device=run.device)
    log_decay = -torch.rand(sum(num_active), heads, device=run.device)
    counts = torch.tensor(num_active)
    firsts = (counts.cumsum(0) - counts).to(run.device)
    num_pieces = (counts > torch.arange(num_active[0])[:, None]).sum(1).to(run.device)
    exact_state, exact_added = state.double(), added.double()
    carry_state.reference(exact_state, exact_added, log_decay.double(), firsts, num_pieces)
    with poisoned_memory():
        carry_state.carry_state(state, added, log_decay, firsts, num_pieces)
    assert_near(state, exact_state)
    assert_near(added, exact_added)


def _check_gated_norm(run: Run, dtype: torch.dtype) -> None:
    for num_tokens, size, num_groups in (
        (1, 34, 1),
        (5, 72, 3),
        *(() if run.is_dry else ((300, 8192, 8), (64, 4096, 1))),
    ):
        x, weight = (
            torch.randn(shape, device=run.device) for shape in ((num_tokens, size), (size,))
        )
        gate: Tensor = torch.randn(num_tokens, size + 3, device=run.device).to(dtype)[:, 3:]
        exact = gated_norm.reference(x.double(), gate.double(), weight.double(), num_groups, EPS)
        with poisoned_memory():
            assert_near(gated_norm.gated_norm(x, gate, weight, num_groups, EPS), exact)
