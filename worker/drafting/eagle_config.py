"""The config of an EAGLE-3 drafter (Li et al., 2025), in the form that SpecForge writes."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from longshore.protocol.errors import ConfigError
from longshore.worker.errors import UnsupportedModel
from longshore.worker.models.decoder_config import DecoderConfig
from longshore.worker.models.json_fields import JsonFields, read_json_object
from longshore.worker.models.llama_config import LlamaConfig

NUM_STATES: Final = 3
"""Layers of the model whose hidden states are read."""


@dataclass(frozen=True, kw_only=True)
class EagleConfig(LlamaConfig):
    """One layer of a Llama.

    num_draft_tokens: size of the head; drafts are tokens that are frequent.
    read_layers:      layers of the model of which the hidden states before them are read.
    model_hidden_size: of these.
    adds_normed_hidden: the hidden states are added to the result of attention after their norm.
    """

    num_draft_tokens: int
    read_layers: tuple[int, ...]
    model_hidden_size: int
    adds_normed_hidden: bool


def read_eagle_config(folder: Path, target: DecoderConfig) -> EagleConfig:
    """target: of the model that it drafts for. Raises ConfigError (UnsupportedModel and
    BrokenCheckpoint among them) for a folder that is no such drafter, or of another model."""
    file = read_json_object(folder / "config.json")
    architectures = file.values.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    if not any("eagle3" in str(name).lower() for name in names):
        raise UnsupportedModel(
            f"{file.source}: architectures={names} names no EAGLE-3 drafter, such as "
            "LlamaForCausalLMEagle3"
        )
    if file.count("num_hidden_layers") != 1:
        raise UnsupportedModel(f"{file.source}: a drafter of several layers is not supported")
    given = file.table("eagle_config") or JsonFields({}, file.source)
    given.reject_unless_neutral(
        "use_aux_hidden_state", True, "drafters of the last hidden state are not supported"
    )
    config = LlamaConfig.read(file)
    found = EagleConfig(
        **{each.name: getattr(config, each.name) for each in fields(config)},
        num_draft_tokens=file.integer("draft_vocab_size", config.vocab_size),
        read_layers=_read_layers(given, target.num_layers),
        model_hidden_size=file.integer("target_hidden_size", config.hidden_size),
        adds_normed_hidden=file.boolean("norm_before_residual", False),
    )
    for name, own, theirs in (
        ("vocab_size", found.vocab_size, target.vocab_size),
        ("target_hidden_size", found.model_hidden_size, target.hidden_size),
    ):
        if own != theirs:
            raise ConfigError(
                f"speculative_config: {folder} drafts for a model with {name}={own}, but this "
                f"model has {theirs}"
            )
    return found


def _read_layers(table: JsonFields, num_layers: int) -> tuple[int, ...]:
    """By default an early, a middle and a late one."""
    key = "eagle_aux_hidden_state_layer_ids"
    given = table.values.get(key)
    if given is None:
        given = [2, num_layers // 2, num_layers - 3]
    if (
        not isinstance(given, list)
        or len(given) != NUM_STATES
        or not all(type(layer) is int and 0 <= layer < num_layers for layer in given)
    ):
        raise table.wrong(key, f"{NUM_STATES} layers of the {num_layers} of the model")
    return tuple(given)
