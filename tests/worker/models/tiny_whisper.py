"""Tiny random checkpoints of Whisper, audio, and the outputs of transformers."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from tests.reference import ReferenceAnswer, caches_of

SAMPLING_RATE: Final = 16_000
NUM_ENCODER_TOKENS: Final = 50  # of a second; the last of their blocks is not full
PROMPT: Final = (1, 17, 40, 99)

SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 128,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 80,
    "max_source_positions": NUM_ENCODER_TOKENS,
    "max_target_positions": 96,
    "decoder_start_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "begin_suppress_tokens": None,
    "init_std": 0.2,
}


def make_tiny_whisper(path: Path, **overrides: Any) -> Any:
    """A random model in float32, and its feature extractor. overrides: fields of its config."""
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    config = WhisperConfig(**(SHAPE | overrides))
    rng_state = torch.get_rng_state()
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(config).eval().float()
    for name, parameter in itertools.chain(model.named_parameters(), model.named_buffers()):
        if name.endswith("bias"):  # zeros and ones would hide mixed-up tensors
            torch.nn.init.normal_(parameter, std=0.1)
        elif name.endswith("norm.weight"):
            parameter.data += torch.empty_like(parameter).uniform_(-0.5, 0.5)
    torch.set_rng_state(rng_state)
    model.save_pretrained(path)
    WhisperFeatureExtractor(
        feature_size=config.num_mel_bins, chunk_length=config.max_source_positions // 50
    ).save_pretrained(path)
    return model


def sound(seed: int, seconds: float = 1.0) -> npt.NDArray[np.float32]:
    """Varying tones and a little noise, within -1 and 1."""
    rng = np.random.default_rng(seed)
    times = np.arange(int(seconds * SAMPLING_RATE)) / SAMPLING_RATE
    tones = [
        np.sin(2 * np.pi * rng.uniform(80, 6_000) * times)
        * np.sin(np.pi * rng.uniform(0.5, 6) * times) ** 2
        for _ in range(4)
    ]
    noise = rng.normal(scale=0.02, size=len(times))
    return (sum(tones) / 5 + noise).clip(-1, 1).astype(np.float32)


def padded(samples: npt.NDArray[np.float32], num_samples: int = SAMPLING_RATE) -> torch.Tensor:
    """Padded with silence to the model's length."""
    return torch.from_numpy(np.pad(samples, (0, num_samples - len(samples))))


def input_features(path: Path, samples: npt.NDArray[np.float32]) -> torch.Tensor:
    """(1, num_mel_bins, num_frames), by transformers."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor.from_pretrained(path)
    given = extractor(samples, sampling_rate=SAMPLING_RATE, return_tensors="pt")
    return given["input_features"]


def greedy_transcript(
    model: Any, features: torch.Tensor, prompt: Sequence[int], num_tokens: int
) -> ReferenceAnswer:
    """`num_tokens` greedy tokens of a transformers model, end-of-sequence ids ignored."""
    token_ids: list[int] = []
    margins: list[float] = []
    with torch.inference_mode():
        encoded = model.get_encoder()(features)
        inputs, caches = torch.tensor([list(prompt)]), {}
        for _ in range(num_tokens):
            output = model(
                encoder_outputs=encoded,
                decoder_input_ids=inputs,
                use_cache=True,
                **caches,
            )
            best = output.logits[0, -1].topk(2)
            token_ids.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            inputs, caches = best.indices[None, :1], caches_of(output)
    return ReferenceAnswer(token_ids, margins)
