"""One answer as its tokens arrive: their text and scores, up to the stop string that ends it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from longshore.deploy.gateway.text.answer_text import NO_STOP_STRINGS, AnswerText, StopStrings
from longshore.deploy.gateway.text.detokenizer import TokenDecoder
from longshore.deploy.requests.live_requests import LiveRequest
from longshore.deploy.requests.token_scores import TokenScore
from longshore.protocol.outputs import FinishedRequest, FinishReason
from longshore.protocol.sampling import SamplingParams


@dataclass(slots=True)
class Growth:
    """What has been added to an answer.

    begins:        it has the answer's first token.
    prompt_scores: of the prompt, with the first token, if requested.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    begins: bool = False
    prompt_scores: list[TokenScore | None] | None = None


class GrowingAnswer:
    """One answer to one prompt. Up to its first token it costs little: most answers of a large
    request wait for long.

    decoder:    None: it has no text.
    live:       the request, once it has been submitted.
    growth:     what `absorb` has added; the owner may take it and leave an empty one.
    is_stopped: a stop string was found; tokens that arrive later are dropped.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        decoder: TokenDecoder | None,
        stops: StopStrings = NO_STOP_STRINGS,
        *,
        shows_special: bool = False,
    ) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.sampling = sampling
        self.decoder = decoder
        self.stops = stops
        self._shows_special = shows_special
        self._text: AnswerText | None = None  # from the first token on
        self.live: LiveRequest | None = None
        self.growth = Growth()
        self.is_stopped = False

    @property
    def end(self) -> FinishedRequest | None:
        return None if self.live is None else self.live.finished

    @property
    def end_reason(self) -> FinishReason:
        """Why the answer ended; `ABORTED` before."""
        if self.is_stopped:
            return FinishReason.STOPPED
        return FinishReason.ABORTED if self.end is None else self.end.reason

    @property
    def stop_string(self) -> str | None:
        """The one that was found."""
        return None if self._text is None else self._text.stop_string

    @property
    def num_text_tokens(self) -> int:
        """Tokens of the text, without those after a stop string."""
        return 0 if self._text is None else self._text.num_tokens

    def absorb(self) -> int | None:
        """Add the tokens that have arrived to `growth`. Returns the number of output tokens to keep
        if a stop string was found in them."""
        live, growth = self.live, self.growth
        assert live is not None
        if live.is_live and not live.new_token_ids:
            return None
        is_first = live.num_taken == 0
        token_ids = live.take_token_ids()
        if is_first and token_ids:
            growth.begins = True
            if self.sampling.prompt_logprobs is not None:
                growth.prompt_scores = live.take_prompt_scores()
        scores = [] if self.sampling.logprobs is None else live.take_scores(len(token_ids))
        if self.is_stopped:
            return None
        num_before, num_kept = self.num_text_tokens, None
        if self._text is None and self.decoder is not None:
            self._text = AnswerText(
                self.decoder, self.prompt_token_ids, self.stops, shows_special=self._shows_special
            )
        if (text := self._text) is not None:
            growth.text += self._text_of(text, token_ids)
            if text.is_stopped:
                self.is_stopped, num_kept = True, text.num_tokens
                token_ids = token_ids[: num_kept - num_before]
                scores = scores[: num_kept - num_before]
        growth.token_ids += token_ids
        growth.scores += scores
        return num_kept

    def _text_of(self, text: AnswerText, token_ids: list[int]) -> str:
        if self.end is None:
            return text.append(token_ids)
        if self.end.reason is FinishReason.STOPPED and not self.stops.is_shown:
            token_ids = token_ids[:-1]  # the text excludes the token that stopped the answer
        return text.append(token_ids) + text.finish()
