"""The file of `longshore serve --models`: the models of one server, each with settings of its own.

    [[models]]
    model = "smollm2-135m-instruct"
    served_model_name = ["chat"]
    num_blocks = 2000

    [[models]]
    model = "/models/embedder"
    max_num_seqs = 16

What a table does not set is as on the command line.
"""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from longshore.deploy.settings.options import EngineOptions, ServeOptions
from longshore.deploy.settings.tables import read_toml, with_table
from longshore.protocol.errors import ConfigError

MAX_MODELS: Final = 32

_OF_GATEWAYS: Final = (
    *("served_model_name", "chat_template", "tool_call_parser", "reasoning_parser"),
    *("default_chat_template_kwargs", "max_forced_calls", "prompt_nonces", "max_live_requests"),
    *(
        "idle_sleep_s",
        "replicas",
        "routing_policy",
        "routing_session_header",
        "routing_index_blocks",
    ),
)
"""Settings of a model that are not of its engines."""
_COMMON: Final = ("state_dir", "log_level", "otlp_traces_endpoint", "seed")
"""Settings of engines that must be the same for all."""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MAX_MODELS)]


def read_models_file(path: Path, options: ServeOptions) -> list[tuple[Path, ServeOptions]]:
    """Each model with its settings. options: of the command line. Raises ConfigError."""
    read, _ = read_toml(path, _File, "models file")
    return [_entry(path, place, table, options) for place, table in enumerate(read.models)]


def _entry(
    path: Path, place: int, table: dict[str, Any], options: ServeOptions
) -> tuple[Path, ServeOptions]:
    where = f"models file {path}: models[{place}]"
    model = table.get("model")
    if not isinstance(model, str) or not model:
        raise ConfigError(
            f"{where}.model is missing or no text: write model = 'NAME', as on the command line"
        )
    every = [each.name for each in fields(ServeOptions)]
    of_models = {each.name for each in fields(EngineOptions)} - {*_COMMON} | {*_OF_GATEWAYS}
    advice = "it is the same for all models; set it on the command line"
    settings = with_table(
        options,
        {name: value for name, value in table.items() if name != "model"},
        where,
        known=every,
        elsewhere={name: advice for name in every if name not in of_models},
    )
    return Path(model), settings


def check_common_settings(models: Sequence[Path], options: ServeOptions) -> None:
    """Raise ConfigError if a setting that only one model can have is given for several."""
    for name in ("served_model_name", "chat_template"):
        if len(models) > 1 and getattr(options, name) is not None:
            raise ConfigError(
                f"{name} is a setting of one model, and {len(models)} are given. Write a file for "
                "--models, with a table for each."
            )
