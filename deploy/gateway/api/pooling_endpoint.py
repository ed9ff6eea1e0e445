"""The base of the endpoints that compute vectors: embeddings, scores of pairs, classification."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

import msgspec

from longshore.deploy.gateway.api.endpoint import (
    ApiEndpoint,
    Service,
    check_capacity,
    check_model,
    check_priority,
    num_at_a_time,
    read_in_turn,
    run_within,
)
from longshore.deploy.gateway.api.parameters import read_parameters
from longshore.deploy.gateway.api.pooled_run import PooledRun
from longshore.deploy.gateway.api.requests import CacheSalt, Int32, TokenIds, check_deadline
from longshore.deploy.gateway.api.usage import PromptTokensDetails
from longshore.deploy.gateway.http.exchange import Exchange
from longshore.deploy.gateway.http.middleware import (
    api_key_of,
    request_id_of,
    trace_headers_of,
    use_request_id,
)
from longshore.deploy.requests.prompts import truncates_nothing
from longshore.protocol.outputs import FinishedRequest
from longshore.protocol.requests import PoolingParams, RequestOptions

MAX_IN_FLIGHT: Final = 256
"""Limit of inputs of one request in the engine at a time, so that they do not fill its queue."""


class PoolingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`truncate_prompt_tokens`, `truncation_side` and `priority` as in vLLM.

    truncate_prompt_tokens: truncate inputs to this many tokens; -1: to the model's maximum.
    truncation_side: the side that is removed; None: as the tokenizer is configured.
    cache_salt, deadline_s, request_id: as for completions.
    """

    model: str | None = None
    truncate_prompt_tokens: Int32 | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Int32 | None = None
    cache_salt: CacheSalt | None = None
    deadline_s: float | None = None
    request_id: str | None = None

    @property
    def truncates(self) -> bool:
        return self.truncate_prompt_tokens is not None

    @property
    def keeps_end(self) -> bool | None:
        """Truncation removes the beginning; None: as the tokenizer is configured."""
        return None if self.truncation_side is None else self.truncation_side == "left"


class PoolingUsage(msgspec.Struct, frozen=True):
    """Tokens of all inputs that were computed."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(prompts: Sequence[TokenIds], ends: Sequence[FinishedRequest]) -> PoolingUsage:
    num_tokens = sum(map(len, prompts))
    cached = PromptTokensDetails(sum(end.num_cached_tokens for end in ends))
    return PoolingUsage(num_tokens, num_tokens, cached)


PoolingRequestT = TypeVar("PoolingRequestT", bound=PoolingRequest)


@dataclass(frozen=True)
class PoolingCall(Generic[PoolingRequestT]):
    """One HTTP request that is valid so far. request_id: in its response and in the engine."""

    exchange: Exchange
    service: Service
    request: PoolingRequestT
    request_id: str
    arrived_s: float


class PoolingEndpoint(ApiEndpoint, Generic[PoolingRequestT]):
    """Computes vectors of inputs. param: the parameter with the inputs."""

    id_prefix: str
    param: str
    request_type: type[PoolingRequestT]

    @abstractmethod
    def check_service(self, service: Service) -> None:
        """Raise RequestError if the model does not support this."""

    @abstractmethod
    async def answer(self, call: PoolingCall[PoolingRequestT]) -> bytes:
        """The response as JSON. Raises RequestError."""

    def parse(self, body: bytes, service: Service) -> PoolingRequestT:
        """The request. Raises RequestError if it is invalid."""
        return read_parameters(self.request_type, body)

    async def serve(self, exchange: Exchange, service: Service, arrived_s: float) -> None:
        body = await read_in_turn(exchange, service)
        self.check_service(service)
        request = await service.json.run(len(body), self.parse, body, service)
        check_deadline(request.deadline_s)
        if request.truncation_side is not None and not request.truncates:
            raise truncates_nothing()
        check_model(request.model, service)
        use_request_id(exchange.scope, request.request_id)
        check_priority(request.priority or 0, api_key_of(exchange.scope))
        request_id = request_id_of(exchange.scope, self.id_prefix)
        call = PoolingCall(exchange, service, request, request_id, arrived_s)

        async def answer() -> None:
            await exchange.send_json(await self.answer(call))

        await run_within(
            exchange, service, answer(), deadline_s=request.deadline_s, arrived_s=arrived_s
        )

    async def pooled(
        self,
        call: PoolingCall[PoolingRequestT],
        prompts: Sequence[TokenIds],
        pooling: PoolingParams,
    ) -> list[FinishedRequest]:
        """The vectors of the prompts, in order. Raises RequestError."""
        service, request, scope = call.service, call.request, call.exchange.scope
        check_capacity(1, service)
        key = api_key_of(scope)
        run = PooledRun(
            request_id=call.request_id,
            prompts=prompts,
            options=RequestOptions(
                pooling=pooling,
                priority=request.priority or 0,
                cache_salt=key.cache_salt(request.cache_salt),
                tenant=key.tenant,
                trace_headers=trace_headers_of(scope),
            ),
            param=self.param,
            max_in_flight=min(len(prompts), num_at_a_time(MAX_IN_FLIGHT, key, service)),
            arrived_s=call.arrived_s,
            client=service.client,
            metrics=service.metrics,
            turn=service.turn_of(key),
            end_turn=service.end_turn_of(key),
        )
        num_tokens = sum(map(len, prompts))
        with service.key_usage.admit(key, num_live=run.max_in_flight, num_tokens=num_tokens):
            async with run:
                return await run.ends()
