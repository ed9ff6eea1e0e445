"""config.json of the model in a GGUF file, from its metadata: a table of architectures.

A setting that no table knows is refused, because llama.cpp would compute something else with it.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from longshore.protocol.errors import shortened
from longshore.protocol.gguf_header import STORED_DTYPE
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel, some_of
from longshore.worker.models.families import ARCHITECTURES, ENCODERS

JsonObject = dict[str, Any]

_WITHOUT_EFFECT: Final = frozenset(
    {
        "vocab_size",  # the embeddings say it
        "tensor_data_layout",
        "rope.scaling.finetuned",
        "attention.causal",  # of encoders, whose family says it
    }
)
_LLAMA4_SCALING: Final = "attention.temperature_scale"


class GgufModel:
    """The metadata of one file, and the shapes of all tensors.

    vectors: the values of small tensors that belong to the config, by name.
    source:  for messages.
    """

    def __init__(
        self,
        metadata: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        vectors: Mapping[str, list[float]],
        source: str,
    ) -> None:
        self.metadata = metadata
        self.shapes = shapes
        self.vectors = dict(vectors)
        self.source = source
        self.architecture = str(metadata.get("general.architecture"))
        self._used: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """A setting of the architecture; of a list with one value for all layers, the value."""
        self._used.add(key)
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            return value[0]
        return value

    def unused(self) -> list[str]:
        prefix = f"{self.architecture}."
        keys = {key.removeprefix(prefix) for key in self.metadata if key.startswith(prefix)}
        return sorted(prefix + key for key in keys - self._used - _WITHOUT_EFFECT)

    def layers_with(self, name: str) -> list[bool]:
        """Of each layer, whether it has this tensor."""
        return [f"blk.{layer}.{name}" in self.shapes for layer in range(self.num_layers)]

    @property
    def num_layers(self) -> int:
        """Raises BrokenCheckpoint unless the file has as many layers as it says."""
        count = self.get("block_count")
        found = {name.split(".")[1] for name in self.shapes if name.startswith("blk.")}
        if type(count) is not int or count != len(found) or not count:
            raise self.broken(
                f"{self.architecture}.block_count={shortened(repr(count))}, and tensors of "
                f"{len(found):,} layers"
            )
        return count

    def broken(self, problem: str) -> BrokenCheckpoint:
        return BrokenCheckpoint(f"{self.source} has {problem}. Fetch the file again.")

    def unsupported(self, problem: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.source} has {problem}. Use the model in Hugging Face format."
        )


_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_QUANTISED_DTYPE: Final = "bfloat16"


def config_of(model: GgufModel, stored_dtype: str) -> JsonObject:
    """stored_dtype: of most matrices; it decides in which dtype the model is computed by default.

    Raises UnsupportedModel for settings that are not supported, and BrokenCheckpoint if something
    is missing. What values are allowed, the reader of config.json checks.
    """
    read = _READERS.get(model.architecture)
    if read is None:
        raise UnsupportedModel(
            f"{model.source}: GGUF files of the architecture "
            f"{shortened(repr(model.metadata.get('general.architecture')))} are not supported. "
            f"Supported: {', '.join(sorted(_READERS))}. Use the model in Hugging Face format."
        )
    try:
        config = read(model)
    except (TypeError, ArithmeticError) as error:  # of what is computed from several settings
        raise model.broken(f"a setting that is not a number ({error})") from error
    if unused := model.unused():
        raise model.unsupported(f"settings that are not supported: {some_of(unused)}")
    if model.vectors:
        raise model.unsupported(f"{some_of(sorted(model.vectors))}, which is not supported here")
    (family,) = config["architectures"]
    config |= {
        "model_type": (ARCHITECTURES | ENCODERS)[family].model_type,
        "dtype": _DTYPES.get(stored_dtype, _QUANTISED_DTYPE),
        STORED_DTYPE: stored_dtype,
    }
    return {key: value for key, value in config.items() if value is not None}


def _common(model: GgufModel, family: str) -> JsonObject:
    """What all families have, in the keys of config.json."""
    embeddings = model.shapes.get("token_embd.weight", ())
    if len(embeddings) != 2:
        raise model.broken("no matrix token_embd.weight")
    return {
        "architectures": [family],
        "vocab_size": embeddings[0],
        "hidden_size": model.get("embedding_length"),
        "intermediate_size": model.get("feed_forward_length"),
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.get("attention.head_count"),
        "num_key_value_heads": model.get("attention.head_count_kv"),
        "max_position_embeddings": model.get("context_length"),
        "tie_word_embeddings": "output.weight" not in model.shapes,
        "bos_token_id": model.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": model.metadata.get("tokenizer.ggml.eos_token_id"),
    }


def _decoder(model: GgufModel, family: str) -> JsonObject:
    return _common(model, family) | {
        "rms_norm_eps": model.get("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(model),
    }


def _decoder_with_heads(model: GgufModel, family: str) -> JsonObject:
    return _decoder(model, family) | {"head_dim": _head_dim(model)}


def _head_dim(model: GgufModel) -> Any:
    """Of keys and of values; None: not given."""
    head_dim = model.get("attention.key_length")
    if model.get("attention.value_length", head_dim) != head_dim:
        raise model.unsupported("keys and values of different widths")
    return head_dim


def _rotated_heads(model: GgufModel, family: str) -> JsonObject:
    """Of families that rotate whole heads, or a part of each."""
    config = _decoder_with_heads(model, family)
    rotated = model.get("rope.dimension_count")
    heads, size = config["num_attention_heads"], config["hidden_size"]
    if all(type(number) is int and number > 0 for number in (rotated, heads, size)):
        head_dim = config["head_dim"] or size // heads
        if head_dim and rotated != head_dim:
            config["rope_parameters"]["partial_rotary_factor"] = rotated / head_dim
    return config


def _rope(model: GgufModel) -> JsonObject:
    theta = {"rope_theta": model.get("rope.freq_base", 10_000.0)}
    factor = model.get("rope.scaling.factor", model.get("rope.scale_linear"))
    kind = model.get("rope.scaling.type", "linear" if factor else "none")
    original = model.get("rope.scaling.original_context_length")
    factors = model.vectors.pop("rope_freqs.weight", None)
    if factors is not None:
        if kind != "none":
            raise model.unsupported(f"both rope_freqs.weight and rope scaling {kind!r}")
        return theta | _divided(factors, factors, model.get("context_length"), 1.0)
    if kind == "yarn":
        return theta | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": model.get("rope.scaling.yarn_attn_factor"),
            "beta_fast": model.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": model.get("rope.scaling.yarn_beta_slow"),
        }
    if kind == "longrope":
        short = model.vectors.pop("rope_factors_short.weight", None)
        long = model.vectors.pop("rope_factors_long.weight", None)
        if short is None or long is None:
            raise model.broken("rope scaling 'longrope' without its factors")
        return theta | _divided(short, long, original, model.get("rope.scaling.attn_factor"))
    if kind == "linear" and factor not in (None, 0.0, 1.0):
        return theta | {"rope_type": "linear", "factor": factor}
    if kind not in ("none", "linear"):
        raise model.unsupported(f"rope scaling {shortened(repr(kind))}")
    return theta | {"rope_type": "default"}


def _divided(
    short: list[float], long: list[float], original: Any, attention_factor: float | None
) -> JsonObject:
    """Each frequency divided by a factor of its own, as LongRoPE has it."""
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        "attention_factor": attention_factor,
    }


def _llama(model: GgufModel) -> JsonObject:
    if model.get(_LLAMA4_SCALING):
        raise model.unsupported("attention scaled by position (attention.temperature_scale)")
    num_experts = model.get("expert_count") or 0
    has_bias = any(model.layers_with("attn_q.bias"))
    config = _rotated_heads(model, "MixtralForCausalLM" if num_experts else "LlamaForCausalLM")
    config |= {"attention_bias": has_bias, "mlp_bias": any(model.layers_with("ffn_up.bias"))}
    num_used = model.get("expert_used_count")
    if num_experts:
        config |= {"num_local_experts": num_experts, "num_experts_per_tok": num_used}
    return config


def _qwen2(model: GgufModel) -> JsonObject:
    return _rotated_heads(model, "Qwen2ForCausalLM")


def _qwen3(model: GgufModel) -> JsonObject:
    config = _rotated_heads(model, "Qwen3ForCausalLM")
    return config | {"attention_bias": any(model.layers_with("attn_q.bias"))}


def _qwen3moe(model: GgufModel) -> JsonObject:
    """llama.cpp always normalises the weights of this architecture's experts."""
    config = _rotated_heads(model, "Qwen3MoeForCausalLM")
    mixtures = model.layers_with("ffn_gate_inp.weight")
    return config | {
        "attention_bias": any(model.layers_with("attn_q.bias")),
        "num_experts": model.get("expert_count"),
        "num_experts_per_tok": model.get("expert_used_count"),
        "moe_intermediate_size": model.get("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "mlp_only_layers": [layer for layer, is_one in enumerate(mixtures) if not is_one],
    }


def _delta(model: GgufModel, family: str) -> JsonObject:
    """Of families with gated DeltaNet. What the layers are, their tensors say. Layers for
    multi-token prediction are not loaded."""
    config = _rotated_heads(model, family)
    num_layers = _num_layers_without_drafter(model)
    attends = model.layers_with("attn_q.weight")[:num_layers]
    for key in ("full_attention_interval", "attention.recurrent_layers"):
        model.get(key)
    model.get("rope.dimension_sections")  # of images
    num_heads = model.get("ssm.time_step_rank")
    return config | {
        "num_hidden_layers": num_layers,
        "attention_bias": any(model.layers_with("attn_q.bias")),
        "layer_types": ["full_attention" if each else "linear_attention" for each in attends],
        "linear_conv_kernel_dim": model.get("ssm.conv_kernel"),
        "linear_key_head_dim": model.get("ssm.state_size"),
        "linear_num_key_heads": model.get("ssm.group_count"),
        "linear_num_value_heads": num_heads,
        "linear_value_head_dim": model.get("ssm.inner_size") // num_heads,
    }


def _num_layers_without_drafter(model: GgufModel) -> int:
    """Layers without the last ones, if they are for multi-token prediction."""
    num_drafted = model.get("nextn_predict_layers", 0)
    num_layers: int = model.num_layers - num_drafted
    if not 0 < num_layers <= model.num_layers:
        raise model.broken(f"nextn_predict_layers={shortened(repr(num_drafted))}")
    return num_layers


def _qwen35(model: GgufModel) -> JsonObject:
    return _delta(model, "Qwen3_5ForCausalLM")


def _shared_mixture(model: GgufModel, family: str) -> JsonObject:
    """llama.cpp always normalises the weights of these architectures' experts."""
    config = _delta(model, family)
    mixtures = model.layers_with("ffn_gate_inp.weight")[: config["num_hidden_layers"]]
    dense = [layer for layer, is_one in enumerate(mixtures) if not is_one]
    return config | {
        "num_experts": model.get("expert_count"),
        "num_experts_per_tok": model.get("expert_used_count"),
        "moe_intermediate_size": model.get("expert_feed_forward_length"),
        "shared_expert_intermediate_size": model.get("expert_shared_feed_forward_length"),
        "mlp_only_layers": dense or None,
    }


def _qwen35moe(model: GgufModel) -> JsonObject:
    return _shared_mixture(model, "Qwen3_5MoeForCausalLM")


def _qwen3next(model: GgufModel) -> JsonObject:
    return _shared_mixture(model, "Qwen3NextForCausalLM")


_LARGEST_GEMMAS: Final = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose scores are scaled by the width of a head in the embedding."""


def _gemma(model: GgufModel, family: str) -> JsonObject:
    config = _decoder_with_heads(model, family)
    head_dim, heads, size = (
        config[key] for key in ("head_dim", "num_attention_heads", "hidden_size")
    )
    if config["num_hidden_layers"] == _LARGEST_GEMMAS[model.architecture] and heads:
        head_dim = size // heads
    return config | {
        "attention_bias": any(model.layers_with("attn_q.bias")),
        "query_pre_attn_scalar": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": model.get("final_logit_softcapping"),
        "sliding_window": model.get("attention.sliding_window"),
    }


def _gemma2(model: GgufModel) -> JsonObject:
    softcap = model.get("attn_logit_softcapping")
    return _gemma(model, "Gemma2ForCausalLM") | {"attn_logit_softcapping": softcap}


def _gemma3(model: GgufModel) -> JsonObject:
    config = _gemma(model, "Gemma3ForCausalLM")
    local = {"rope_type": "default", "rope_theta": model.get("rope.freq_base_swa", 10_000.0)}
    ropes = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    period = model.get("attention.sliding_window_pattern", 6)
    if type(period) is not int:
        raise model.unsupported("windows in a pattern of its own")
    return config | {"rope_parameters": ropes, "sliding_window_pattern": period}


def _phi3(model: GgufModel) -> JsonObject:
    config = _rotated_heads(model, "Phi3ForCausalLM")
    model.get("rope.scaling.original_context_length")
    if model.vectors and config["rope_parameters"]["rope_type"] == "default":
        # Only the attention factor says how positions are scaled.
        rope = _divided(
            model.vectors.pop("rope_factors_short.weight", []),
            model.vectors.pop("rope_factors_long.weight", []),
            model.get("rope.scaling.original_context_length"),
            model.get("rope.scaling.attn_factor"),
        )
        config["rope_parameters"] |= rope
    return config | {"sliding_window": model.get("attention.sliding_window") or None}


def _gpt_oss(model: GgufModel) -> JsonObject:
    config = _decoder_with_heads(model, "GptOssForCausalLM")
    model.get("rope.dimension_count")
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False
    return config | {
        "attention_bias": any(model.layers_with("attn_q.bias")),
        "intermediate_size": model.get("expert_feed_forward_length"),
        "num_local_experts": model.get("expert_count"),
        "num_experts_per_tok": model.get("expert_used_count"),
        "sliding_window": model.get("attention.sliding_window"),
    }


def _with_heads_in_some(model: GgufModel, family: str) -> JsonObject:
    """Of families in which some layers have no keys and values."""
    config = _decoder_with_heads(model, family)
    kv_heads = model.metadata.get(f"{model.architecture}.attention.head_count_kv")
    if isinstance(kv_heads, list):
        config["num_key_value_heads"] = max(kv_heads, default=None)
    return config


def _granite(model: GgufModel) -> JsonObject:
    """A Granite 4 whose layers all have attention and rotary positions."""
    config = _granite_hybrid(model)
    if config["num_local_experts"]:
        raise model.unsupported("experts, which this architecture does not have")
    return config | {
        "layer_types": ["attention"] * config["num_hidden_layers"],
        "position_embedding_type": "rope",
        "mamba_n_heads": 1,  # of layers that there are not
    }


def _granite_hybrid(model: GgufModel) -> JsonObject:
    config = _with_heads_in_some(model, "GraniteMoeHybridForCausalLM")
    model.get("rope.dimension_count")
    num_experts = model.get("expert_count") or 0
    is_attention = model.layers_with("attn_q.weight")
    shared = model.get("expert_shared_feed_forward_length", config["intermediate_size"])
    size, inner = config["hidden_size"], model.get("ssm.inner_size")
    heads = model.get("ssm.time_step_rank")
    mamba = {
        "mamba_n_heads": heads,
        "mamba_d_state": model.get("ssm.state_size"),
        "mamba_d_conv": model.get("ssm.conv_kernel"),
        "mamba_n_groups": model.get("ssm.group_count"),
        "mamba_conv_bias": any(model.layers_with("ssm_conv1d.bias")),
        "mamba_proj_bias": any(model.layers_with("ssm_in.bias")),
    }
    if not all(is_attention) and all(
        type(number) is int and number > 0 for number in (size, inner, heads)
    ):
        mamba |= {"mamba_expand": inner // size, "mamba_d_head": inner // heads}
    return (
        config
        | mamba
        | {
            "attention_bias": any(model.layers_with("attn_q.bias")),
            "layer_types": ["attention" if each else "mamba" for each in is_attention],
            "position_embedding_type": "nope",
            "shared_intermediate_size": shared,
            "num_local_experts": num_experts,
            "num_experts_per_tok": model.get("expert_used_count") or (1 if num_experts else None),
            "attention_multiplier": model.get("attention.scale"),
            "embedding_multiplier": model.get("embedding_scale"),
            "residual_multiplier": model.get("residual_scale"),
            "logits_scaling": model.get("logit_scale"),
        }
    )


_SIGMOID: Final = 2
"""Of `expert_gating_func`."""
_YARN_MULTIPLIER: Final = 0.1
"""llama.cpp stores the factor of YaRN's logarithm, and DeepSeek's config what multiplies it."""


def _deepseek2(model: GgufModel) -> JsonObject:
    latent, rotated = model.get("attention.kv_lora_rank"), model.get("rope.dimension_count")
    for key in ("attention.key_length", "attention.value_length"):
        model.get(key)  # of the latents
    width = model.get("attention.key_length_mla")
    if not all(type(number) is int and number > 0 for number in (latent, rotated, width)):
        raise model.unsupported(
            "keys and values that are not divided into heads (key_length_mla is missing), as old "
            "versions of llama.cpp wrote them"
        )
    is_v3 = model.get("expert_gating_func", 1) == _SIGMOID or any(
        model.layers_with("exp_probs_b.bias")
    )
    config = _decoder(model, "DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM")
    multiplier = model.get("rope.scaling.yarn_log_multiplier")
    if multiplier:
        scale = round(multiplier / _YARN_MULTIPLIER, 6)
        config["rope_parameters"] |= {"mscale": scale, "mscale_all_dim": scale}
    num_groups = model.get("expert_group_count")
    groups = {"n_group": num_groups, "topk_group": model.get("expert_group_used_count")}
    normalises = bool(model.get("expert_weights_norm", False))
    if is_v3:
        config["norm_topk_prob"] = normalises
    elif num_groups and num_groups > 1:
        config["topk_method"] = "group_limited_greedy"
    if normalises and not is_v3:
        config["norm_topk_prob"] = True
    return (
        config
        | groups
        | {
            "num_key_value_heads": config["num_attention_heads"],
            "q_lora_rank": model.get("attention.q_lora_rank", 0),
            "kv_lora_rank": latent,
            "qk_rope_head_dim": rotated,
            "qk_nope_head_dim": width - rotated,
            "v_head_dim": model.get("attention.value_length_mla"),
            "attention_bias": any(model.layers_with("attn_kv_a_mqa.bias")),
            "first_k_dense_replace": model.get("leading_dense_block_count"),
            "moe_intermediate_size": model.get("expert_feed_forward_length"),
            "n_routed_experts": model.get("expert_count"),
            "num_experts_per_tok": model.get("expert_used_count"),
            "n_shared_experts": model.get("expert_shared_count", 0),
            "routed_scaling_factor": model.get("expert_weights_scale", 1.0),
            "num_nextn_predict_layers": 0,
        }
    )


def _lfm2(model: GgufModel) -> JsonObject:
    config = _with_heads_in_some(model, "Lfm2ForCausalLM")
    model.get("rope.dimension_count")
    attends = model.layers_with("attn_q.weight")
    return config | {
        "norm_eps": config.pop("rms_norm_eps"),
        "layer_types": ["full_attention" if each else "conv" for each in attends],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": model.get("shortconv.l_cache"),
        "conv_bias": any(model.layers_with("shortconv.in_proj.bias")),
    }


def _lfm2moe(model: GgufModel) -> JsonObject:
    """llama.cpp always normalises the weights of this architecture's experts."""
    if model.get("expert_gating_func") != _SIGMOID:
        raise model.unsupported("experts without a sigmoid router")
    return _lfm2(model) | {
        "architectures": ["Lfm2MoeForCausalLM"],
        "num_dense_layers": model.get("leading_dense_block_count"),
        "num_experts": model.get("expert_count"),
        "num_experts_per_tok": model.get("expert_used_count"),
        "moe_intermediate_size": model.get("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "routed_scaling_factor": model.get("expert_weights_scale") or 1.0,
        "use_expert_bias": any(model.layers_with("exp_probs_b.bias")),
    }


def _falcon_h1(model: GgufModel) -> JsonObject:
    """The multipliers are in the weights. llama.cpp normalises after the gate, if at all."""
    config = _decoder_with_heads(model, "FalconH1ForCausalLM")
    model.get("rope.dimension_count")
    width, heads = model.get("ssm.inner_size"), model.get("ssm.time_step_rank")
    return config | {
        "attention_bias": any(model.layers_with("attn_q.bias")),
        "mlp_bias": any(model.layers_with("ffn_up.bias")),
        "mamba_d_ssm": width,
        "mamba_n_heads": heads,
        "mamba_d_head": width // heads,
        "mamba_d_state": model.get("ssm.state_size"),
        "mamba_d_conv": model.get("ssm.conv_kernel"),
        "mamba_n_groups": model.get("ssm.group_count"),
        "mamba_conv_bias": any(model.layers_with("ssm_conv1d.bias")),
        "mamba_proj_bias": any(model.layers_with("ssm_in.bias")),
        "projectors_bias": any(model.layers_with("ssm_out.bias")),
        "mamba_rms_norm": any(model.layers_with("ssm_norm.weight")),
        "mamba_norm_before_gate": False,
    }


def _nemotron_h(model: GgufModel) -> JsonObject:
    config = _with_heads_in_some(model, "NemotronHForCausalLM")
    config["layer_norm_epsilon"] = config.pop("rms_norm_eps") or model.get(
        "attention.layer_norm_epsilon"
    )
    model.get("rope.dimension_count")
    for layer, is_dense in enumerate(model.layers_with("ffn_up.weight")):
        if is_dense:  # the setting is a list, in which mixtures have another width
            config["intermediate_size"] = model.shapes[f"blk.{layer}.ffn_up.weight"][0]
    if not isinstance(config["intermediate_size"], int):
        config["intermediate_size"] = None
    heads = model.get("ssm.time_step_rank")
    return config | {
        "layers_block_type": _kinds_of_layers(model),
        "mlp_bias": any(model.layers_with("ffn_up.bias")),
        "use_bias": any(model.layers_with("ssm_in.bias")),
        "use_conv_bias": any(model.layers_with("ssm_conv1d.bias")),
        "mamba_num_heads": heads,
        "mamba_head_dim": model.get("ssm.inner_size") // heads,
        "ssm_state_size": model.get("ssm.state_size"),
        "conv_kernel": model.get("ssm.conv_kernel"),
        "n_groups": model.get("ssm.group_count"),
    }


def _nemotron_h_moe(model: GgufModel) -> JsonObject:
    config, num_layers = _nemotron_h(model), _num_layers_without_drafter(model)
    return config | {
        "num_hidden_layers": num_layers,
        "layers_block_type": config["layers_block_type"][:num_layers],
        "n_routed_experts": model.get("expert_count"),
        "num_experts_per_tok": model.get("expert_used_count"),
        "moe_intermediate_size": model.get("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": model.get("expert_shared_feed_forward_length"),
        "moe_latent_size": model.get("moe_latent_size"),
        "n_shared_experts": model.get("expert_shared_count", 1),
        "n_group": model.get("expert_group_count", 1),
        "topk_group": model.get("expert_group_used_count", 1),
        "norm_topk_prob": bool(model.get("expert_weights_norm", False)),
        "routed_scaling_factor": model.get("expert_weights_scale", 1.0),
    }


def _kinds_of_layers(model: GgufModel) -> list[str]:
    kinds = ["mlp"] * model.num_layers
    for name, kind in (
        ("ssm_in.weight", "linear_attention"),
        ("attn_q.weight", "full_attention"),
        ("ffn_gate_inp.weight", "moe"),
    ):
        for layer, has_it in enumerate(model.layers_with(name)):
            kinds[layer] = kind if has_it else kinds[layer]
    return kinds


def _bert(model: GgufModel) -> JsonObject:
    config = _common(model, "BertModel")
    model.get("pooling_type")  # not of the config
    return config | {
        "head_dim": _head_dim(model),
        "layer_norm_eps": model.get("attention.layer_norm_epsilon"),
        "hidden_act": "gelu",
        "type_vocab_size": model.metadata.get("tokenizer.ggml.token_type_count"),
        "pad_token_id": model.metadata.get("tokenizer.ggml.padding_token_id"),
    }


_READERS: Final[Mapping[str, Callable[[GgufModel], JsonObject]]] = {
    "bert": _bert,
    "deepseek2": _deepseek2,
    "falcon-h1": _falcon_h1,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "granitehybrid": _granite_hybrid,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2moe,
    "llama": _llama,
    "mistral3": _llama,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h_moe,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35moe,
    "qwen3next": _qwen3next,
}
