"""Beam search over HTTP: all answers to one request, returned together at its end."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from longshore.deploy.gateway.api.engine_requests import (
    end_in_turns,
    run_in_turns,
    start_in_turns,
)
from longshore.deploy.gateway.api.usage import Usage, usage
from longshore.deploy.gateway.engines.engines import Engines
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.gateway.request_log import answer_ended, answers_begin
from longshore.deploy.gateway.request_turns import Turn
from longshore.deploy.gateway.text.answer_text import whole_text
from longshore.deploy.gateway.text.detokenizer import TokenDecoder
from longshore.deploy.requests.beam_search import BeamSearch, FinishedBeam
from longshore.deploy.requests.engine_run import EngineRun
from longshore.deploy.requests.generation_spec import GenerationSpec, Piece, ShowAtOnce
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
        self._num_output_tokens = 0
        self._ends: list[FinishReason] = []
        self._searches = [
            BeamSearch(client, f"{spec.request_id}-{number}", prompt, spec.beams, spec.options)
            for number, prompt in enumerate(spec.prompts)
        ]
        self._is_changed = asyncio.Event()
        self._run = EngineRun(
            self._searches, max_live=len(self._searches), on_change=self._is_changed.set
        )
        answers_begin(
            spec.request_id,
            num_answers=spec.num_samples * len(spec.prompts),
            num_prompt_tokens=metrics.prompts_received(spec.prompts),
            max_tokens=spec.beams.max_tokens,
        )

    async def __aenter__(self) -> "BeamGeneration":
        self._metrics.live_requests.inc(len(self._searches))
        return self

    async def start(self) -> None:
        """Submit the first request of each search, if `pieces` should not do it. Raises
        RequestError."""
        await start_in_turns(self._run, self._turn, 1)

    async def __aexit__(self, *_: object) -> None:
        await end_in_turns(self._run.started, _close, self._end_turn, 1)
        metrics = self._metrics
        metrics.live_requests.dec(len(self._searches))
        duration_s = time.perf_counter() - self._spec.arrived_s
        for reason in self._ends or [FinishReason.ABORTED]:
            metrics.request_ended(reason, duration_s)
        answer_ended(
            self._spec.request_id,
            reason=(self._ends or [FinishReason.ABORTED])[0],
            num_output_tokens=self._num_output_tokens,
            arrived_s=self._spec.arrived_s,
            first_token_s=None,
        )

    async def pieces(self, _: ShowAtOnce | None = None) -> AsyncIterator[list[Piece]]:
        """All answers, once all searches are complete. Raises RequestError if the engine fails or
        rejects a request."""
        await run_in_turns(self._run, self._is_changed, self._turn, 1)
        yield [
            self._piece(number * self._spec.num_samples + index, search, finished)
            for number, search in enumerate(self._searches)
            for index, finished in enumerate(search.finished[: self._spec.num_samples])
        ]

    def _piece(self, index: int, search: BeamSearch, finished: FinishedBeam) -> Piece:
        token_ids = list(finished.beam.token_ids)
        self._ends.append(finished.reason)
        self._num_output_tokens += len(token_ids)
        self._metrics.generated_tokens.inc(len(token_ids))
        if self._spec.charge is not None:
            self._spec.charge(len(token_ids))
        self._metrics.answer_lengths.observe(len(token_ids))
        text = whole_text(
            self._tokenizer,
            search.prompt_token_ids,
            finished.text_token_ids,
            shows_special=self._spec.shows_special_tokens,
        )
        return Piece(index, text, token_ids, finished.reason.api_name)

    def usage(self) -> Usage:
        """Usage of the returned answers; tokens of other beams are not counted."""
        return usage(
            sum(map(len, self._spec.prompts)),
            self._num_output_tokens,
            sum(search.num_cached_tokens for search in self._searches),
        )


def _close(searches: Sequence[BeamSearch]) -> None:
    for search in searches:
        search.close()
