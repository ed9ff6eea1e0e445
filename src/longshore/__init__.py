"""Longshore: an LLM serving stack whose subject is the KV cache.

This package holds relative links to the top-level folders (`protocol/`, `scheduler/`, `worker/`,
`connectors/`, `deploy/`) and the few names that a user imports directly. Those are looked up on
first use (PEP 562), so that `import longshore`, which every process does, loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from longshore.deploy.llm.llm import LLM
    from longshore.deploy.requests.token_scores import Logprob
    from longshore.protocol.sampling import SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "Logprob", "SamplingParams", "__version__"]

_HOME_OF_NAME: Final = {
    "LLM": "longshore.deploy.llm.llm",
    "Logprob": "longshore.deploy.requests.token_scores",
    "SamplingParams": "longshore.protocol.sampling",
}


def __getattr__(name: str) -> object:
    home = _HOME_OF_NAME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value  # the next access finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
