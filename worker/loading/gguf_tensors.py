"""What llama.cpp's converter did to the tensors of a Hugging Face model, undone, by architecture.

The converter renames tensors, stacks those of experts, turns the rows of some and changes the
values of others. That the tables are right is tested with the files that it makes of tiny models.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from longshore.protocol.errors import shortened
from longshore.protocol.gguf_header import GgufTensor
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.loading.gguf_recipes import (
    Recipe,
    below_each_other,
    heads_of_latents,
    in_turns,
    of_dims,
    one_of,
    plain,
    reshaped,
    rows_of_stacks,
    transposed,
    turned,
    with_values,
)
from longshore.worker.models.json_fields import MAX_COUNT

UNUSED: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Vectors that belong to the config."""
_LAYER: Final = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(.+)")


class Heads(NamedTuple):
    """Numbers of heads, in the metadata."""

    of_queries: int
    of_keys: int


Make: TypeAlias = Callable[[GgufTensor, Heads], Iterable[tuple[str, Recipe]]]
Join: TypeAlias = Callable[[list[Recipe]], Recipe]


@dataclass(frozen=True)
class Architecture:
    """names:  tensors that are stored as they are: the module in the file, and in the model. Of a
               layer, names are without the layer.
    made:      others: the tensor in the file, and how those of the model are made of it.
    joined:    tensors of a layer that are made of several: the name, its sources, and how.
    changed:   what is done to the values of tensors whose names in the model end so.
    layers:    how the names of layers begin in the model.
    """

    names: Mapping[str, str]
    made: Mapping[str, Make] = field(default_factory=dict)
    joined: tuple[tuple[str, tuple[str, ...], Join], ...] = ()
    changed: Mapping[str, Callable[[np.ndarray], np.ndarray]] = field(default_factory=dict)
    layers: str = "model.layers."


