"""POST /v1/embeddings: returns an embedding of each text or list of token ids.

Each input is a request to the engine. A limited number of them run at a time; the embeddings are
returned together, in order.
"""

import asyncio
import base64
import time
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec
import numpy as np

from longshore.deploy.gateway.api_keys import ApiKey
from longshore.deploy.gateway.engines.engines import Engines
from longshore.deploy.gateway.http.exchange import Exchange
from longshore.deploy.gateway.http.middleware import (
    api_key_of,
    request_id_of,
    trace_headers_of,
    use_request_id,
)
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.gateway.openai.endpoint import (
    ApiEndpoint,
    Service,
    check_capacity,
    check_model,
    check_priority,
    num_at_a_time,
    read_in_turn,
    within,
)
from longshore.deploy.gateway.openai.errors import (
    ApiError,
    invalid,
    unavailable,
)
from longshore.deploy.gateway.openai.parameters import read_parameters
from longshore.deploy.gateway.openai.prompts import no_tokenizer
from longshore.deploy.gateway.openai.requests import (
    CacheSalt,
    Int32,
    TokenIds,
    check_deadline,
    each_of,
)
from longshore.deploy.gateway.openai.responses import PromptTokensDetails
from longshore.deploy.gateway.request_log import answer_ended, answers_begin
from longshore.deploy.gateway.text.tokenizer import MAX_INLINE_CHARACTERS
from longshore.deploy.model.embedding import NOT_SAMPLED
from longshore.deploy.requests.live_requests import LiveRequest
from longshore.protocol.errors import EngineDead
from longshore.protocol.outputs import FinishedRequest, FinishReason
from longshore.protocol.requests import PoolingParams, Tenant

MAX_INPUTS: Final = 2048
MAX_IN_FLIGHT: Final = 256
"""Limit of inputs of one request in the engine at a time, so that they do not fill its queue."""


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`truncate_prompt_tokens`, `truncation_side`, `add_special_tokens`, `normalize` and `priority`
    as in vLLM.

    dimensions: number of leading elements to return, normalized again if the embedding is.
    truncate_prompt_tokens: truncate inputs to this many tokens; -1: to the model's maximum.
    normalize:  None: the model folder's setting.
    cache_salt, deadline_s, request_id: as for completions.
    """

    input: str | list[str | int | TokenIds]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int32 | None = None
    truncate_prompt_tokens: Int32 | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    normalize: bool | None = None
    priority: Int32 | None = None
    cache_salt: CacheSalt | None = None
    deadline_s: float | None = None
    request_id: str | None = None

    def inputs(self) -> list[str | TokenIds]:
        """The list of inputs. Raises ApiError as `each_of` does."""
        return each_of(self.input, "input", MAX_INPUTS)


class EmbeddingItem(msgspec.Struct, frozen=True):
    """A list of numbers, or the base64 of little-endian float32s."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingResponse(msgspec.Struct, frozen=True, kw_only=True):
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


class EmbeddingsEndpoint(ApiEndpoint):
    """Available for every model that takes text."""

    path = "/v1/embeddings"

    async def serve(self, exchange: Exchange, service: Service, arrived_s: float) -> None:
        body = await read_in_turn(exchange, service)
        if service.embedding is None:
            raise invalid(
                f"{service.model_name} is a speech model and has no embeddings; "
                f"{self.path} is for models that take text",
                param="model",
            )
        request = await service.json.run(len(body), read_parameters, EmbeddingRequest, body)
        check_deadline(request.deadline_s)
        check_model(request.model, service)
        use_request_id(exchange.scope, request.request_id)
        key = api_key_of(exchange.scope)
        check_priority(request.priority or 0, key)
        try:
            pooling = service.embedding.pooling(
                normalize=request.normalize, dimensions=request.dimensions
            )
        except ValueError as error:
            param = str(error).replace("=", ":").partition(":")[0]
            raise invalid(str(error).removeprefix("model: "), param=param) from error
        answer = self._answer(exchange, service, request, pooling, key, arrived_s)
        await within(request.deadline_s, arrived_s, exchange.run_while_connected(answer))

    async def _answer(
        self,
        exchange: Exchange,
        service: Service,
        request: EmbeddingRequest,
        pooling: PoolingParams,
        key: ApiKey,
        arrived_s: float,
    ) -> None:
        inputs = request.inputs()
        if sum(map(len, inputs)) > MAX_INLINE_CHARACTERS:
            prompts = await asyncio.to_thread(_token_ids, inputs, request, service)
        else:
            prompts = _token_ids(inputs, request, service)
        check_capacity(1, service)
        run = _Run(
            request_id=request_id_of(exchange.scope, "embd"),
            prompts=prompts,
            pooling=pooling,
            priority=request.priority or 0,
            cache_salt=key.cache_salt(request.cache_salt),
            tenant=key.tenant,
            trace_headers=trace_headers_of(exchange.scope),
            max_in_flight=min(len(prompts), num_at_a_time(MAX_IN_FLIGHT, key, service)),
            arrived_s=arrived_s,
            client=service.client,
            metrics=service.metrics,
        )
        num_tokens = sum(map(len, prompts))
        with (
            service.key_usage.admit(key, num_live=run.max_in_flight, num_tokens=num_tokens),
            run,
        ):
            ends = await run.ends()
        usage = EmbeddingUsage(
            num_tokens,
            num_tokens,
            PromptTokensDetails(sum(end.num_cached_tokens for end in ends)),
        )
        as_text = request.encoding_format == "base64"
        num_bytes = sum(end.pooled.nbytes for end in ends)
        response = await service.json.run(
            num_bytes, _response, ends, service.model_name, usage, as_text=as_text
        )
        await exchange.send_json(response)


