"""The gates of the feed-forward layer."""

import pytest
import torch
import torch.nn.functional as F

from longshore.worker.layers.mlp import GATES

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_activation_has_its_gate(dtype: torch.dtype) -> None:
    assert GATES.keys() == ACTIVATIONS.keys()
    gate_up = torch.linspace(-6, 6, 5 * 46).view(5, 46).to(dtype)
    gate, up = gate_up.chunk(2, dim=1)
    for name, activation in ACTIVATIONS.items():
        before = gate_up.clone()
        torch.testing.assert_close(GATES[name](gate_up), activation(gate) * up)
        assert torch.equal(gate_up, before)
