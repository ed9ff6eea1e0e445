"""Tokenizers of other forms than tokenizer.json are converted by transformers, or refused."""

import base64
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from transformers import AutoTokenizer

from longshore.deploy.gateway.text.tokenizer import check_text_files, load_tokenizer
from longshore.deploy.model import tokenizer_file as module
from longshore.deploy.model.convert_tokenizer import convert
from longshore.deploy.model.tokenizer_file import find_tokenizer
from longshore.protocol.errors import ConfigError
from tests.deploy.tiny_tokenizer import byte_level_tokenizer

TEXT: Final = "the cat sat on 12 mats"


def bpe_files() -> dict[str, Any]:
    model = json.loads(byte_level_tokenizer().to_str())["model"]
    merges = "\n".join(["#version: 0.2", *map(" ".join, model["merges"])])
    return {"vocab.json": model["vocab"], "merges.txt": merges}


def sentencepiece_model(folder: Path, kind: str) -> bytes:
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    trainer.train(
        sentence_iterator=iter([f"the cat {i} sat on {i * 7} mats" for i in range(100)]),
        model_prefix=str(folder / kind),
        model_type=kind,
        vocab_size=290,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
    )
    return (folder / f"{kind}.model").read_bytes()


def tiktoken_file() -> str:
    pytest.importorskip("tiktoken")
    tokens = [*(bytes([i]) for i in range(256)), b"th", b"the", b" c", b"at"]
    return "".join(
        f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)
    )


def write(folder: Path, model_type: str, files: Mapping[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name, content in files.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name).write_text(text)
    return folder


def form(name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """The type of a model, and the files of its tokenizer."""
    llama = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    template = {"chat_template": "{{ bos_token }}{{ eos_token }}"}
    match name:
        case "vocab.json and merges.txt":
            return "qwen2", bpe_files()
        case "GPT-2's, with added tokens":
            settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>", **template}
            return "llama", {
                **bpe_files(),
                "tokenizer_config.json": settings,
                "added_tokens.json": {"<|end|>": 261},
            }
        case "vocab.txt":
            words = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat on mat ##s sat 12"
            return "bert", {"vocab.txt": words.replace(" ", "\n")}
        case "SentencePiece BPE":
            return "llama", {"tokenizer.model": sentencepiece_model(folder, "bpe")}
        case "SentencePiece of Gemma":
            return "gemma2", {"tokenizer.model": sentencepiece_model(folder, "bpe")}
        case "SentencePiece with a class":
            settings = {**llama, **template, "add_bos_token": True}
            model = sentencepiece_model(folder, "bpe")
            return "llama", {"tokenizer.model": model, "tokenizer_config.json": settings}
        case "SentencePiece unigrams":
            return "xlm-roberta", {
                "sentencepiece.bpe.model": sentencepiece_model(folder, "unigram")
            }
        case "tiktoken as of Llama 3":
            return "llama", {"tokenizer.model": tiktoken_file()}
        case _:
            return "llama", {"tiktoken.model": tiktoken_file()}


FORMS: Final = (
    "vocab.json and merges.txt",
    "GPT-2's, with added tokens",
    "vocab.txt",
    "SentencePiece BPE",
    "SentencePiece of Gemma",
    "SentencePiece with a class",
    "SentencePiece unigrams",
    "tiktoken as of Llama 3",
    "tiktoken.model",
)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions need no process that has to import transformers first."""

    class Ended:
        returncode, stderr = 0, b""

    def run(command: list[str], **_: object) -> Ended:
        assert command[:3] == [sys.executable, "-m", module.CONVERTER]
        ended = Ended()
        try:
            convert(*command[3:])
        except Exception as error:
            ended.returncode, ended.stderr = 1, str(error).encode()
        return ended

    monkeypatch.setattr(module.subprocess, "run", run)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("name", FORMS)
def test_converted_tokenizers_encode_as_transformers_does(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "model", *form(name, tmp_path))
    before = sorted(folder.iterdir())
    found = find_tokenizer(folder, 1000, tmp_path / "state")
    assert found is not None
    check_text_files(folder, found[0], None)
    tokenizer = load_tokenizer(folder, found[0])
    assert tokenizer is not None
    expected = AutoTokenizer.from_pretrained(folder)
    for text in (TEXT, f"{expected.eos_token or ''}{TEXT}"):
        assert tokenizer.encode(text) == expected(text)["input_ids"]
    special = dict(tokenizer.chat_template.special_tokens)
    assert special == expected.special_tokens_map
    if expected.chat_template:
        chat = [{"role": "user", "content": ""}]
        assert tokenizer.chat_template.render(chat) == expected.apply_chat_template(
            chat, tokenize=False
        )
    assert sorted(folder.iterdir()) == before


def test_conversions_are_made_in_a_process_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "model", "qwen2", bpe_files())
    found = find_tokenizer(folder, 1000, tmp_path / "state")
    monkeypatch.setattr(module.subprocess, "run", None)
    assert find_tokenizer(folder, 1000, tmp_path / "state") == found
    (folder / "merges.txt").write_text("#version: 0.2\n")  # another tokenizer
    with pytest.raises(TypeError):
        find_tokenizer(folder, 1000, tmp_path / "state")
    kept = list((tmp_path / "state" / "tokenizers").iterdir())
    assert [entry.stat().st_mode & 0o777 for entry in kept] == [0o700]


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("model_type", "files", "reason"),
    [
        ("olmo2", bpe_files(), "cannot convert vocab.json"),
        ("qwen2", {"vocab.json": "[1", "merges.txt": ""}, "cannot convert vocab.json"),
        ("llama", {"tokenizer.model": "no model"}, "cannot convert tokenizer.model"),
        ("bert", {"vocab.txt": "[UNK]\nother"}, "words have no tokens"),
        (
            "qwen",
            {
                "qwen.tiktoken": "AA== 0",
                "tokenizer_config.json": {
                    "tokenizer_class": "QWenTokenizer",
                    "auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]},
                },
            },
            "cannot convert qwen.tiktoken",
        ),
    ],
    ids=["no class", "no JSON", "no model", "other words", "code of the folder"],
)
def test_tokenizers_that_cannot_be_converted_are_refused_in_one_line(
    tmp_path: Path, model_type: str, files: dict[str, Any], reason: str
) -> None:
    folder = write(tmp_path / "model", model_type, files)
    with pytest.raises(ConfigError, match=reason) as error:
        find_tokenizer(folder, 1000, tmp_path / "state")
    assert len(str(error.value).splitlines()) == 1
    assert "Add the model's tokenizer.json" in str(error.value)
    assert list((tmp_path / "state" / "tokenizers").iterdir()) == []


def test_conversions_need_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "model", "qwen2", bpe_files())
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'longshore-serve\[tokenizers\]'"):
        find_tokenizer(folder, 1000, tmp_path / "state")


def test_folder_without_any_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "llama", {"tokenizer_config.json": {}})
    assert find_tokenizer(folder, 1000, tmp_path / "state") is None
