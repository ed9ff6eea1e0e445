"""The form of what is known of an architecture in GGUF files (`gguf_tensors.py`), and what several
of them have in common."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from longshore.protocol.gguf_header import GgufTensor
from longshore.worker.loading.gguf_recipes import Recipe, of_dims, one_of, reshaped
from longshore.worker.models.json_fields import MAX_COUNT


class DeltaHeads(NamedTuple):
    """Numbers of heads of gated DeltaNet layers, and their elements."""

    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int

    @property
    def key_width(self) -> int:
        """Elements of all key heads."""
        return self.num_keys * self.key_dim

    @property
    def value_width(self) -> int:
        """Elements of all value heads."""
        return self.num_values * self.value_dim


class Heads(NamedTuple):
    """Numbers of heads, in the metadata. delta: of architectures with gated DeltaNet."""

    of_queries: int
    of_keys: int
    delta: DeltaHeads = DeltaHeads(0, 0, 0, 0)


Make: TypeAlias = Callable[[GgufTensor, Heads], Iterable[tuple[str, Recipe]]]
Join: TypeAlias = Callable[[list[Recipe], Heads], Recipe]


@dataclass(frozen=True)
class Architecture:
    """names:  tensors that are stored as they are: the module in the file, and in the model. Of a
               layer, names are without the layer.
    made:      others: the tensor in the file, and how those of the model are made of it.
    joined:    tensors of a layer that are made of several: the name, its sources, and how.
    changed:   what is done to the values of tensors whose names in the model end so.
    layers:    how the names of layers begin in the model.
    has_delta: whether it has layers of gated DeltaNet.
    """

    names: Mapping[str, str]
    made: Mapping[str, Make] = field(default_factory=dict)
    joined: tuple[tuple[str, tuple[str, ...], Join], ...] = ()
    changed: Mapping[str, Callable[[np.ndarray], np.ndarray]] = field(default_factory=dict)
    layers: str = "model.layers."
    has_delta: bool = False


def split_experts(name: str, gate: str, up: str, down: str) -> dict[str, Make]:
    """Stacks with a matrix per expert. name: of the experts in a layer."""

    def split(target: str) -> Make:
        def make(tensor: GgufTensor, heads: Heads) -> Iterable[tuple[str, Recipe]]:
            count = of_dims(tensor, 3).shape[0]
            if count > MAX_COUNT:
                raise ValueError(f"{tensor.name} has {count:,} experts")
            return [(f"{name}.{i}.{target}.weight", one_of(tensor, i)) for i in range(count)]

        return make

    return {
        "ffn_gate_exps.weight": split(gate),
        "ffn_up_exps.weight": split(up),
        "ffn_down_exps.weight": split(down),
    }


def as_recipe(target: str, recipe: Callable[[GgufTensor], Recipe]) -> Make:
    return lambda tensor, heads: [(target, recipe(tensor))]


def alone(join: Callable[[list[Recipe]], Recipe]) -> Join:
    """Of the parts only."""
    return lambda parts, heads: join(parts)


def minus_one(values: np.ndarray) -> np.ndarray:
    changed: np.ndarray = values - np.float32(1)
    return changed


def log_of_negative(values: np.ndarray) -> np.ndarray:
    changed: np.ndarray = np.log(-values)
    return changed


def convolution(tensor: GgufTensor) -> Recipe:
    channels, width = of_dims(tensor, 2).shape
    return reshaped(tensor, (channels, 1, width))


OUTER: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
ATTENTION: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
MLP: Final = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
DENSE: Final = {**OUTER, **ATTENTION, **MLP}
HEAD_NORMS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP_EXPERTS: Final = split_experts("mlp.experts", "gate_proj", "up_proj", "down_proj")
