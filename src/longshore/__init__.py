"""Longshore: an LLM serving stack with a focus on the KV cache.

This package has relative links to the top-level folders (`protocol/`, `scheduler/`, `worker/`,
`connectors/`, `deploy/`) and the few names that users import directly. These names are imported on
first use (PEP 562), so that `import longshore`, which every process does, does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from longshore.deploy.llm.async_llm import AsyncEngineArgs, AsyncLLM
    from longshore.deploy.llm.beams import BeamSearchParams
    from longshore.deploy.llm.llm import LLM
    from longshore.deploy.llm.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from longshore.deploy.llm.pooling_params import PoolingParams
    from longshore.deploy.llm.prompts import TextPrompt, TokensPrompt
    from longshore.deploy.llm.sampling_params import RequestOutputKind, SamplingParams
    from longshore.deploy.requests.structured_outputs import StructuredOutputsParams
    from longshore.deploy.requests.token_scores import Logprob
    from longshore.protocol.sampling import RepetitionDetection

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RepetitionDetection",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_HOME_OF_NAME: Final = {
    "AsyncEngineArgs": "longshore.deploy.llm.async_llm",
    "AsyncLLM": "longshore.deploy.llm.async_llm",
    "BeamSearchParams": "longshore.deploy.llm.beams",
    "ClassificationOutput": "longshore.deploy.llm.outputs",
    "ClassificationRequestOutput": "longshore.deploy.llm.outputs",
    "CompletionOutput": "longshore.deploy.llm.outputs",
    "EmbeddingOutput": "longshore.deploy.llm.outputs",
    "EmbeddingRequestOutput": "longshore.deploy.llm.outputs",
    "LLM": "longshore.deploy.llm.llm",
    "Logprob": "longshore.deploy.requests.token_scores",
    "PoolingOutput": "longshore.deploy.llm.outputs",
    "PoolingParams": "longshore.deploy.llm.pooling_params",
    "PoolingRequestOutput": "longshore.deploy.llm.outputs",
    "RepetitionDetection": "longshore.protocol.sampling",
    "RequestOutput": "longshore.deploy.llm.outputs",
    "RequestOutputKind": "longshore.deploy.llm.sampling_params",
    "SamplingParams": "longshore.deploy.llm.sampling_params",
    "ScoringOutput": "longshore.deploy.llm.outputs",
    "ScoringRequestOutput": "longshore.deploy.llm.outputs",
    "StructuredOutputsParams": "longshore.deploy.requests.structured_outputs",
    "TextPrompt": "longshore.deploy.llm.prompts",
    "TokensPrompt": "longshore.deploy.llm.prompts",
}


def __getattr__(name: str) -> object:
    home = _HOME_OF_NAME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value  # so that the next access does not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