def _token_ids(
    inputs: Sequence[str | TokenIds], request: EmbeddingRequest, service: Service
) -> list[TokenIds]:
    """Valid token ids of each input. Raises ApiError."""
    prompts, tokenizer = service.prompts, service.tokenizer
    # One less than max_model_len: the engine plans a request with its next token.
    longest = prompts.max_model_len - 1
    cut = request.truncate_prompt_tokens
    if cut is not None and cut != -1 and not 1 <= cut <= longest:
        raise invalid(
            f"truncate_prompt_tokens={cut} must be -1 or between 1 and {longest}, the maximum for "
            "this model",
            param="truncate_prompt_tokens",
        )
    max_tokens = longest if cut == -1 else cut
    with_special = request.add_special_tokens is not False
    keeps_end = tokenizer is not None and tokenizer.keeps_end
    if request.truncation_side is not None:
        keeps_end = request.truncation_side == "left"
    encoded = []
    for index, given in enumerate(inputs):
        if not given:
            raise invalid(f"input[{index}] is empty; there is nothing to embed", param="input")
        if not isinstance(given, str):
            ids = given[-(max_tokens or 0) :] if keeps_end else given[:max_tokens]
        elif tokenizer is None:
            raise no_tokenizer("input")
        elif max_tokens is not None:
            ids = tokenizer.encode_cut(
                given, max_tokens, with_special=with_special, keeps_end=keeps_end
            )
        else:
            prompts.reject_too_long(given, tokenizer, "input")
            ids = tokenizer.encode(given) if with_special else tokenizer.encode_rendered(given)
        encoded.append(_checked(ids, index, longest, prompts.vocab_size))
    return encoded


def _checked(token_ids: TokenIds, index: int, longest: int, vocab_size: int) -> TokenIds:
    if not token_ids:
        raise invalid(f"input[{index}] has no tokens; there is nothing to embed", param="input")
    if len(token_ids) > longest:
        raise invalid(
            f"input[{index}] has {len(token_ids)} tokens; the maximum for this model is {longest}. "
            "Shorten it, or set truncate_prompt_tokens to -1",
            param="input",
            code="context_length_exceeded",
        )
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise invalid(
                f"input[{index}] has token id {token_id}, outside the vocabulary "
                f"(0 to {vocab_size - 1})",
                param="input",
            )
    return token_ids


def _response(
    ends: Sequence[FinishedRequest], model: str, usage: EmbeddingUsage, *, as_text: bool
) -> bytes:
    """The response as JSON. Each embedding is encoded on its own, to release the interpreter lock
    in between."""
    data = [
        msgspec.Raw(
            msgspec.json.encode(
                EmbeddingItem(
                    index,
                    base64.b64encode(end.pooled.astype(np.dtype("<f4"))).decode()
                    if as_text
                    else end.pooled.tolist(),
                )
            )
        )
        for index, end in enumerate(ends)
    ]
    return msgspec.json.encode({"object": "list", "data": data, "model": model, "usage": usage})


class _Run(msgspec.Struct, kw_only=True):
    """The engine requests of one HTTP request. A context manager: on exit it aborts live ones."""

    request_id: str
    prompts: Sequence[TokenIds]
    pooling: PoolingParams
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

    def __enter__(self) -> "_Run":
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
                self.metrics.phases_known(end, None)
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
                _check(live)
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


def _check(live: LiveRequest) -> None:
    """Raise ApiError if the request failed."""
    if live.failure is not None:
        raise unavailable(str(live.failure))
    end = live.finished
    if end is None or end.reason is FinishReason.STOPPED:
        return
    if end.reason is FinishReason.IGNORED:
        raise invalid(end.message or "the engine rejected this input", param="input")
    raise ApiError(500, end.message or "the engine failed on this request")
