"""The gateway's routes."""

from collections.abc import Callable, Sequence

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from longshore.deploy.gateway.chat import ChatEndpoint
from longshore.deploy.gateway.completions import CompletionsEndpoint
from longshore.deploy.gateway.endpoint import Endpoint, Service
from longshore.deploy.gateway.errors import ApiError, unavailable, unknown_model
from longshore.deploy.gateway.front_door import FrontDoor
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.gateway.openai_responses import Model, ModelList
from longshore.deploy.gateway.openapi import document
from longshore.deploy.gateway.request_log import note_failure
from longshore.deploy.gateway.tokenization import DetokenizeEndpoint, TokenizeEndpoint
from longshore.deploy.gateway.transcriptions import TranscriptionsEndpoint, TranslationsEndpoint
from longshore.protocol.errors import EngineDead


class Gateway:
    """The ASGI application and what changes while it runs.

    not_ready_reason: says why, until the engine serves and again once it is gone or draining.
    report_timeout_s: how long a scheduler may take to describe itself.
    api_keys: see FrontDoor.
    """

    def __init__(
        self,
        model: Model,
        not_ready_reason: Callable[[], str | None],
        *,
        report_timeout_s: float,
        api_keys: Sequence[str] = (),
    ) -> None:
        self.metrics = GatewayMetrics()
        self._model = model
        self._report_timeout_s = report_timeout_s
        self._not_ready_reason = not_ready_reason
        self._endpoints: tuple[Endpoint, ...] = (
            CompletionsEndpoint(self.metrics),
            ChatEndpoint(self.metrics),
            TranscriptionsEndpoint(self.metrics),
            TranslationsEndpoint(self.metrics),
            TokenizeEndpoint(self.metrics),
            DetokenizeEndpoint(self.metrics),
        )
        app = Starlette(
            routes=[
                *(Route(each.path, each, methods=["POST"]) for each in self._endpoints),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{name:path}", self._get_model),
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/metrics", self._metrics),
                Route("/engine/report", self._engine_report),
                Route("/openapi.json", self._openapi),
            ],
            exception_handlers={HTTPException: _http_error, ApiError: _api_error},
        )
        self.app = FrontDoor(app, api_keys, self.metrics)

    def serve_with(self, service: Service) -> None:
        """There is an engine: requests are taken from now on."""
        for endpoint in self._endpoints:
            endpoint.service = service

    @property
    def is_serving(self) -> bool:
        """`serve_with` has been called."""
        return self._endpoints[0].service is not None

    async def _list_models(self, request: Request) -> Response:
        return _json(ModelList((self._model,)))

    async def _get_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._model.id:
            raise unknown_model(name, self._model.id)
        return _json(self._model)

    async def _health(self, request: Request) -> Response:
        """Alive: this process answers."""
        return Response("alive\n", media_type="text/plain")

    async def _ready(self, request: Request) -> Response:
        """Whether a request sent now would be taken."""
        reason = self._not_ready_reason()
        if reason is None:
            return Response("ready\n", media_type="text/plain")
        return Response(f"{reason}\n", status_code=503, media_type="text/plain")

    async def _engine_report(self, request: Request) -> Response:
        """What the engine does, and what each waiting request waits for."""
        service = self._endpoints[0].service
        if service is None:
            raise unavailable("the engine is still starting; /ready tells when it serves")
        try:
            report = await service.client.describe(self._report_timeout_s)
        except TimeoutError:
            raise ApiError(
                504,
                f"the scheduler has not answered for {self._report_timeout_s:g} s: its process "
                "hangs or is stopped",
                code="scheduler_silent",
            ) from None
        except EngineDead as error:
            raise unavailable(str(error)) from error
        content = msgspec.json.encode(msgspec.structs.asdict(report))  # an empty list is shown too
        return Response(content, media_type="application/json")

    async def _openapi(self, request: Request) -> Response:
        return Response(msgspec.json.encode(document()), media_type="application/json")

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4")


def _json(content: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _error_response(error: ApiError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error.headers}
    return Response(
        error.json(), status_code=error.status, media_type="application/json", headers=headers
    )


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    note_failure(error)
    return _error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = f"{request.method} {request.url.path}"
    return _error_response(ApiError(error.status_code, f"{path}: {error.detail}"))
