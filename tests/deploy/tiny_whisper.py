"""A tiny random Whisper with a tokenizer that has all special tokens, as transformers writes it."""

import json
from pathlib import Path
from typing import Any, Final

LANGUAGES: Final = ("en", "de", "fr", "haw")
MAX_AUDIO_S: Final = 2
SAMPLING_RATE: Final = 16_000
MAX_TARGET_POSITIONS: Final = 64
SPACE: Final = "Ġ"


def make_tiny_whisper(path: Path, *, multilingual: bool = True, seed: int = 1) -> Any:
    """Write the folder and return the transformers model, in float32. The window is MAX_AUDIO_S
    long. With these weights, language and answer depend on the audio."""
    import torch
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    tokenizer = save_whisper_tokenizer(path)
    id_of = tokenizer.convert_tokens_to_ids
    end = id_of("<|endoftext|>")
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        num_mel_bins=80,
        max_source_positions=50 * MAX_AUDIO_S,
        max_target_positions=MAX_TARGET_POSITIONS,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=id_of("<|startoftranscript|>"),
        init_std=0.15,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = WhisperForConditionalGeneration(config).eval().float()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed + 1)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
            elif name.endswith("decoder.embed_positions.weight"):  # else it repeats one word
                torch.nn.init.normal_(parameter, std=2.0)
            elif "encoder_attn" in name:
                parameter *= 1.5
    model.save_pretrained(path)
    save_whisper_settings(path, is_multilingual=multilingual)
    model.generation_config = GenerationConfig.from_pretrained(path)
    WhisperFeatureExtractor(chunk_length=MAX_AUDIO_S).save_pretrained(path)
    return model


def save_whisper_settings(path: Path, **settings: Any) -> None:
    """generation_config.json like that of published models, for the tokenizer in the folder.
    settings: in addition to or instead of the usual ones.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    id_of = tokenizer.token_to_id
    end, tasks = id_of("<|endoftext|>"), ("transcribe", "translate")
    usual: dict[str, Any] = {
        "decoder_start_token_id": id_of("<|startoftranscript|>"),
        "eos_token_id": end,
        "bos_token_id": end,
        "pad_token_id": end,
        "max_length": MAX_TARGET_POSITIONS,
        "is_multilingual": True,
        "no_timestamps_token_id": id_of("<|notimestamps|>"),
        "prev_sot_token_id": id_of("<|startofprev|>"),
        # Incomplete characters and special tokens, as in published models. Timestamps too: a
        # trained model generates none here, and after one transformers would start again.
        "suppress_tokens": [
            *map(id_of, _bytes_above_ascii()),
            *range(end + 1, tokenizer.get_vocab_size()),
        ],
        "begin_suppress_tokens": [id_of(SPACE), end],
    }
    if settings.get("is_multilingual", True):
        usual["lang_to_id"] = {f"<|{code}|>": id_of(f"<|{code}|>") for code in LANGUAGES}
        usual["task_to_id"] = {task: id_of(f"<|{task}|>") for task in tasks}
    file = path / "generation_config.json"
    file.write_text(json.dumps(usual | settings), encoding="utf-8")


def save_whisper_tokenizer(path: Path) -> Any:
    """Write tokenizer.json and its settings: every byte, a few words, and Whisper's special tokens
    in their order, timestamps last. Return the tokenizer of transformers."""
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import WhisperTokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    merges = [("t", "h"), ("th", "e"), (SPACE, "the"), (SPACE, "a"), ("e", "r"), (SPACE, "s")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    vocab["<|endoftext|>"] = len(vocab)
    names = ["startoftranscript", *LANGUAGES, "translate", "transcribe", "startoflm"]
    names += ["startofprev", "nospeech", "notimestamps"]
    tokenizer = WhisperTokenizer(vocab=vocab, merges=merges)
    tokenizer.add_special_tokens(
        {
            "additional_special_tokens": [
                AddedToken(f"<|{name}|>", special=True, normalized=False) for name in names
            ]
        }
    )
    times = [f"<|{0.02 * index:.2f}|>" for index in range(50 * MAX_AUDIO_S + 1)]
    tokenizer.add_tokens([AddedToken(time, special=False, normalized=False) for time in times])
    tokenizer.save_pretrained(path)
    assert json.loads((path / "tokenizer.json").read_text())["added_tokens"]
    return tokenizer


def _bytes_above_ascii() -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [letter for byte, letter in bytes_to_unicode().items() if byte >= 128]
