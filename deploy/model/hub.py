"""Resolves a model id on a model hub: downloads it once, then uses the hub's own cache."""

import logging
import re
from pathlib import Path
from typing import Final

from longshore.protocol.errors import ConfigError, shortened
from longshore.protocol.model_files import exists

logger = logging.getLogger(__name__)

_HUB_ID: Final = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w./-]+))?")
_WANTED: Final = ["*.json", "*.safetensors", "*.jinja"]


def resolve_model(model: str | Path) -> Path:
    """The folder of `model`: a folder, or a hub id `owner/name`, or `owner/name@revision`.

    For an existing folder, the network is not used. If the hub cannot be reached, an earlier
    download is used. Raises ConfigError if there is none.
    """
    path = Path(model)
    if exists(path):
        try:
            path.stat()
        except OSError as error:
            raise ConfigError(f"{path} cannot be opened ({error.strerror})") from error
        return path
    match = _HUB_ID.fullmatch(str(model))
    if match is None:
        raise ConfigError(
            f"{shortened(str(model))} is neither a folder nor a model hub id (owner/name or "
            "owner/name@revision). Use a folder in Hugging Face format, with config.json and "
            "safetensors files."
        )
    return _fetch(match["repo"], match["revision"])


def model_name(model: str | Path) -> str:
    """The model's name in the API: the name of the folder, or the hub id without its revision."""
    path = Path(model)
    return path.resolve().name if path.exists() else str(model).partition("@")[0]


def _fetch(repo: str, revision: str | None) -> Path:
    # Imported here because the import is slow, and local folders do not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    logger.info("%s is not a local folder; downloading it from the model hub", repo)
    try:
        # Subfolders contain other formats of the same weights.
        folder = snapshot_download(
            repo, revision=revision, allow_patterns=_WANTED, ignore_patterns=["*/*"]
        )
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
    return Path(folder)
