"""The base of all endpoints: parse a request, submit it, answer as a whole or as a stream."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic

import msgspec
from starlette.types import Receive, Scope, Send

from longshore.deploy.gateway.api.answer_size import check_prompt_size, piece_bytes
from longshore.deploy.gateway.api.beams import BeamGeneration
from longshore.deploy.gateway.api.errors import (
    ApiError,
    error_json,
    queue_full,
    renamed,
    unknown_model,
)
from longshore.deploy.gateway.api.generation import Generation
from longshore.deploy.gateway.api.prompts import PromptReader
from longshore.deploy.gateway.api.requests import RequestT, parse_request
from longshore.deploy.gateway.api.sealed_reasoning import ReasoningSeal
from longshore.deploy.gateway.api.session_key import session_key
from longshore.deploy.gateway.api.transfer_params import TransferAccess, check_transfer_params
from longshore.deploy.gateway.api.uncached_clients import UncachedClients
from longshore.deploy.gateway.api.usage import Usage
from longshore.deploy.gateway.api_keys import ApiKey
from longshore.deploy.gateway.engines.engines import Engines
from longshore.deploy.gateway.http.exchange import (
    SERVER_SENT_EVENTS,
    ClientGone,
    Exchange,
    StreamFormat,
    server_sent_event,
)
from longshore.deploy.gateway.http.json_body import JsonThread, read_json_body
from longshore.deploy.gateway.http.middleware import (
    api_key_of,
    request_id_of,
    trace_headers_of,
    use_request_id,
)
from longshore.deploy.gateway.http.server_span import server_span, use_spans
from longshore.deploy.gateway.idle_sleep import IdleSleep
from longshore.deploy.gateway.key_usage import KeyUsage
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.gateway.request_log import note_bug
from longshore.deploy.gateway.request_turns import RequestTurns, Turn
from longshore.deploy.gateway.settings import GatewaySettings
from longshore.deploy.gateway.text.audio_decoder import AudioDecoder
from longshore.deploy.gateway.text.detokenizer import TokenDecoder
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.gateway.text.tokenizer_process import TextRejected
from longshore.deploy.model.classifier import ClassifierModel
from longshore.deploy.model.embedding import EmbeddingModel
from longshore.deploy.parsers.answer import NO_PARSERS, AnswerParsers
from longshore.deploy.requests.cache_hints import cache_options
from longshore.deploy.requests.errors import RequestError, Unavailable, invalid
from longshore.deploy.requests.generation_spec import GenerationSpec, Piece
from longshore.deploy.requests.speech import SpeechModel

if TYPE_CHECKING:
    from longshore.deploy.requests.spans import RequestSpans

_encode = msgspec.json.Encoder().encode
_DONE: Final = server_sent_event(b"[DONE]")


class Service(msgspec.Struct, frozen=True):
    """The objects and limits with which endpoints serve requests; created once the engine is ready.

    classifier: labels of a model for sequence classification; None: it is another one.
    has_score_template: the operator has given the chat template, so pairs are rendered with it.
    model_name: name in responses. model_aliases: further names that requests may use.
    embedding: how the model pools embeddings; None: it has none.
    speech: a speech model's features and prompts; None: the model takes text.
    max_audio_bytes, max_audio_s: limits of an audio file's size and duration.
    max_live_requests: limit of running and waiting requests.
    audio_decoder: decodes audio files within a memory limit.
    key_usage: what each API key uses, and may use.
    json: decodes and encodes large bodies.
    turns: in which requests are read and submitted. end_turns: in which they end.
    session_header: see `session_key`.
    transfers: who may send `kv_transfer_params`.
    parsers: of the model's answers.
    spans: of requests, if they are exported.
    seal: of reasoning that clients keep.
    uncached: clients whose prompts the prefix cache does not help.
    max_forced_calls: in an answer.
    idle_sleep: of the engines; None: they do not sleep by themselves.
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
    max_audio_bytes: int = GatewaySettings.max_audio_mib << 20
    max_audio_s: float = GatewaySettings.max_audio_s
    embedding: EmbeddingModel | None = None
    classifier: ClassifierModel | None = None
    has_score_template: bool = False
    audio_decoder: AudioDecoder = msgspec.field(default_factory=AudioDecoder)
    json: JsonThread = msgspec.field(default_factory=JsonThread)
    turns: RequestTurns = msgspec.field(default_factory=RequestTurns)
    end_turns: RequestTurns = msgspec.field(default_factory=RequestTurns)
    parsers: AnswerParsers = NO_PARSERS
    model_aliases: tuple[str, ...] = ()
    session_header: str | None = None
    transfers: TransferAccess = TransferAccess()
    spans: "RequestSpans | None" = None
    seal: ReasoningSeal = msgspec.field(default_factory=ReasoningSeal)
    uncached: UncachedClients = msgspec.field(default_factory=UncachedClients)
    max_forced_calls: int = GatewaySettings.max_forced_calls
    idle_sleep: IdleSleep | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may use."""
        return (self.model_name, *self.model_aliases)

    def turn_of(self, key: ApiKey) -> Turn:
        """Waits for the next turn in which requests of the key may be read and submitted."""
        return partial(self.turns.wait, key.name)

    def end_turn_of(self, key: ApiKey) -> Turn:
        """Waits for the next turn in which requests of the key may end."""
        return partial(self.end_turns.wait, key.name)


class Services:
    """The services of the models of a gateway, at least one."""

    def __init__(self, services: Sequence[Service]) -> None:
        self.all = tuple(services)
        self._by_name = {name: service for service in services for name in service.names}

    @property
    def first(self) -> Service:
        """Of the model for requests that name none."""
        return self.all[0]

    def named(self, name: str | None) -> Service:
        """That of the model with this name. Raises RequestError if there is none."""
        if name is None:
            return self.first
        if (service := self._by_name.get(name)) is None:
            raise unknown_model(name, [each.model_name for each in self.all])
        return service

    @property
    def names(self) -> list[str]:
        """All names that requests may use."""
        return list(self._by_name)

    @property
    def engines(self) -> list[int]:
        """The numbers of all engines."""
        return sorted(engine for service in self.all for engine in service.client.clients)

    def of_engine(self, engine: int) -> Service:
        """That of the model of an engine."""
        return next(each for each in self.all if engine in each.client.clients)

    @property
    def num_live_requests(self) -> int:
        """Of all models; see Engines."""
        return sum(each.client.num_live_requests for each in self.all)


class ResponseWriter(ABC):
    """Writes the bodies of one response in its endpoint's format."""

    @abstractmethod
    def first_chunks(self) -> Sequence[msgspec.Struct]:
        """The chunks at the beginning of a stream, before any text."""

    @abstractmethod
    def chunks(self, piece: Piece) -> Sequence[msgspec.Struct]:
        """The chunks of a stream for one piece."""

    @abstractmethod
    def last_chunks(self, usage: Usage) -> Sequence[msgspec.Struct]:
        """The chunks at the end of a stream, if the client requested usage."""

    @abstractmethod
    def whole(self, pieces: Sequence[Piece], usage: Usage) -> msgspec.Struct | str:
        """The response without streaming: JSON or plain text."""

    async def keep(self) -> None:  # noqa: B027  # most responses are not stored
        """Store the response, if the client asked for that. Called once it is complete, before
        its end is sent."""

    stream_format: StreamFormat = SERVER_SENT_EVENTS
    end: bytes = _DONE
    """What is sent after the last chunk of a stream."""

    def event(self, chunk: msgspec.Struct) -> bytes:
        """The part of a stream for a chunk."""
        return b"data: %b\n\n" % _encode(chunk)  # as `server_sent_event`, once per token

    def error_events(self, error: RequestError) -> Sequence[bytes]:
        """The end of a stream that fails."""
        return (server_sent_event(error_json(error)),)


