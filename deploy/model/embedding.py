"""How a model folder wants its texts turned into vectors: sentence-transformers' files, or the way
of decoders that were trained for it, the last token's state at length 1."""

from pathlib import Path
from typing import Any, Final

import msgspec

from longshore.deploy.model.json_file import read_json_object, read_text
from longshore.protocol.errors import ConfigError
from longshore.protocol.requests import PoolingKind, PoolingParams
from longshore.protocol.sampling import SamplingParams

MODULES_FILE: Final = "modules.json"

NOT_SAMPLED: Final = SamplingParams(temperature=0.0, max_tokens=1, seed=0)
"""The engine wants settings of every request; of one for a vector they mean nothing."""

_MODES: Final[dict[str, PoolingKind]] = {
    "cls_token": "cls",
    "cls": "cls",
    "mean_tokens": "mean",
    "mean": "mean",
    "lasttoken": "last",
}
_MODE_PREFIX: Final = "pooling_mode_"


class EmbeddingModel(msgspec.Struct, frozen=True):
    """size:    elements of a vector.
    kind, normalize: unless a request says else; see PoolingParams.
    is_only: the model has no output head: it gives vectors and no tokens.
    problem: why the folder's own way is not computed here; None: it is.
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
        """What to ask the engine. Raises ValueError, beginning with the name of the setting at
        fault: what the folder wants is not computed here, or it has not so many dimensions."""
        if self.problem is not None and kind is None:
            raise ValueError(f"model: {self.problem}")
        if dimensions is not None and not 1 <= dimensions <= self.size:
            raise ValueError(
                f"dimensions={dimensions} must lie within 1..{self.size}, the model's own number"
            )
        return PoolingParams(
            kind or self.kind, self.normalize if normalize is None else normalize, dimensions
        )


def read_embedding_model(model_dir: Path, size: int, *, is_only: bool = False) -> EmbeddingModel:
    """size: of the model's hidden states. Raises ConfigError for files that make no sense."""
    default = EmbeddingModel(size, is_only=is_only)
    file = model_dir / MODULES_FILE
    if not file.exists():
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
                        f"{config} pools {', '.join(modes) or 'nothing'}; computed are the mean, "
                        "the last token and the first (cls), one of them"
                    )
                    return msgspec.structs.replace(default, problem=problem)
                kind = _MODES[modes[0]]
            case _:
                problem = (
                    f"{file} has a module {name} that is not computed here; without it the vectors "
                    "would not be the model's"
                )
                return msgspec.structs.replace(default, problem=problem)
    if kind is None:
        raise ConfigError(f"{file} names no Pooling module, so its model gives no vectors")
    return msgspec.structs.replace(default, kind=kind, normalize=normalize)


def _modules(file: Path) -> list[tuple[str, str]]:
    """The class and the folder of each, in order."""
    try:
        modules = msgspec.json.decode(read_text(file), type=list[dict[str, Any]])
        return [(module["type"].rpartition(".")[2], module["path"]) for module in modules]
    except (msgspec.DecodeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{file} is no list of modules with type and path: {error}") from error


def _pooling_modes(config: dict[str, Any]) -> list[str]:
    """By the names of the flags that are set, or the one name that newer files have."""
    if isinstance(mode := config.get("pooling_mode"), str):
        return [mode]
    return [
        name.removeprefix(_MODE_PREFIX)
        for name, is_set in config.items()
        if name.startswith(_MODE_PREFIX) and is_set is True
    ]
