"""The answers of an `LLM`: each from prompt to output, and many at a time on one engine."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tqdm import tqdm

from longshore.deploy.gateway.text.answer_text import NO_STOP_STRINGS, StopStrings
from longshore.deploy.gateway.text.detokenizer import TokenDecoder
from longshore.deploy.llm.blocking_client import BlockingClient
from longshore.deploy.llm.outputs import CompletionOutput, RequestOutput, RequestStateStats
from longshore.deploy.llm.prompts import PromptInput
from longshore.deploy.requests.growing_answer import GrowingAnswer
from longshore.deploy.requests.live_requests import RequestClient
from longshore.deploy.requests.token_scores import Logprob
from longshore.protocol.outputs import FinishReason, RequestEvent
from longshore.protocol.requests import NO_OPTIONS, RequestOptions
from longshore.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from longshore.deploy.requests.spans import RequestSpans

# Far more than run at a time; other requests wait here and not in the engine's queue.
MAX_LIVE_REQUESTS: Final = 16_384


class Answer(GrowingAnswer):
    """One answer in progress.

    index:       of the answer among those of its prompt.
    first:       the first answer to its prompt; None if this is the first.
    logprobs, cumulative_logprob, prompt_logprobs: of the answer so far.
    stats:       when it got how far.
    num_choices: number of answers to its prompt.
    options, num_primed: see `LiveRequests.open`.
    """

    def __init__(
        self,
        request_id: str,
        prompt: PromptInput,
        sampling: SamplingParams,
        decoder: TokenDecoder | None = None,
        stops: StopStrings = NO_STOP_STRINGS,
        *,
        index: int = 0,
        num_choices: int = 1,
        first: "Answer | None" = None,
        shows_special: bool = False,
        options: RequestOptions = NO_OPTIONS,
        num_primed: int = 0,
    ) -> None:
        super().__init__(prompt.token_ids, sampling, decoder, stops, shows_special=shows_special)
        self.request_id = request_id
        self.prompt = prompt
        self.index = index
        self.num_choices = num_choices
        self.first = first
        self.options = options
        self.num_primed = num_primed
        self.logprobs: list[dict[int, Logprob]] = []
        self.cumulative_logprob = 0.0
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.stats = RequestStateStats(arrival_time=time.time())
        self._arrived_s = time.monotonic()

    def submit(self, client: RequestClient, on_change: Callable[[], None]) -> None:
        """Submit the request to the engine. Raises EngineDead."""
        self.live = client.submit(
            self.request_id,
            self.prompt.token_ids,
            self.sampling,
            self.options,
            on_change=on_change,
            fork_of=None if self.first is None else self.first.live,
            num_primed=self.num_primed,
        )

    def note_change(self) -> None:
        """Call this after new tokens or the end. Raises ValueError if the engine rejected the
        request, as for an invalid setting."""
        live, stats = self.live, self.stats
        if live is None:
            return
        if live.num_tokens > stats.num_generation_tokens:
            now_s = time.monotonic()
            if not stats.num_generation_tokens:
                stats.queued_ts, stats.first_token_ts = live.opened_s, now_s
                stats.first_token_latency = now_s - self._arrived_s
            stats.num_generation_tokens, stats.last_token_ts = live.num_tokens, now_s
        end = live.finished
        if end is None:
            return
        if end.reason is FinishReason.IGNORED:
            raise ValueError(end.message or "the engine rejected this prompt")
        scheduled = [after_s for event, after_s in end.events if event is RequestEvent.SCHEDULED]
        if scheduled:
            stats.scheduled_ts = live.opened_s + scheduled[0]

    def make_spans(self, spans: "RequestSpans") -> None:
        """Once it has ended, if it was submitted."""
        if (live := self.live) is not None:
            spans.request_ended(
                live,
                self.end_reason,
                arrived_s=self._arrived_s,
                first_token_s=self.stats.first_token_ts or None,
                num_output_tokens=self.num_text_tokens if self.is_stopped else live.num_tokens,
                num_choices=self.num_choices,
            )

    def absorb(self) -> int | None:
        num_kept, growth = super().absorb(), self.growth
        for score in growth.scores[len(self.logprobs) :]:
            self.logprobs.append(score.by_token(self._decode))
            self.cumulative_logprob += score.logprob
        if growth.prompt_scores is not None and self.prompt_logprobs is None:
            self.prompt_logprobs = [
                None if score is None else score.by_token(self._decode)
                for score in growth.prompt_scores
            ]
        return num_kept

    def _decode(self, token_ids: Sequence[int]) -> str | None:
        return None if self.decoder is None else self.decoder.decode(token_ids)

    def output(self) -> CompletionOutput:
        """The answer so far, as of the last `absorb`. It shares the lists of this object."""
        token_ids, end = self.growth.token_ids, self.end
        output = CompletionOutput(self.index, self.growth.text, token_ids)
        if self.sampling.logprobs is not None:
            output.logprobs = self.logprobs
            output.cumulative_logprob = self.cumulative_logprob
        if end is None:
            return output
        output.finish_reason = self.end_reason.api_name
        output.stop_reason = self._stop_reason(token_ids)
        output.num_cached_tokens = end.num_cached_tokens
        output.num_preemptions = end.num_preemptions
        output.error = end.message
        output.kv_transfer_params = end.kv_transfer_params
        if end.routed_experts is not None:  # received arrays are read-only
            output.routed_experts = end.routed_experts.array().copy()
        return output

    def _stop_reason(self, token_ids: Sequence[int]) -> int | str | None:
        if self.is_stopped:
            return self.stop_string
        if self.end_reason is FinishReason.STOPPED and token_ids:
            last = token_ids[-1]
            return last if last in self.sampling.stop_token_ids else None
        return None


def request_output(request_id: str, answers: Sequence[Answer]) -> RequestOutput:
    """The output for a prompt with these answers, each as of its last `absorb`."""
    first, outputs = answers[0], [answer.output() for answer in answers]
    return RequestOutput(
        request_id,
        first.prompt.text,
        first.prompt.token_ids,
        outputs,
        finished=all(output.finished() for output in outputs),
        num_cached_tokens=outputs[0].num_cached_tokens,
        prompt_logprobs=first.prompt_logprobs,
        metrics=replace(first.stats),
    )


def run_answers(
    answers: Sequence[Answer],
    client: BlockingClient,
    bar: "tqdm[Any]",
    spans: "RequestSpans | None" = None,
) -> None:
    """Submit all answers, at most MAX_LIVE_REQUESTS at a time, and wait until they are complete.
    Raises ValueError if the engine rejects one. spans: if they are exported."""
    requests = client.requests
    waiting = deque(answers)
    num_tokens = 0
    while True:
        while waiting and len(requests) < MAX_LIVE_REQUESTS:
            _submit(waiting.popleft(), client, spans)
        if not (num_live := len(requests)):
            break
        outputs = client.engine.receive()
        if outputs is None:
            continue
        requests.apply(outputs)
        num_tokens += len(outputs.tokens)
        if (num_ended := num_live - len(requests)) > 0:
            elapsed_s = bar.format_dict["elapsed"] or 1.0
            bar.set_postfix_str(f"{num_tokens / elapsed_s:,.0f} tokens/s", refresh=False)
            bar.update(num_ended)
    for answer in answers:
        if answer.options.pooling is None:
            answer.absorb()


def _submit(answer: Answer, client: BlockingClient, spans: "RequestSpans | None") -> None:
    on_change: Callable[[], None] = answer.note_change
    if answer.stops.texts:
        on_change = partial(_stop_if_found, answer, client)
    if spans is not None:
        on_change = partial(_make_spans_at_end, answer, on_change, spans)
    answer.submit(client, on_change)


def _make_spans_at_end(
    answer: Answer, on_change: Callable[[], None], spans: "RequestSpans"
) -> None:
    """Raises ValueError."""
    try:
        on_change()
    finally:
        if answer.live is not None and not answer.live.is_live:
            answer.make_spans(spans)


def _stop_if_found(answer: Answer, client: BlockingClient) -> None:
    """Stop the request if its answer has grown to a stop string. Raises ValueError."""
    answer.note_change()
    num_kept = answer.absorb()
    if num_kept is not None and answer.live is not None:
        client.stop(answer.live, num_kept)
