"""Beam search over HTTP: all answers to one request, returned together at its end."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from functools import partial

from longshore.deploy.gateway.engines.engines import Engines
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.gateway.openai.errors import (
    ApiError,
    invalid,
    unavailable,
)
from longshore.deploy.gateway.openai.generation_spec import GenerationSpec, Piece, ShowAtOnce
from longshore.deploy.gateway.openai.responses import Usage, usage
from longshore.deploy.gateway.request_log import answer_ended, answers_begin
from longshore.deploy.gateway.request_turns import Turn
from longshore.deploy.gateway.text.answer_text import AnswerText
from longshore.deploy.gateway.text.detokenizer import TokenDecoder
from longshore.deploy.requests.beam_search import (
    BeamSearch,
    BeamSearchFailed,
    FinishedBeam,
)
from longshore.protocol.errors import EngineDead
from longshore.protocol.outputs import FinishReason


class BeamGeneration:
    """Like `Generation`, for a spec with `beams`: `num_samples` answers per prompt, best first,
    each as one piece."""

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
        assert spec.beams is not None
        self._spec = spec
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._turn, self._end_turn = turn, end_turn
        self._is_changed = asyncio.Event()
        self._changed: OrderedDict[int, None] = OrderedDict()  # numbers of searches
        self._num_started = 0
        self._num_output_tokens = 0
        self._ends: list[FinishReason] = []
        self._searches = [
            BeamSearch(
                client,
                f"{spec.request_id}-{number}",
                prompt,
                spec.beams,
                on_change=partial(self._note_change, number),
                priority=spec.priority,
                cache_salt=spec.cache_salt,
                no_store=spec.no_store,
                tenant=spec.tenant,
            )
            for number, prompt in enumerate(spec.prompts)
        ]
        answers_begin(
            spec.request_id,
            num_answers=spec.num_samples * len(spec.prompts),
            num_prompt_tokens=metrics.prompts_received(spec.prompts),
            max_tokens=spec.beams.max_tokens,
        )

    async def __aenter__(self) -> "BeamGeneration":
        self._metrics.live_requests.inc(len(self._searches))
        return self

    def _note_change(self, number: int) -> None:
        self._changed[number] = None
        self._is_changed.set()

    async def start(self) -> None:
        """Submit the first request of each search, if `pieces` should not do it. Raises
        ApiError."""
        while self._num_started < len(self._searches):
            if self._num_started:
                await self._turn()
            search = self._searches[self._num_started]
            self._num_started += 1
            try:
                search.start()
            except EngineDead as error:
                raise unavailable(str(error)) from error

    async def __aexit__(self, *_: object) -> None:
        """If this is cancelled, too, the rest ends at once."""
        left = self._searches[: self._num_started]
        try:
            while left:
                left.pop().close()
                if left:
                    await self._end_turn()
        finally:
            for search in left:
                search.close()
        metrics = self._metrics
        metrics.live_requests.dec(len(self._searches))
        duration_s = time.perf_counter() - self._spec.arrived_s
        for reason in self._ends or [FinishReason.ABORTED]:
            metrics.request_ended(reason, duration_s)
        answer_ended(
            self._spec.request_id,
            reason=(self._ends or [FinishReason.ABORTED])[0].name,
            num_output_tokens=self._num_output_tokens,
            arrived_s=self._spec.arrived_s,
            first_token_s=None,
        )

    async def pieces(self, _: ShowAtOnce | None = None) -> AsyncIterator[list[Piece]]:
        """All answers, once all searches are complete. Raises ApiError if the engine fails or
        rejects a request."""
        await self.start()
        num_left = len(self._searches)
        while num_left:
            if not self._changed:
                self._is_changed.clear()
            await self._is_changed.wait()
            number, _ = self._changed.popitem(last=False)
            search = self._searches[number]
            if search.is_over:
                continue
            try:
                has_advanced = search.advance()
            except BeamSearchFailed as error:
                if error.reason is FinishReason.IGNORED:
                    raise invalid(str(error)) from error
                raise ApiError(500, str(error)) from error
            except EngineDead as error:
                raise unavailable(str(error)) from error
            num_left -= search.is_over
            if has_advanced:
                await self._turn()
        yield [
            self._piece(number * self._spec.num_samples + index, search, finished)
            for number, search in enumerate(self._searches)
            for index, finished in enumerate(search.finished[: self._spec.num_samples])
        ]

    def _piece(self, index: int, search: BeamSearch, finished: FinishedBeam) -> Piece:
        beam = finished.beam
        token_ids = list(beam.token_ids)
        reason = FinishReason.STOPPED if beam.has_ended else FinishReason.LENGTH_CAPPED
        self._ends.append(reason)
        self._num_output_tokens += len(token_ids)
        self._metrics.generated_tokens.inc(len(token_ids))
        if self._spec.charge is not None:
            self._spec.charge(len(token_ids))
        self._metrics.answer_lengths.observe(len(token_ids))
        text = self._text(search.prompt_token_ids, token_ids[:-1] if beam.has_ended else token_ids)
        return Piece(index, text, token_ids, reason.api_name)

    def _text(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        text = AnswerText(
            self._tokenizer, prompt_token_ids, shows_special=self._spec.shows_special_tokens
        )
        return text.append(token_ids) + text.finish()

    def usage(self) -> Usage:
        """Usage of the returned answers; tokens of other beams are not counted."""
        return usage(
            sum(map(len, self._spec.prompts)),
            self._num_output_tokens,
            sum(search.num_cached_tokens for search in self._searches),
        )
