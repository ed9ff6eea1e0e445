"""What a model folder says about its texts beside the vocabulary: special tokens, chat templates.

Hugging Face's tools have kept these in several files. All are read here, with the precedence that
transformers gives them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from longshore.deploy.model.json_file import read_json_object, read_text
from longshore.protocol.errors import ConfigError
from longshore.protocol.model_files import exists

DEFAULT: Final = "default"
TOOL_USE: Final = "tool_use"
"""The template for chats with tools, if a folder names several."""

TEMPLATE_FILE: Final = "chat_template.jinja"
TEMPLATE_FOLDER: Final = "additional_chat_templates"
_TEMPLATE_KEY: Final = "chat_template"
_PROCESSOR_FILES: Final = ("processor_config.json", "chat_template.json")
_MAX_TEMPLATES: Final = 64


class AddedToken(NamedTuple):
    """A token that a folder adds to the vocabulary. fields: of an entry in tokenizer.json."""

    content: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class TextFiles:
    """special_tokens: by name, such as `eos_token`.
    templates:      sources of the chat templates, by name.
    added_tokens:   that the folder lists outside tokenizer.json, in the order of their ids.
    keeps_end:      truncation removes the beginning of a text.
    """

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    templates: Mapping[str, str] = field(default_factory=dict)
    added_tokens: tuple[AddedToken, ...] = ()
    keeps_end: bool = False


def read_text_files(model_dir: Path, tokenizer_file: Path | None = None) -> TextFiles:
    """tokenizer_file: of the model, if it is not in its folder: the special tokens are those beside
    it. Raises ConfigError if a file exists and cannot be read."""
    settings_dir = model_dir
    if tokenizer_file is not None and exists(tokenizer_file.with_name("tokenizer_config.json")):
        settings_dir = tokenizer_file.parent
    settings = _object(settings_dir / "tokenizer_config.json")
    template_settings = settings
    if settings_dir != model_dir:
        template_settings = _object(model_dir / "tokenizer_config.json")
    if "added_tokens_decoder" in settings:
        listed = _decoder_tokens(settings["added_tokens_decoder"])
        tokens = _special_tokens(settings)
    else:  # as older versions of transformers have saved it
        settings = settings | _object(settings_dir / "special_tokens_map.json")
        tokens = _special_tokens(settings)
        file = _object(settings_dir / "added_tokens.json")
        listed = _plain_tokens(file, frozenset(tokens.values()))
    known = {token.content for token in listed}
    named = [name for name in dict.fromkeys(tokens.values()) if name not in known]
    return TextFiles(
        tokens,
        _templates(model_dir, template_settings),
        (*listed, *(AddedToken(name, _SPECIAL) for name in named)),
        settings.get("truncation_side") == "left",
    )


def read_template_file(path: Path) -> str:
    """A template that the user has chosen. Raises ConfigError."""
    try:
        return read_text(path)
    except ConfigError as error:
        raise ConfigError(f"chat_template: {error}") from error


_PLAIN: Final[Mapping[str, Any]] = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": True,
    "special": False,
}
_SPECIAL: Final[Mapping[str, Any]] = {**_PLAIN, "normalized": False, "special": True}


def _object(path: Path) -> dict[str, Any]:
    return read_json_object(path) if exists(path) else {}


def _templates(model_dir: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Files of their own replace what the tokenizer's settings have. What only a processor would
    read comes last."""
    files = {}
    folder = model_dir / TEMPLATE_FOLDER
    if folder.is_dir():
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".jinja")
        files = {path.stem: read_text(path) for path in paths[:_MAX_TEMPLATES]}
    if exists(model_dir / TEMPLATE_FILE):
        files[DEFAULT] = read_text(model_dir / TEMPLATE_FILE)
    if DEFAULT in files:
        return files
    found = _named_templates(settings.get(_TEMPLATE_KEY)) | files
    for name in _PROCESSOR_FILES:
        if DEFAULT not in found and exists(model_dir / name):
            found = _named_templates(_object(model_dir / name).get(_TEMPLATE_KEY)) | found
    return found


def _named_templates(value: object) -> dict[str, str]:
    """One template, a list of named ones, or an object of them."""
    named: dict[Any, Any] = {}
    if isinstance(value, str):
        named = {DEFAULT: value}
    elif isinstance(value, dict):
        named = value
    elif isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
    return {
        name: source
        for name, source in list(named.items())[:_MAX_TEMPLATES]
        if isinstance(name, str) and isinstance(source, str)
    }


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Those that every model has, such as `eos_token`, and a model's own, such as `image_token`."""
    extra = settings.get("extra_special_tokens")
    named = {**settings, **extra} if isinstance(extra, dict) else settings
    tokens = {}
    for name, token in named.items():
        if isinstance(token, dict):
            token = token.get("content")
        if name.endswith("_token") and isinstance(token, str):
            tokens[name] = token
    return tokens


def _decoder_tokens(tokens: object) -> tuple[AddedToken, ...]:
    """The tokens of `added_tokens_decoder`: objects by id."""
    found = []
    for token_id, token in tokens.items() if isinstance(tokens, dict) else ():
        content = token.get("content") if isinstance(token, dict) else None
        if token_id.isdecimal() and isinstance(content, str):
            flags = {name: bool(token.get(name, flag)) for name, flag in _PLAIN.items()}
            found.append((int(token_id), AddedToken(content, flags)))
    return tuple(token for _, token in sorted(found, key=lambda item: item[0]))


def _plain_tokens(ids: Mapping[str, object], special: frozenset[str]) -> tuple[AddedToken, ...]:
    """The tokens of `added_tokens.json`: ids by content."""
    numbered = [(number, text) for text, number in ids.items() if type(number) is int]
    return tuple(
        AddedToken(text, _SPECIAL if text in special else _PLAIN) for _, text in sorted(numbered)
    )
