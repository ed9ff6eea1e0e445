"""The engine requests of one HTTP request for vectors: a limited number of them run at a time.

They are submitted and ended a few at a time, in turns of the request's API key.
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from longshore.deploy.gateway.engines.engines import Engines
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.gateway.openai.errors import ApiError, invalid, unavailable
from longshore.deploy.gateway.openai.requests import TokenIds
from longshore.deploy.gateway.request_log import answer_ended, answers_begin
from longshore.deploy.gateway.request_turns import Turn
from longshore.deploy.model.embedding import NOT_SAMPLED
from longshore.deploy.requests.live_requests import LiveRequest
from longshore.protocol.errors import EngineDead
from longshore.protocol.outputs import FinishedRequest, FinishReason
from longshore.protocol.requests import PoolingParams, Tenant

SUBMITTED_PER_TURN: Final = 2
ENDED_PER_TURN: Final = 8


class PooledRun(msgspec.Struct, kw_only=True):
    """The engine requests of one HTTP request. A context manager: on exit it aborts live ones.

    param: parameter with the inputs, for errors.
    turn, end_turn: wait before further ones are submitted, and ended.
    sent:  those that were submitted. in_flight: the numbers of those that have not ended yet.
    noted: the numbers of those that may have ended since the last look.
    """

    request_id: str
    prompts: Sequence[TokenIds]
    pooling: PoolingParams
    param: str
    priority: int
    cache_salt: str | None
    tenant: Tenant
    trace_headers: Mapping[str, str]
    max_in_flight: int
    arrived_s: float
    client: Engines
    metrics: GatewayMetrics
    turn: Turn
    end_turn: Turn
    sent: list[LiveRequest] = msgspec.field(default_factory=list)
    in_flight: set[int] = msgspec.field(default_factory=set)
    noted: deque[int] = msgspec.field(default_factory=deque)
    changed: asyncio.Event = msgspec.field(default_factory=asyncio.Event)

    async def __aenter__(self) -> "PooledRun":
        answers_begin(
            self.request_id,
            num_answers=len(self.prompts),
            num_prompt_tokens=self.metrics.prompts_received(self.prompts),
            max_tokens=None,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """If this is cancelled, too, the rest ends at once."""
        ended_s, left = time.perf_counter(), self.sent
        try:
            while left:
                self._end(left[-ENDED_PER_TURN:], ended_s)
                del left[-ENDED_PER_TURN:]
                if left:
                    await self.end_turn()
        finally:
            self._end(left, ended_s)

    def _end(self, requests: Sequence[LiveRequest], ended_s: float) -> None:
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
                reason=reason.name,
                num_output_tokens=0,
                arrived_s=self.arrived_s,
                first_token_s=None,
            )

    async def ends(self) -> list[FinishedRequest]:
        """The results of all inputs, in order. Raises ApiError if the engine fails or rejects
        one."""
        while True:
            num_new = 0
            while len(self.sent) < len(self.prompts) and len(self.in_flight) < self.max_in_flight:
                if num_new and num_new % SUBMITTED_PER_TURN == 0:
                    await self.turn()
                num_new += 1
                self._submit()
            if not self.in_flight:
                break
            await self.changed.wait()
            self.changed.clear()
            while self.noted:
                self._take_note(self.noted.popleft())
        return [live.finished for live in self.sent if live.finished is not None]

    def _note_change(self, number: int) -> None:
        self.noted.append(number)
        self.changed.set()

    def _take_note(self, number: int) -> None:
        live = self.sent[number]
        if number in self.in_flight and not live.is_live:
            self.in_flight.remove(number)
            _check(live, self.param)

    def _submit(self) -> None:
        number = len(self.sent)
        try:
            live = self.client.submit(
                f"{self.request_id}-{number}",
                self.prompts[number],
                NOT_SAMPLED,
                on_change=partial(self._note_change, number),
                priority=self.priority,
                cache_salt=self.cache_salt,
                tenant=self.tenant,
                trace_headers=self.trace_headers,
                pooling=self.pooling,
            )
        except EngineDead as error:
            raise unavailable(str(error)) from error
        self.sent.append(live)
        self.in_flight.add(number)
        self.metrics.live_requests.inc()


def _check(live: LiveRequest, param: str) -> None:
    """Raise ApiError if the request failed."""
    if live.failure is not None:
        raise unavailable(str(live.failure))
    end = live.finished
    if end is None or end.reason is FinishReason.STOPPED:
        return
    if end.reason is FinishReason.IGNORED:
        raise invalid(end.message or "the engine rejected this input", param=param)
    raise ApiError(500, end.message or "the engine failed on this request")
