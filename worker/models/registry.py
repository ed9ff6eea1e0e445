"""The class that computes a family's models, by the type of its config."""

import importlib
from typing import Final

from longshore.worker.errors import UnsupportedModel
from longshore.worker.models.decoder_config import DecoderConfig
from longshore.worker.models.decoder_model import DecoderModel


class Models:
    """`models[type(config)](config, ...)` builds a model; its module is imported by that."""

    def __getitem__(self, config_type: type[DecoderConfig]) -> type[DecoderModel]:
        module, _, name = config_type.model.partition(":")
        found = getattr(importlib.import_module(module), name, None)
        if not (isinstance(found, type) and issubclass(found, DecoderModel)):
            raise UnsupportedModel(
                f"{config_type.__name__}.model = {config_type.model!r} leads to {found!r}, which "
                "is no subclass of DecoderModel (docs/models.md)."
            )
        return found


MODELS: Final = Models()
