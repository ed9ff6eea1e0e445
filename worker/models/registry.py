"""The model class of each family, by the class of its config."""

import importlib
from typing import Final

from longshore.worker.errors import UnsupportedModel
from longshore.worker.models.decoder_config import DecoderConfig
from longshore.worker.models.decoder_model import DecoderModel


class Models:
    """`MODELS[type(config)](config, ...)` imports the family's module and builds a model."""

    def __getitem__(self, config_type: type[DecoderConfig]) -> type[DecoderModel]:
        module, _, name = config_type.model.partition(":")
        found = getattr(importlib.import_module(module), name, None)
        if not (isinstance(found, type) and issubclass(found, DecoderModel)):
            raise UnsupportedModel(
                f"{config_type.__name__}.model = {config_type.model!r} refers to {found!r}, which "
                "is not a subclass of DecoderModel (docs/models.md)."
            )
        return found


MODELS: Final = Models()
