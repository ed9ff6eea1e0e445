"""What llama.cpp's converter did to the tensors of a Hugging Face model, undone, by architecture.

The converter renames tensors, stacks those of experts, turns the rows of some and changes the
values of others. That the tables are right is tested with the files that it makes of tiny models.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from longshore.protocol.errors import shortened
from longshore.protocol.gguf_header import GgufTensor
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.loading.gguf_architecture import (
    ATTENTION,
    DENSE,
    HEAD_NORMS,
    MLP_EXPERTS,
    OUTER,
    Architecture,
    Heads,
    Make,
    alone,
    as_recipe,
    convolution,
    log_of_negative,
    minus_one,
    split_experts,
)
from longshore.worker.loading.gguf_delta import QWEN3_NEXT, QWEN35, QWEN35_MOE, delta_heads
from longshore.worker.loading.gguf_recipes import (
    Recipe,
    below_each_other,
    heads_of_latents,
    in_turns,
    of_dims,
    plain,
    reshaped,
    rows_of_stacks,
    transposed,
    turned,
    with_values,
)

UNUSED: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Vectors that belong to the config."""
_LAYER: Final = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(.+)")


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
        heads = _heads(metadata, name)
        if architecture.has_delta:
            heads = heads._replace(delta=delta_heads(metadata, name))
        return _recipes(architecture, _without_drafter(metadata, name, tensors), heads)
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
                recipe = join([made.pop(part) for part in names], heads)
                made[f"{architecture.layers}{layer}.{target}"] = recipe
    return {name: _changed(architecture, name, recipe) for name, recipe in made.items()}


def _heads(metadata: Mapping[str, Any], name: str) -> Heads:
    """A list has a number for each layer; layers without attention have none."""
    queries = metadata.get(f"{name}.attention.head_count")
    keys = metadata.get(f"{name}.attention.head_count_kv", queries)
    counts: list[int] = []
    for number in (queries, keys):
        found = {each for each in number if each} if isinstance(number, list) else {number}
        count = found.pop() if len(found) == 1 else None
        if type(count) is not int or count < 1:
            raise ValueError(
                f"attention.head_count={shortened(repr(queries))} and attention.head_count_kv="
                f"{shortened(repr(keys))} are not numbers of heads, the same in all layers"
            )
        counts.append(count)
    of_queries, of_keys = counts
    return Heads(of_queries, of_keys)


def _without_drafter(
    metadata: Mapping[str, Any], name: str, tensors: Mapping[str, GgufTensor]
) -> Mapping[str, GgufTensor]:
    """Without the last layers, if they are for multi-token prediction."""
    count, num_drafted = (
        metadata.get(f"{name}.{key}", 0) for key in ("block_count", "nextn_predict_layers")
    )
    if not (type(count) is int and type(num_drafted) is int and 0 < num_drafted < count):
        return tensors

    def is_drafter(match: re.Match[str] | None) -> bool:
        return match is not None and int(match[1]) >= count - num_drafted

    return {
        stored: tensor
        for stored, tensor in tensors.items()
        if not is_drafter(_LAYER.fullmatch(stored))
    }


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


def _turned_heads(name: str = "self_attn") -> dict[str, Make]:
    """Queries and keys of architectures whose rotated pairs are neighbours in the file. name: of
    the module."""

    def queries(tensor: GgufTensor, heads: Heads) -> Iterable[tuple[str, Recipe]]:
        kind = tensor.name.rpartition(".")[2]
        yield f"{name}.q_proj.{kind}", turned(tensor, heads.of_queries)

    def keys(tensor: GgufTensor, heads: Heads) -> Iterable[tuple[str, Recipe]]:
        kind = tensor.name.rpartition(".")[2]
        yield f"{name}.k_proj.{kind}", turned(tensor, heads.of_keys)

    return {
        "attn_q.weight": queries,
        "attn_q.bias": queries,
        "attn_k.weight": keys,
        "attn_k.bias": keys,
    }


def _vector(tensor: GgufTensor) -> Recipe:
    return reshaped(tensor, (int(np.prod(tensor.shape, dtype=object)),))


_SANDWICH: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GRANITE_MLP: Final = "shared_mlp.input_linear.weight"


_SSM: Final = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_dt.bias": "dt_bias",
    "ssm_out": "out_proj",
}


def _mamba(name: str) -> dict[str, Make]:
    """Tensors of Mamba layers in another shape. name: of the module."""
    return {
        "ssm_conv1d.weight": as_recipe(f"{name}.conv1d.weight", convolution),
        "ssm_a": as_recipe(f"{name}.A_log", _vector),
        "ssm_d": as_recipe(f"{name}.D", _vector),
        "ssm_norm.weight": as_recipe(f"{name}.norm.weight", _vector),
    }


def _of(name: str, modules: Mapping[str, str]) -> dict[str, str]:
    """The modules of another one, by their names in the file."""
    return {stored: f"{name}.{module}" for stored, module in modules.items()}


