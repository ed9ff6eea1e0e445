"""The models whose GGUF files are beside this module: what they are made of, and by which names
their tokenizers go. `make.py` says how the files were made."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.models import make_tiny_model
from tests.worker.models.cases import (
    DELTA,
    GEMMA3_ROPES,
    GRANITE,
    LATENT,
    LLAMA3,
    NEMOTRON,
    SHARED_MIXTURE,
    YARN,
)

FILES: Final = Path(__file__).parent
QUANTISED: Final = FILES.parent / "worker" / "loading" / "quantised"
NVFP4: Final = {
    "nvfp4": QUANTISED / "llama-modelopt_nvfp4",
    "nvfp4-experts": QUANTISED / "qwen3_moe-modelopt_nvfp4",
}
"""Folders with a file, and the checkpoints that these are made of."""
TYPES: Final = FILES / "types"
"""Its file has values of N(0, 1) in each element type, which is the name of the tensor."""
TYPES_SHAPE: Final = (8, 512)
SHAPE: Final = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 32,
    "head_dim": 8,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
}
WIDE_DELTA: Final = {**DELTA, "linear_value_head_dim": 32}
"""Value heads have 256 elements in all, a block of every type."""
SPM: Final = {"vocab_size": 420}
"""SentencePiece needs more tokens than bytes and letters."""


@dataclass(frozen=True)
class GgufCase:
    """A file `NAME.gguf`.

    family, settings: see `make_tiny_model`.
    tokenizer: a file in `tokenizers/`. pre: tokenizer.ggml.pre, which the converter finds by a hash
               of real vocabularies; None: it does not look for it.
    options:   of the converter.
    """

    name: str
    family: str
    settings: dict[str, Any] = field(default_factory=dict)
    tokenizer: str = "llama-bpe"
    pre: str | None = "llama-bpe"
    head: str = "ForCausalLM"
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def file(self) -> Path:
        return FILES / f"{self.name}.gguf"

    def make_original(self, path: Path) -> Any:
        """The model that was converted, without its tokenizer."""
        return make_tiny_model(self.family, path, head=self.head, **(SHAPE | self.settings))


CASES: Final = (
    GgufCase("llama", "Llama", {"rope_parameters": dict(LLAMA3), "attention_bias": True}),
    GgufCase("llama-untied", "Llama", {
        "tie_word_embeddings": False, "head_dim": 12, "rope_parameters": {
            "rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}, "smollm", "smollm"),
    GgufCase("mixtral", "Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2,
                                    "sliding_window": None}),
    GgufCase("mistral", "Mistral", {"sliding_window": None, **SPM}, "sentencepiece", None),
    GgufCase("qwen2", "Qwen2", {"rope_parameters": dict(YARN)}, "qwen2", "qwen2"),
    GgufCase("qwen3", "Qwen3", {"head_dim": 12}, "qwen2", "qwen2"),
    GgufCase("qwen3moe", "Qwen3Moe", {
        "moe_intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2,
        "norm_topk_prob": True}, "qwen2", "qwen2"),
    GgufCase("gemma2", "Gemma2", {
        **SPM,
        "sliding_window": 24, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 12.0}, "sentencepiece", None),
    GgufCase("gemma3", "Gemma3", {
        **SPM, "num_hidden_layers": 6, "sliding_window": 24, "query_pre_attn_scalar": 8,
        "rope_parameters": GEMMA3_ROPES}, "sentencepiece", None),
    GgufCase("phi3", "Phi3", {**SPM, "sliding_window": 33, "num_attention_heads": 2,
                              "head_dim": 16, "rope_parameters": {
        "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.7],
        "long_factor": [1.0, 2.0, 3.0, 5.0], "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5, "original_max_position_embeddings": 64},
        "original_max_position_embeddings": 64}, "sentencepiece", None),
    GgufCase("gpt-oss", "GptOss", {
        "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 20,
        "rope_parameters": {**YARN, "truncate": False, "rope_theta": 150_000.0}},
        "gpt-4o", "gpt-4o"),
    GgufCase("granite", "GraniteMoeHybrid", {
        **GRANITE, "layer_types": ["attention"] * 2, "position_embedding_type": "rope",
        "mamba_n_heads": 8, "shared_intermediate_size": 24}, "refact", "refact"),
    GgufCase("granitehybrid", "GraniteMoeHybrid", {
        **GRANITE, "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_state": 16,
        "mamba_n_groups": 2, "num_local_experts": 3, "num_experts_per_tok": 2,
        "shared_intermediate_size": 24}, "refact", "refact"),
    GgufCase("granitehybrid-dense", "GraniteMoeHybrid", {
        **GRANITE, "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_state": 16,
        "mamba_n_groups": 1, "shared_intermediate_size": 24}, "refact", "refact"),
    GgufCase("deepseek2", "DeepseekV2", {
        **LATENT, "head_dim": 8, "q_lora_rank": None, "n_routed_experts": 4, "n_shared_experts": 2,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
        "deepseek-v3", "deepseek-v3"),
    GgufCase("deepseek3", "DeepseekV3", {
        **LATENT, "head_dim": 8, "n_group": 2, "topk_group": 1, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
        "scoring_func": "sigmoid"}, "deepseek-v3", "deepseek-v3"),
    GgufCase("qwen3next", "Qwen3Next", {
        **WIDE_DELTA, **SHARED_MIXTURE, "num_experts": 3, "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention"]}, "qwen2", "qwen2",
        options=("--no-mtp",)),
    GgufCase("qwen35", "Qwen3_5", {
        **WIDE_DELTA, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
        "qwen35", "qwen35", options=("--no-mtp",)),
    GgufCase("qwen35moe", "Qwen3_5Moe", {
        **WIDE_DELTA, **SHARED_MIXTURE, "num_experts": 3, "num_experts_per_tok": 2,
        "linear_num_key_heads": 2, "tie_word_embeddings": False,
        "layer_types": ["full_attention", "linear_attention"]}, "qwen35", "qwen35",
        options=("--no-mtp",)),
    GgufCase("lfm2", "Lfm2", {
        "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
        "intermediate_size": 48, "block_multiple_of": 8}),
    GgufCase("lfm2moe", "Lfm2Moe", {
        "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24}),
    GgufCase("falcon-h1", "FalconH1", {
        "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_d_state": 16,
        "mamba_n_groups": 2, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
        "tie_word_embeddings": False}),
    GgufCase("falcon-h1-plain", "FalconH1", {
        "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16,
        "mamba_rms_norm": False, "mamba_norm_before_gate": False}),
    GgufCase("nemotron_h", "NemotronH", {
        **NEMOTRON, "mamba_num_heads": 8, "mamba_head_dim": 8, "tie_word_embeddings": False,
        "layers_block_type": ["linear_attention", "mlp", "full_attention"]}),
    GgufCase("nemotron_h_moe", "NemotronH", {
        **NEMOTRON, "mamba_num_heads": 8, "mamba_head_dim": 8, "tie_word_embeddings": False,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "routed_scaling_factor": 1.5,
        "moe_latent_size": 16,
        "layers_block_type": ["linear_attention", "moe", "full_attention"]}),
    GgufCase("bert", "Bert", {"type_vocab_size": 2, "pad_token_id": 0}, "bert", "jina-v2-en",
             head="Model"),
)  # fmt: skip
