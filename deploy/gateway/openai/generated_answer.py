"""One answer of a request in progress: takes the engine's tokens and returns pieces of text."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from longshore.deploy.gateway.engines.engines import Engines
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.gateway.openai.errors import ApiError, invalid, unavailable
from longshore.deploy.gateway.openai.generation_spec import AnsweredPrompt, GenerationSpec, Piece
from longshore.deploy.gateway.request_log import answer_ended
from longshore.deploy.gateway.text.answer_text import AnswerText
from longshore.deploy.gateway.text.detokenizer import TokenDecoder
from longshore.deploy.requests.live_requests import LiveRequest
from longshore.deploy.requests.token_scores import TokenScore
from longshore.protocol.outputs import FinishedRequest, FinishReason
from longshore.protocol.requests import CONSTRAINT_TOO_COMPLEX
from longshore.protocol.sampling import SamplingParams


@dataclass(slots=True)
class _Growth:
    """The next piece of an answer, while it is collected."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    prompt: AnsweredPrompt | None = None


class GeneratedAnswer:
    """One answer to one prompt. Up to its first token it costs little: most answers of a large
    request wait for long."""

    def __init__(
        self,
        index: int,
        spec: GenerationSpec,
        sampling: SamplingParams,
        client: Engines,
        tokenizer: TokenDecoder | None,
        metrics: GatewayMetrics,
        on_growth: Callable[["GeneratedAnswer"], None],
        on_tokens: Callable[[int], None],
    ) -> None:
        self.index = index
        self._spec = spec
        self._sampling = sampling
        self._prompt_number = index // spec.num_samples
        self._prompt = spec.prompts[self._prompt_number]
        self._tokenizer = tokenizer
        self._text: AnswerText | None = None  # from the first token on
        self._client = client
        self._metrics = metrics
        self._on_growth = on_growth
        self._on_tokens = on_tokens
        self._last_token_s: float | None = None
        self._submitted_s = 0.0
        self._first_token_s: float | None = None
        self._num_seen = 0
        self._growth = _Growth()
        self._is_stopped = False  # by a stop string; later tokens of the engine are dropped
        self.live: LiveRequest | None = None
        self.is_complete = False

    @property
    def is_growing(self) -> bool:
        return self.live is not None and self.live.is_live and not self._is_stopped

    @property
    def begins_with_scores(self) -> bool:
        """The next piece has the scores of the prompt."""
        asks = self._sampling.prompt_logprobs is not None
        return asks and self.live is not None and self.live.num_taken == 0

    @property
    def end(self) -> FinishedRequest | None:
        return None if self.live is None else self.live.finished

    def submit(self, *, fork_of: LiveRequest | None) -> None:
        spec, number = self._spec, self._prompt_number
        self._submitted_s = time.perf_counter()
        self.live = self._client.submit(
            f"{spec.request_id}-{self.index}",
            self._prompt,
            self._sampling,
            on_change=self._on_change,
            priority=spec.priority,
            cache_salt=spec.cache_salt,
            fork_of=fork_of,
            multimodal=tuple(spec.multimodal[number : number + 1]),
            num_primed=spec.num_primed,
            tenant=spec.tenant,
            trace_headers=spec.trace_headers,
            skips_reading=spec.skips_reading,
            cache_hint=spec.cache_hint,
            no_store=spec.no_store,
            job_id=spec.job_id,
            is_last_step=spec.is_last_step,
            session_key=spec.session_key,
            structured_output=spec.structured_output,
            kv_transfer_params=spec.kv_transfer_params,
        )

    def _on_change(self) -> None:
        if self.live is None:  # the engine died while this request was submitted
            return
        num_tokens = len(self.live.new_token_ids) - self._num_seen
        if num_tokens:
            self._num_seen += num_tokens
            self._measure(num_tokens)
            self._on_tokens(num_tokens)
        if self._spec.is_stream or not self.live.is_live:
            self._on_growth(self)
        if self._spec.stops.texts:
            self._absorb()  # at once: tokens after a stop string are computed for nothing

    def _measure(self, num_tokens: int) -> None:
        now_s = time.perf_counter()
        metrics = self._metrics
        if self._last_token_s is None:
            self._first_token_s = now_s
            metrics.time_to_first_token_s.observe(now_s - self._spec.arrived_s)
            metrics.inter_token_latency_s.observe(0.0, num_tokens - 1)  # arrived with the first
        else:
            gap_s = (now_s - self._last_token_s) / num_tokens
            metrics.inter_token_latency_s.observe(gap_s, num_tokens)
        self._last_token_s = now_s
        metrics.generated_tokens.inc(num_tokens)
        if self._spec.charge is not None:
            self._spec.charge(num_tokens)

    def take(self) -> Piece | None:
        """The next piece; None if there is nothing to show. Raises ApiError if the request
        failed."""
        live, end = self._absorb(), self.end
        if live.failure is not None and not self._is_stopped:
            if not (self._spec.is_stream and self._growth.token_ids):
                raise unavailable(str(live.failure))
            self._on_growth(self)  # first show what arrived before the failure
        elif live.is_live and not self._spec.is_stream:
            return None
        self.is_complete = not live.is_live and (end is not None or self._is_stopped)
        if end is not None and not self._is_stopped:
            _check_end(end)
        growth = self._growth
        if not growth.token_ids and not self.is_complete:
            return None
        self._growth = _Growth()
        reason = self._end_reason.api_name if self.is_complete else None
        if self._spec.scores_only:
            return Piece(self.index, "", [], reason, [], growth.prompt)
        return Piece(
            self.index,
            growth.text,
            growth.token_ids,
            reason,
            growth.scores,
            growth.prompt,
            self._text.stop_string if self._text is not None and self.is_complete else None,
            end.kv_transfer_params if end is not None else None,
            end.routed_experts if end is not None else None,
        )

    def _absorb(self) -> LiveRequest:
        """Add the tokens that have arrived to the next piece."""
        live, growth = self.live, self._growth
        assert live is not None
        if live.is_live and not live.new_token_ids:
            return live
        is_first = live.num_taken == 0
        token_ids = live.take_token_ids()
        self._num_seen = 0
        if is_first and token_ids:
            growth.prompt = self._answered_prompt(live)
        scores = [] if self._sampling.logprobs is None else live.take_scores(len(token_ids))
        if self._is_stopped:
            return live
        num_before = 0 if self._text is None else self._text.num_tokens
        if self._text is None and self._tokenizer is not None:
            self._text = AnswerText(
                self._tokenizer,
                self._prompt,
                self._spec.stops,
                shows_special=self._spec.shows_special_tokens,
            )
        growth.text += self._text_of(token_ids)
        if self._text is not None and self._text.is_stopped:
            self._is_stopped = True
            num_kept = self._text.num_tokens - num_before
            token_ids, scores = token_ids[:num_kept], scores[:num_kept]
            self._client.stop(live, self._text.num_tokens)
        growth.token_ids += token_ids
        growth.scores += scores
        return live

    @property
    def _end_reason(self) -> FinishReason:
        if self._is_stopped:
            return FinishReason.STOPPED
        return FinishReason.ABORTED if self.end is None else self.end.reason

    @property
    def num_output_tokens(self) -> int:
        if self._is_stopped:
            assert self._text is not None
            return self._text.num_tokens
        return 0 if self.end is None else self.end.num_output_tokens - self._spec.num_primed

    @property
    def _num_tokens_given(self) -> int:
        """Output tokens, also of an aborted answer."""
        if self.live is not None and self.end is None and not self._is_stopped:
            return self.live.num_taken
        return self.num_output_tokens

    def _answered_prompt(self, live: LiveRequest) -> AnsweredPrompt:
        asks = self._sampling.prompt_logprobs is not None
        scores = live.take_prompt_scores() if asks else None
        return AnsweredPrompt(self._prompt_number, self._prompt, scores)

    def _text_of(self, token_ids: list[int]) -> str:
        if self._text is None:
            return ""
        if self.end is None:
            return self._text.append(token_ids)
        if self.end.reason is FinishReason.STOPPED and not self._spec.stops.is_shown:
            token_ids = token_ids[:-1]  # the text excludes the token that stopped the answer
        return self._text.append(token_ids) + self._text.finish()

    def count_end(self) -> None:
        """Update the metrics, once, when the HTTP request ends."""
        metrics = self._metrics
        metrics.live_requests.dec()
        now_s = time.perf_counter()
        metrics.request_ended(self._end_reason, now_s - self._spec.arrived_s)
        if self.end is not None:
            metrics.answer_lengths.observe(self.num_output_tokens)
            waited_s = (
                None if self._first_token_s is None else self._first_token_s - self._submitted_s
            )
            metrics.phases_known(self.end, waited_s, now_s - self._submitted_s)
        answer_ended(
            f"{self._spec.request_id}-{self.index}",
            reason=self._end_reason.name,
            num_output_tokens=self._num_tokens_given,
            arrived_s=self._spec.arrived_s,
            first_token_s=self._first_token_s,
        )


def _check_end(end: FinishedRequest) -> None:
    if end.reason is FinishReason.IGNORED:
        raise invalid(end.message or "the engine rejected this prompt")
    message = end.message or ""
    if end.reason is FinishReason.ERROR and message.startswith(CONSTRAINT_TOO_COMPLEX):
        raise invalid(message, code="constraint_too_complex")
    if end.reason is FinishReason.ERROR:
        raise ApiError(500, end.message or "the engine failed on this request")
