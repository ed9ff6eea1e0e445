"""Beam search over HTTP: all answers to one request, returned together at its end."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

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
    ) -> None:
        assert spec.beams is not None
        self._spec = spec
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._changed = asyncio.Event()
        self._num_output_tokens = 0
        self._ends: list[FinishReason] = []
        self._searches = [
            BeamSearch(
                client,
                f"{spec.request_id}-{number}",
                prompt,
                spec.beams,
                on_change=self._changed.set,
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

    def __enter__(self) -> "BeamGeneration":
        try:
            for search in self._searches:
                search.start()
        except EngineDead as error:
            self._close()
            raise unavailable(str(error)) from error
        self._metrics.live_requests.inc(len(self._searches))
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
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

    def _close(self) -> None:
        for search in self._searches:
            search.close()

    async def pieces(self, _: ShowAtOnce | None = None) -> AsyncIterator[list[Piece]]:
        """All answers, once all searches are complete. Raises ApiError if the engine fails or
        rejects a request."""
        live = list(self._searches)
        while live:
            await self._changed.wait()
            self._changed.clear()
            try:
                for search in live:
                    search.advance()
            except BeamSearchFailed as error:
                if error.reason is FinishReason.IGNORED:
                    raise invalid(str(error)) from error
                raise ApiError(500, str(error)) from error
            except EngineDead as error:
                raise unavailable(str(error)) from error
            live = [search for search in live if not search.is_over]
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
