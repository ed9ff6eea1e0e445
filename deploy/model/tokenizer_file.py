"""Finds a model's `tokenizer.json`, the one form of a tokenizer that is used here.

A folder without one, but with the files of another form, is converted by transformers, in a process
of its own: it takes seconds, imports much, and reads files of others. Tokens that a folder has only
beside its tokenizer.json are added to a copy. Results are kept in the state directory.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from longshore.deploy.gateway.text.tokenizer_bounds import TokenizerSpec, read_tokenizer_spec
from longshore.deploy.model.json_file import read_json_object
from longshore.deploy.model.kept_folder import kept_folder
from longshore.deploy.model.text_files import AddedToken, read_text_files
from longshore.protocol.errors import ConfigError, shortened
from longshore.protocol.install_command import install_command
from longshore.protocol.model_files import exists, read_bytes

TOKENIZER_FILE: Final = "tokenizer.json"
CONVERSION_TIMEOUT_S: Final = 120.0
CONVERTER: Final = "longshore.deploy.model.convert_tokenizer"

_FOLDER: Final = "tokenizers"
_VOCABULARIES: Final = ("vocab.json", "vocab.txt", "vocab.bpe", "encoder.json", "tekken.json")
_VOCABULARY_ENDINGS: Final = (".model", ".spm", ".tiktoken")
_SETTINGS: Final = (
    "config.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


def find_tokenizer(
    model_dir: Path, vocab_size: int, state_dir: Path | None = None
) -> tuple[Path, TokenizerSpec] | None:
    """The tokenizer.json of a model, and its parts; None if the folder has no tokenizer.

    vocab_size: of the model; no token with a higher id is added.
    state_dir:  of the deployment; None: the user's.
    Raises ConfigError if there is a tokenizer that cannot be used.
    """
    file = model_dir / TOKENIZER_FILE
    if not exists(file):
        vocabularies = _vocabularies(model_dir)
        if not vocabularies:
            return None
        file = _converted(model_dir, vocabularies, state_dir)
    spec = read_tokenizer_spec(file)
    ids = spec.token_ids()
    next_id = 1 + max(ids.values(), default=-1)
    added = {token.content for token in spec.added_tokens}
    lacking: list[tuple[int, AddedToken]] = []
    for token in read_text_files(model_dir, file).added_tokens:
        if token.content in added or not token.content:
            continue
        token_id = ids.get(token.content, next_id)
        if token_id < vocab_size:
            lacking.append((token_id, token))
            added.add(token.content)
            next_id = max(next_id, token_id + 1)
    if lacking:
        file = _with_tokens(file, lacking, state_dir)
        spec = read_tokenizer_spec(file)
    return file, spec


def _vocabularies(model_dir: Path) -> list[Path]:
    return sorted(
        path
        for path in model_dir.iterdir()
        if path.name in _VOCABULARIES or path.name.endswith(_VOCABULARY_ENDINGS)
    )


def _converted(model_dir: Path, vocabularies: Sequence[Path], state_dir: Path | None) -> Path:
    names = ", ".join(path.name for path in vocabularies)
    packages = ["transformers"]
    if any(path.name.endswith(_VOCABULARY_ENDINGS) for path in vocabularies):
        packages += ["sentencepiece", "tiktoken"]
    lacking = [name for name in packages if find_spec(name) is None]
    if lacking:
        raise ConfigError(
            f"{model_dir} has no {TOKENIZER_FILE}, but {shortened(names)}; converting it needs "
            f"{', '.join(lacking)}. Run {install_command('tokenizers')}"
        )
    settings = [model_dir / name for name in _SETTINGS if exists(model_dir / name)]
    try:
        key = _digest(part for path in (*vocabularies, *settings) for part in _named(path))
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error

    def convert(target: Path) -> None:
        command = [sys.executable, "-m", CONVERTER, str(model_dir.absolute()), str(target)]
        try:
            ended = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=CONVERSION_TIMEOUT_S,
                check=False,
            )
            reason = " ".join(ended.stderr.decode(errors="replace").split())
            is_converted = ended.returncode == 0 and exists(target / TOKENIZER_FILE)
        except subprocess.TimeoutExpired:
            is_converted, reason = False, f"it took longer than {CONVERSION_TIMEOUT_S:g} s"
        if not is_converted:
            raise ConfigError(
                f"{model_dir} has no {TOKENIZER_FILE}, and transformers cannot convert "
                f"{shortened(names)}: {shortened(reason)}. Add the model's {TOKENIZER_FILE}"
            )

    return _kept(state_dir, key, convert)


def _with_tokens(
    file: Path, tokens: Sequence[tuple[int, AddedToken]], state_dir: Path | None
) -> Path:
    """A copy of a tokenizer.json with added tokens, given with their ids."""
    content = read_json_object(file)
    entries = [{"id": token_id, "content": name, **flags} for token_id, (name, flags) in tokens]
    content["added_tokens"] = [*(content.get("added_tokens") or ()), *entries]
    text = json.dumps(content, ensure_ascii=False)

    def write(target: Path) -> None:
        (target / TOKENIZER_FILE).write_text(text, encoding="utf-8")
        settings = file.with_name("tokenizer_config.json")
        if file.parent.parent.name == _FOLDER and exists(settings):  # it was converted
            shutil.copy(settings, target)

    return _kept(state_dir, _digest([text.encode()]), write)


def _named(path: Path) -> tuple[bytes, bytes]:
    return path.name.encode(), read_bytes(path)


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def _kept(state_dir: Path | None, key: str, make: Callable[[Path], None]) -> Path:
    """The tokenizer.json in the state directory under `key`, which `make` writes into a folder if
    it is not there yet."""
    return kept_folder(state_dir, _FOLDER, key, make) / TOKENIZER_FILE
