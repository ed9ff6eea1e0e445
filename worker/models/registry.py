"""The class that computes a family's models, by the type of its config."""

from typing import Final

from longshore.worker.models.llama import Llama
from longshore.worker.models.llama_config import LlamaConfig

MODELS: Final = {LlamaConfig: Llama}
