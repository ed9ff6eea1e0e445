"""Resolves a model id on a model hub: downloads it once, then uses the hub's own cache."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from longshore.deploy.model.gguf_folder import gguf_name, is_gguf_model
from longshore.deploy.model.known_models import KNOWN_MODELS, pulled_folder
from longshore.protocol.errors import ConfigError, shortened
from longshore.protocol.model_files import exists
from longshore.worker.loading.gguf_files import GGUF_SUFFIX
from longshore.worker.loading.safetensors_files import has_safetensors
from longshore.worker.process.byte_size import byte_size

logger = logging.getLogger(__name__)

_HUB_ID: Final = re.compile(
    r"(hf\.co/)?(?P<repo>[\w][\w.-]*/[\w][\w.-]*)"
    r"(:(?P<file>[\w.-]+))?(@(?P<revision>[\w./-]+))?"
)
_WANTED: Final = [
    *("*.json", "*.safetensors", "*.jinja"),
    *("*.model", "*.spm", "*.tiktoken", "merges.txt", "vocab.txt", "vocab.bpe"),
]
_UNWANTED: Final = ["*/*.json", "*/*.safetensors", "*/*.model", "*/*.spm", "*/*.tiktoken"]
"""Subfolders have other formats of the same weights, and chat templates."""


def resolve_model(model: str | Path, state_dir: Path | None = None) -> Path:
    """The folder or file of `model`: one that exists, the name of a known model that was pulled, or
    a hub id `owner/name`, or `owner/name@revision`. `owner/name:Q4_K_M` is the GGUF file with this
    end of its name, which may be left out if the repository has no safetensors files and one model
    in GGUF files.

    For an existing one, the network is not used. If the hub cannot be reached, an earlier
    download is used. Raises ConfigError if there is none, or if the GGUF file is not named clearly.
    """
    path = Path(model)
    if exists(path):
        try:
            path.stat()
        except OSError as error:
            raise ConfigError(f"{path} cannot be opened ({error.strerror})") from error
        return path
    if (known := KNOWN_MODELS.get(str(model))) is not None:
        if (folder := pulled_folder(known, state_dir)) is None:
            raise ConfigError(
                f"{known.name} is not on this machine. `longshore pull {known.name}` fetches it "
                f"({byte_size(known.download_bytes)}), as does `longshore serve {known.name} --yes`"
            )
        return folder
    match = _HUB_ID.fullmatch(str(model))
    if match is None:
        raise ConfigError(
            f"{shortened(str(model))} is neither a folder nor a model hub id (owner/name, "
            "owner/name@revision or owner/name:GGUF), and `longshore models` does not list it. "
            "Use a folder in Hugging Face format, with config.json and safetensors files, or a "
            "GGUF file."
        )
    repo, file, revision = match["repo"], match["file"], match["revision"]
    logger.info("%s is not a local folder; downloading it from the model hub", repo)
    whole = _fetch(repo, revision) if file is None else None
    if whole is not None and has_safetensors(whole):
        return whole
    names = _gguf_names(repo, revision)
    if whole is not None and not names:
        return whole
    parts = _parts_of(repo, names, file)
    return _fetch(repo, revision, allow_patterns=parts) / parts[0]


def model_name(model: str | Path) -> str:
    """The model's name in the API: the name of the folder, of the GGUF file without its suffix, or
    the hub id without its revision."""
    path = Path(model)
    if not path.exists():
        return str(model).partition("@")[0]
    return path.resolve().name if path.is_dir() else gguf_name(path)


def _fetch(repo: str, revision: str | None, **options: Any) -> Path:
    """The folder with the files of a repository, or those of them that `options` select."""
    # Imported here because the import is slow, and local folders do not need it.
    from huggingface_hub import snapshot_download

    wanted = {"allow_patterns": _WANTED, "ignore_patterns": _UNWANTED}
    with _hub_errors(repo):
        return Path(snapshot_download(repo, revision=revision, **(options or wanted)))


def _gguf_names(repo: str, revision: str | None) -> list[str]:
    """The GGUF files of a repository with models. If the hub cannot be reached, those in its
    cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError

    pattern = f"*{GGUF_SUFFIX}"
    try:
        files = snapshot_download(repo, revision=revision, allow_patterns=pattern, dry_run=True)
        names = [file.filename for file in files]
    except DryRunError:
        folder = _fetch(repo, revision, allow_patterns=[])
        names = [str(path.relative_to(folder)) for path in folder.rglob(pattern)]
    return sorted(name for name in names if is_gguf_model(Path(name)))


def _parts_of(repo: str, names: Sequence[str], wanted: str | None) -> list[str]:
    """The files of one model, which may be split, among GGUF files.

    wanted: the model's name, or the end of it; None: it is the only one.

    Raises ConfigError unless there is one such model.
    """
    if not names:
        raise ConfigError(f"{repo} has no GGUF file, so it is served without :{wanted}")
    models: dict[str, list[str]] = {}
    for path in map(Path, names):
        models.setdefault(str(path.with_name(gguf_name(path))), []).append(str(path))
    end = (wanted or "").lower().removesuffix(GGUF_SUFFIX)
    found = [
        model
        for model in models
        if wanted is None or f"-{Path(model).name}".lower().endswith((f"-{end}", f".{end}"))
    ]
    if len(found) == 1:
        return models[found[0]]
    ends = _ends_of([Path(model).name for model in models])
    asked = "" if wanted is None else f", and {len(found)} of them end in {wanted}"
    raise ConfigError(
        f"{repo} has {len(models)} models in GGUF files ({', '.join(ends)}){asked}. "
        f"Choose one by the end of its name, such as {repo}:{ends[0]}"
    )


def _ends_of(names: Sequence[str]) -> list[str]:
    """What the names do not have in common, such as the quantisation: their ends after a - or a
    dot."""
    same = takewhile(lambda characters: len(set(characters)) == 1, zip(*names, strict=False))
    begin = names[0][: len(list(same))]
    cut = max(begin.rfind("-"), begin.rfind(".")) + 1
    return [name[cut:] for name in names]


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Errors of the hub's client become ConfigErrors."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{repo} is not a local folder, the model hub cannot be reached, and its cache has no "
            "earlier download. Use a folder, or download the model on a machine with a network."
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{repo} is not a local folder, and the model hub rejected the request: {reason}"
        ) from error
    except OSError as error:
        raise ConfigError(f"{repo} cannot be downloaded from the model hub: {error}") from error
