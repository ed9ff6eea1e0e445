"""The shapes in which each family is checked against transformers."""

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
LONGROPE: Final = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.0, 2.0, 3.0, 5.0],
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
}


@dataclass(frozen=True)
class Case:
    """family:         of transformers, as in `LlamaForCausalLM`.
    settings:       fields of its config beside those of tests.models.SHAPE.
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
    Case("Phi-3", "Phi3", {"num_key_value_heads": 4}),
    Case("Phi-3, partial rotary", "Phi3", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}}),
    # transformers chooses by each request's length: long and short ones must not meet here.
    Case("Phi-3, long factors", "Phi3",
         {"rope_parameters": dict(LONGROPE), "original_max_position_embeddings": 64},
         prompt_lengths=(66, 90, 70, 65)),
    Case("Phi-3, short factors", "Phi3",
         {"rope_parameters": dict(LONGROPE), "original_max_position_embeddings": 64},
         max_model_len=64, prompt_lengths=(37, 1, 50, 16)),
    Case("OLMo 2", "Olmo2", {}),
    Case("OLMo 2, biased, tied", "Olmo2", {"attention_bias": True, "num_key_value_heads": 1,
                                           "tie_word_embeddings": True}),
)  # fmt: skip