class NamedEventWriter(ResponseWriter):
    """Chunks are tagged structs, whose tags are the names of their events. Streams have no mark
    after the last event."""

    end = b""

    def event(self, chunk: msgspec.Struct) -> bytes:
        name = chunk.__struct_config__.tag
        assert isinstance(name, str)
        return server_sent_event(_encode(chunk), name)


class Names(msgspec.Struct, frozen=True):
    """What a request may name its model with. name: in Ollama's API."""

    model: str | None = None
    name: Any = None


class ApiEndpoint(ABC):
    """An ASGI application for one path, and other names of it. `services` is None until the engines
    are ready."""

    path: str
    other_paths: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.services: Services | None = None

    @abstractmethod
    async def serve(self, exchange: Exchange, service: Service, arrived_s: float) -> None:
        """Read one request and answer it. Raises RequestError if it cannot be served."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        services = self.services
        spans = None if services is None else services.first.spans
        with server_span(exchange, spans, self.path):
            await self._respond(exchange, services)

    async def _respond(self, exchange: Exchange, services: Services | None) -> None:
        arrived_s = time.perf_counter()
        try:
            if services is None:
                raise Unavailable("the engine is still starting; /ready shows the progress")
            service = services.first
            if len(services.all) > 1:
                service = await self.choose(exchange, services)
                use_spans(service.spans)
            await self.serve(exchange, service, arrived_s)
        except RequestError as error:
            await exchange.send_error(error)
        except TextRejected as error:
            await exchange.send_error(invalid(str(error), code="tokenizer_failed"))
        except ClientGone:
            pass  # logged by the access log
        except Exception as error:
            note_bug(error)
            await exchange.send_error(ApiError(500, "internal error; see the server's log"))

    async def choose(self, exchange: Exchange, services: Services) -> Service:
        """The service of the model that a request names, which is read for this before anything
        else of it. Raises RequestError if the model does not exist."""
        first = services.first
        body = await read_json_body(exchange, first.max_body_bytes)
        exchange.put_back(body)
        names = await first.json.run(len(body), _names_in, body)
        return services.named(self.named_model(names, services))

    def named_model(self, names: Names, services: Services) -> str | None:
        """The name of a request's model, as it is served; None if the request has none."""
        return names.model


