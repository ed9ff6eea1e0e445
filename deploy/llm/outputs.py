"""Outputs of `LLM`: plain values, one per answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longshore.deploy.gateway.text.answer_text import AnswerText
from longshore.deploy.gateway.text.detokenizer import TokenDecoder
from longshore.deploy.requests.token_scores import Logprob
from longshore.protocol.outputs import FinishReason


@dataclass(frozen=True)
class RequestOutput:
    """An answer to one prompt.

    index:             index of the sample among those of its prompt.
    token_ids:         output token ids, including a stop token.
    text:              output text, without the stop string or token; empty if the folder has no
                       tokenizer.
    finish_reason:     `stop`, `length` or `error`.
    num_cached_tokens: prompt tokens whose KV was found in the prefix cache.
    num_preemptions:   how often the request was preempted.
    error:             why the request failed; None if it did not.
    logprobs:          per output token: the token and the most likely ones, by id. None if not
                       requested.
    prompt_logprobs:   the same per prompt token, None for the first. None if not requested, or if
                       the request failed before its first token.
    kv_transfer_params: answer of the KV connector, such as the file that it has written.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    num_cached_tokens: int
    num_preemptions: int
    error: str | None = None
    index: int = 0
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    kv_transfer_params: dict[str, Any] | None = None


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
class BeamOutput:
    """One of the most likely answers to a prompt.

    token_ids, text: the output; only `token_ids` includes an end token.
    score:           log probability / length ** length_penalty.
    finish_reason:   `stop` or `length`.
    """

    token_ids: list[int]
    text: str
    score: float
    finish_reason: str


@dataclass(frozen=True)
class BeamSearchOutput:
    """The answers to one prompt, best first; empty, with the reason in `error`, if it failed."""

    prompt_token_ids: list[int]
    beams: list[BeamOutput]
    error: str | None = None


def answer_text(
    tokenizer: TokenDecoder | None,
    prompt_token_ids: Sequence[int],
    token_ids: Sequence[int],
    reason: FinishReason,
) -> str:
    """The output text without the stop token; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    if reason is FinishReason.STOPPED:
        token_ids = token_ids[:-1]
    text = AnswerText(tokenizer, prompt_token_ids)
    return text.append(token_ids) + text.finish()
