"""What the settings need to know of a model folder, read from its JSON files alone.

A model that cannot be computed is refused here already, in the worker's own words, before any
process is started.
"""

from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import msgspec

from longshore.deploy.json_file import read_json_object
from longshore.protocol.errors import ConfigError
from longshore.protocol.sampling import SamplingParams
from longshore.worker.models.families import read_model_config

DtypeName: TypeAlias = Literal["float32", "bfloat16", "float16"]


class SamplingDefaults(msgspec.Struct, frozen=True):
    """What a request that does not say gets: generation_config.json, else the API's defaults.

    A model whose generation_config says `do_sample: false` and no temperature answers greedily.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


class ModelFolder(msgspec.Struct, frozen=True):
    """A Hugging Face model folder.

    max_model_len: tokens of prompt and answer together that the model was made for.
    eos_token_ids: any of them ends an answer.
    checkpoint_dtype: as config.json names it.
    """

    path: Path
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str
    sampling_defaults: SamplingDefaults

    def resolve_dtype(self, name: str, device: str) -> DtypeName:
        """The dtype to run in. `auto` is the checkpoint's own, except that float16 becomes float32
        on a CPU, whose float16 kernels are slow."""
        if name == "auto":
            is_slow = self.checkpoint_dtype == "float16" and device == "cpu"
            name = "float32" if is_slow else self.checkpoint_dtype
        return cast(DtypeName, name)


def read_model_folder(path: Path) -> ModelFolder:
    """Raises ConfigError if this is no model folder, or a setting that is needed is missing."""
    if not path.is_dir():
        raise ConfigError(
            f"{path} is not a folder. A model is a local folder with config.json and safetensors "
            "files, as Hugging Face writes it; nothing is downloaded."
        )
    if not (path / "config.json").exists():
        raise ConfigError(f"{path} holds no config.json, so it is not a model folder")
    model = read_model_config(path)
    config = read_json_object(path / "config.json")
    generation = (
        read_json_object(path / "generation_config.json")
        if (path / "generation_config.json").exists()
        else {}
    )
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    return ModelFolder(
        path=path.resolve(),
        vocab_size=model.vocab_size,
        max_model_len=model.max_supported_len,
        eos_token_ids=_token_ids(eos, path),
        checkpoint_dtype=model.dtype,
        sampling_defaults=_sampling_defaults(generation, path),
    )


def _sampling_defaults(generation: dict[str, Any], path: Path) -> SamplingDefaults:
    is_greedy = generation.get("do_sample") is False
    temperature = generation.get("temperature")
    if temperature is None:
        temperature = 0.0 if is_greedy else 1.0
    top_p = generation.get("top_p")
    top_k = generation.get("top_k")
    try:
        defaults = msgspec.convert(
            {
                "temperature": temperature,
                "top_p": 1.0 if top_p is None else top_p,
                "top_k": 0 if top_k is None else max(top_k, 0),
            },
            SamplingDefaults,
        )
        SamplingParams(temperature=defaults.temperature, top_p=defaults.top_p, top_k=defaults.top_k)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path / 'generation_config.json'}: {error}") from error
    return defaults


def _token_ids(value: object, path: Path) -> tuple[int, ...]:
    match value:
        case None:
            return ()
        case int():
            return (value,)
        case list() if all(isinstance(item, int) for item in value):
            return tuple(value)
    raise ConfigError(f"{path}: eos_token_id is {value!r}, neither an id nor a list of ids")
