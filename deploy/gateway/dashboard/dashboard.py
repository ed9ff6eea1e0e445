"""The dashboard: one page that shows, live, what the engine does with its KV blocks.

The page is `dashboard.html` with its style and script put in, so that it is one file that asks for
nothing else; a content security policy allows these two texts and no others. It asks for
`/dashboard/state` once a second while somebody looks at it, and nothing is made unless it asks.
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
from longshore.deploy.gateway.openai.endpoint import Service
from longshore.deploy.gateway.openai.errors import ApiError, unavailable
from longshore.deploy.supervisor.replica import Replica
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

Said = TypeVar("Said")


class DashboardState(msgspec.Struct, frozen=True):
    """What the page shows beside `/metrics`; see `BlockSnapshot`.

    state_names: of the blocks' states, by number.
    states:      a byte per block, deflated, as base64.
    block_ids:   little-endian int32, deflated, as base64.
    """

    model: str
    version: str
    num_engines: int
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


class Dashboard:
    """The two routes. service: None as long as there is no engine; timeout_s: how long a
    scheduler may take to answer."""

    def __init__(self, service: Callable[[], Service | None], timeout_s: float) -> None:
        self._service = service
        self._timeout_s = timeout_s
        self._page, policy = _read_page()
        self._headers = {
            "content-security-policy": policy,
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }

    async def page(self, request: Request) -> Response:
        """The page; it asks for a key itself where the state needs one."""
        return Response(self._page, media_type="text/html", headers=self._headers)

    async def state(self, request: Request) -> Response:
        """`DashboardState` as JSON."""
        service = self._service()
        if service is None:
            raise unavailable("the engine is still starting; /ready tells when it serves")
        engine, num_engines = engine_asked(request, service) or 0, len(service.client)
        block_map = await scheduler_says(
            service.client.describe_blocks(self._timeout_s, engine),
            self._timeout_s,
            Replica(engine, num_engines).scheduler,
        )
        content = await asyncio.to_thread(
            encode_state, service.model_name, block_map, num_engines=num_engines
        )
        return Response(
            content, media_type="application/json", headers={"cache-control": "no-store"}
        )


def engine_asked(request: Request, service: Service) -> int | None:
    """The query's number; None without one. Raises ApiError 404 for none of those here."""
    asked, num_engines = request.query_params.get("engine"), len(service.client)
    if asked is None:
        return None
    if asked not in map(str, range(num_engines)):
        raise ApiError(
            404,
            f"engine={asked!r} is none of the {num_engines} here; they are numbered from 0",
            param="engine",
        )
    return int(asked)


async def scheduler_says(answer: Awaitable[Said], timeout_s: float, name: str) -> Said:
    """What the scheduler called `name` answers; ApiError 504 if it is silent, 503 if it is gone."""
    try:
        return await answer
    except TimeoutError:
        raise ApiError(
            504,
            f"the {name} has not answered for {timeout_s:g} s: its process hangs or is stopped",
            code="scheduler_silent",
        ) from None
    except EngineDead as error:
        raise unavailable(str(error)) from error


def encode_state(model: str, block_map: BlockSnapshot, *, num_engines: int = 1) -> bytes:
    """A `DashboardState` as JSON. Takes milliseconds where there are a million blocks."""
    state = DashboardState(
        model=model,
        version=longshore.__version__,
        num_engines=num_engines,
        report=block_map.report,
        state_names=tuple(state.name.lower() for state in BlockState),
        states=_packed(block_map.states),
        groups=block_map.groups,
        holders=block_map.holders,
        block_ids=_packed(block_map.block_ids),
        num_steps=block_map.num_steps,
        num_preemptions=block_map.num_preemptions,
        num_prefix_queried_tokens=block_map.num_prefix_queried_tokens,
        num_prefix_hit_tokens=block_map.num_prefix_hit_tokens,
    )
    report = msgspec.structs.asdict(block_map.report)  # an empty list is shown too
    return msgspec.json.encode(msgspec.structs.asdict(state) | {"report": report})


def _packed(array: UInt8Array | Int32Array) -> str:
    little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return base64.b64encode(zlib.compress(little_endian.tobytes(), _COMPRESSION)).decode()


def _read_page() -> tuple[str, str]:
    """The page, and the policy that its style and script fit."""
    page = (_FILES / "dashboard.html").read_text()
    sources = {}
    for kind, suffix in (("style", "css"), ("script", "js")):
        text = (_FILES / f"dashboard.{suffix}").read_text()
        page = page.replace(f"<{kind}></{kind}>", f"<{kind}>{text}</{kind}>")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        sources[kind] = f"'sha256-{digest}'"
    return page, (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
