"""What an HTTP request asks of the engine, and the pieces of its answers."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from longshore.deploy.gateway.text.answer_text import NO_STOP_STRINGS, StopStrings
from longshore.deploy.requests.beam_search import BeamSearchParams
from longshore.deploy.requests.token_scores import TokenScore
from longshore.protocol.requests import NO_OPTIONS, MultimodalFeature, RequestOptions
from longshore.protocol.routed_experts import RoutedExperts
from longshore.protocol.sampling import SamplingParams


class GenerationSpec(msgspec.Struct, frozen=True):
    """What one HTTP request submits to the engine.

    num_samples: number of answers per prompt; the answers to one prompt are consecutive.
    scores_only: answers have no tokens; the engine computes one, which is dropped.
    stops:     strings that end an answer.
    shown_special_token_ids: special tokens that are part of an answer's text.
    beams:     settings of a beam search; see `BeamGeneration`.
    options:   of each of its requests, except for `multimodal`.
    multimodal: a feature per prompt; empty: no prompt has one.
    num_primed: tokens at each prompt's end that are sent as output; see `LiveRequests.open`.
    max_in_flight: limit of answers in the engine at a time, with one sample per prompt: the next
               is submitted when one has finished. None: no limit.
    session_key: names its session, for routing.
    num_echoed_characters: length of the prompts' texts, if they are part of the answers.
    num_returned_prompt_ids: number of the prompts' token ids in the response.
    shows_special_tokens: texts include special tokens.
    is_stream: yield pieces as answers grow, not each answer as a whole.
    arrived_s: from `time.perf_counter`.
    charge:    called with the number of new tokens, which count for the limit of the API key.
    """

    request_id: str
    prompts: Sequence[list[int]]
    sampling: SamplingParams
    is_stream: bool
    arrived_s: float
    options: RequestOptions = NO_OPTIONS
    session_key: str | None = None
    num_samples: int = 1
    scores_only: bool = False
    stops: StopStrings = NO_STOP_STRINGS
    shown_special_token_ids: frozenset[int] = frozenset()
    beams: BeamSearchParams | None = None
    multimodal: Sequence[MultimodalFeature] = ()
    num_primed: int = 0
    max_in_flight: int | None = None
    num_echoed_characters: int = 0
    num_returned_prompt_ids: int = 0
    shows_special_tokens: bool = False
    charge: Callable[[int], None] | None = None

    def options_of(self, number: int) -> RequestOptions:
        """The options of the requests of prompt `number`."""
        items = tuple(self.multimodal[number : number + 1])
        return msgspec.structs.replace(self.options, multimodal=items) if items else self.options

    @property
    def num_answers(self) -> int:
        """Maximum number of requests in the engine at a time."""
        width = self.num_samples if self.beams is None else self.beams.beam_width
        return width * len(self.prompts[: self.max_in_flight])


class AnsweredPrompt(msgspec.Struct, frozen=True):
    """The prompt of an answer, sent with the answer's first piece.

    number: index of the prompt in the request.
    scores: of each token except the first; None if not requested.
    """

    number: int
    token_ids: Sequence[int]
    scores: list[TokenScore | None] | None


class Piece(msgspec.Struct, frozen=True):
    """New text and tokens of one answer. The last piece of an answer has a `finish_reason`.

    scores: of each of `token_ids`; empty if not requested.
    prompt: set in the first piece with a token.
    stop_string: the stop string that ended the answer, in the last piece.
    kv_transfer_params: of the connector, for the engine that continues the request.
    routed_experts: of the tokens, in the last piece, if the engine returns them.
    first_token_s: when the answer's first token arrived, from `time.perf_counter`; in the last
        piece of an answer that has one.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    scores: list[TokenScore] = []
    prompt: AnsweredPrompt | None = None
    stop_string: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    routed_experts: RoutedExperts | None = None
    first_token_s: float | None = None


ShowAtOnce: TypeAlias = Callable[[Callable[[], Piece | None]], bool]
"""Called with a function that takes an answer's next piece. Returns False if it did not take it
and the piece has to wait."""
