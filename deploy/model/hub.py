"""A model given by its id on a model hub: fetched once, then found in the hub's own cache."""

import logging
import re
from pathlib import Path
from typing import Final

from longshore.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

_HUB_ID: Final = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w./-]+))?")
_WANTED: Final = ["*.json", "*.safetensors", "*.jinja"]


def resolve_model(model: str | Path) -> Path:
    """The folder of `model`: a folder, or a hub id `owner/name`, or `owner/name@revision`.

    A folder that exists never touches the network. What was fetched before is used when the hub
    cannot be reached. Raises ConfigError when neither leads to files.
    """
    path = Path(model)
    if path.exists():
        return path
    match = _HUB_ID.fullmatch(str(model))
    if match is None:
        raise ConfigError(
            f"{model} is no folder, and no id of a model hub (owner/name or owner/name@revision). "
            "Give a folder with config.json and safetensors files, as Hugging Face writes it."
        )
    return _fetch(match["repo"], match["revision"])


def model_name(model: str | Path) -> str:
    """What requests call it: the name of the folder, or the hub id without its revision."""
    path = Path(model)
    return path.resolve().name if path.exists() else str(model).partition("@")[0]


def _fetch(repo: str, revision: str | None) -> Path:
    # Only now: importing it takes a while, and a local folder needs nothing of it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    logger.info("%s is no local folder; asking the model hub for it", repo)
    try:
        # Files in subfolders are other formats of the same weights.
        folder = snapshot_download(
            repo, revision=revision, allow_patterns=_WANTED, ignore_patterns=["*/*"]
        )
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{repo} is no local folder, the model hub cannot be reached, and no earlier download "
            "is in its cache. Give a folder, or fetch the model where there is a network."
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{repo} is no local folder, and the model hub refuses it: {reason}"
        ) from error
    except OSError as error:
        raise ConfigError(f"{repo} cannot be fetched from the model hub: {error}") from error
    return Path(folder)