def _names_in(body: bytes) -> Names:
    """No name also of what is no request, which `serve` rejects."""
    try:
        return msgspec.json.decode(body, type=Names)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Names()


class GenerationEndpoint(ApiEndpoint, Generic[RequestT]):
    """Generates text from text. names: what an API in another format calls parameters of chats."""

    id_prefix: str
    request_type: type[RequestT]
    names: Mapping[str, str] = {}

    @abstractmethod
    async def specify(
        self, service: Service, request: RequestT, request_id: str, arrived_s: float
    ) -> GenerationSpec:
        """What to submit to the engine. Raises RequestError if it cannot be served."""

    @abstractmethod
    def writer(self, service: Service, request: RequestT, spec: GenerationSpec) -> ResponseWriter:
        """The writer of the response."""

    async def read(self, exchange: Exchange, service: Service) -> RequestT:
        """The request. Raises RequestError if it is invalid."""
        body = await self.read_body(exchange, service)
        return await service.json.run(len(body), parse_request, self.request_type, body)

    async def read_body(self, exchange: Exchange, service: Service) -> bytes:
        """Raises RequestError if the model does not generate text from text."""
        body = await read_in_turn(exchange, service)
        if service.speech is not None:
            raise invalid(
                f"{service.model_name} is a speech model: use /v1/audio/transcriptions or "
                f"/v1/audio/translations; {self.path} is for models that take text",
                param="model",
            )
        if service.classifier is not None:
            raise invalid(
                f"{service.model_name} classifies text: use /classify, /v1/score or /v1/rerank; "
                f"{self.path} is for models that generate text",
                param="model",
            )
        if service.embedding is not None and service.embedding.is_only:
            raise invalid(
                f"{service.model_name} has no output head and only serves embeddings: use "
                f"/v1/embeddings; {self.path} is for models that generate text",
                param="model",
            )
        return body

    async def serve(self, exchange: Exchange, service: Service, arrived_s: float) -> None:
        request = await self.read(exchange, service)
        check_model(request.model, service)
        await self.respond(exchange, service, request, arrived_s)

    async def respond(
        self, exchange: Exchange, service: Service, request: RequestT, arrived_s: float
    ) -> None:
        """Submit a request, and answer it. Raises RequestError if it cannot be served."""
        use_request_id(exchange.scope, request.request_id)
        request_id = request_id_of(exchange.scope, self.id_prefix)
        try:
            spec = await self.specify(service, request, request_id, arrived_s)
        except RequestError as error:
            await self.reject(exchange, service, request, renamed(error, self.names))
            return
        key = api_key_of(exchange.scope)
        check_priority(request.priority or 0, key)
        kept = cache_options(request.cache_salt, request.cache_hint(), no_store=request.no_store)
        options = msgspec.structs.replace(
            spec.options,
            priority=request.priority or 0,
            trace_headers=trace_headers_of(exchange.scope),
            cache_salt=key.cache_salt(kept.cache_salt),
            skip_reading_prefix_cache=bool(request.skip_reading_prefix_cache),
            cache_hint=kept.cache_hint,
            no_store=kept.no_store,
            job_id=request.job_id,
            is_last_step=bool(request.is_last_step),
            kv_transfer_params=request.kv_transfer_params,
        )
        spec = msgspec.structs.replace(
            spec,
            options=options,
            session_key=session_key(
                exchange.scope, service.session_header, request.prompt_cache_key, request.user
            ),
            shows_special_tokens=request.shows_special_tokens,
        )
        check_transfer_params(
            options.kv_transfer_params,
            service.transfers,
            exchange.scope,
            num_answers=spec.num_answers,
            is_stream=spec.is_stream,
        )
        check_prompt_size(spec)
        check_capacity(spec.num_answers, service)
        await self.answer(exchange, service, request, spec, self.writer(service, request, spec))

    async def reject(
        self, exchange: Exchange, service: Service, request: RequestT, error: RequestError
    ) -> None:
        """Answer a request that cannot be submitted: raise the error, or send it otherwise."""
        raise error from None

    async def answer(
        self,
        exchange: Exchange,
        service: Service,
        request: RequestT,
        spec: GenerationSpec,
        writer: ResponseWriter,
    ) -> None:
        """Submit the request, and send the response. Raises RequestError."""
        key = api_key_of(exchange.scope)
        async with generating(spec, key, service, service.tokenizer) as generation:
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
            await run_within(
                exchange,
                service,
                answer,
                deadline_s=request.deadline_s,
                arrived_s=spec.arrived_s,
            )


