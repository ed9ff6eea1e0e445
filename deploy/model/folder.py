"""The properties of a model folder that settings depend on, read only from its JSON files.

An unsupported model is rejected here, with the worker's message, before any process is started.
"""

import logging
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import msgspec

from longshore.deploy.model.classifier import ClassifierModel, read_classifier
from longshore.deploy.model.embedding import EmbeddingModel, read_embedding_model
from longshore.deploy.model.gguf_folder import gguf_folder
from longshore.deploy.model.hub import model_name, resolve_model
from longshore.deploy.model.json_file import read_json_object
from longshore.deploy.model.text_files import read_text_files
from longshore.deploy.model.tokenizer_file import find_tokenizer
from longshore.protocol.errors import ConfigError, shortened
from longshore.protocol.model_files import exists
from longshore.protocol.sampling import SamplingParams
from longshore.worker.loading.gguf_files import has_gguf
from longshore.worker.models.decoder_config import DecoderConfig
from longshore.worker.models.families import read_model_config

logger = logging.getLogger(__name__)

DtypeName: TypeAlias = Literal["float32", "bfloat16", "float16"]


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Defaults for requests: from generation_config.json, else the API's.

    `do_sample: false` in generation_config.json means greedy.

    max_tokens: limit of output tokens; None: the API's default.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None


class AudioInput(msgspec.Struct, frozen=True):
    """Input of a speech model: at most `max_samples` mono samples at `sampling_rate` Hz. The
    encoder always produces `num_tokens` tokens, even for shorter audio."""

    sampling_rate: int
    max_samples: int
    num_tokens: int


class ModelFolder(msgspec.Struct, frozen=True):
    """A Hugging Face model folder.

    name:          model name in the API, unless the deployment sets another one.
    max_model_len: the model's limit of prompt and output tokens together.
    eos_token_ids: token ids that end an answer.
    checkpoint_dtype: dtype in config.json.
    embedding:     how it pools embeddings; None: it takes no text, or only classifies it.
    classifier:    labels of a model for sequence classification; None: it is another one.
    audio:         audio input of a speech model; None: it takes text.
    tokenizer_file: its tokenizer.json, in the folder or converted from what is there; None: the
                   folder has no tokenizer.
    """

    path: Path
    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str
    sampling_defaults: SamplingDefaults
    embedding: EmbeddingModel | None = None
    classifier: ClassifierModel | None = None
    audio: AudioInput | None = None
    tokenizer_file: Path | None = None

    @property
    def can_chat(self) -> bool:
        """Whether it generates text from text, and has a tokenizer for that."""
        makes_text = self.audio is None and not (self.embedding and self.embedding.is_only)
        return makes_text and self.tokenizer_file is not None

    def resolve_dtype(self, name: str, device: str) -> DtypeName:
        """The dtype to compute in. `auto` is the checkpoint's dtype, except that float16 becomes
        float32 on a CPU, where float16 is slow."""
        if name == "auto":
            is_slow = self.checkpoint_dtype == "float16" and device == "cpu"
            name = "float32" if is_slow else self.checkpoint_dtype
        return cast(DtypeName, name)


def find_model_folder(name: str | Path, state_dir: Path | None = None) -> Path:
    """The folder of a model; name, state_dir: as in `read_model_folder`. Raises ConfigError if it
    is not a model folder."""
    path = resolve_model(name, state_dir)
    if has_gguf(path):
        path = gguf_folder(path, state_dir)
    if not path.is_dir():
        raise ConfigError(
            f"{path} is a file; a model must be a folder in Hugging Face format, or a GGUF file"
        )
    if not exists(path / "config.json"):
        raise ConfigError(f"{path} has no config.json, so it is not a model folder")
    return path


def read_model_folder(name: str | Path, state_dir: Path | None = None) -> ModelFolder:
    """name: a folder, a GGUF file, a known model, or an id on a model hub (see `resolve_model`).
    state_dir: where what is fetched or converted is kept; None: the default.

    Logs a warning if nothing ends the answers of a model. Raises ConfigError if this is not a model
    folder, or a required setting is missing.
    """
    path = find_model_folder(name, state_dir)
    model = read_model_config(path)
    config = read_json_object(path / "config.json")
    generation = (
        read_json_object(path / "generation_config.json")
        if exists(path / "generation_config.json")
        else {}
    )
    audio = _audio_input(model)
    embedding = None
    if audio is None and not model.labels:
        embedding = read_embedding_model(
            path,
            model.hidden_size,
            is_only=not model.has_head,
            default_kind="cls" if model.is_bidirectional else "last",
        )
    ends = _end_ids(path, generation, config)
    tokenizer_file = None
    tokenizer = find_tokenizer(path.resolve(), model.vocab_size, state_dir)
    if tokenizer is not None:
        tokenizer_file, spec = tokenizer
        name_of_end = read_text_files(path, tokenizer_file).special_tokens.get("eos_token", "")
        ends = (*ends, spec.token_ids().get(name_of_end, -1))
    # Some converted folders have -1 for "none".
    eos_token_ids = tuple(i for i in dict.fromkeys(ends) if 0 <= i < model.vocab_size)
    if not eos_token_ids and model.has_head:
        logger.warning(
            "%s has no token that ends an answer (eos_token_id in generation_config.json or "
            "config.json, eos_token in tokenizer_config.json): answers end at max_tokens",
            path,
        )
    return ModelFolder(
        path=path.resolve(),
        name=model_name(name),
        vocab_size=model.vocab_size,
        max_model_len=model.max_supported_len,
        eos_token_ids=eos_token_ids,
        checkpoint_dtype=model.dtype,
        sampling_defaults=_sampling_defaults(generation, path),
        embedding=embedding,
        classifier=read_classifier(config, model.labels) if model.labels else None,
        audio=audio,
        tokenizer_file=tokenizer_file,
    )


def _end_ids(path: Path, *settings: dict[str, Any]) -> tuple[int, ...]:
    """The end-of-sequence ids of the folder's settings, and of the text part of each."""
    parts = (part for each in settings for part in (each, each.get("text_config")))
    values = [part.get("eos_token_id") for part in parts if isinstance(part, dict)]
    return tuple(token_id for value in values for token_id in _token_ids(value, path))


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
            given["top_k"] = max(given["top_k"], 0)  # -1 also means all
        settings = {name: value for name, value in given.items() if value is not None}
        defaults = msgspec.convert(settings, SamplingDefaults)
        SamplingParams(**msgspec.structs.asdict(defaults))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path / 'generation_config.json'}: {error}") from error
    return defaults


def _token_ids(value: object, path: Path) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    numbers = [token_id for token_id in ids if type(token_id) is int]  # not bool
    if len(numbers) < len(ids):
        given = shortened(repr(value))
        raise ConfigError(f"{path}: eos_token_id is {given}, neither an id nor a list of ids")
    return tuple(numbers)
