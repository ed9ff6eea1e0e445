"""What `LLM` answers: plain values, one per answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from longshore.deploy.gateway.text.answer_text import AnswerText
from longshore.deploy.gateway.text.detokenizer import TokenDecoder
from longshore.deploy.requests.token_scores import Logprob
from longshore.protocol.outputs import FinishReason


@dataclass(frozen=True)
class RequestOutput:
    """An answer to one prompt.

    index:             number of the sample among those of its prompt.
    token_ids:         of the answer, a stop token included.
    text:              of the answer, without what stopped it; empty if the folder has no tokenizer.
    finish_reason:     `stop`, `length` or `error`.
    num_cached_tokens: prompt tokens whose KV was found in the prefix cache.
    num_preemptions:   how often it lost its blocks and was computed again.
    error:             what went wrong, if something did.
    logprobs:          per token of the answer: the token and the most likely ones, by id. None if
                       not asked for.
    prompt_logprobs:   the same per token of the prompt, None for its first. None if not asked for,
                       or if the request failed before a token came.
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


@dataclass(frozen=True)
class TranscriptionOutput:
    """What was said in an audio.

    language: the code of the one that was heard, asked for or detected.
    pieces:   the answers to the audio's pieces, in order; one if the audio fits the model's window.
    error:    what went wrong with a piece, if something did.
    """

    text: str
    language: str
    pieces: list[RequestOutput]
    error: str | None = None


@dataclass(frozen=True)
class BeamOutput:
    """One of the likeliest answers to a prompt.

    token_ids, text: of the answer; an end token is part of the ids alone.
    score:           log probability / length ** length_penalty.
    finish_reason:   `stop` or `length`.
    """

    token_ids: list[int]
    text: str
    score: float
    finish_reason: str


@dataclass(frozen=True)
class BeamSearchOutput:
    """The answers to one prompt, the best first; none if the engine failed on it, for `error`."""

    prompt_token_ids: list[int]
    beams: list[BeamOutput]
    error: str | None = None


def answer_text(
    tokenizer: TokenDecoder | None,
    prompt_token_ids: Sequence[int],
    token_ids: Sequence[int],
    reason: FinishReason,
) -> str:
    """Without the token that stopped it; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    if reason is FinishReason.STOPPED:
        token_ids = token_ids[:-1]
    text = AnswerText(tokenizer, prompt_token_ids)
    return text.append(token_ids) + text.finish()
