"""Tokenizers without training: one token per byte, in the encodings that models use for bytes."""

import json
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

BOS: Final = "<s>"
EOS: Final = "</s>"
BOS_ID: Final = 0
EOS_ID: Final = 1
VOCAB_SIZE: Final = 320
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    """The encoding of GPT-2: ids 2.. are the 256 bytes; a few words are one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {BOS: BOS_ID, EOS: EOS_ID} | {byte: i + 2 for i, byte in enumerate(alphabet)}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """The encoding of Llama 2: letters and `▁` are tokens, everything else is bytes `<0x..>`."""
    vocab = {BOS: BOS_ID, EOS: EOS_ID} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    for letter in "▁abcdefghijklmnopqrstuvwxyz":
        vocab[letter] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    return tokenizer


def unigram_tokenizer() -> Tokenizer:
    """The other kind of SentencePiece (T5, Gemma): likely pieces, spaces as `▁`, and the rest as
    bytes."""
    pieces = [("<unk>", 0.0), (BOS, 0.0), (EOS, 0.0)]
    pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    pieces += [("▁", -2.0), ("▁the", -1.0), *((letter, -3.0) for letter in "abcdefgh.é")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    spaces = {"replacement": "▁", "prepend_scheme": "always"}
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(**spaces)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(**spaces)])
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    return tokenizer


def with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer with words that were added later, within the text and separate from it."""
    words = ("<think>", "crane-7", "日本")
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def save_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """tokenizer.json and tokenizer_config.json, as Hugging Face writes them."""
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": BOS}, "eos_token": EOS, "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
