"""The bytes of tokens, compared with what the tokenizer decodes."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.scheduler.features.grammar import GrammarError
from longshore.scheduler.process.structured_output.vocabulary import load_vocabulary
from tests.harness.vocabularies import demo_vocabulary

TEXT = 'Grüße, {"a": [1, 2]}\n\t\x01 你好 😀'


def test_tokens_of_a_text_have_its_bytes() -> None:
    vocabulary = demo_vocabulary()
    ids = vocabulary.encode(TEXT)
    assert b"".join(vocabulary.tokens[token_id] for token_id in ids) == TEXT.encode()


def test_special_tokens_and_ids_without_a_token_are_special() -> None:
    vocabulary = demo_vocabulary()
    assert vocabulary.tokens[2] == b"<|end|>"
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))
    unknown = [one for one in range(1600) if tokenizer.id_to_token(one) is None]
    added = tokenizer.get_added_tokens_decoder().items()
    special = [token_id for token_id, token in added if token.special]
    assert vocabulary.special_ids == tuple(sorted({*unknown, *special, 2}))


def write_tokenizer(folder: Path, decoder: object, vocab: dict[str, int]) -> Path:
    file = folder / "tokenizer.json"
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True}
    content = {"version": "1.0", "added_tokens": [], "model": model, "decoder": decoder}
    for name in ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"):
        content[name] = None
    file.write_text(json.dumps(content))
    return file


def test_tokens_of_sentencepiece_with_spaces_and_bytes(tmp_path: Path) -> None:
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    file = write_tokenizer(tmp_path, decoder, {"▁hello": 0, "<0x0A>": 1, "é": 2, "</s>": 3})
    vocabulary = load_vocabulary(file, vocab_size=6, eos_token_ids=(3,))
    assert vocabulary.tokens == (b" hello", b"\n", "é".encode(), b"</s>", b"", b"")
    assert vocabulary.special_ids == (3, 4, 5)


def test_a_tokenizer_whose_bytes_are_unknown_is_an_error(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path, {"type": "WordPiece", "prefix": "##", "cleanup": True}, {})
    with pytest.raises(GrammarError, match="decoder WordPiece"):
        load_vocabulary(file, vocab_size=6, eos_token_ids=(3,))


def test_a_model_without_an_end_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match="eos_token_id"):
        load_vocabulary(tmp_path / "tokenizer.json", vocab_size=6, eos_token_ids=())


def test_a_broken_tokenizer_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(GrammarError, match="cannot be read"):
        load_vocabulary(tmp_path / "tokenizer.json", vocab_size=6, eos_token_ids=(1,))