async def read_in_turn(exchange: Exchange, service: Service) -> bytes:
    """The JSON body, once it is the turn of the request's API key."""
    body = await read_json_body(exchange, service.max_body_bytes)
    await service.turn_of(api_key_of(exchange.scope))()
    return body


def check_model(name: str | None, service: Service) -> None:
    """Raise RequestError if a request is for another model."""
    if name is not None and name not in service.names:
        raise unknown_model(name, [service.model_name])


def check_capacity(num_answers: int, service: Service) -> None:
    """Raise RequestError if the limit of live requests would be exceeded. A request that exceeds it
    by itself is accepted when there is no other."""
    num_live = service.client.num_live_requests
    if num_live and num_live + num_answers > service.max_live_requests:
        raise queue_full(num_live, service.max_live_requests)


def check_priority(priority: int, key: ApiKey) -> None:
    """Raise RequestError if requests of the key must not be so urgent."""
    if key.min_priority is not None and priority < key.min_priority:
        raise invalid(
            f"priority={priority} is below {key.min_priority}, the most urgent priority that this "
            "API key may set (min_priority)",
            param="priority",
        )


@contextmanager
def admit(spec: GenerationSpec, key: ApiKey, service: Service) -> Iterator[GenerationSpec]:
    """Count a request as live within the limits of its key; returns it with the key's tenant and
    `charge`. Raises RequestError if it exceeds one."""
    num_tokens = sum(map(len, spec.prompts))
    with service.key_usage.admit(key, num_live=spec.num_answers, num_tokens=num_tokens) as admitted:
        options = msgspec.structs.replace(spec.options, tenant=key.tenant)
        yield msgspec.structs.replace(spec, options=options, charge=admitted.charge)


@asynccontextmanager
async def generating(
    spec: GenerationSpec, key: ApiKey, service: Service, tokenizer: TokenDecoder | None
) -> AsyncIterator[Generation | BeamGeneration]:
    """The answers to a request, within the limits of its key. Raises RequestError."""
    kind = Generation if spec.beams is None else BeamGeneration
    with admit(spec, key, service) as admitted:
        generation = kind(
            admitted,
            service.client,
            tokenizer,
            service.metrics,
            turn=service.turn_of(key),
            end_turn=service.end_turn_of(key),
        )
        async with generation:
            yield generation


def num_at_a_time(maximum: int, key: ApiKey, service: Service) -> int:
    """Parts of a request that may be in the engine at a time, within the limits of live
    requests."""
    maximum = service.key_usage.num_at_a_time(maximum, key)
    return max(1, min(maximum, service.max_live_requests - service.client.num_live_requests))


async def run_within(
    exchange: Exchange,
    service: Service,
    work: Awaitable[None],
    *,
    deadline_s: float | None,
    arrived_s: float,
) -> None:
    """Await `work`, unless the client disconnects. Raises RequestError at the deadline."""
    left_s = None if deadline_s is None else deadline_s - (time.perf_counter() - arrived_s)
    end_turn = service.end_turn_of(api_key_of(exchange.scope))
    try:
        await exchange.run_while_connected(work, end_turn, left_s)
    except TimeoutError:
        raise deadline_passed(deadline_s) from None


def deadline_passed(deadline_s: float | None) -> RequestError:
    """504: the client set a deadline."""
    return ApiError(
        504,
        f"the answer was not complete within deadline_s={deadline_s or 0:g}",
        param="deadline_s",
        code="deadline_exceeded",
    )


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
            exchange.write_events(*map(writer.event, writer.chunks(piece)))
        return True

    async for pieces in generation.pieces(show_at_once):
        if exchange.status is None:
            await exchange.start_stream(writer.error_events, writer.stream_format)
            await exchange.send_events(*map(writer.event, writer.first_chunks()))
        await exchange.send_events(
            *await json.run(sum(map(piece_bytes, pieces)), _events, writer, pieces)
        )
    last = writer.last_chunks(generation.usage()) if include_usage else ()
    await writer.keep()
    await exchange.send_events(*map(writer.event, last), writer.end)
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
    await writer.keep()
    if isinstance(whole, str):
        await exchange.send_text(whole)
    else:
        await exchange.send_json(whole)


def _events(writer: ResponseWriter, pieces: Sequence[Piece]) -> list[bytes]:
    return [writer.event(chunk) for piece in pieces for chunk in writer.chunks(piece)]


def _whole(writer: ResponseWriter, pieces: Sequence[Piece], usage: Usage) -> bytes | str:
    whole = writer.whole(pieces, usage)
    return whole if isinstance(whole, str) else _encode(whole)
