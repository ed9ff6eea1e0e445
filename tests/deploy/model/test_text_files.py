"""Special tokens and chat templates are those that transformers reads, wherever they stand."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from transformers import AutoTokenizer

from longshore.deploy.gateway.text.tokenizer import load_tokenizer
from longshore.deploy.model.text_files import read_text_files
from longshore.deploy.model.tokenizer_file import find_tokenizer
from longshore.protocol.errors import ConfigError
from tests.deploy.tiny_tokenizer import VOCAB_SIZE, byte_level_tokenizer

CHAT: Final = [{"role": "user", "content": "Where?"}]
TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": {}}}
NAMED: Final = [
    {"name": "default", "template": "{{ bos_token }}settings"},
    {"name": "tool_use", "template": "settings' tools"},
]


def text_folder(folder: Path, files: Mapping[str, Any]) -> Path:
    """A folder with tokenizer.json and `files`: text, or values to be written as JSON."""
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text)
    return folder


PLACES: Final[dict[str, dict[str, Any]]] = {
    "settings": {"tokenizer_config.json": {"chat_template": "settings"}},
    "list": {"tokenizer_config.json": {"chat_template": NAMED, "bos_token": "<s>"}},
    "file": {"tokenizer_config.json": {"chat_template": NAMED}, "chat_template.jinja": "file"},
    "files": {
        "tokenizer_config.json": {"chat_template": "settings"},
        "chat_template.jinja": "file",
        "additional_chat_templates/tool_use.jinja": "file's tools",
    },
    "files without settings": {
        "chat_template.jinja": "file {{ eos_token }}",
        "additional_chat_templates/tool_use.jinja": "tools {{ eos_token }}",
        "tokenizer_config.json": {"eos_token": "</s>"},
    },
    "tokens of the map": {
        "chat_template.jinja": "{{ bos_token }}|{{ eos_token }}|{{ image_token }}|{{ cls_token }}",
        "tokenizer_config.json": {"bos_token": "a", "image_token": "<s>", "cls_token": "<s>"},
        "special_tokens_map.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}},
    },
    "map that no longer counts": {
        "chat_template.jinja": "{{ bos_token }}|{{ eos_token }}",
        "tokenizer_config.json": {
            "bos_token": "<s>",
            "added_tokens_decoder": {"0": {"content": "<s>", "special": True}},
        },
        "special_tokens_map.json": {"bos_token": "</s>", "eos_token": "</s>"},
    },
    "extra tokens": {
        "chat_template.jinja": "{{ boi_token }}",
        "tokenizer_config.json": {"extra_special_tokens": {"boi_token": "</s>"}},
    },
}


@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["no tools", "tools"])
@pytest.mark.parametrize("place", PLACES)
def test_chats_are_rendered_as_by_transformers(
    tmp_path: Path, place: str, tools: list[dict[str, Any]] | None
) -> None:
    folder = text_folder(tmp_path, PLACES[place])
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        CHAT, tools=tools, tokenize=False
    )
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    template = tokenizer.chat_template.for_tools(tools)
    assert template.render(CHAT, tools=tools, add_generation_prompt=False) == expected


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.json": {"chat_template": "processor"}},
        {"processor_config.json": {"chat_template": "processor"}},
        {
            "processor_config.json": {"chat_template": "processor"},
            "chat_template.json": {"chat_template": "older"},
        },
    ],
)
def test_template_of_a_processor_is_used_if_the_tokenizer_has_none(
    tmp_path: Path, files: dict[str, Any]
) -> None:
    folder = text_folder(tmp_path, files)
    assert read_text_files(folder).templates == {"default": "processor"}
    (folder / "chat_template.jinja").write_text("tokenizer")
    assert read_text_files(folder).templates == {"default": "tokenizer"}


def test_templates_of_files_and_settings_are_taken_together(tmp_path: Path) -> None:
    files = {
        "tokenizer_config.json": {"chat_template": "settings"},
        "additional_chat_templates/tool_use.jinja": "tools",
    }
    folder = text_folder(tmp_path, files)
    assert read_text_files(folder).templates == {"default": "settings", "tool_use": "tools"}


def test_broken_files_are_named(tmp_path: Path) -> None:
    for name in ("special_tokens_map.json", "added_tokens.json", "processor_config.json"):
        folder = tmp_path / name
        folder.mkdir()
        text_folder(folder, {name: "["})
        with pytest.raises(ConfigError, match=f"{name} is not JSON"):
            read_text_files(folder)


ADDED: Final[dict[str, dict[str, Any]]] = {
    "added_tokens.json": {
        "added_tokens.json": {"<|end|>": 262, "<tool>": 261},
        "special_tokens_map.json": {"eos_token": "<|end|>"},
    },
    "added_tokens_decoder": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "262": {"content": "<|end|>", "special": True},
                "261": {"content": "<tool>", "lstrip": True, "normalized": False},
            },
        },
    },
    "a special token": {"tokenizer_config.json": {"eos_token": "<|end|>", "bos_token": "the"}},
}


@pytest.mark.parametrize("place", ADDED)
def test_tokens_beside_tokenizer_json_are_added_as_by_transformers(
    tmp_path: Path, place: str
) -> None:
    (tmp_path / "model").mkdir()
    folder = text_folder(tmp_path / "model", ADDED[place])
    found = find_tokenizer(folder, VOCAB_SIZE, tmp_path / "state")
    assert found is not None
    tokenizer = load_tokenizer(folder, found[0])
    assert tokenizer is not None
    expected = AutoTokenizer.from_pretrained(folder)
    text = "the <tool> is near<|end|> the end"
    assert tokenizer.encode(text) == expected(text)["input_ids"]
    assert found[0] != folder / "tokenizer.json"
    # A restart uses the same file.
    assert find_tokenizer(folder, VOCAB_SIZE, tmp_path / "state") == found
    # Tokens that the model has no embedding for are not added.
    few = find_tokenizer(folder, 261, tmp_path / "state")
    assert few is not None
    assert "<|end|>" not in few[1].token_ids()
