"""One answer of an HTTP request in progress: pieces of its text, and its metrics."""

import time
from collections.abc import Callable

from longshore.deploy.gateway.engines.engines import Engines
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.gateway.request_log import answer_ended
from longshore.deploy.gateway.text.detokenizer import TokenDecoder
from longshore.deploy.requests.errors import Unavailable, check_end
from longshore.deploy.requests.generation_spec import AnsweredPrompt, GenerationSpec, Piece
from longshore.deploy.requests.growing_answer import GrowingAnswer, Growth
from longshore.deploy.requests.live_requests import LiveRequest
from longshore.protocol.sampling import SamplingParams


class GeneratedAnswer(GrowingAnswer):
    """One answer of an HTTP request, with its metrics."""

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
        self._prompt_number = index // spec.num_samples
        super().__init__(
            spec.prompts[self._prompt_number],
            sampling,
            tokenizer,
            spec.stops,
            shows_special=spec.shows_special_tokens,
        )
        self.index = index
        self._spec = spec
        self._client = client
        self._metrics = metrics
        self._on_growth = on_growth
        self._on_tokens = on_tokens
        self._last_token_s: float | None = None
        self._submitted_s = 0.0
        self._first_token_s: float | None = None
        self._num_seen = 0
        self.is_complete = False

    @property
    def is_growing(self) -> bool:
        return self.live is not None and self.live.is_live and not self.is_stopped

    @property
    def begins_with_scores(self) -> bool:
        """The next piece has the scores of the prompt."""
        asks = self.sampling.prompt_logprobs is not None
        return asks and self.live is not None and self.live.num_taken == 0

    def submit(self, *, fork_of: LiveRequest | None) -> None:
        spec = self._spec
        self._submitted_s = time.perf_counter()
        self.live = self._client.submit(
            f"{spec.request_id}-{self.index}",
            self.prompt_token_ids,
            self.sampling,
            spec.options_of(self._prompt_number),
            on_change=self._on_change,
            fork_of=fork_of,
            num_primed=spec.num_primed,
            session_key=spec.session_key,
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
        """The next piece; None if there is nothing to show. Raises RequestError if the request
        failed."""
        self._absorb()
        live, end = self.live, self.end
        assert live is not None
        if live.failure is not None and not self.is_stopped:
            if not (self._spec.is_stream and self.growth.token_ids):
                raise Unavailable(str(live.failure))
            self._on_growth(self)  # first show what arrived before the failure
        elif live.is_live and not self._spec.is_stream:
            return None
        self.is_complete = not live.is_live and (end is not None or self.is_stopped)
        if end is not None and not self.is_stopped:
            check_end(end)
        growth = self.growth
        if not growth.token_ids and not self.is_complete:
            return None
        self.growth = Growth()
        reason = self.end_reason.api_name if self.is_complete else None
        prompt = None
        if growth.begins:
            prompt = AnsweredPrompt(
                self._prompt_number, self.prompt_token_ids, growth.prompt_scores
            )
        if self._spec.scores_only:
            return Piece(self.index, "", [], reason, [], prompt)
        return Piece(
            self.index,
            growth.text,
            growth.token_ids,
            reason,
            growth.scores,
            prompt,
            self.stop_string if self.is_complete else None,
            end.kv_transfer_params if end is not None else None,
            end.routed_experts if end is not None else None,
            self._first_token_s if self.is_complete else None,
        )

    def _absorb(self) -> None:
        """Add the tokens that have arrived to the next piece."""
        num_kept = self.absorb()
        self._num_seen = 0
        if num_kept is not None and self.live is not None:
            self._client.stop(self.live, num_kept)

    @property
    def num_output_tokens(self) -> int:
        if self.is_stopped:
            return self.num_text_tokens
        return 0 if self.end is None else self.end.num_output_tokens - self._spec.num_primed

    @property
    def _num_tokens_given(self) -> int:
        """Output tokens, also of an aborted answer."""
        if self.live is not None and self.end is None and not self.is_stopped:
            return self.live.num_taken
        return self.num_output_tokens

    def count_end(self) -> None:
        """Update the metrics, once, when the HTTP request ends."""
        metrics = self._metrics
        metrics.live_requests.dec()
        now_s = time.perf_counter()
        metrics.request_ended(self.end_reason, now_s - self._spec.arrived_s)
        if self.end is not None:
            metrics.answer_lengths.observe(self.num_output_tokens)
            waited_s = (
                None if self._first_token_s is None else self._first_token_s - self._submitted_s
            )
            metrics.phases_known(self.end, waited_s, now_s - self._submitted_s)
        answer_ended(
            f"{self._spec.request_id}-{self.index}",
            reason=self.end_reason,
            num_output_tokens=self._num_tokens_given,
            arrived_s=self._spec.arrived_s,
            first_token_s=self._first_token_s,
            live=self.live,
            num_choices=self._spec.num_samples,
        )
