"""What the settings need to know of a model folder, read from its JSON files alone.

A model that cannot be computed is refused here already, in the worker's own words, before any
process is started.
"""

from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import msgspec

from longshore.deploy.model.embedding import EmbeddingModel, read_embedding_model
from longshore.deploy.model.hub import model_name, resolve_model
from longshore.deploy.model.json_file import read_json_object
from longshore.protocol.errors import ConfigError
from longshore.protocol.sampling import SamplingParams
from longshore.worker.models.decoder_config import DecoderConfig
from longshore.worker.models.families import read_model_config

DtypeName: TypeAlias = Literal["float32", "bfloat16", "float16"]


class SamplingDefaults(msgspec.Struct, frozen=True):
    """What a request that does not say gets: generation_config.json, else the API's defaults.

    A model whose generation_config says `do_sample: false` answers greedily.

    max_tokens: tokens of an answer at most; None is for the API to say.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None


class AudioInput(msgspec.Struct, frozen=True):
    """What a speech model takes: mono samples at `sampling_rate` Hz, at most `max_samples` of them,
    which its encoder makes `num_tokens` of, however few they are."""

    sampling_rate: int
    max_samples: int
    num_tokens: int


class ModelFolder(msgspec.Struct, frozen=True):
    """A Hugging Face model folder.

    name:          what requests call the model, unless the deployment gives it another name.
    max_model_len: tokens of prompt and answer together that the model was made for.
    eos_token_ids: any of them ends an answer.
    checkpoint_dtype: as config.json names it.
    embedding:     how it turns texts into vectors; None: it takes none.
    audio:         what it turns into text; None: it takes text.
    """

    path: Path
    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str
    sampling_defaults: SamplingDefaults
    embedding: EmbeddingModel | None = None
    audio: AudioInput | None = None

    def resolve_dtype(self, name: str, device: str) -> DtypeName:
        """The dtype to run in. `auto` is the checkpoint's own, except that float16 becomes float32
        on a CPU, whose float16 kernels are slow."""
        if name == "auto":
            is_slow = self.checkpoint_dtype == "float16" and device == "cpu"
            name = "float32" if is_slow else self.checkpoint_dtype
        return cast(DtypeName, name)


def read_model_folder(name: str | Path) -> ModelFolder:
    """name: a folder, or the id of one on a model hub (`resolve_model`).

    Raises ConfigError if this is no model folder, or a setting that is needed is missing.
    """
    path = resolve_model(name)
    if not path.is_dir():
        raise ConfigError(f"{path} is a file. A model is a folder, as Hugging Face writes it.")
    if not (path / "config.json").exists():
        raise ConfigError(f"{path} holds no config.json, so it is not a model folder")
    model = read_model_config(path)
    config = read_json_object(path / "config.json")
    generation = (
        read_json_object(path / "generation_config.json")
        if (path / "generation_config.json").exists()
        else {}
    )
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id")
    audio = _audio_input(model)
    embedding = read_embedding_model(path, model.hidden_size, is_only=not model.has_head)
    return ModelFolder(
        path=path.resolve(),
        name=model_name(name),
        vocab_size=model.vocab_size,
        max_model_len=model.max_supported_len,
        eos_token_ids=_token_ids(eos, path),
        checkpoint_dtype=model.dtype,
        sampling_defaults=_sampling_defaults(generation, path),
        embedding=None if audio else embedding,
        audio=audio,
    )


def _audio_input(model: DecoderConfig) -> AudioInput | None:
    if not model.max_encoder_tokens:
        return None
    return AudioInput(model.sampling_rate, model.max_audio_samples, model.max_encoder_tokens)


def _sampling_defaults(generation: dict[str, Any], path: Path) -> SamplingDefaults:
    given = {
        "temperature": generation.get("temperature"),
        "top_p": generation.get("top_p"),
        "top_k": generation.get("top_k"),
        "min_p": generation.get("min_p"),
        "repetition_penalty": generation.get("repetition_penalty"),
        "max_tokens": generation.get("max_new_tokens"),
    }
    if generation.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        if given["top_k"] is not None:
            given["top_k"] = max(given["top_k"], 0)  # some say -1 for all
        settings = {name: value for name, value in given.items() if value is not None}
        defaults = msgspec.convert(settings, SamplingDefaults)
        SamplingParams(**msgspec.structs.asdict(defaults))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path / 'generation_config.json'}: {error}") from error
    return defaults


def _token_ids(value: object, path: Path) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    numbers = [token_id for token_id in ids if type(token_id) is int]  # true is no id
    if len(numbers) < len(ids):
        raise ConfigError(f"{path}: eos_token_id is {value!r}, neither an id nor a list of ids")
    # Converted folders write -1 for "none".
    return tuple(token_id for token_id in numbers if token_id >= 0)
