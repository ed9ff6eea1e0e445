"""The shapes in which each family is checked against transformers."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

YARN: Final = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10_000.0,
}
LLAMA3: Final = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500_000.0,
}
GEMMA3_ROPES: Final = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
LONGROPE: Final = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.0, 2.0, 3.0, 5.0],
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
}

LATENT: Final = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 48,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
MAMBA: Final = {"num_heads": 8, "head_dim": 16, "state_size": 16}
HYBRID: Final = {"mamba_n_heads": 8, "mamba_d_state": 16}
GRANITE: Final = {
    "num_local_experts": 0,
    "shared_intermediate_size": 80,
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.5,
}
FALCON: Final = {
    **HYBRID,
    "mamba_d_ssm": 96,
    "embedding_multiplier": 1.7,
    "lm_head_multiplier": 0.6,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.7,
    "mlp_multipliers": [0.8, 1.1],
    "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.7],
}
NEMOTRON: Final = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "head_dim": 16,
    # transformers applies it to the time steps of a prompt, but not to those of decodes.
    "time_step_min": 1e-30,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
}
DELTA: Final = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
SHARED_MIXTURE: Final = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}


@dataclass(frozen=True)
class Case:
    """family:         of transformers, as in `LlamaForCausalLM`.
    settings:       fields of its config in addition to tests.models.SHAPE.
    max_model_len:  the longest request that is served, in tokens.
    prompt_lengths: in tokens.
    """

    name: str
    family: str
    settings: dict[str, Any] = field(default_factory=dict)
    max_model_len: int = 256
    prompt_lengths: Sequence[int] = (37, 1, 70, 16)

    def __str__(self) -> str:
        return self.name


CASES: Final = (
    Case("Llama", "Llama", {"rope_parameters": dict(LLAMA3)}),
    Case("Llama, biased, tied", "Llama", {"attention_bias": True, "mlp_bias": True,
                                          "tie_word_embeddings": True}),
    Case("Llama, one KV head", "Llama", {"num_key_value_heads": 1, "vocab_size": 131}),
    Case("Qwen2", "Qwen2", {"tie_word_embeddings": True}),
    Case("Qwen2, yarn", "Qwen2", {"rope_parameters": dict(YARN), "num_key_value_heads": 4}),
    Case("Qwen3", "Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    Case("Qwen3, biased", "Qwen3", {"head_dim": 16, "attention_bias": True,
                                    "num_key_value_heads": 1}),
    Case("Mistral", "Mistral", {"sliding_window": None, "head_dim": 24}),
    Case("Mistral, linear", "Mistral", {"sliding_window": None, "rope_parameters": {
        "rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}),
    Case("Qwen2, later layers windowed", "Qwen2", {
        "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    Case("Qwen3, alternating", "Qwen3", {
        "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 17,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    Case("Mistral, windowed", "Mistral", {"sliding_window": 24}),
    Case("Mistral, a window of one block, one KV head", "Mistral", {
        "sliding_window": 16, "num_key_value_heads": 1}),
    Case("Phi-3", "Phi3", {"num_key_value_heads": 4}),
    Case("Phi-3, windowed", "Phi3", {"sliding_window": 33}),
    Case("Phi-3, partial rotary", "Phi3", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}}),
    # transformers chooses by each request's length: long and short ones must not meet here.
    Case("Phi-3, long factors", "Phi3",
         {"rope_parameters": dict(LONGROPE), "original_max_position_embeddings": 64},
         prompt_lengths=(66, 90, 70, 65)),
    Case("Phi-3, short factors", "Phi3",
         {"rope_parameters": dict(LONGROPE), "original_max_position_embeddings": 64},
         max_model_len=64, prompt_lengths=(37, 1, 50, 16)),
    Case("Gemma 2", "Gemma2", {
        "num_hidden_layers": 4, "sliding_window": 24, "head_dim": 24, "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 3.0, "final_logit_softcapping": 12.0,
        "initializer_range": 0.1}),
    Case("Gemma 2, uncapped, biased, untied", "Gemma2", {
        "sliding_window": 16, "head_dim": 16, "attention_bias": True, "num_key_value_heads": 1,
        "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "tie_word_embeddings": False, "initializer_range": 0.1}),
    Case("Gemma 3", "Gemma3", {
        "num_hidden_layers": 7, "sliding_window": 24, "head_dim": 24, "query_pre_attn_scalar": 20,
        "rope_parameters": copy.deepcopy(GEMMA3_ROPES), "initializer_range": 0.1}),
    Case("Gemma 3, another pattern, capped, untied", "Gemma3", {
        "num_hidden_layers": 3, "sliding_window": 17, "head_dim": 16, "num_key_value_heads": 1,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "final_logit_softcapping": 12.0, "hidden_activation": "gelu",
        "tie_word_embeddings": False, "initializer_range": 0.1}),
    Case("OLMo 2", "Olmo2", {}),
    Case("OLMo 2, biased, tied", "Olmo2", {"attention_bias": True, "num_key_value_heads": 1,
                                           "tie_word_embeddings": True}),
    Case("Mixtral", "Mixtral", {}),
    Case("Mixtral, one of three experts, tied", "Mixtral", {
        "num_local_experts": 3, "num_experts_per_tok": 1, "tie_word_embeddings": True}),
    Case("Qwen3-MoE", "Qwen3Moe", {"moe_intermediate_size": 32, "num_local_experts": 8,
                                   "num_experts_per_tok": 3, "norm_topk_prob": True}),
    Case("Qwen3-MoE, dense and sparse", "Qwen3Moe", {
        "moe_intermediate_size": 40, "num_local_experts": 6, "num_experts_per_tok": 2,
        "decoder_sparse_step": 2, "attention_bias": True, "head_dim": 24}),
    Case("Qwen3-MoE, named dense layer", "Qwen3Moe", {
        "moe_intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
        "mlp_only_layers": [1]}),
    Case("Mixtral, window", "Mixtral", {"sliding_window": 24}),
    Case("GPT-OSS", "GptOss", {
        "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 20,
        "swiglu_limit": 1.5}),
    Case("GPT-OSS, unbiased, short rope", "GptOss", {
        "head_dim": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 40,
        "attention_bias": False, "tie_word_embeddings": True, "rope_parameters": {
            **YARN, "truncate": False, "rope_theta": 150_000.0}}),
    Case("Llama 4", "Llama4", {
        "head_dim": 16, "intermediate_size_mlp": 80, "num_local_experts": 4,
        "attention_chunk_size": 24, "no_rope_layer_interval": 2, "floor_scale": 16,
        "rope_parameters": dict(LLAMA3)}),
    Case("Llama 4, dense and sparse", "Llama4", {
        "head_dim": 24, "intermediate_size_mlp": 80, "num_local_experts": 4,
        "num_experts_per_tok": 2, "attention_chunk_size": 32, "no_rope_layers": [0, 1],
        "use_qk_norm": False, "attn_temperature_tuning": False, "interleave_moe_layer_step": 2,
        "attention_bias": True}),
    Case("DeepSeek-V2", "DeepseekV2", {**LATENT, "q_lora_rank": None}),
    Case("DeepSeek-V2, groups, biased", "DeepseekV2", {
        **LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 1.5, "first_k_dense_replace": 0, "attention_bias": True,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}),
    Case("DeepSeek-V2, biased latents alone", "DeepseekV2", {
        **LATENT, "q_lora_rank": None, "attention_bias": True, "first_k_dense_replace": 2,
        "n_shared_experts": 1}),
    Case("DeepSeek-V3", "DeepseekV3", {
        **LATENT, "n_group": 4, "topk_group": 2,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    Case("DeepSeek-V3, rotary halves, tied", "DeepseekV3", {
        **LATENT, "n_group": 1, "topk_group": 1, "rope_interleave": False, "q_lora_rank": None,
        "first_k_dense_replace": 0, "norm_topk_prob": False, "tie_word_embeddings": True}),
    Case("Mamba 2", "Mamba2", {**MAMBA, "n_groups": 2}),
    Case("Mamba 2, one group, biased, tied", "Mamba2", {
        **MAMBA, "n_groups": 1, "use_bias": True, "use_conv_bias": False, "conv_kernel": 3,
        "num_key_value_heads": 1, "tie_word_embeddings": True}),
    Case("Mamba 2, narrow residual", "Mamba2", {
        **MAMBA, "n_groups": 8, "residual_in_fp32": False, "num_hidden_layers": 3}),
    Case("Bamba", "Bamba", {**HYBRID, "mamba_n_groups": 2, "attn_layer_indices": [1]}),
    Case("Bamba, four layers, one group, biased", "Bamba", {
        **HYBRID, "num_hidden_layers": 4, "attn_layer_indices": [0, 2], "num_key_value_heads": 1,
        "mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True}),
    Case("Granite 4 hybrid", "GraniteMoeHybrid", {
        **HYBRID, **GRANITE, "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_groups": 2}),
    Case("Granite 4 hybrid, mixture", "GraniteMoeHybrid", {
        **HYBRID, **GRANITE, "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_groups": 2, "num_local_experts": 6, "num_experts_per_tok": 2}),
    Case("Granite 4 hybrid, turned, tied", "GraniteMoeHybrid", {
        **HYBRID, **GRANITE, "num_hidden_layers": 3, "position_embedding_type": "rope",
        "mamba_d_state": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_key_value_heads": 1, "tie_word_embeddings": True}),
    Case("Qwen3-Next", "Qwen3Next", {
        **DELTA, **SHARED_MIXTURE, "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"]}),
    Case("Qwen3-Next, dense and sparse, biased, one key head", "Qwen3Next", {
        **DELTA, **SHARED_MIXTURE, "num_hidden_layers": 4, "head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 1,
        "linear_conv_kernel_dim": 3, "num_key_value_heads": 1, "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "norm_topk_prob": False, "attention_bias": True, "tie_word_embeddings": True}),
    Case("Qwen3.5", "Qwen3_5", {
        **DELTA, "head_dim": 32, "num_hidden_layers": 4, "tie_word_embeddings": True}),
    Case("Qwen3.5, a key head per value head, biased", "Qwen3_5", {
        **DELTA, "head_dim": 256, "linear_num_key_heads": 8, "attention_bias": True,
        "layer_types": ["full_attention", "linear_attention"]}),
    Case("Qwen3.5-MoE", "Qwen3_5Moe", {
        **DELTA, **SHARED_MIXTURE, "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"]}),
    Case("Qwen3.5-MoE, one key head", "Qwen3_5Moe", {
        **DELTA, **SHARED_MIXTURE, "head_dim": 32, "linear_num_key_heads": 1,
        "num_hidden_layers": 3, "num_key_value_heads": 1,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"]}),
    Case("LFM2", "Lfm2", {
        "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
    Case("LFM2, biased, wide convolutions, untied", "Lfm2", {
        "num_hidden_layers": 4, "full_attn_idxs": [0, 3], "conv_bias": True, "conv_L_cache": 5,
        "num_key_value_heads": 1, "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": False}),
    Case("LFM2-MoE", "Lfm2Moe", {
        "num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"],
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "num_dense_layers": 1}),
    Case("LFM2-MoE, plain weights", "Lfm2Moe", {
        "layer_types": ["conv", "full_attention"], "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 40, "num_dense_layers": 0, "use_expert_bias": False,
        "norm_topk_prob": False, "routed_scaling_factor": 1.5, "tie_word_embeddings": False}),
    Case("Falcon-H1", "FalconH1", {**FALCON, "mamba_n_groups": 2}),
    Case("Falcon-H1, normed, biased, tied", "FalconH1", {
        **FALCON, "mamba_d_ssm": None, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
        "mamba_n_groups": 2, "num_hidden_layers": 3, "projectors_bias": True,
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    Case("Falcon-H1, norm first, one group, biased projections", "FalconH1", {
        **FALCON, "mamba_rms_norm": True, "mamba_proj_bias": True, "mamba_conv_bias": False,
        "num_key_value_heads": 1, "mamba_d_conv": 3}),
    Case("Nemotron-H", "NemotronH", {
        **NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}),
    Case("Nemotron-H, mixtures", "NemotronH", {
        **NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}),
    Case("Nemotron-H, latent mixtures, biased, one group", "NemotronH", {
        **NEMOTRON, "layers_block_type": [
            "moe", "full_attention", "linear_attention", "mlp", "linear_attention", "moe"],
        "n_groups": 1, "ssm_state_size": 6, "moe_latent_size": 24, "mlp_bias": True,
        "use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "num_key_value_heads": 1,
        "norm_topk_prob": False}),
)  # fmt: skip

FIRST_CASES: Final = {case.family: case for case in reversed(CASES)}
"""The first one of each family."""
