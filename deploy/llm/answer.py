"""The answers of an `LLM`: each from prompt to output, and many at a time on one engine."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from tqdm import tqdm

from longshore.deploy.gateway.text.answer_text import AnswerText
from longshore.deploy.gateway.text.detokenizer import TokenDecoder
from longshore.deploy.llm.blocking_client import BlockingClient
from longshore.deploy.llm.outputs import RequestOutput, answer_text
from longshore.deploy.requests.live_requests import LiveRequest
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import MultimodalFeature, PoolingParams
from longshore.protocol.sampling import SamplingParams

# Far more than run at a time; other requests wait here and not in the engine's queue.
MAX_LIVE_REQUESTS: Final = 16_384


@dataclass
class Answer:
    """One answer in progress.

    first: the first sample of its prompt; None if this is the first.
    text:  detects stop strings as the answer grows; None without stop strings.
    shown: text so far, if there are stop strings.
    live:  the request, once it has been submitted.
    multimodal, num_primed, pooling: see `LiveRequests.open`.
    """

    prompt_token_ids: list[int]
    sampling: SamplingParams
    index: int = 0
    first: "Answer | None" = None
    text: AnswerText | None = None
    shown: str = ""
    live: LiveRequest | None = None
    multimodal: tuple[MultimodalFeature, ...] = ()
    num_primed: int = 0
    pooling: PoolingParams | None = None

    def grow(self) -> int | None:
        """Process new tokens. Returns the number of tokens to keep if a stop string was found.

        Call it for every change of an answer that has `text`.
        """
        live, text = self.live, self.text
        assert live is not None
        assert text is not None
        was_stopped = text.is_stopped
        if was_stopped:
            return None
        end = live.finished
        is_ended_by_token = end is not None and end.reason is FinishReason.STOPPED
        new_ids = live.new_token_ids[text.num_tokens :]
        self.shown += text.append(new_ids[:-1] if is_ended_by_token else new_ids)
        if end is not None:
            self.shown += text.finish()
        return text.num_tokens if text.is_stopped else None

    def output(self, decoder: TokenDecoder | None) -> RequestOutput:
        """The output; call it once, when the request has finished. decoder: if None, the text is
        empty."""
        live = self.live
        assert live is not None
        assert live.finished is not None
        end = live.finished
        token_ids = live.take_token_ids()
        logprobs = prompt_logprobs = None
        if self.sampling.logprobs is not None:
            logprobs = [score.by_token() for score in live.take_scores(len(token_ids))]
        text, reason = self.shown, end.reason
        if self.text is None:
            text = answer_text(decoder, self.prompt_token_ids, token_ids, reason)
        elif self.text.is_stopped:  # drop tokens computed before the engine was notified
            reason, num_tokens = FinishReason.STOPPED, self.text.num_tokens
            token_ids, logprobs = token_ids[:num_tokens], logprobs and logprobs[:num_tokens]
        if self.sampling.prompt_logprobs is not None and token_ids:
            scores = live.take_prompt_scores()
            prompt_logprobs = [None if score is None else score.by_token() for score in scores]
        return RequestOutput(
            request_id=live.request_id,
            prompt_token_ids=self.prompt_token_ids,
            token_ids=token_ids,
            text=text,
            finish_reason=reason.api_name,
            num_cached_tokens=end.num_cached_tokens,
            num_preemptions=end.num_preemptions,
            error=end.message,
            index=self.index,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            kv_transfer_params=end.kv_transfer_params,
        )


def run_answers(
    answers: Sequence[Answer],
    client: BlockingClient,
    request_ids: Iterator[str],
    bar: "tqdm[Any]",
) -> None:
    """Submit all answers, at most MAX_LIVE_REQUESTS at a time, and wait until they are complete."""
    requests = client.requests
    waiting = deque(answers)
    num_tokens = 0
    while True:
        while waiting and len(requests) < MAX_LIVE_REQUESTS:
            _submit(waiting.popleft(), client, next(request_ids))
        if not (num_live := len(requests)):
            return
        outputs = client.engine.receive()
        if outputs is None:
            continue
        requests.apply(outputs)
        num_tokens += len(outputs.tokens)
        if (num_ended := num_live - len(requests)) > 0:
            elapsed_s = bar.format_dict["elapsed"] or 1.0
            bar.set_postfix_str(f"{num_tokens / elapsed_s:,.0f} tokens/s", refresh=False)
            bar.update(num_ended)


def _submit(answer: Answer, client: BlockingClient, request_id: str) -> None:
    answer.live = client.submit(
        request_id,
        answer.prompt_token_ids,
        answer.sampling,
        on_change=_ignore if answer.text is None else partial(_stop_if_found, answer, client),
        fork_of=None if answer.first is None else answer.first.live,
        multimodal=answer.multimodal,
        num_primed=answer.num_primed,
        pooling=answer.pooling,
    )


def _stop_if_found(answer: Answer, client: BlockingClient) -> None:
    """Stop the request if its answer has grown to a stop string."""
    num_kept = answer.grow()
    if num_kept is not None and answer.live is not None:
        client.stop(answer.live, num_kept)


def _ignore() -> None:
    return None
