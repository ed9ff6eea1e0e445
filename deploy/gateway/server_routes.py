"""Small routes with vLLM's paths: the version, a probe, the load, the settings, and a page."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

import longshore
from longshore.deploy.gateway.docs_page import CONTENT_SECURITY_POLICY, docs_page
from longshore.deploy.gateway.openai.responses import (
    EngineInfo,
    ServerInfo,
    ServerLoad,
    ServerVersion,
)
from longshore.protocol.handshake import EngineReady


class ServerRoutes:
    """not_ready_reason: returns why requests are not accepted, or None if they are.
    num_live_requests: returns the number of requests in the engines.
    settings: of the server, without secrets.
    engines: returns what the engines that are ready have reported, by number.
    """

    def __init__(
        self,
        not_ready_reason: Callable[[], str | None],
        num_live_requests: Callable[[], int],
        settings: Mapping[str, Any],
        engines: Callable[[], Mapping[int, EngineReady]],
    ) -> None:
        self._not_ready_reason = not_ready_reason
        self._settings = settings
        self._engines = engines
        self._num_live_requests = num_live_requests
        self.routes = (
            Route("/version", self._version),
            Route("/ping", self._ping, methods=["GET", "POST"]),
            Route("/load", self._load),
            Route("/server_info", self._server_info),
            Route("/docs", self._docs),
        )

    async def _version(self, request: Request) -> Response:
        return _json(ServerVersion(longshore.__version__))

    async def _ping(self, request: Request) -> Response:
        """The probe of SageMaker: 200 when this process serves requests."""
        reason = self._not_ready_reason()
        if reason is None:
            return Response("ready\n", media_type="text/plain")
        return Response(f"{reason}\n", status_code=503, media_type="text/plain")

    async def _load(self, request: Request) -> Response:
        return _json(ServerLoad(self._num_live_requests()))

    async def _server_info(self, request: Request) -> Response:
        engines = {
            number: EngineInfo(
                num_blocks=ready.num_blocks,
                **{
                    name: getattr(ready.identity, name)
                    for name in EngineInfo.__struct_fields__
                    if name != "num_blocks"
                },
            )
            for number, ready in self._engines().items()
        }
        return _json(ServerInfo(longshore.__version__, self._settings, engines))

    async def _docs(self, request: Request) -> Response:
        page = await asyncio.to_thread(docs_page)
        headers = {"content-security-policy": CONTENT_SECURITY_POLICY}
        return HTMLResponse(page, headers=headers)


def _json(content: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
