"""The gateway's routes."""

import asyncio
from collections.abc import Callable, Sequence

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
from longshore.deploy.gateway.api_keys import ApiKey
from longshore.deploy.gateway.dashboard.dashboard import (
    Dashboard,
    ask_scheduler,
    chosen_engine,
    requested_engine,
)
from longshore.deploy.gateway.engines.peers import READY, PeerGateways
from longshore.deploy.gateway.http.allowed_hosts import AllowedHosts
from longshore.deploy.gateway.http.error_body import error_body
from longshore.deploy.gateway.http.middleware import REQUEST_ID_HEADER, RequestMiddleware
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.gateway.openai.chat import ChatEndpoint
from longshore.deploy.gateway.openai.classification import ClassifyEndpoint
from longshore.deploy.gateway.openai.completions import CompletionsEndpoint
from longshore.deploy.gateway.openai.embeddings import EmbeddingsEndpoint
from longshore.deploy.gateway.openai.endpoint import ApiEndpoint, Service
from longshore.deploy.gateway.openai.errors import (
    ApiError,
    unavailable,
    unknown_model,
)
from longshore.deploy.gateway.openai.openapi import document_json
from longshore.deploy.gateway.openai.responses import Model, ModelList
from longshore.deploy.gateway.openai.scoring import RerankEndpoint, ScoreEndpoint
from longshore.deploy.gateway.openai.tokenization import DetokenizeEndpoint, TokenizeEndpoint
from longshore.deploy.gateway.openai.transcriptions import (
    TranscriptionsEndpoint,
    TranslationsEndpoint,
)
from longshore.deploy.gateway.openai.unknown_fields import IGNORED_FIELDS_HEADER
from longshore.deploy.gateway.request_log import AccessLog, note_failure
from longshore.deploy.gateway.responses_api.endpoint import ResponsesEndpoint
from longshore.deploy.gateway.responses_api.routes import StoredResponseRoutes
from longshore.deploy.gateway.responses_api.store import ResponseStore
from longshore.deploy.gateway.server_routes import ServerRoutes
from longshore.deploy.gateway.sleep_routes import SleepRoutes
from longshore.protocol.errors import shortened


class Gateway:
    """The ASGI application and its state.

    models: the served model, by each of its names.
    not_ready_reason: returns why requests are not accepted, or None if they are.
    report_timeout_s: seconds that a scheduler has to answer.
    number, peers: see PeerGateways.
    api_keys: see RequestMiddleware.
    admin: None: there are no paths under /admin.
    response_store: where responses are stored; None: nowhere.
    allowed_hosts: see AllowedHosts; without effect if there are API keys.
    cors_allow_origins: origins whose pages may use the API from a browser; `*`: all.
    access_log: log a line at info for every HTTP request.
    vllm_metrics: return the metrics under vLLM's names, too.
    is_strict: reject unknown fields of requests.

    lacking_knowledge: returns what routing does not know, for /health; None if it knows all.
    """

    def __init__(
        self,
        models: Sequence[Model],
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
        access_log: bool = False,
        vllm_metrics: bool = False,
        is_strict: bool = False,
    ) -> None:
        self.metrics = GatewayMetrics(models[0].id, vllm_names=vllm_metrics)
        self.metrics.watch_readiness(not_ready_reason)
        self._not_ready_reason = not_ready_reason
        self.lacking_knowledge: Callable[[], str | None] = lambda: None
        self.peers = PeerGateways(
            number,
            peers,
            {
                "metrics": self.metrics.render,
                "ready": lambda: (not_ready_reason() or "").encode() or READY,
            },
        )
        self._models = tuple(models)
        self._report_timeout_s = report_timeout_s
        self._endpoints: tuple[ApiEndpoint, ...] = (
            CompletionsEndpoint(),
            ChatEndpoint(),
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
            ResponsesEndpoint(response_store),
        )
        dashboard = Dashboard(lambda: self._endpoints[0].service, report_timeout_s)
        app = Starlette(
            routes=[
                *(
                    Route(path, each, methods=["POST"])
                    for each in self._endpoints
                    for path in (each.path, *each.other_paths)
                ),
                *StoredResponseRoutes(response_store).routes,
                Route("/v1/models", self._list_models),
                Route("/v1/models/{name:path}", self._get_model),
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/metrics", self._metrics),
                Route("/engine/report", self._engine_report),
                Route("/openapi.json", self._openapi),
                Route("/", _to_dashboard),
                Route("/dashboard", dashboard.page),
                Route("/dashboard/state", dashboard.state),
                *ServerRoutes(not_ready_reason, self._num_live_requests).routes,
                *(() if admin is None else (*admin.routes, *SleepRoutes(admin).routes)),
            ],
            exception_handlers={HTTPException: _http_error, ApiError: _api_error},
        )
        app.router.redirect_slashes = False  # clients do not follow redirects of a POST
        paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
        self.log = AccessLog(is_on=access_log)
        self.app: ASGIApp = RequestMiddleware(
            app,
            api_keys,
            self.metrics,
            paths,
            self.log,
            hosts=AllowedHosts(allowed_hosts, cors_allow_origins),
            is_strict=is_strict,
        )
        if cors_allow_origins:
            # Outermost, because browsers send CORS preflights without an API key.
            self.app = CORSMiddleware(
                self.app,
                allow_origins=cors_allow_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=[
                    REQUEST_ID_HEADER.decode(),
                    IGNORED_FIELDS_HEADER.decode(),
                    "retry-after",
                ],
            )

    def serve_with(self, service: Service) -> None:
        """Accept requests from now on: the engine is ready."""
        for endpoint in self._endpoints:
            endpoint.service = service

    @property
    def is_serving(self) -> bool:
        """`serve_with` has been called."""
        return self._endpoints[0].service is not None

    def _num_live_requests(self) -> int:
        service = self._endpoints[0].service
        return 0 if service is None else service.client.num_live_requests

    async def _list_models(self, request: Request) -> Response:
        return _json(ModelList(self._models))

    async def _get_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        for model in self._models:
            if model.id == name:
                return _json(model)
        raise unknown_model(name, self._models[0].id)

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
        service = self._endpoints[0].service
        if service is None:
            raise unavailable("the engine is still starting; /ready shows the progress")
        engine = requested_engine(request, service)
        if engine is None and len(service.client) > 1:
            reports: object = await asyncio.gather(
                *(self._report(service, engine) for engine in service.client.clients)
            )
        else:
            reports = await self._report(service, chosen_engine(engine, service))
        return Response(msgspec.json.encode(reports), media_type="application/json")

    async def _report(self, service: Service, engine: int) -> dict[str, object]:
        timeout_s = self._report_timeout_s
        report = await ask_scheduler(service.client.describe(timeout_s, engine), timeout_s, engine)
        return msgspec.structs.asdict(report)  # as a dict, JSON includes empty lists

    async def _openapi(self, request: Request) -> Response:
        return Response(document_json(), media_type="application/json")

    async def _metrics(self, request: Request) -> Response:
        content = await self.peers.metrics()
        return Response(content, media_type="text/plain; version=0.0.4")


async def _to_dashboard(request: Request) -> Response:
    """For a browser on the bare URL. The redirect is relative, as a proxy may add a prefix."""
    return RedirectResponse("dashboard")


def _json(content: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _error_response(error: ApiError, path: str) -> Response:
    headers = {name.decode(): value.decode() for name, value in error.headers}
    body = error_body(error, path)
    return Response(body, status_code=error.status, media_type="application/json", headers=headers)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
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
