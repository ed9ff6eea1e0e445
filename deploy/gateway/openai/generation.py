"""All answers to one HTTP request: submits them to the engine and yields their pieces."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from longshore.deploy.gateway.engines.engines import Engines
from longshore.deploy.gateway.engines.split_requests import TooManyWaiting
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.gateway.openai.answer_size import check_output_size
from longshore.deploy.gateway.openai.errors import ApiError, rate_limited, unavailable
from longshore.deploy.gateway.openai.generated_answer import GeneratedAnswer
from longshore.deploy.gateway.openai.generation_spec import GenerationSpec, Piece, ShowAtOnce
from longshore.deploy.gateway.openai.responses import Usage, usage
from longshore.deploy.gateway.request_log import answers_begin
from longshore.deploy.gateway.text.detokenizer import TokenDecoder
from longshore.deploy.requests.sample_params import sample_params
from longshore.protocol.errors import EngineDead


class Generation:
    """All answers of one HTTP request. A context manager: on exit it aborts live requests.

    tokenizer: if None, all texts are empty.
    """

    def __init__(
        self,
        spec: GenerationSpec,
        client: Engines,
        tokenizer: TokenDecoder | None,
        metrics: GatewayMetrics,
    ) -> None:
        self._spec = spec
        self._client = client
        self._metrics = metrics
        self._changed = asyncio.Event()
        self._is_awaited = False
        self._show_at_once: ShowAtOnce | None = None
        self._failure: Exception | None = None
        self._num_tokens = 0
        self._num_prompt_tokens = metrics.prompts_received(spec.prompts)
        samples = sample_params(spec.sampling, spec.num_samples)
        self._answers = [
            GeneratedAnswer(
                index, spec, sampling, client, tokenizer, metrics, self._on_growth, self._on_tokens
            )
            for index, sampling in enumerate(samples * len(spec.prompts))
        ]
        answers_begin(
            spec.request_id,
            num_answers=len(self._answers),
            num_prompt_tokens=self._num_prompt_tokens,
            max_tokens=spec.sampling.max_tokens,
        )

    def __enter__(self) -> "Generation":
        try:
            self._submit(self._answers[: self._spec.max_in_flight])
        except ApiError:
            self.__exit__()
            raise
        return self

    def _submit(self, answers: Sequence[GeneratedAnswer]) -> None:
        """Submit those that have not been submitted yet."""
        try:
            for answer in answers:
                if answer.live is None:
                    first = self._answers[answer.index - answer.index % self._spec.num_samples]
                    answer.submit(fork_of=first.live)
                    self._metrics.live_requests.inc()
        except EngineDead as error:
            raise unavailable(str(error)) from error
        except TooManyWaiting as error:
            raise rate_limited(str(error), "queue_full", retry_after_s=1) from error

    def __exit__(self, *_: object) -> None:
        started = [answer for answer in self._answers if answer.live is not None]
        self._client.abort([answer.live for answer in started if answer.live is not None])
        for answer in started:
            answer.count_end()

    async def pieces(self, show_at_once: ShowAtOnce | None = None) -> AsyncIterator[list[Piece]]:
        """New pieces since the last time, until all answers are complete. Without `is_stream` each
        answer is one piece.

        show_at_once: called to show pieces, except the last of an answer, while this generator
        waits; waking a task for every token would cost more than everything else done for a token.
        Raises ApiError if the engine fails or rejects a request.
        """
        self._show_at_once = show_at_once
        unfinished = list(self._answers)
        while in_flight := unfinished[: self._spec.max_in_flight]:
            self._is_awaited = True
            await self._changed.wait()
            self._is_awaited = False
            self._changed.clear()
            if self._failure is not None:
                raise self._failure
            pieces = [piece for answer in in_flight if (piece := answer.take()) is not None]
            unfinished = [answer for answer in unfinished if not answer.is_complete]
            self._submit(unfinished[: self._spec.max_in_flight])
            if pieces:
                yield pieces

    def _on_growth(self, answer: GeneratedAnswer) -> None:
        if self._was_shown(answer):
            return
        self._changed.set()

    def _on_tokens(self, num_tokens: int) -> None:
        """Count the tokens that are held until the answers are complete."""
        self._num_tokens += num_tokens
        if self._spec.is_stream or self._failure is not None:
            return
        try:
            check_output_size(self._spec, self._num_tokens)
        except ApiError as error:
            self._failure = error
            self._changed.set()

    def _was_shown(self, answer: GeneratedAnswer) -> bool:
        """Show the answer's next piece at once, if that is possible now."""
        is_idle = self._is_awaited and not self._changed.is_set()
        if self._show_at_once is None or not is_idle or not answer.is_growing:
            return False
        if answer.begins_with_scores:  # a large piece, which is written off the event loop
            return False
        try:
            return self._show_at_once(answer.take)
        except Exception as error:  # affects only this request
            self._failure = error
            return False

    def usage(self) -> Usage:
        """Usage of all answers, once they are complete."""
        # Count cached tokens of the first sample only: the others share the blocks it computed.
        firsts = [answer.end for answer in self._answers[:: self._spec.num_samples]]
        return usage(
            self._num_prompt_tokens,
            0
            if self._spec.scores_only
            else sum(answer.num_output_tokens for answer in self._answers),
            sum(end.num_cached_tokens for end in firsts if end is not None),
        )
