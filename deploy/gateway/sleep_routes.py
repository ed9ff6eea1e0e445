"""Sleep and wake at vLLM's paths, with the admin key: the same actions as at `/admin`."""

from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from longshore.deploy.admin.actions import SleepEngine, Status, WakeEngine
from longshore.deploy.gateway.admin_routes import SLEEP_PATHS, AdminRoutes
from longshore.deploy.requests.errors import Unavailable, invalid
from longshore.protocol.errors import shortened

_TIMEOUTS: Final = {"wait": {}, "keep": {"timeout_s": 0}}
"""Of vLLM's modes: fields of SleepEngine."""


class _Values(msgspec.Struct):
    """is_sleeping: None in the results of other processes than schedulers."""

    is_sleeping: bool | None = None


class _Result(msgspec.Struct):
    process: str
    message: str
    values: _Values = msgspec.field(default_factory=_Values)


class _Statuses(msgspec.Struct):
    results: list[_Result] = []
    error: str | None = None


class SleepRoutes:
    """admin: checks keys and carries out actions."""

    def __init__(self, admin: AdminRoutes) -> None:
        self._admin = admin
        sleep, wake_up, is_sleeping = SLEEP_PATHS
        self.routes = [
            Route(sleep, self._sleep, methods=["POST"]),
            Route(wake_up, self._wake_up, methods=["POST"]),
            Route(is_sleeping, self._is_sleeping),
        ]

    async def _sleep(self, request: Request) -> Response:
        self._admin.check_key(request)
        query = request.query_params
        _check_names(request, "level", "mode")
        if (level := query.get("level", "1")) != "1":
            raise invalid(
                f"level={shortened(level)} is not supported: weights wait in host memory, which is "
                "level=1. To discard them, stop the server or remove the engine."
            )
        if (mode := query.get("mode", "wait")) not in _TIMEOUTS:
            raise invalid(
                f"mode={shortened(mode)} is not supported: running requests finish (wait), or go "
                "on after the sleep (keep). To abort them, use /admin/pause before."
            )
        return await self._admin.perform(
            {"action": SleepEngine.__struct_config__.tag, **_TIMEOUTS[mode]}
        )

    async def _wake_up(self, request: Request) -> Response:
        self._admin.check_key(request)
        _check_names(request)
        return await self._admin.perform({"action": WakeEngine.__struct_config__.tag})

    async def _is_sleeping(self, request: Request) -> Response:
        """Whether all engines sleep, or are about to; 503 if one of them does not say."""
        self._admin.check_key(request)
        response = await self._admin.perform({"action": Status.__struct_config__.tag})
        status = msgspec.json.decode(response.body, type=_Statuses)
        if status.error is not None:
            raise Unavailable(f"it is not known whether the engines sleep: {status.error}")
        schedulers = [each for each in status.results if each.process.startswith("scheduler")]
        for each in schedulers:
            if each.values.is_sleeping is None:
                raise Unavailable(
                    f"it is not known whether all engines sleep: {each.process}: {each.message}"
                )
        are_asleep = [each.values.is_sleeping for each in schedulers]
        return JSONResponse({"is_sleeping": bool(are_asleep) and all(are_asleep)})


def _check_names(request: Request, *known: str) -> None:
    """Raise RequestError for a query parameter that does not exist here."""
    for name in request.query_params:
        if name not in known:
            raise invalid(
                f"{shortened(name)} is not supported: an engine sleeps and wakes as a whole"
            )
