"""Outputs of `LLM` and `AsyncLLM`: plain values with vLLM's names."""

from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy.typing as npt

from longshore.deploy.requests.token_scores import Logprob
from longshore.protocol.arrays import Float32Array


@dataclass
class CompletionOutput:
    """One answer to a prompt.

    index:              of the answer among those of its prompt.
    text:               output text, without the stop string or token; empty if the folder has no
                        tokenizer.
    token_ids:          output token ids, including a stop token.
    cumulative_logprob: sum of the log probabilities of `token_ids`. None if not requested.
    logprobs:           per output token: the token and the most likely ones, by id. None if not
                        requested.
    finish_reason:      `stop`, `length`, `abort`, `repetition` or `error`; None if it is not
                        complete.
    stop_reason:        the stop string or the id of `stop_token_ids` that ended the answer.
    num_cached_tokens:  prompt tokens whose KV was found in the prefix cache, or shared with the
                        first answer.
    num_preemptions:    how often the request was preempted.
    error:              why the request failed; None if it did not.
    kv_transfer_params: answer of the KV connector, such as the file that it has written.
    routed_experts:     with `enable_return_routed_experts`, once the answer is complete: per token
                        of prompt and answer but the last, and per layer with experts, the ids of
                        the chosen ones, best first: (num_tokens, num_layers, top_k), uint8, or
                        int16 if they do not fit. `routed_experts_prompt_start` leaves out the
                        first tokens.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    routed_experts: npt.NDArray[Any] | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestStateStats:
    """When a request, or the first answer to a prompt, got how far. `arrival_time` is in seconds
    since 1970, the others as `time.monotonic`; 0.0: it did not.

    num_generation_tokens: output tokens so far.
    queued_ts:           sent to the engine.
    scheduled_ts:        first scheduled; known once the answer is complete.
    first_token_latency: seconds from the arrival to the first token.
    """

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0


@dataclass
class RequestOutput:
    """The answers to one prompt.

    prompt:            its text; for a chat, the rendered text; None if it was given as token ids.
    outputs:           the answers. In a stream of deltas, those that have grown.
    finished:          all answers are complete.
    num_cached_tokens: prompt tokens whose KV was found in the prefix cache; 0 until the first
                       answer is complete.
    prompt_logprobs:   per prompt token: the token and the most likely ones, by id; None for the
                       first token. None if not requested, or if there is no output token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestStateStats | None = None

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """The transfer parameters of the first answer."""
        return self.outputs[0].kv_transfer_params if self.outputs else None


@dataclass
class EmbeddingOutput:
    """embedding: empty if the request failed."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(eq=False)
class PoolingOutput:
    """data: float32; empty if the request failed."""

    data: Float32Array


@dataclass
class ClassificationOutput:
    """probs: of all labels; empty if the request failed. label: the most likely one."""

    probs: list[float]
    label: str

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass
class ScoringOutput:
    """score: not a number if the request failed."""

    score: float


PooledT = TypeVar("PooledT", EmbeddingOutput, PoolingOutput, ClassificationOutput, ScoringOutput)


@dataclass
class PoolingRequestOutput(Generic[PooledT]):
    """What was pooled from one prompt.

    num_cached_tokens: prompt tokens whose KV was found in the prefix cache.
    num_preemptions:   how often the request was preempted.
    error:             why the request failed; None if it did not.
    """

    request_id: str
    outputs: PooledT
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True
    num_preemptions: int = 0
    error: str | None = None


EmbeddingRequestOutput: TypeAlias = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput: TypeAlias = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput: TypeAlias = PoolingRequestOutput[ScoringOutput]
"""Of two texts. If their embeddings were compared, its tokens are those of both."""


@dataclass(frozen=True)
class TranscriptionOutput:
    """The transcript of one audio input.

    language: code of the language, given or detected.
    pieces:   outputs of the pieces, in order; one if the audio fits the model's window.
    error:    why a piece failed; None if none did.
    """

    text: str
    language: str
    pieces: list[RequestOutput]
    error: str | None = None


@dataclass(frozen=True)
class BeamSearchSequence:
    """One of the most likely answers to a prompt.

    tokens, text:  the prompt and the answer; only `tokens` includes an end token.
    cum_logprob:   sum of the log probabilities of the answer's tokens.
    score:         cum_logprob / length ** length_penalty.
    finish_reason: `stop` or `length`.
    """

    tokens: list[int]
    text: str
    cum_logprob: float
    score: float
    finish_reason: str


@dataclass(frozen=True)
class BeamSearchOutput:
    """The answers to one prompt, best first; empty, with the reason in `error`, if it failed."""

    sequences: list[BeamSearchSequence]
    error: str | None = None