def recipes(
    metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor], source: str
) -> dict[str, Recipe]:
    """The recipes of a model's tensors, by name. Tensors that the architecture does not have keep
    the name that they have in the file, so that messages can name them.

    source: for messages. Raises UnsupportedModel for an unknown architecture, and BrokenCheckpoint
    for tensors that do not fit the metadata.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{source}: GGUF files of the architecture {shortened(repr(name))} are not supported. "
            f"Supported: {', '.join(sorted(ARCHITECTURES))}. Use the model in Hugging Face format."
        )
    architecture = ARCHITECTURES[name]
    try:
        return _recipes(architecture, tensors, _heads(metadata, name))
    except ValueError as error:
        raise BrokenCheckpoint(f"{source}: {error}. Fetch the file again.") from error


def _recipes(
    architecture: Architecture, tensors: Mapping[str, GgufTensor], heads: Heads
) -> dict[str, Recipe]:
    made: dict[str, Recipe] = {}
    for stored, tensor in tensors.items():
        if stored not in UNUSED:
            made.update(_made_of(architecture, tensor, heads))
    for layer in {match[1] for match in map(_LAYER.fullmatch, tensors) if match}:
        for target, parts, join in architecture.joined:
            names = [f"blk.{layer}.{part}" for part in parts]
            if all(part in made for part in names):
                recipe = join([made.pop(part) for part in names])
                made[f"{architecture.layers}{layer}.{target}"] = recipe
    return {name: _changed(architecture, name, recipe) for name, recipe in made.items()}


def _heads(metadata: Mapping[str, Any], name: str) -> Heads:
    """A list has a number for each layer; layers without attention have none."""
    queries = metadata.get(f"{name}.attention.head_count")
    keys = metadata.get(f"{name}.attention.head_count_kv", queries)
    counts = []
    for number in (queries, keys):
        found = {each for each in number if each} if isinstance(number, list) else {number}
        count = found.pop() if len(found) == 1 else None
        if type(count) is not int or count < 1:
            raise ValueError(
                f"attention.head_count={shortened(repr(queries))} and attention.head_count_kv="
                f"{shortened(repr(keys))} are not numbers of heads, the same in all layers"
            )
        counts.append(count)
    return Heads(*counts)


def _made_of(
    architecture: Architecture, tensor: GgufTensor, heads: Heads
) -> Iterable[tuple[str, Recipe]]:
    match = _LAYER.fullmatch(tensor.name)
    prefix, name = "", tensor.name
    if match is not None:
        prefix, name = f"{architecture.layers}{match[1]}.", match[2]
    module, _, kind = name.rpartition(".")
    if name in architecture.made:
        for target, recipe in architecture.made[name](tensor, heads):
            yield prefix + target, recipe
    elif name in architecture.names:
        yield prefix + architecture.names[name], plain(tensor)
    elif module in architecture.names:
        yield f"{prefix}{architecture.names[module]}.{kind}", plain(tensor)
    else:
        yield tensor.name, plain(tensor)


def _changed(architecture: Architecture, name: str, recipe: Recipe) -> Recipe:
    for ending, change in architecture.changed.items():
        if name.endswith(ending):
            return with_values(recipe, change)
    return recipe


def _turned_heads() -> dict[str, Make]:
    """Queries and keys of architectures whose rotated pairs are neighbours in the file."""

    def queries(tensor: GgufTensor, heads: Heads) -> Iterable[tuple[str, Recipe]]:
        kind = tensor.name.rpartition(".")[2]
        yield f"self_attn.q_proj.{kind}", turned(tensor, heads.of_queries)

    def keys(tensor: GgufTensor, heads: Heads) -> Iterable[tuple[str, Recipe]]:
        kind = tensor.name.rpartition(".")[2]
        yield f"self_attn.k_proj.{kind}", turned(tensor, heads.of_keys)

    return {
        "attn_q.weight": queries,
        "attn_q.bias": queries,
        "attn_k.weight": keys,
        "attn_k.bias": keys,
    }


def _split_experts(name: str, gate: str, up: str, down: str) -> dict[str, Make]:
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


def _as(target: str, recipe: Callable[[GgufTensor], Recipe]) -> Make:
    return lambda tensor, heads: [(target, recipe(tensor))]


def _minus_one(values: np.ndarray) -> np.ndarray:
    changed: np.ndarray = values - np.float32(1)
    return changed


def _log_of_negative(values: np.ndarray) -> np.ndarray:
    changed: np.ndarray = np.log(-values)
    return changed


def _vector(tensor: GgufTensor) -> Recipe:
    return reshaped(tensor, (int(np.prod(tensor.shape, dtype=object)),))


def _convolution(tensor: GgufTensor) -> Recipe:
    channels, width = of_dims(tensor, 2).shape
    return reshaped(tensor, (channels, 1, width))


_OUTER: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP: Final = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_DENSE: Final = {**_OUTER, **_ATTENTION, **_MLP}
_HEAD_NORMS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MLP_EXPERTS: Final = _split_experts("mlp.experts", "gate_proj", "up_proj", "down_proj")
_GRANITE_MLP: Final = "shared_mlp.input_linear.weight"

_LLAMA: Final = Architecture(
    {**_DENSE, "ffn_gate_inp": "block_sparse_moe.gate"},
    made=_turned_heads() | _split_experts("block_sparse_moe.experts", "w1", "w3", "w2"),
)
_GEMMA2: Final = Architecture({**_DENSE, **_SANDWICH}, changed={"norm.weight": _minus_one})
_GRANITE: Final = Architecture(
    {
        **_OUTER,
        **_ATTENTION,
        "ffn_norm": "post_attention_layernorm",
        "ffn_down": "shared_mlp.output_linear",
    },
    made=_turned_heads(),
    joined=((_GRANITE_MLP, ("ffn_gate.weight", "ffn_up.weight"), below_each_other),),
)
ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "bert": Architecture(
        {
            "token_embd": "bert.embeddings.word_embeddings",
            "position_embd": "bert.embeddings.position_embeddings",
            "token_types": "bert.embeddings.token_type_embeddings",
            "token_embd_norm": "bert.embeddings.LayerNorm",
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
        layers="bert.encoder.layer.",
    ),
    "deepseek2": Architecture(
        {
            **_DENSE,
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "ffn_gate_inp": "mlp.gate",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
            "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
            "ffn_up_shexp": "mlp.shared_experts.up_proj",
            "ffn_down_shexp": "mlp.shared_experts.down_proj",
        },
        made=_MLP_EXPERTS,
        joined=(
            (
                "self_attn.kv_b_proj.weight",
                ("attn_k_b.weight", "attn_v_b.weight"),
                heads_of_latents,
            ),
        ),
    ),
    "gemma2": _GEMMA2,
    "gemma3": Architecture({**_GEMMA2.names, **_HEAD_NORMS}, changed=_GEMMA2.changed),
    "gpt-oss": Architecture(
        {
            **_OUTER,
            **_ATTENTION,
            "attn_sinks.weight": "self_attn.sinks",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        made={
            "ffn_down_exps.weight": _as(
                "mlp.experts.down_proj", lambda tensor: transposed(of_dims(tensor, 3))
            )
        },
        joined=(
            (
                "mlp.experts.gate_up_proj",
                ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
                in_turns,
            ),
            (
                "mlp.experts.gate_up_proj_bias",
                ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
                in_turns,
            ),
        ),
    ),
    "granite": _GRANITE,
    "granitehybrid": Architecture(
        {
            **_GRANITE.names,
            "ssm_in": "mamba.in_proj",
            "ssm_conv1d": "mamba.conv1d",
            "ssm_dt.bias": "mamba.dt_bias",
            "ssm_out": "mamba.out_proj",
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_down_exps": "block_sparse_moe.output_linear",
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
        made=_turned_heads()
        | {
            "ssm_conv1d.weight": _as("mamba.conv1d.weight", _convolution),
            "ssm_a": _as("mamba.A_log", _vector),
            "ssm_d": _as("mamba.D", _vector),
            "ssm_norm.weight": _as("mamba.norm.weight", _vector),
        },
        joined=(
            *_GRANITE.joined,
            (_GRANITE_MLP, ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), below_each_other),
            (
                "block_sparse_moe.input_linear.weight",
                ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
                rows_of_stacks,
            ),
        ),
        changed={"mamba.A_log": _log_of_negative},
    ),
    "llama": _LLAMA,
    "mistral3": _LLAMA,
    "phi3": Architecture(
        {
            **_OUTER,
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        }
    ),
    "qwen2": Architecture(_DENSE),
    "qwen3": Architecture({**_DENSE, **_HEAD_NORMS}),
    "qwen3moe": Architecture(
        {**_DENSE, **_HEAD_NORMS, "ffn_gate_inp": "mlp.gate"}, made=_MLP_EXPERTS
    ),
}