_LFM2: Final = Architecture(
    {
        "token_embd": "model.embed_tokens",
        "token_embd_norm": "model.embedding_norm",
        "output_norm": "model.embedding_norm",
        "output": "lm_head",
        **ATTENTION,
        "attn_norm": "operator_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        **_of("conv", {"shortconv.in_proj": "in_proj", "shortconv.out_proj": "out_proj"}),
        "shortconv.conv.bias": "conv.conv.bias",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        "ffn_gate_inp": "feed_forward.gate",
        "exp_probs_b.bias": "feed_forward.expert_bias",
    },
    made={
        "shortconv.conv.weight": as_recipe("conv.conv.weight", convolution),
        **split_experts("feed_forward.experts", "w1", "w3", "w2"),
    },
)
_NEMOTRON_H: Final = Architecture(
    {
        "token_embd": "backbone.embeddings",
        "output_norm": "backbone.norm_f",
        "output": "lm_head",
        "attn_norm": "norm",
        **_of(
            "mixer",
            {
                **_SSM,
                "attn_v": "v_proj",
                "attn_output": "o_proj",
                "ffn_up": "up_proj",
                "ffn_down": "down_proj",
                "ffn_gate_inp": "gate",
                "exp_probs_b.bias": "gate.e_score_correction_bias",
                "ffn_up_shexp": "shared_experts.up_proj",
                "ffn_down_shexp": "shared_experts.down_proj",
                "ffn_latent_down": "fc1_latent_proj",
                "ffn_latent_up": "fc2_latent_proj",
            },
        ),
    },
    made={
        **_turned_heads("mixer"),
        **_mamba("mixer"),
        **split_experts("mixer.experts", "gate_proj", "up_proj", "down_proj"),
    },
    changed={"mixer.A_log": log_of_negative},
    layers="backbone.layers.",
)
_LLAMA: Final = Architecture(
    {**DENSE, "ffn_gate_inp": "block_sparse_moe.gate"},
    made=_turned_heads() | split_experts("block_sparse_moe.experts", "w1", "w3", "w2"),
)
_GEMMA2: Final = Architecture({**DENSE, **_SANDWICH}, changed={"norm.weight": minus_one})
_GRANITE: Final = Architecture(
    {
        **OUTER,
        **ATTENTION,
        "ffn_norm": "post_attention_layernorm",
        "ffn_down": "shared_mlp.output_linear",
    },
    made=_turned_heads(),
    joined=((_GRANITE_MLP, ("ffn_gate.weight", "ffn_up.weight"), alone(below_each_other)),),
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
            **DENSE,
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
        made=MLP_EXPERTS,
        joined=(
            (
                "self_attn.kv_b_proj.weight",
                ("attn_k_b.weight", "attn_v_b.weight"),
                alone(heads_of_latents),
            ),
        ),
    ),
    "falcon-h1": Architecture(
        {
            **OUTER,
            "output_norm": "model.final_layernorm",
            **ATTENTION,
            "ffn_norm": "pre_ff_layernorm.weight",  # has no ending in files
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
            **_of("mamba", _SSM),
        },
        made=_mamba("mamba"),
        changed={"mamba.A_log": log_of_negative},
    ),
    "gemma2": _GEMMA2,
    "gemma3": Architecture({**_GEMMA2.names, **HEAD_NORMS}, changed=_GEMMA2.changed),
    "gpt-oss": Architecture(
        {
            **OUTER,
            **ATTENTION,
            "attn_sinks.weight": "self_attn.sinks",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        made={
            "ffn_down_exps.weight": as_recipe(
                "mlp.experts.down_proj", lambda tensor: transposed(of_dims(tensor, 3))
            )
        },
        joined=(
            (
                "mlp.experts.gate_up_proj",
                ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
                alone(in_turns),
            ),
            (
                "mlp.experts.gate_up_proj_bias",
                ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
                alone(in_turns),
            ),
        ),
    ),
    "granite": _GRANITE,
    "granitehybrid": Architecture(
        {
            **_GRANITE.names,
            **_of("mamba", _SSM),
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_down_exps": "block_sparse_moe.output_linear",
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
        made=_turned_heads() | _mamba("mamba"),
        joined=(
            *_GRANITE.joined,
            (
                _GRANITE_MLP,
                ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
                alone(below_each_other),
            ),
            (
                "block_sparse_moe.input_linear.weight",
                ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
                alone(rows_of_stacks),
            ),
        ),
        changed={"mamba.A_log": log_of_negative},
    ),
    "lfm2": _LFM2,
    "lfm2moe": _LFM2,
    "llama": _LLAMA,
    "mistral3": _LLAMA,
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "phi3": Architecture(
        {
            **OUTER,
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        }
    ),
    "qwen2": Architecture(DENSE),
    "qwen3": Architecture({**DENSE, **HEAD_NORMS}),
    "qwen3moe": Architecture({**DENSE, **HEAD_NORMS, "ffn_gate_inp": "mlp.gate"}, made=MLP_EXPERTS),
    "qwen35": QWEN35,
    "qwen35moe": QWEN35_MOE,
    "qwen3next": QWEN3_NEXT,
}
