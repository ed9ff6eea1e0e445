"""The engine requests of one HTTP request for vectors: a limited number of them run at a time."""

import asyncio
import time
from collections.abc import Mapping, Sequence

import msgspec

from longshore.deploy.gateway.engines.engines import Engines
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.gateway.openai.errors import ApiError, invalid, unavailable
from longshore.deploy.gateway.openai.requests import TokenIds
from longshore.deploy.gateway.request_log import answer_ended, answers_begin
from longshore.deploy.model.embedding import NOT_SAMPLED
from longshore.deploy.requests.live_requests import LiveRequest
from longshore.protocol.errors import EngineDead
from longshore.protocol.outputs import FinishedRequest, FinishReason
from longshore.protocol.requests import PoolingParams, Tenant


class PooledRun(msgspec.Struct, kw_only=True):
    """The engine requests of one HTTP request. A context manager: on exit it aborts live ones.

    param: parameter with the inputs, for errors.
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
    sent: list[LiveRequest] = msgspec.field(default_factory=list)
    changed: asyncio.Event = msgspec.field(default_factory=asyncio.Event)

    def __enter__(self) -> "PooledRun":
        answers_begin(
            self.request_id,
            num_answers=len(self.prompts),
            num_prompt_tokens=self.metrics.prompts_received(self.prompts),
            max_tokens=None,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.client.abort(self.sent)
        elapsed_s = time.perf_counter() - self.arrived_s
        for live in self.sent:
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
        in_flight: list[LiveRequest] = []
        while True:
            for live in in_flight:
                _check(live, self.param)
            in_flight = [live for live in in_flight if live.is_live]
            while len(self.sent) < len(self.prompts) and len(in_flight) < self.max_in_flight:
                in_flight.append(self._submit())
            if not in_flight:
                return [live.finished for live in self.sent if live.finished is not None]
            await self.changed.wait()
            self.changed.clear()

    def _submit(self) -> LiveRequest:
        number = len(self.sent)
        try:
            live = self.client.submit(
                f"{self.request_id}-{number}",
                self.prompts[number],
                NOT_SAMPLED,
                on_change=self.changed.set,
                priority=self.priority,
                cache_salt=self.cache_salt,
                tenant=self.tenant,
                trace_headers=self.trace_headers,
                pooling=self.pooling,
            )
        except EngineDead as error:
            raise unavailable(str(error)) from error
        self.sent.append(live)
        self.metrics.live_requests.inc()
        return live


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
