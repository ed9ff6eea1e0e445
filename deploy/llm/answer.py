"""The answers of an `LLM`: each from prompt to output, and many at a time on one engine."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from tqdm import tqdm

from longshore.deploy.gateway.text.answer_text import AnswerText
from longshore.deploy.gateway.text.detokenizer import TokenDecoder
from longshore.deploy.llm.blocking_client import BlockingClient
from longshore.deploy.llm.outputs import CompletionOutput, RequestOutput, RequestStateStats
from longshore.deploy.llm.prompts import PromptInput
from longshore.deploy.requests.live_requests import LiveRequest, RequestFields
from longshore.deploy.requests.token_scores import Logprob
from longshore.protocol.outputs import FinishReason, RequestEvent
from longshore.protocol.requests import MultimodalFeature, PoolingParams, StructuredOutput
from longshore.protocol.sampling import SamplingParams

# Far more than run at a time; other requests wait here and not in the engine's queue.
MAX_LIVE_REQUESTS: Final = 16_384


@dataclass(eq=False)
class Answer:
    """One answer in progress.

    index:       of the answer among those of its prompt.
    first:       the first answer to its prompt; None if this is the first.
    decoder:     decodes single tokens, for their scores; None: they have no text.
    detokenizer: its text, as it grows; None: it has no text.
    has_stops:   a stop string may end it, so its text is needed after every change.
    shows_stop:  its text includes the token that ended it.
    live:        the request, once it has been submitted.
    token_ids, text, logprobs, cumulative_logprob: the answer so far.
    stats:       when it got how far.
    arrived_s:   when it was made, by `time.monotonic`.
    other fields: see `LiveRequests.open`.
    """

    request_id: str
    prompt: PromptInput
    sampling: SamplingParams
    index: int = 0
    first: "Answer | None" = None
    decoder: TokenDecoder | None = None
    detokenizer: AnswerText | None = None
    has_stops: bool = False
    shows_stop: bool = False
    multimodal: tuple[MultimodalFeature, ...] = ()
    num_primed: int = 0
    pooling: PoolingParams | None = None
    structured_output: StructuredOutput | None = None
    skips_reading: bool = False
    priority: int = 0
    job_id: str | None = None
    is_last_step: bool = False
    live: LiveRequest | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    stats: RequestStateStats = field(
        default_factory=lambda: RequestStateStats(arrival_time=time.time())
    )
    arrived_s: float = field(default_factory=time.monotonic)

    @property
    def is_stopped(self) -> bool:
        """A stop string was found; tokens that arrive later are dropped."""
        return self.detokenizer is not None and self.detokenizer.is_stopped

    def fields(self) -> RequestFields:
        """What its request needs beside prompt and sampling settings."""
        return RequestFields(
            on_change=self.note_change,
            fork_of=None if self.first is None else self.first.live,
            multimodal=self.multimodal,
            num_primed=self.num_primed,
            pooling=self.pooling,
            structured_output=self.structured_output,
            skips_reading=self.skips_reading,
            priority=self.priority,
            job_id=self.job_id,
            is_last_step=self.is_last_step,
            cache_salt=self.prompt.cache_salt,
            cache_hint=self.prompt.cache_hint,
            no_store=self.prompt.no_store,
        )

    def note_change(self) -> None:
        """After new tokens or the end. Raises ValueError if the engine rejected the request, as for
        an invalid setting."""
        live, stats = self.live, self.stats
        if live is None:
            return
        if live.num_tokens > stats.num_generation_tokens:
            now_s = time.monotonic()
            if not stats.num_generation_tokens:
                stats.queued_ts, stats.first_token_ts = live.opened_s, now_s
                stats.first_token_latency = now_s - self.arrived_s
            stats.num_generation_tokens, stats.last_token_ts = live.num_tokens, now_s
        end = live.finished
        if end is None:
            return
        if end.reason is FinishReason.IGNORED:
            raise ValueError(end.message or "the engine rejected this prompt")
        scheduled = [after_s for event, after_s in end.events if event is RequestEvent.SCHEDULED]
        if scheduled:
            stats.scheduled_ts = live.opened_s + scheduled[0]

    def absorb(self) -> int | None:
        """Process new tokens. Returns the number of tokens to keep if they have a stop string."""
        live = self.live
        assert live is not None
        end, was_stopped = live.finished, self.is_stopped
        token_ids = live.take_token_ids()
        scores = [] if self.sampling.logprobs is None else live.take_scores(len(token_ids))
        if was_stopped:
            return None
        if token_ids and not self.token_ids and self.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [
                None if score is None else score.by_token(self._decode)
                for score in live.take_prompt_scores()
            ]
        if (text := self.detokenizer) is not None:
            is_ended_by_token = end is not None and end.reason is FinishReason.STOPPED
            hides_last = is_ended_by_token and not self.shows_stop
            self.text += text.append(token_ids[:-1] if hides_last else token_ids)
            if end is not None:
                self.text += text.finish()
            if text.is_stopped:
                num_kept = text.num_tokens - len(self.token_ids)
                token_ids, scores = token_ids[:num_kept], scores[:num_kept]
        self.token_ids += token_ids
        self.logprobs += [score.by_token(self._decode) for score in scores]
        self.cumulative_logprob += sum(score.logprob for score in scores)
        return len(self.token_ids) if self.is_stopped else None

    def _decode(self, token_ids: Sequence[int]) -> str | None:
        return None if self.decoder is None else self.decoder.decode(token_ids)

    def output(self) -> CompletionOutput:
        """The answer so far, as of the last `absorb`. It shares the lists of this object."""
        output = CompletionOutput(self.index, self.text, self.token_ids)
        if self.sampling.logprobs is not None:
            output.logprobs = self.logprobs
            output.cumulative_logprob = self.cumulative_logprob
        end = None if self.live is None else self.live.finished
        if end is None:
            return output
        reason = FinishReason.STOPPED if self.is_stopped else end.reason
        output.finish_reason = reason.api_name
        output.stop_reason = self._stop_reason(reason)
        output.num_cached_tokens = end.num_cached_tokens
        output.num_preemptions = end.num_preemptions
        output.error = end.message
        output.kv_transfer_params = end.kv_transfer_params
        if end.routed_experts is not None:
            output.routed_experts = (
                end.routed_experts.array().copy()
            )  # received arrays are read-only
        return output

    def _stop_reason(self, reason: FinishReason) -> int | str | None:
        if self.detokenizer is not None and self.is_stopped:
            return self.detokenizer.stop_string
        if reason is FinishReason.STOPPED and self.token_ids:
            last = self.token_ids[-1]
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
) -> None:
    """Submit all answers, at most MAX_LIVE_REQUESTS at a time, and wait until they are complete.
    Raises ValueError if the engine rejects one."""
    requests = client.requests
    waiting = deque(answers)
    num_tokens = 0
    while True:
        while waiting and len(requests) < MAX_LIVE_REQUESTS:
            _submit(waiting.popleft(), client)
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
        if answer.pooling is None:
            answer.absorb()


def _submit(answer: Answer, client: BlockingClient) -> None:
    fields = answer.fields()
    if answer.has_stops:
        fields["on_change"] = partial(_stop_if_found, answer, client)
    answer.live = client.submit(
        answer.request_id, answer.prompt.token_ids, answer.sampling, **fields
    )


def _stop_if_found(answer: Answer, client: BlockingClient) -> None:
    """Stop the request if its answer has grown to a stop string. Raises ValueError."""
    answer.note_change()
    num_kept = answer.absorb()
    if num_kept is not None and answer.live is not None:
        client.stop(answer.live, num_kept)
