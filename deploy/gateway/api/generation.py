"""All answers to one HTTP request: submits them to the engine and yields their pieces.

A request may have a thousand answers. They are submitted, shown and ended a few at a time, in turns
of the request's API key, so that other requests go on meanwhile; and each event costs what the
answers cost that it is about.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Final

from longshore.deploy.gateway.api.answer_size import check_output_size
from longshore.deploy.gateway.api.engine_requests import (
    ENDED_PER_TURN,
    SUBMITTED_PER_TURN,
    end_in_turns,
    engine_errors,
)
from longshore.deploy.gateway.api.generated_answer import GeneratedAnswer
from longshore.deploy.gateway.api.usage import Usage, usage
from longshore.deploy.gateway.engines.engines import Engines
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.gateway.request_log import answers_begin
from longshore.deploy.gateway.request_turns import Turn
from longshore.deploy.gateway.text.detokenizer import ShowingDecoder, TokenDecoder
from longshore.deploy.requests.errors import RequestError
from longshore.deploy.requests.generation_spec import GenerationSpec, Piece, ShowAtOnce
from longshore.deploy.requests.live_requests import LiveRequest
from longshore.deploy.requests.sample_params import sample_params

TAKEN_PER_TURN: Final = 16


class Generation:
    """All answers of one HTTP request. A context manager: on exit it aborts live requests.

    tokenizer: if None, all texts are empty.
    turn:      waits before the next answers are submitted or shown.
    end_turn:  waits before the next answers are ended.
    """

    def __init__(
        self,
        spec: GenerationSpec,
        client: Engines,
        tokenizer: TokenDecoder | None,
        metrics: GatewayMetrics,
        *,
        turn: Turn,
        end_turn: Turn,
    ) -> None:
        self._spec = spec
        self._client = client
        if tokenizer is not None and spec.shown_special_token_ids:
            tokenizer = ShowingDecoder(tokenizer, spec.shown_special_token_ids)
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._turn, self._end_turn = turn, end_turn
        self._changed = asyncio.Event()
        self._is_awaited = False
        self._show_at_once: ShowAtOnce | None = None
        self._failure: Exception | None = None
        self._num_tokens = 0
        self._num_prompt_tokens = metrics.prompts_received(spec.prompts)
        self._samplings = sample_params(spec.sampling, spec.num_samples)
        self._num_answers = spec.num_samples * len(spec.prompts)
        self._answers: list[GeneratedAnswer] = []  # that have been submitted
        self._parent: LiveRequest | None = None  # of the next sample
        self._grown: OrderedDict[GeneratedAnswer, None] = OrderedDict()  # that may have a piece
        self._num_complete = 0
        answers_begin(
            spec.request_id,
            num_answers=self._num_answers,
            num_prompt_tokens=self._num_prompt_tokens,
            max_tokens=spec.sampling.max_tokens,
        )

    async def __aenter__(self) -> "Generation":
        return self

    async def start(self) -> None:
        """Submit the answers that may be in the engine now, if `pieces` should not do it. Raises
        RequestError."""
        most = self._num_answers
        if self._spec.max_in_flight is not None:
            most = min(most, self._num_complete + self._spec.max_in_flight)
        num_before = len(self._answers)
        while len(self._answers) < most:
            num_submitted = len(self._answers) - num_before
            if num_submitted and num_submitted % SUBMITTED_PER_TURN == 0:
                await self._turn()
            self._submit_next()

    def _submit_next(self) -> None:
        index, spec = len(self._answers), self._spec
        sample = index % spec.num_samples
        answer = GeneratedAnswer(
            index,
            spec,
            self._samplings[sample],
            self._client,
            self._tokenizer,
            self._metrics,
            self._on_growth,
            self._on_tokens,
        )
        if sample == 0:
            self._parent = None
        elif self._parent is None or not self._parent.is_live:
            self._parent = self._answers[-1].live
        with engine_errors():
            answer.submit(fork_of=self._parent)
        self._answers.append(answer)
        self._metrics.live_requests.inc()
        if not answer.is_growing:  # the engine died meanwhile
            self._on_growth(answer)

    async def __aexit__(self, *_: object) -> None:
        await end_in_turns(self._answers, self._end, self._end_turn, ENDED_PER_TURN)

    def _end(self, answers: list[GeneratedAnswer]) -> None:
        self._client.abort([answer.live for answer in answers if answer.live is not None])
        for answer in answers:
            answer.count_end()

    async def pieces(self, show_at_once: ShowAtOnce | None = None) -> AsyncIterator[list[Piece]]:
        """New pieces since the last time, until all answers are complete. Without `is_stream` each
        answer is one piece.

        show_at_once: called to show pieces, except the last of an answer, while this generator
        waits; waking a task for every token would cost more than everything else done for a token.
        Raises RequestError if the engine fails or rejects a request.
        """
        self._show_at_once = show_at_once
        await self.start()
        while self._num_complete < self._num_answers:
            self._is_awaited = True
            await self._changed.wait()
            self._is_awaited = False
            self._changed.clear()
            if self._failure is not None:
                raise self._failure
            pieces = self._take()
            await self.start()
            if pieces:
                yield pieces
            if self._grown:
                await self._turn()
                self._changed.set()

    def _take(self) -> list[Piece]:
        num_taken = min(TAKEN_PER_TURN, len(self._grown))
        pieces = []
        for answer in [self._grown.popitem(last=False)[0] for _ in range(num_taken)]:
            if (piece := answer.take()) is not None:
                pieces.append(piece)
            self._num_complete += answer.is_complete
        return pieces

    def _on_growth(self, answer: GeneratedAnswer) -> None:
        if answer.is_complete or self._was_shown(answer):
            return
        self._grown[answer] = None
        self._changed.set()

    def _on_tokens(self, num_tokens: int) -> None:
        """Count the tokens that are held until the answers are complete."""
        self._num_tokens += num_tokens
        if self._spec.is_stream or self._failure is not None:
            return
        try:
            check_output_size(self._spec, self._num_tokens)
        except RequestError as error:
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
