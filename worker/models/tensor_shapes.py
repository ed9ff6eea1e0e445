"""The tensors of layers in a checkpoint, by name, with their shapes.

They say the same as the `checkpoint_tensors` of the layers, without torch: so weights that do not
fit config.json are refused before any process is started. A test compares the two for all families.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

Shapes: TypeAlias = dict[str, tuple[int, ...]]


def linear(name: str, rows: int, columns: int, *, bias: bool = False) -> Shapes:
    """rows: outputs."""
    weight: Shapes = {f"{name}.weight": (rows, columns)}
    return weight | {f"{name}.bias": (rows,)} if bias else weight


def layer_norm(name: str, size: int) -> Shapes:
    """With a bias, unlike RMSNorm."""
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def norms(name: str, size: int, *names: str) -> Shapes:
    """RMSNorms of a layer."""
    return {f"{name}.{norm}.weight": (size,) for norm in names}


def gated_mlp(
    name: str,
    size: int,
    width: int,
    *,
    bias: bool = False,
    names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
) -> Shapes:
    """names: of gate, up and down."""
    gate, up, down = names
    return {
        **linear(f"{name}.{gate}", width, size, bias=bias),
        **linear(f"{name}.{up}", width, size, bias=bias),
        **linear(f"{name}.{down}", size, width, bias=bias),
    }


def mlp(
    name: str,
    size: int,
    width: int,
    names: Sequence[str] = ("fc1", "fc2"),
    *,
    bias: bool = True,
) -> Shapes:
    """Without a gate."""
    up, down = names
    return {
        **linear(f"{name}.{up}", width, size, bias=bias),
        **linear(f"{name}.{down}", size, width, bias=bias),
    }


def split_experts(
    name: str,
    num_experts: int,
    size: int,
    width: int,
    names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
) -> Shapes:
    """A router called `gate`, and three matrices per expert. names: of gate, up and down."""
    gate, up, down = names

    def tensors() -> Iterator[Shapes]:
        yield linear(f"{name}.gate", num_experts, size)
        for expert in range(num_experts):
            module = f"{name}.experts.{expert}"
            yield linear(f"{module}.{gate}", width, size)
            yield linear(f"{module}.{up}", width, size)
            yield linear(f"{module}.{down}", size, width)

    return {key: shape for part in tensors() for key, shape in part.items()}


def stacked_experts(
    name: str, num_experts: int, size: int, width: int, *, bias: bool = False
) -> Shapes:
    """A router called `router`, and two tensors for all experts, as (expert, inputs, outputs)."""
    shapes: Shapes = {
        **linear(f"{name}.router", num_experts, size, bias=bias),
        f"{name}.experts.gate_up_proj": (num_experts, size, 2 * width),
        f"{name}.experts.down_proj": (num_experts, width, size),
    }
    if bias:
        shapes[f"{name}.experts.gate_up_proj_bias"] = (num_experts, 2 * width)
        shapes[f"{name}.experts.down_proj_bias"] = (num_experts, size)
    return shapes


def experts_by_outputs(name: str, num_experts: int, size: int, width: int) -> Shapes:
    """A router called `gate`, and two tensors for all experts, as (expert, outputs, inputs)."""
    return {
        **linear(f"{name}.gate", num_experts, size),
        f"{name}.experts.gate_up_proj": (num_experts, 2 * width, size),
        f"{name}.experts.down_proj": (num_experts, size, width),
    }
