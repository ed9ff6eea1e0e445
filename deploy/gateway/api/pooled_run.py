"""The engine requests of one HTTP request for vectors: a limited number of them run at a time.

They are submitted and ended a few at a time, in turns of the request's API key.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from longshore.deploy.gateway.api.engine_requests import (
    ENDED_PER_TURN,
    SUBMITTED_PER_TURN,
    end_in_turns,
    run_in_turns,
)
from longshore.deploy.gateway.api.requests import TokenIds
from longshore.deploy.gateway.engines.engines import Engines
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.gateway.request_log import answer_ended, answers_begin
from longshore.deploy.gateway.request_turns import Turn
from longshore.deploy.model.embedding import NOT_SAMPLED
from longshore.deploy.requests.engine_run import EngineRun
from longshore.deploy.requests.errors import RequestFailed, check_end
from longshore.deploy.requests.live_requests import LiveRequest
from longshore.protocol.outputs import FinishedRequest, FinishReason
from longshore.protocol.requests import RequestOptions


class PooledInput:
    """One input, a `Part` of an `EngineRun`. param: parameter with the inputs, for errors."""

    def __init__(
        self,
        client: Engines,
        request_id: str,
        prompt: TokenIds,
        options: RequestOptions,
        *,
        param: str,
        metrics: GatewayMetrics,
    ) -> None:
        self._client = client
        self._request_id = request_id
        self._prompt = prompt
        self._options = options
        self._param = param
        self._metrics = metrics
        self.live: LiveRequest | None = None

    @property
    def is_over(self) -> bool:
        return self.live is not None and not self.live.is_live

    def start(self, on_change: Callable[[], None]) -> None:
        self.live = self._client.submit(
            self._request_id, self._prompt, NOT_SAMPLED, self._options, on_change=on_change
        )
        self._metrics.live_requests.inc()

    def advance(self) -> bool:
        """Raises RequestError if it failed, EngineDead."""
        assert self.live is not None
        if self.live.failure is not None:
            raise self.live.failure
        if (end := self.live.finished) is not None:
            check_end(end, param=self._param)
            if end.reason is not FinishReason.STOPPED:
                raise RequestFailed(f"the engine ended this request: {end.reason.api_name}")
        return False


@dataclass(kw_only=True)
class PooledRun:
    """The engine requests of one HTTP request. A context manager: on exit it aborts live ones.

    param: parameter with the inputs, for errors.
    turn, end_turn: wait before further ones are submitted, and ended.
    """

    request_id: str
    prompts: Sequence[TokenIds]
    options: RequestOptions
    param: str
    max_in_flight: int
    arrived_s: float
    client: Engines
    metrics: GatewayMetrics
    turn: Turn
    end_turn: Turn

    def __post_init__(self) -> None:
        inputs = [
            PooledInput(
                self.client,
                f"{self.request_id}-{number}",
                prompt,
                self.options,
                param=self.param,
                metrics=self.metrics,
            )
            for number, prompt in enumerate(self.prompts)
        ]
        self._inputs = inputs
        self._is_changed = asyncio.Event()
        self._run = EngineRun(inputs, max_live=self.max_in_flight, on_change=self._is_changed.set)

    async def __aenter__(self) -> "PooledRun":
        answers_begin(
            self.request_id,
            num_answers=len(self.prompts),
            num_prompt_tokens=self.metrics.prompts_received(self.prompts),
            max_tokens=None,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        end = partial(self._end, time.perf_counter())
        await end_in_turns(self._run.started, end, self.end_turn, ENDED_PER_TURN)

    def _end(self, ended_s: float, inputs: Sequence[PooledInput]) -> None:
        requests = [each.live for each in inputs if each.live is not None]
        self.client.abort(requests)
        elapsed_s = ended_s - self.arrived_s
        for live in requests:
            end = live.finished
            reason = FinishReason.ABORTED if end is None else end.reason
            self.metrics.live_requests.dec()
            self.metrics.request_ended(reason, elapsed_s)
            if end is not None:
                self.metrics.phases_known(end, None, elapsed_s)
            answer_ended(
                live.request_id,
                reason=reason,
                num_output_tokens=0,
                arrived_s=self.arrived_s,
                first_token_s=None,
                live=live,
            )

    async def ends(self) -> list[FinishedRequest]:
        """The results of all inputs, in order. Raises RequestError if the engine fails or rejects
        one."""
        await run_in_turns(self._run, self._is_changed, self.turn, SUBMITTED_PER_TURN)
        ended = (each.live.finished for each in self._inputs if each.live is not None)
        return [end for end in ended if end is not None]
