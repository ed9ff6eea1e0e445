"""The gateway's routes."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from longshore.deploy.gateway.admin_routes import AdminRoutes
from longshore.deploy.gateway.anthropic.count_tokens import CountTokensEndpoint
from longshore.deploy.gateway.anthropic.messages import MessagesEndpoint
from longshore.deploy.gateway.api.endpoint import ApiEndpoint, Services
from longshore.deploy.gateway.api.error_body import error_body
from longshore.deploy.gateway.api.errors import ApiError, headers_of, status_of, unknown_model
from longshore.deploy.gateway.api.uncached_clients import UncachedClientList
from longshore.deploy.gateway.api.unknown_fields import IGNORED_FIELDS_HEADER
from longshore.deploy.gateway.api_keys import ApiKey
from longshore.deploy.gateway.batches.routes import BatchRoutes
from longshore.deploy.gateway.batches.runner import BatchRunner
from longshore.deploy.gateway.batches.store import BatchStore
from longshore.deploy.gateway.config import ModelConfig
from longshore.deploy.gateway.dashboard.dashboard import (
    Dashboard,
    ask_scheduler,
    chosen_engine,
    requested_engine,
)
from longshore.deploy.gateway.dashboard.history import History
from longshore.deploy.gateway.engines.peers import READY, PeerGateways
from longshore.deploy.gateway.http.allowed_hosts import AllowedHosts
from longshore.deploy.gateway.http.middleware import REQUEST_ID_HEADER, RequestMiddleware
from longshore.deploy.gateway.metric_samples import Sample, read_metrics
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.gateway.ollama.chat import OllamaChatEndpoint, OllamaGenerateEndpoint
from longshore.deploy.gateway.ollama.embed import OllamaEmbeddingsEndpoint, OllamaEmbedEndpoint
from longshore.deploy.gateway.ollama.model_routes import (
    OllamaModelFacts,
    OllamaModelRoutes,
    OllamaShowEndpoint,
)
from longshore.deploy.gateway.openai.chat import ChatCompletionsEndpoint
from longshore.deploy.gateway.openai.classification import ClassifyEndpoint
from longshore.deploy.gateway.openai.completions import CompletionsEndpoint
from longshore.deploy.gateway.openai.embeddings import EmbeddingsEndpoint
from longshore.deploy.gateway.openai.responses import Model, ModelList
from longshore.deploy.gateway.openai.scoring import RerankEndpoint, ScoreEndpoint
from longshore.deploy.gateway.openai.tokenization import DetokenizeEndpoint, TokenizeEndpoint
from longshore.deploy.gateway.openai.transcriptions import (
    TranscriptionsEndpoint,
    TranslationsEndpoint,
)
from longshore.deploy.gateway.openapi import document_json
from longshore.deploy.gateway.request_log import AccessLog, note_failure
from longshore.deploy.gateway.responses_api.endpoint import ResponsesEndpoint
from longshore.deploy.gateway.responses_api.input_tokens import InputTokensEndpoint
from longshore.deploy.gateway.responses_api.routes import StoredResponseRoutes
from longshore.deploy.gateway.responses_api.store import ResponseStore
from longshore.deploy.gateway.server_routes import ServerRoutes
from longshore.deploy.gateway.sleep_routes import SleepRoutes
from longshore.deploy.requests.errors import RequestError, Unavailable
from longshore.protocol.errors import shortened
from longshore.protocol.handshake import EngineReady


class Gateway:
    """The ASGI application and its state.

    models: that are served.
    not_ready_reason: returns why requests are not accepted, or None if they are.
    report_timeout_s: seconds that a scheduler has to answer.
    number, peers: see PeerGateways.
    api_keys: see RequestMiddleware.
    admin: None: there are no paths under /admin.
    response_store: where responses are stored; None: nowhere.
    allowed_hosts: see AllowedHosts; without effect if there are API keys.
    cors_allow_origins: origins whose pages may use the API from a browser; `*`: all.
    log: the access log.
    vllm_metrics: return all metrics that vLLM has under its names, too.
    is_strict: reject unknown fields of requests.
    batch_store: where files and batches are stored; None: nowhere.
    batch_priority: see BatchRunner.
    server_settings: for /server_info.

    lacking_knowledge: returns what routing does not know, for /health; None if it knows all.
    """

    def __init__(
        self,
        models: Sequence[ModelConfig],
        not_ready_reason: Callable[[], str | None],
        *,
        report_timeout_s: float,
        number: int = 0,
        peers: Sequence[str] = (),
        admin: AdminRoutes | None = None,
        api_keys: Sequence[ApiKey] = (),
        response_store: ResponseStore | None = None,
        allowed_hosts: Sequence[str] = (),
        cors_allow_origins: Sequence[str] = (),
        log: AccessLog | None = None,
        vllm_metrics: bool = False,
        is_strict: bool = False,
        batch_store: BatchStore | None = None,
        batch_priority: int | None = None,
        server_settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.metrics = GatewayMetrics(models[0].name, vllm_names=vllm_metrics)
        self.metrics.watch_readiness(not_ready_reason)
        self._not_ready_reason = not_ready_reason
        self.lacking_knowledge: Callable[[], str | None] = lambda: None
        self.peers = PeerGateways(
            number,
            peers,
            {
                "metrics": self.metrics.render,
                "ready": lambda: (not_ready_reason() or "").encode() or READY,
                "uncached-clients": self._own_uncached_clients,
            },
        )
        created = int(time.time())
        self._models = tuple(each for model in models for each in _listed(model, created))
        self._report_timeout_s = report_timeout_s
        facts = [OllamaModelFacts(model, created=created) for model in models]
        self._endpoints = _endpoints(response_store, facts)
        self.history = History(self._sample, self._engines)
        dashboard = Dashboard(lambda: self._services, report_timeout_s, self.history)
        app = Starlette(
            routes=[
                *(
                    Route(path, each, methods=["POST"])
                    for each in self._endpoints
                    for path in (each.path, *each.other_paths)
                ),
                *StoredResponseRoutes(response_store).routes,
                *BatchRoutes(batch_store, models[0].name, self._wake_batches).routes,
                Route("/v1/models", self._list_models),
                Route("/v1/models/{name:path}", self._get_model),
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/metrics", self._metrics),
                Route("/engine/report", self._engine_report),
                Route("/engine/uncached-clients", self._uncached_clients),
                Route("/openapi.json", self._openapi),
                Route("/", _to_dashboard),
                Route("/dashboard", dashboard.page),
                Route("/dashboard/state", dashboard.state),
                Route("/dashboard/history", dashboard.history),
                *OllamaModelRoutes(facts, self._loaded_models).routes,
                *ServerRoutes(
                    not_ready_reason,
                    self._num_live_requests,
                    {} if server_settings is None else server_settings,
                    self._ready_engines,
                ).routes,
                *(() if admin is None else (*admin.routes, *SleepRoutes(admin).routes)),
            ],
            exception_handlers={HTTPException: _http_error, RequestError: _api_error},
        )
        app.router.redirect_slashes = False  # clients do not follow redirects of a POST
        paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
        self.log = AccessLog() if log is None else log
        self.app: ASGIApp
        self.app = self._keeper = RequestMiddleware(
            app,
            api_keys,
            self.metrics,
            paths,
            self.log,
            hosts=AllowedHosts(allowed_hosts, cors_allow_origins),
            is_strict=is_strict,
        )
        self.batches = None
        if batch_store is not None:
            self.batches = BatchRunner(
                batch_store,
                self.app,
                lambda: self._services,
                lambda: self._keeper.api_keys,
                model=models[0].name,
                priority=batch_priority,
            )
        if cors_allow_origins:
            self.app = _with_cors(self.app, cors_allow_origins)

    def serve_with(self, services: Services) -> None:
        """Accept requests from now on: the engines are ready."""
        for endpoint in self._endpoints:
            endpoint.services = services

    def use_keys(self, keys: Sequence[ApiKey]) -> None:
        """Accept these keys from now on, and no others."""
        self._keeper.api_keys = keys

    @property
    def is_serving(self) -> bool:
        """`serve_with` has been called."""
        return self._services is not None

    @property
    def _services(self) -> Services | None:
        return self._endpoints[0].services

    async def _sample(self) -> Sample:
        """The metrics of all gateways."""
        now_s = time.perf_counter()
        if len(self.peers) < 2:
            return self.metrics.sample(now_s)
        text = (await self.peers.metrics()).decode()
        return await asyncio.to_thread(read_metrics, text, now_s)

    def _engines(self) -> Sequence[int]:
        return () if self._services is None else self._services.engines

    def _ready_engines(self) -> Mapping[int, EngineReady]:
        services = () if self._services is None else self._services.all
        clients = (item for service in services for item in service.client.clients.items())
        return {engine: client.ready for engine, client in clients if client.ready is not None}

    def _loaded_models(self) -> dict[str, float]:
        services = () if self._services is None else self._services.all
        return {
            each.model_name: math.inf if (idle := each.idle_sleep) is None else idle.sleeps_in_s
            for each in services
            if not each.client.is_asleep
        }

    def _wake_batches(self) -> None:
        if self.batches is not None:
            self.batches.wake()

    def _num_live_requests(self) -> int:
        return 0 if self._services is None else self._services.num_live_requests

    async def _list_models(self, request: Request) -> Response:
        return _json(ModelList(self._models))

    async def _get_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        for model in self._models:
            if model.id == name:
                return _json(model)
        raise unknown_model(name, [model.id for model in self._models])

    async def _health(self, request: Request) -> Response:
        """Liveness: this process answers. Its answer says also what the engines lack."""
        reason = self._not_ready_reason()
        state = "alive" if reason is None else f"alive; not ready: {reason}"
        if reason is None and (lacking := self.lacking_knowledge()) is not None:
            state = f"alive; {lacking}"
        return Response(f"{state}\n", media_type="text/plain")

    async def _ready(self, request: Request) -> Response:
        """Readiness of all gateways of the deployment."""
        reason = await self.peers.not_ready_reason()
        if reason is None:
            return Response("ready\n", media_type="text/plain")
        return Response(f"{reason}\n", status_code=503, media_type="text/plain")

    async def _engine_report(self, request: Request) -> Response:
        """The state of an engine and what each waiting request waits for. The query `engine`
        selects an engine; without it, the response is the report of the only engine, or a list of
        all reports."""
        services = self._services
        if services is None:
            raise Unavailable("the engine is still starting; /ready shows the progress")
        engine = requested_engine(request, services)
        if engine is None and len(services.engines) > 1:
            reports: object = await asyncio.gather(
                *(self._report(services, engine) for engine in services.engines)
            )
        else:
            reports = await self._report(services, chosen_engine(engine, services))
        return Response(msgspec.json.encode(reports), media_type="application/json")

    async def _report(self, services: Services, engine: int) -> dict[str, object]:
        timeout_s, client = self._report_timeout_s, services.of_engine(engine).client
        report = await ask_scheduler(client.describe(timeout_s, engine), timeout_s, engine)
        return msgspec.structs.asdict(report)  # as a dict, JSON includes empty lists

    def _own_uncached_clients(self) -> bytes:
        services = () if self._services is None else self._services.all
        found = [client for each in services for client in each.uncached.found().data]
        return msgspec.json.encode(UncachedClientList(found))

    async def _uncached_clients(self, request: Request) -> Response:
        """Clients whose long prompts always differ in their first blocks, of all gateways."""
        answers = await self.peers.ask("uncached-clients")
        lists = (msgspec.json.decode(each, type=UncachedClientList) for each in answers if each)
        return _json(UncachedClientList([client for each in lists for client in each.data]))

    async def _openapi(self, request: Request) -> Response:
        return Response(document_json(), media_type="application/json")

    async def _metrics(self, request: Request) -> Response:
        content = await self.peers.metrics()
        return Response(content, media_type="text/plain; version=0.0.4")


def _listed(model: ModelConfig, created: int) -> list[Model]:
    """A model, by each of its names."""
    return [
        Model(
            id=name,
            created=created,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
        )
        for name in model.names
    ]


def _endpoints(
    store: ResponseStore | None, facts: Sequence[OllamaModelFacts]
) -> tuple[ApiEndpoint, ...]:
    """The endpoints of all APIs; each knows its paths."""
    return (
        CompletionsEndpoint(),
        ChatCompletionsEndpoint(),
        EmbeddingsEndpoint(),
        ScoreEndpoint(),
        RerankEndpoint(),
        ClassifyEndpoint(),
        TranscriptionsEndpoint(),
        TranslationsEndpoint(),
        TokenizeEndpoint(),
        DetokenizeEndpoint(),
        MessagesEndpoint(),
        CountTokensEndpoint(),
        ResponsesEndpoint(store),
        InputTokensEndpoint(store),
        OllamaChatEndpoint(),
        OllamaGenerateEndpoint(),
        OllamaEmbedEndpoint(),
        OllamaEmbeddingsEndpoint(),
        OllamaShowEndpoint(facts),
    )


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Outermost, because browsers send CORS preflights without an API key."""
    shown = (REQUEST_ID_HEADER.decode(), IGNORED_FIELDS_HEADER.decode(), "retry-after")
    methods = ("GET", "POST", "DELETE")
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=methods,
        allow_headers=["*"],
        expose_headers=shown,
    )


async def _to_dashboard(request: Request) -> Response:
    """For a browser on the bare URL. The redirect is relative, as a proxy may add a prefix."""
    return RedirectResponse("dashboard")


def _json(content: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _error_response(error: RequestError, path: str) -> Response:
    headers = {name.decode(): value.decode() for name, value in headers_of(error)}
    body = error_body(error, path)
    return Response(
        body, status_code=status_of(error), media_type="application/json", headers=headers
    )


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    note_failure(error)
    return _error_response(error, request.scope["path"])


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    target = f"{shortened(request.method)} {shortened(request.scope['path'])}"
    headers = error.headers or {}
    if error.status_code == 404:
        message = f"{target} does not exist; GET /openapi.json lists the paths"
    elif error.status_code == 405:
        message = f"{target} is not allowed; use {headers['Allow']}"
    else:
        message = f"{target}: {error.detail}"
    sent = tuple((name.lower().encode(), value.encode()) for name, value in headers.items())
    return _error_response(
        ApiError(error.status_code, message, headers=sent), request.scope["path"]
    )
