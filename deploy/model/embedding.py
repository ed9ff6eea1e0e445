"""Pooling settings of a model folder, from sentence-transformers' files. Without them, the default
of decoders trained for embeddings: the last token's hidden state, normalized to length 1."""

from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from longshore.deploy.model.json_file import read_json_object, read_text
from longshore.protocol.arrays import Float32Array
from longshore.protocol.errors import ConfigError, shortened
from longshore.protocol.model_files import exists
from longshore.protocol.requests import PoolingKind, PoolingParams
from longshore.protocol.sampling import SamplingParams

MODULES_FILE: Final = "modules.json"

NOT_SAMPLED: Final = SamplingParams(temperature=0.0, max_tokens=1, seed=0)
"""Sampling settings of an embedding request: the engine requires some, without effect."""

_MODES: Final[dict[str, PoolingKind]] = {
    "cls_token": "cls",
    "cls": "cls",
    "mean_tokens": "mean",
    "mean": "mean",
    "lasttoken": "last",
}
_MODE_PREFIX: Final = "pooling_mode_"


class EmbeddingModel(msgspec.Struct, frozen=True):
    """How a model pools embeddings.

    size:    elements of an embedding.
    kind, normalize: defaults for requests; see PoolingParams.
    is_only: the model has no output head and only serves embeddings.
    problem: why the folder's pooling is not supported; None: it is.
    """

    size: int
    kind: PoolingKind = "last"
    normalize: bool = True
    is_only: bool = False
    problem: str | None = None

    def pooling(
        self,
        *,
        kind: PoolingKind | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
    ) -> PoolingParams:
        """The settings of a request. Raises ValueError, beginning with the name of the setting, if
        the folder's pooling is not supported or `dimensions` is out of range."""
        if self.problem is not None and kind is None:
            raise ValueError(f"model: {self.problem}")
        if dimensions is not None and not 1 <= dimensions <= self.size:
            raise ValueError(
                f"dimensions={dimensions} must be between 1 and {self.size}, the model's own number"
            )
        return PoolingParams(
            kind or self.kind, self.normalize if normalize is None else normalize, dimensions
        )


def cosine(one: Float32Array, other: Float32Array) -> float:
    """Of two embeddings of length 1."""
    return float(one.astype(np.float64) @ other.astype(np.float64))


def read_embedding_model(
    model_dir: Path, size: int, *, is_only: bool = False, default_kind: PoolingKind = "last"
) -> EmbeddingModel:
    """size: elements of the model's hidden states. default_kind: for a folder that does not say how
    to pool. Raises ConfigError for invalid files."""
    default = EmbeddingModel(size, default_kind, is_only=is_only)
    file = model_dir / MODULES_FILE
    if not exists(file):
        return default
    kind: PoolingKind | None = None
    normalize = False
    for name, path in _modules(file):
        match name:
            case "Transformer":
                continue
            case "Normalize":
                normalize = True
            case "Pooling" if kind is None and not normalize:
                config = model_dir / path / "config.json"
                modes = _pooling_modes(read_json_object(config))
                if len(modes) != 1 or modes[0] not in _MODES:
                    problem = (
                        f"{config} pools {shortened(', '.join(modes)) or 'nothing'}; supported is "
                        "one of the mean, the last token and the first (cls)"
                    )
                    return msgspec.structs.replace(default, problem=problem)
                kind = _MODES[modes[0]]
            case _:
                problem = (
                    f"{file} has a module {shortened(name)} that is not supported; without it the "
                    "embeddings would be wrong"
                )
                return msgspec.structs.replace(default, problem=problem)
    if kind is None:
        raise ConfigError(f"{file} has no Pooling module, so the model has no embeddings")
    return msgspec.structs.replace(default, kind=kind, normalize=normalize)


def _modules(file: Path) -> list[tuple[str, str]]:
    """Class name and folder of each module, in order."""
    try:
        modules = msgspec.json.decode(read_text(file), type=list[dict[str, Any]])
        return [(module["type"].rpartition(".")[2], module["path"]) for module in modules]
    except (msgspec.DecodeError, RecursionError, KeyError, AttributeError) as error:
        raise ConfigError(f"{file} is not a list of modules with type and path: {error}") from error


def _pooling_modes(config: dict[str, Any]) -> list[str]:
    """The names of the flags that are set, or the single name in newer files."""
    if isinstance(mode := config.get("pooling_mode"), str):
        return [mode]
    return [
        name.removeprefix(_MODE_PREFIX)
        for name, is_set in config.items()
        if name.startswith(_MODE_PREFIX) and is_set is True
    ]
