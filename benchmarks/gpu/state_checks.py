"""The kernels of Mamba 2 layers against float64. Blocks that no sequence reads are NaN."""

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.gpu.exactness import assert_near, poisoned_memory
from benchmarks.gpu.results import Run
from longshore.worker.kernels import carry_state, gated_norm, state_step
from longshore.worker.kernels.state_step import StateWeights
from tests.worker.kernels.test_state_step import BLOCK_SIZE, Shape, arguments

EPS: Final = 1e-5
SHAPES: Final = (
    Shape(num_heads=2),
    Shape(num_heads=3, head_dim=50, num_groups=1, state_size=33, conv_width=3),
    Shape(num_heads=128, head_dim=64, num_groups=8, state_size=128),
)


def check(run: Run) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        for shape in SHAPES[:1] if run.is_dry else SHAPES:
            run.check(
                f"one token of {shape}, {name}", partial(_check_step, run.device, shape, dtype)
            )
        run.check(f"gated norm, {name}", partial(_check_gated_norm, run, dtype))
    run.check("states carried from piece to piece", partial(_check_carry, run))


def _check_step(device: str, shape: Shape, dtype: torch.dtype) -> None:
    tensors, weights = arguments(shape, [0, 1, 2, 4, 5, 13], dtype, has_bias=True)
    inputs, dt, states, kept, *places = (tensor.to(device) for tensor in tensors)
    weights = StateWeights(*(weight.to(device) for weight in weights))
    settings: dict[str, Any] = {"num_groups": shape.num_groups, "block_size": BLOCK_SIZE}
    exact_states, exact_kept = states.double(), kept.clone()
    exact = StateWeights(*(weight.double() for weight in weights))
    wanted = state_step.reference(inputs, dt, exact_states, exact_kept, *places, exact, **settings)
    with poisoned_memory():
        got = state_step.state_step(inputs, dt, states, kept, *places, weights, **settings)
    heads = (len(got), shape.num_heads, shape.head_dim)
    assert_near(got.view(heads), wanted.view(heads), dtype)
    for one, other in ((states, exact_states), (kept, exact_kept)):
        written = ~other.flatten(1).isnan().any(1)
        assert torch.equal(~one.flatten(1).isnan().any(1), written), "another block is written"
        assert_near(one[written].flatten(1), other[written].flatten(1).double(), dtype)


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
