"""The base of all endpoints: parse a request, submit it, answer as a whole or as a stream."""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic

import msgspec
from starlette.types import Receive, Scope, Send

from longshore.deploy.gateway.api_keys import ApiKey
from longshore.deploy.gateway.engines.engines import Engines
from longshore.deploy.gateway.http.exchange import ClientGone, Exchange
from longshore.deploy.gateway.http.json_body import JsonThread, read_json_body
from longshore.deploy.gateway.http.middleware import (
    api_key_of,
    request_id_of,
    trace_headers_of,
    use_request_id,
)
from longshore.deploy.gateway.key_usage import KeyUsage
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.gateway.openai.answer_size import check_prompt_size, piece_bytes
from longshore.deploy.gateway.openai.beams import BeamGeneration
from longshore.deploy.gateway.openai.errors import (
    ApiError,
    invalid,
    queue_full,
    unavailable,
    unknown_model,
)
from longshore.deploy.gateway.openai.generation import Generation
from longshore.deploy.gateway.openai.generation_spec import GenerationSpec, Piece
from longshore.deploy.gateway.openai.prompts import PromptReader
from longshore.deploy.gateway.openai.requests import RequestT, parse_request
from longshore.deploy.gateway.openai.responses import Usage
from longshore.deploy.gateway.request_log import note_bug
from longshore.deploy.gateway.request_turns import RequestTurns
from longshore.deploy.gateway.text.audio_decoder import AudioDecoder
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.model.embedding import EmbeddingModel
from longshore.deploy.requests.speech import SpeechModel

_encode = msgspec.json.Encoder().encode


class Service(msgspec.Struct, frozen=True):
    """The objects and limits with which endpoints serve requests; created once the engine is ready.

    model_name: name in responses. model_aliases: further names that requests may use.
    embedding: how the model pools embeddings; None: it takes no text.
    speech: a speech model's features and prompts; None: the model takes text.
    max_audio_bytes, max_audio_s: limits of an audio file's size and duration.
    max_live_requests: limit of running and waiting requests.
    audio_decoder: decodes audio files within a memory limit.
    key_usage: what each API key uses, and may use.
    json: decodes and encodes large bodies.
    turns: in which requests are read.
    """

    model_name: str
    client: Engines
    tokenizer: ModelTokenizer | None
    prompts: PromptReader
    metrics: GatewayMetrics
    max_body_bytes: int
    max_live_requests: int
    key_usage: KeyUsage
    speech: SpeechModel | None = None
    max_audio_bytes: int = 25 << 20
    max_audio_s: float = 3600.0
    embedding: EmbeddingModel | None = None
    audio_decoder: AudioDecoder = msgspec.field(default_factory=AudioDecoder)
    json: JsonThread = msgspec.field(default_factory=JsonThread)
    turns: RequestTurns = msgspec.field(default_factory=RequestTurns)
    model_aliases: tuple[str, ...] = ()


class ResponseWriter(ABC):
    """Writes the bodies of one response in its endpoint's format."""

    @abstractmethod
    def first_chunks(self) -> Sequence[msgspec.Struct]:
        """The chunks at the beginning of a stream, before any text."""

    @abstractmethod
    def chunks(self, piece: Piece) -> Sequence[msgspec.Struct]:
        """The chunks of a stream for one piece."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """The last chunk of a stream, if the client requested usage."""

    @abstractmethod
    def whole(self, pieces: Sequence[Piece], usage: Usage) -> msgspec.Struct | str:
        """The response without streaming: JSON or plain text."""


class ApiEndpoint(ABC):
    """An ASGI application for one path. `service` is None until the engine is ready."""

    path: str

    def __init__(self) -> None:
        self.service: Service | None = None

    @abstractmethod
    async def serve(self, exchange: Exchange, service: Service, arrived_s: float) -> None:
        """Read one request and answer it. Raises ApiError if it cannot be served."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            arrived_s = time.perf_counter()
            service = self.service
            if service is None:
                raise unavailable("the engine is still starting; /ready shows the progress")
            await self.serve(exchange, service, arrived_s)
        except ApiError as error:
            await exchange.send_error(error)
        except ClientGone:
            pass  # logged by the access log
        except Exception as error:
            note_bug(error)
            await exchange.send_error(ApiError(500, "internal error; see the server's log"))


class GenerationEndpoint(ApiEndpoint, Generic[RequestT]):
    """Generates text from text."""

    id_prefix: str
    request_type: type[RequestT]

    @abstractmethod
    async def specify(
        self, service: Service, request: RequestT, request_id: str, arrived_s: float
    ) -> GenerationSpec:
        """What to submit to the engine. Raises ApiError if it cannot be served."""

    @abstractmethod
    def writer(self, service: Service, request: RequestT, request_id: str) -> ResponseWriter:
        """The writer of the response."""

    async def serve(self, exchange: Exchange, service: Service, arrived_s: float) -> None:
        body = await read_in_turn(exchange, service)
        if service.speech is not None:
            raise invalid(
                f"{service.model_name} is a speech model: use /v1/audio/transcriptions or "
                f"/v1/audio/translations; {self.path} is for models that take text",
                param="model",
            )
        if service.embedding is not None and service.embedding.is_only:
            raise invalid(
                f"{service.model_name} has no output head and only serves embeddings: use "
                f"/v1/embeddings; {self.path} is for models that generate text",
                param="model",
            )
        request = await service.json.run(len(body), parse_request, self.request_type, body)
        check_model(request.model, service)
        use_request_id(exchange.scope, request.request_id)
        request_id = request_id_of(exchange.scope, self.id_prefix)
        spec = await self.specify(service, request, request_id, arrived_s)
        key = api_key_of(exchange.scope)
        check_priority(spec.priority, key)
        spec = msgspec.structs.replace(
            spec,
            trace_headers=trace_headers_of(exchange.scope),
            cache_salt=key.cache_salt(
                # A random salt: no other request has it.
                uuid.uuid4().hex if request.no_store else request.cache_salt
            ),
            skips_reading=bool(request.skip_reading_prefix_cache),
            shows_special_tokens=request.shows_special_tokens,
        )
        check_prompt_size(spec)
        check_capacity(spec.num_answers, service)
        writer = self.writer(service, request, request_id)
        kind = Generation if spec.beams is None else BeamGeneration
        with (
            admit(spec, key, service) as spec,
            kind(spec, service.client, service.tokenizer, service.metrics) as generation,
        ):
            if request.stream:
                answer = stream(
                    exchange,
                    generation,
                    writer,
                    service.json,
                    include_usage=request.include_usage,
                )
            else:
                answer = answer_whole(exchange, generation, writer, service.json)
            await within(request.deadline_s, arrived_s, exchange.run_while_connected(answer))


