"""A tiny random Qwen3.5 that takes images too, made by transformers."""

from pathlib import Path
from typing import Any, Final

from tests.models import SHAPE

VISION: Final = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
ROPE: Final = {
    "mrope_interleaved": True,
    "mrope_section": [1, 1, 0],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10_000_000,
    "rope_type": "default",
}


def make_qwen3_5_with_images(
    family: str, path: Path, *, tie_word_embeddings: bool = False, **settings: Any
) -> Any:
    """family: `Qwen3_5` or `Qwen3_5Moe`. settings: of its text config."""
    import torch
    import transformers

    text = {**SHAPE, "rope_parameters": dict(ROPE), "tie_word_embeddings": tie_word_embeddings}
    config = getattr(transformers, f"{family}Config")(
        text_config=text | settings, vision_config=VISION, tie_word_embeddings=tie_word_embeddings
    )
    config.text_config._experts_implementation = "eager"
    model_class = getattr(transformers, f"{family}ForConditionalGeneration")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config).eval().float()
    model.save_pretrained(path)
    return model
