"""Which model families are known, by what config.json calls them.

No tensor library is needed for this: settings are derived from a model's config before anything is
loaded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from longshore.worker.errors import UnsupportedModel
from longshore.worker.models.json_fields import JsonFields, read_json_object
from longshore.worker.models.llama_config import LlamaConfig, read_llama_config


@dataclass(frozen=True)
class ModelFamily:
    """How a family's config.json is read."""

    model_type: str
    read_config: Callable[[JsonFields], LlamaConfig]


ARCHITECTURES: Final = {
    "LlamaForCausalLM": ModelFamily("llama", read_llama_config),
}


def read_model_config(model_dir: Path) -> LlamaConfig:
    """What `model_dir/config.json` describes.

    Raises UnsupportedModel for an architecture or feature that is not computed here, and
    BrokenCheckpoint for a file that is missing or makes no sense.
    """
    fields = read_json_object(model_dir / "config.json")
    return _family(fields).read_config(fields)


def _family(fields: JsonFields) -> ModelFamily:
    names = fields.values.get("architectures") or ()
    if not isinstance(names, list | tuple):
        raise fields.wrong("architectures", "a list of names")
    supported = ", ".join(ARCHITECTURES)
    if not names:
        model_type = fields.text("model_type", "none")
        for family in ARCHITECTURES.values():
            if family.model_type == model_type:
                return family
        raise UnsupportedModel(
            f"{fields.source}: model_type={model_type!r} is not supported. Supported: {supported}."
        )
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise UnsupportedModel(
        f"{fields.source}: architecture {', '.join(map(str, names))} is not supported. "
        f"Supported: {supported}."
    )
