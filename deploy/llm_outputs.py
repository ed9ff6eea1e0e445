"""What `LLM` answers: plain values, one per answer."""

from dataclasses import dataclass

from longshore.deploy.token_scores import Logprob


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
