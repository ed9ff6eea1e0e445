"""The dashboard: a live page that shows how the engine uses its KV blocks.

The page is `dashboard.html` with its style and script inlined, so that it loads nothing else; a
content security policy allows only these two. It fetches `/dashboard/history` when it is opened,
and `/dashboard/state` once a second while it is visible; the engine is queried only then.
"""

import asyncio
import base64
import hashlib
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import longshore
from longshore.deploy.gateway.api.endpoint import Services
from longshore.deploy.gateway.api.errors import ApiError
from longshore.deploy.gateway.dashboard.history import History, Values
from longshore.deploy.requests.errors import Unavailable
from longshore.protocol.arrays import Int32Array, UInt8Array
from longshore.protocol.errors import EngineDead
from longshore.protocol.statistics import (
    BlockHolder,
    BlockSnapshot,
    BlockState,
    EngineReport,
    GroupUse,
)

_FILES: Final = Path(__file__).resolve().parent
_COMPRESSION: Final = 1

ResultT = TypeVar("ResultT")


class DashboardState(msgspec.Struct, frozen=True):
    """The data of the page in addition to `/metrics`; see `BlockSnapshot`.

    engine:      number of the engine.
    engines:     numbers of all engines.
    restarting:  why the engine's workers are being replaced; None if they are not.
    state_names: names of the block states, by number.
    states:      one byte per block, deflated, as base64.
    block_ids:   little-endian int32, deflated, as base64.
    """

    model: str
    version: str
    engine: int
    engines: tuple[int, ...]
    restarting: str | None
    report: EngineReport
    state_names: tuple[str, ...]
    states: str
    groups: tuple[GroupUse, ...]
    holders: tuple[BlockHolder, ...]
    block_ids: str
    num_steps: int
    num_preemptions: int
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int


class DashboardHistory(msgspec.Struct, frozen=True):
    """The charts of the last hour. times: Unix times in seconds. values: at each time, a list per
    chart, with a value per line of it."""

    times: list[float]
    values: list[Values]


class Dashboard:
    """The routes. services: returns None until the engines are ready; timeout_s: seconds that a
    scheduler has to answer; history: of the charts."""

    def __init__(
        self, services: Callable[[], Services | None], timeout_s: float, history: History
    ) -> None:
        self._services = services
        self._timeout_s = timeout_s
        self._history = history
        self._page, policy = _read_page()
        self._headers = {
            "content-security-policy": policy,
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }

    async def page(self, request: Request) -> Response:
        """The page. It needs no key; it asks the user for one if the state needs it."""
        return Response(self._page, media_type="text/html", headers=self._headers)

    async def history(self, request: Request) -> Response:
        """The points of the charts, as `History.of` has them."""
        services = self._services()
        if services is None:
            raise Unavailable("the engine is still starting; /ready shows the progress")
        engine = chosen_engine(requested_engine(request, services), services)
        points = self._history.of(engine)
        content = msgspec.json.encode(
            DashboardHistory([time_s for time_s, _ in points], [values for _, values in points])
        )
        return Response(
            content, media_type="application/json", headers={"cache-control": "no-store"}
        )

    async def state(self, request: Request) -> Response:
        """`DashboardState` as JSON."""
        services = self._services()
        if services is None:
            raise Unavailable("the engine is still starting; /ready shows the progress")
        engine = chosen_engine(requested_engine(request, services), services)
        service = services.of_engine(engine)
        block_snapshot = await ask_scheduler(
            service.client.describe_blocks(self._timeout_s, engine),
            self._timeout_s,
            engine,
        )
        content = await asyncio.to_thread(
            encode_state,
            service.model_name,
            block_snapshot,
            engine=engine,
            engines=tuple(services.engines),
            restarting=service.client.clients[engine].pause,
        )
        return Response(
            content, media_type="application/json", headers={"cache-control": "no-store"}
        )


def requested_engine(request: Request, services: Services) -> int | None:
    """The number in the query `engine`; None without one. Raises ApiError 404 if unknown."""
    given, engines = request.query_params.get("engine"), services.engines
    if given is None:
        return None
    if given not in map(str, engines):
        raise ApiError(
            404,
            f"engine={given!r} does not exist; the engines are {', '.join(map(str, engines))}",
            param="engine",
        )
    return int(given)


def chosen_engine(engine: int | None, services: Services) -> int:
    """The first engine, unless one was requested."""
    return services.engines[0] if engine is None else engine


async def ask_scheduler(answer: Awaitable[ResultT], timeout_s: float, engine: int) -> ResultT:
    """The answer of an engine's scheduler process. Raises ApiError: 504 if it does not answer,
    503 if it has died."""
    try:
        return await answer
    except TimeoutError:
        raise ApiError(
            504,
            f"the scheduler of engine {engine} has not answered for {timeout_s:g} s: its process "
            "hangs or is stopped",
            code="scheduler_silent",
        ) from None
    except EngineDead as error:
        raise Unavailable(str(error)) from error


def encode_state(
    model: str,
    block_snapshot: BlockSnapshot,
    *,
    engine: int = 0,
    engines: tuple[int, ...] = (0,),
    restarting: str | None = None,
) -> bytes:
    """A `DashboardState` as JSON. Takes milliseconds with a million blocks."""
    state = DashboardState(
        model=model,
        version=longshore.__version__,
        engine=engine,
        engines=engines,
        restarting=restarting,
        report=block_snapshot.report,
        state_names=tuple(state.name.lower() for state in BlockState),
        states=_packed(block_snapshot.states),
        groups=block_snapshot.groups,
        holders=block_snapshot.holders,
        block_ids=_packed(block_snapshot.block_ids),
        num_steps=block_snapshot.num_steps,
        num_preemptions=block_snapshot.num_preemptions,
        num_prefix_queried_tokens=block_snapshot.num_prefix_queried_tokens,
        num_prefix_hit_tokens=block_snapshot.num_prefix_hit_tokens,
    )
    report = msgspec.structs.asdict(block_snapshot.report)  # as a dict, JSON includes empty lists
    return msgspec.json.encode(msgspec.structs.asdict(state) | {"report": report})


def _packed(array: UInt8Array | Int32Array) -> str:
    little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return base64.b64encode(zlib.compress(little_endian.tobytes(), _COMPRESSION)).decode()


def _read_page() -> tuple[str, str]:
    """The page, and the content security policy with the hashes of its style and script."""
    page = (_FILES / "dashboard.html").read_text(encoding="utf-8")
    sources = {}
    for kind, suffix in (("style", "css"), ("script", "js")):
        text = (_FILES / f"dashboard.{suffix}").read_text(encoding="utf-8")
        page = page.replace(f"<{kind}></{kind}>", f"<{kind}>{text}</{kind}>")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        sources[kind] = f"'sha256-{digest}'"
    return page, (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