async def read_in_turn(exchange: Exchange, service: Service) -> bytes:
    """The JSON body, once it is the turn of the request's API key."""
    body = await read_json_body(exchange, service.max_body_bytes)
    await service.turns.wait(api_key_of(exchange.scope).name)
    return body


def check_model(name: str | None, service: Service) -> None:
    """Raise ApiError if a request is for another model."""
    if name is not None and name not in (service.model_name, *service.model_aliases):
        raise unknown_model(name, service.model_name)


def check_capacity(num_answers: int, service: Service) -> None:
    """Raise ApiError if the limit of live requests would be exceeded. A request that exceeds it by
    itself is accepted when there is no other."""
    num_live = service.client.num_live_requests
    if num_live and num_live + num_answers > service.max_live_requests:
        raise queue_full(num_live, service.max_live_requests)


def check_priority(priority: int, key: ApiKey) -> None:
    """Raise ApiError if requests of the key must not be so urgent."""
    if key.min_priority is not None and priority < key.min_priority:
        raise invalid(
            f"priority={priority} is below {key.min_priority}, the most urgent priority that this "
            "API key may set (min_priority)",
            param="priority",
        )


@contextmanager
def admit(spec: GenerationSpec, key: ApiKey, service: Service) -> Iterator[GenerationSpec]:
    """Count a request as live within the limits of its key; returns it with `tenant` and `charge`.
    Raises ApiError if it exceeds one."""
    num_tokens = sum(map(len, spec.prompts))
    with service.key_usage.admit(key, num_live=spec.num_answers, num_tokens=num_tokens) as admitted:
        yield msgspec.structs.replace(spec, tenant=key.tenant, charge=admitted.charge)


def num_at_a_time(maximum: int, key: ApiKey, service: Service) -> int:
    """Parts of a request that may be in the engine at a time, within the limits of live
    requests."""
    maximum = service.key_usage.num_at_a_time(maximum, key)
    return max(1, min(maximum, service.max_live_requests - service.client.num_live_requests))


async def within(deadline_s: float | None, arrived_s: float, answer: Awaitable[None]) -> None:
    """Await `answer`, or cancel it at the deadline and raise ApiError."""
    left_s = None if deadline_s is None else deadline_s - (time.perf_counter() - arrived_s)
    try:
        async with asyncio.timeout(left_s):
            await answer
    except TimeoutError:
        raise ApiError(
            504,
            f"the answer was not complete within deadline_s={deadline_s:g}",
            param="deadline_s",
            code="deadline_exceeded",
        ) from None


async def stream(
    exchange: Exchange,
    generation: Generation | BeamGeneration,
    writer: ResponseWriter,
    json: JsonThread,
    *,
    include_usage: bool,
) -> None:
    """Stream the answers. The response begins with the first token, so that an error before it can
    still set the status."""

    def show_at_once(take: Callable[[], Piece | None]) -> bool:
        if not exchange.is_writable:
            return False
        if (piece := take()) is not None:
            exchange.write_events(*map(_encode, writer.chunks(piece)))
        return True

    async for pieces in generation.pieces(show_at_once):
        if exchange.status is None:
            await exchange.start_stream()
            await exchange.send_events(*map(_encode, writer.first_chunks()))
        await exchange.send_events(
            *await json.run(sum(map(piece_bytes, pieces)), _events, writer, pieces)
        )
    if include_usage:
        await exchange.send_events(_encode(writer.usage_chunk(generation.usage())))
    await exchange.send_events(b"[DONE]")
    await exchange.end_stream()


async def answer_whole(
    exchange: Exchange,
    generation: Generation | BeamGeneration,
    writer: ResponseWriter,
    json: JsonThread,
) -> None:
    answers = [piece async for pieces in generation.pieces() for piece in pieces]
    answers.sort(key=lambda piece: piece.index)
    num_bytes = sum(map(piece_bytes, answers))
    whole = await json.run(num_bytes, _whole, writer, answers, generation.usage())
    if isinstance(whole, str):
        await exchange.send_text(whole)
    else:
        await exchange.send_json(whole)


def _events(writer: ResponseWriter, pieces: Sequence[Piece]) -> list[bytes]:
    return [_encode(chunk) for piece in pieces for chunk in writer.chunks(piece)]


def _whole(writer: ResponseWriter, pieces: Sequence[Piece], usage: Usage) -> bytes | str:
    whole = writer.whole(pieces, usage)
    return whole if isinstance(whole, str) else _encode(whole)
