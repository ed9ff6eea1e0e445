"""The bytes of each token of a model's vocabulary, from its tokenizer.json."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from longshore.protocol.model_files import parse_json, read_bytes
from longshore.scheduler.features.grammar import GrammarError

_SPACE: Final = "▁"  # how SentencePiece writes a space


@dataclass(frozen=True)
class Vocabulary:
    """tokens: (vocab_size,) the bytes of each id; empty for ids without a token.
    special_ids: ids that no grammar allows as text, in ascending order; all ids without a token
                 are among them.
    encode: splits text into ids.
    """

    tokens: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]


def load_vocabulary(
    tokenizer_file: Path, *, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> Vocabulary:
    """vocab_size: of the model, which may have more ids than the tokenizer. Raises GrammarError if
    the bytes of the tokens are unknown."""
    from tokenizers import Tokenizer

    if not eos_token_ids:
        raise GrammarError(
            "structured output needs a token that ends the output, but the model has no "
            "eos_token_id in generation_config.json or config.json"
        )
    try:
        content = read_bytes(tokenizer_file)
        tokenizer = Tokenizer.from_buffer(content)
        settings = parse_json(content)
    except Exception as error:  # the library raises bare Exception
        raise GrammarError(f"the tokenizer cannot be read: {error}") from error
    assert isinstance(settings, dict), "the library has read it"
    to_bytes = bytes_of_tokens(settings.get("decoder"))
    if to_bytes is None:
        decoders = _decoder_types(settings.get("decoder"))
        raise GrammarError(
            f"structured output does not support tokenizers with the decoder "
            f"{', '.join(sorted(decoders)) or 'none'}; it supports ByteLevel, ByteFallback and "
            "Metaspace"
        )
    tokens = [b""] * vocab_size
    for text, token_id in tokenizer.get_vocab(with_added_tokens=False).items():
        if token_id < vocab_size:
            tokens[token_id] = to_bytes(text)
    special = set(eos_token_ids)
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        if token_id < vocab_size:
            tokens[token_id] = added.content.encode()
            if added.special:
                special.add(token_id)
    special.update(token_id for token_id, token in enumerate(tokens) if not token)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return Vocabulary(tuple(tokens), tuple(sorted(special)), eos_token_ids, encode)


def bytes_of_tokens(decoder: object) -> Callable[[str], bytes] | None:
    """What makes bytes of the text by which a vocabulary knows a token. decoder: as tokenizer.json
    has it. None: it is an unknown one."""
    decoders = _decoder_types(decoder)
    if "ByteLevel" in decoders:
        return _byte_level
    return _sentencepiece if decoders & {"ByteFallback", "Metaspace"} else None


def _decoder_types(decoder: Any) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    if decoder.get("type") == "Sequence":
        return {name for part in decoder["decoders"] for name in _decoder_types(part)}
    return {str(decoder.get("type"))}


def _byte_characters() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte: itself if it can be printed."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES: Final = _byte_characters()


def _byte_level(text: str) -> bytes:
    try:
        return bytes(map(_BYTES.__getitem__, text))
    except KeyError:  # not written in bytes
        return text.encode()


def _sentencepiece(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes.fromhex(text[3:5])
        except ValueError:
            pass
    return text.replace(_SPACE, " ").encode()
