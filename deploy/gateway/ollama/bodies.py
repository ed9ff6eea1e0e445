"""Response bodies of Ollama's API: whole answers and the lines of streams."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import msgspec

from longshore.deploy.gateway.api.logprobs import ChatTokenLogprob

NEVER: Final = "9999-12-31T23:59:59Z"


class OllamaCalledFunction(msgspec.Struct, frozen=True):
    """arguments: a JSON object. index: of the call in the answer."""

    name: str
    arguments: msgspec.Raw
    index: int


class OllamaCall(msgspec.Struct, frozen=True):
    id: str
    function: OllamaCalledFunction


class OllamaChatMessage(msgspec.Struct, frozen=True):
    """The answer, or its next part. A call is in one part."""

    content: str
    role: str = "assistant"
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: Sequence[OllamaCall] | msgspec.UnsetType = msgspec.UNSET


class OllamaDurations(NamedTuple):
    """In nanoseconds. The model is always loaded, so `load_duration` is 0. The time until the
    first token, also what the request waited, is that of the prompt."""

    total_duration: int
    prompt_eval_duration: int
    eval_duration: int

    @classmethod
    def between(
        cls, arrived_s: float, first_token_s: float | None, now_s: float
    ) -> "OllamaDurations":
        first_s = now_s if first_token_s is None else first_token_s
        return cls(
            round((now_s - arrived_s) * 1e9),
            round((first_s - arrived_s) * 1e9),
            round((now_s - first_s) * 1e9),
        )


class OllamaAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What the answers of both endpoints have. The fields from `done_reason` on are in the last
    line; `logprobs` in each one, if requested."""

    model: str
    created_at: str
    done: bool
    logprobs: Sequence[ChatTokenLogprob] | msgspec.UnsetType = msgspec.UNSET
    done_reason: str | msgspec.UnsetType = msgspec.UNSET
    total_duration: int | msgspec.UnsetType = msgspec.UNSET
    load_duration: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_count: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    eval_count: int | msgspec.UnsetType = msgspec.UNSET
    eval_duration: int | msgspec.UnsetType = msgspec.UNSET


class OllamaChatAnswer(OllamaAnswer, frozen=True, kw_only=True):
    """Of /api/chat."""

    message: OllamaChatMessage

    @staticmethod
    def part(text: str, thinking: str, calls: Sequence[OllamaCall]) -> dict[str, Any]:
        """The fields that say this."""
        message = OllamaChatMessage(
            text, thinking=thinking or msgspec.UNSET, tool_calls=calls or msgspec.UNSET
        )
        return {"message": message}


class OllamaGenerateAnswer(OllamaAnswer, frozen=True, kw_only=True):
    """Of /api/generate."""

    response: str
    thinking: str | msgspec.UnsetType = msgspec.UNSET

    @staticmethod
    def part(text: str, thinking: str, calls: Sequence[OllamaCall]) -> dict[str, Any]:
        """The fields that say this; there are no calls."""
        return {"response": text, "thinking": thinking or msgspec.UNSET}


class OllamaEmbedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Of /api/embed."""

    model: str
    embeddings: Sequence[Sequence[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OllamaEmbeddingResponse(msgspec.Struct, frozen=True):
    """Of /api/embeddings."""

    embedding: Sequence[float]


class OllamaModelDetails(msgspec.Struct, frozen=True):
    """What the model folder says."""

    format: str = "safetensors"
    family: str = ""
    families: Sequence[str] = ()
    parameter_size: str = ""
    quantization_level: str = ""
    parent_model: str = ""


class OllamaModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model, under one of its names. size: of the folder's files, in bytes. The fields after
    `details` are those of a running model; `expires_at` is when it would be unloaded."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaModelDetails
    expires_at: str | msgspec.UnsetType = msgspec.UNSET
    size_vram: int | msgspec.UnsetType = msgspec.UNSET
    context_length: int | msgspec.UnsetType = msgspec.UNSET


class OllamaModels(msgspec.Struct, frozen=True):
    """Of /api/tags and /api/ps."""

    models: Sequence[OllamaModel]


class OllamaModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """Of /api/show. template: in Jinja."""

    modified_at: str
    details: OllamaModelDetails
    model_info: dict[str, Any]
    capabilities: Sequence[str]
    template: str


class OllamaVersion(msgspec.Struct, frozen=True):
    version: str


def timestamp(time_s: float | None = None) -> str:
    """None: now."""
    at = datetime.now(UTC) if time_s is None else datetime.fromtimestamp(time_s, UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
