"""The actions of an operator over HTTP: `/admin/NAME`, with a key of their own.

The gateway checks the key and passes the action on to the deployment's admin socket, so that every
gateway does the same as `longshore admin`.
"""

import asyncio
import hmac
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from longshore.deploy.admin.actions import ACTION_NAMES, MAX_REQUEST_BYTES, KVSnapshot, Status
from longshore.deploy.gateway.api.errors import ApiError
from longshore.deploy.requests.errors import Unavailable, invalid
from longshore.protocol.errors import shortened

ADMIN_PREFIX: Final = "/admin/"
SLEEP_PATHS: Final = ("/sleep", "/wake_up", "/is_sleeping")
"""Of `SleepRoutes`, which check the same key."""
CHUNK_BYTES: Final = 65_536


class AdminSocket:
    """Passes actions on to the supervisor. path: of the admin socket."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def perform(self, action: dict[str, Any]) -> Response:
        """The content of the response is the supervisor's answer. Raises RequestError."""
        try:
            reader, writer = await asyncio.open_unix_connection(
                str(self._path), limit=16 * MAX_REQUEST_BYTES
            )
        except OSError as error:
            raise Unavailable(f"the supervisor does not answer: {error}") from error
        try:
            writer.write(msgspec.json.encode(action) + b"\n")
            answer = await reader.readline()
        except (OSError, ValueError):
            answer = b""
        if not answer:
            writer.close()
            raise Unavailable("the supervisor has closed the connection")
        status = _status_of(answer)
        if action["action"] == KVSnapshot.__struct_config__.tag and status == 200:
            return StreamingResponse(_rest(reader, writer), media_type="application/x-ndjson")
        writer.close()
        return Response(answer, status_code=status, media_type="application/json")

    async def is_done(self, action: dict[str, Any]) -> bool:
        """Whether an action was carried out. Raises RequestError."""
        return (await self.perform(action)).status_code == 200


class AdminRoutes:
    """key: what clients send as `Authorization: Bearer KEY`. supervisor: carries out actions."""

    def __init__(self, key: str, supervisor: AdminSocket) -> None:
        self._key = key.encode()
        self.perform = supervisor.perform

    @property
    def routes(self) -> list[Route]:
        """Make one route per action. They are POSTs, except for the status."""
        reading = (Status.__struct_config__.tag,)
        return [
            Route(ADMIN_PREFIX + name, self._act, methods=["GET" if name in reading else "POST"])
            for name in ACTION_NAMES
        ]

    async def _act(self, request: Request) -> Response:
        self.check_key(request)
        name = request.url.path.rsplit("/", 1)[-1]
        return await self.perform({**await _fields_of(request), "action": name})

    def check_key(self, request: Request) -> None:
        """Raise RequestError unless the request has the admin key."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(given.strip().encode("latin-1"), self._key)
        if scheme.lower() != "bearer" or not is_right:
            raise ApiError(
                401,
                "unknown admin key; send it as `Authorization: Bearer KEY`",
                code="invalid_admin_key",
                headers=((b"www-authenticate", b"Bearer"),),
            )


async def _fields_of(request: Request) -> dict[str, Any]:
    """The fields of the action: a JSON object, or nothing. The supervisor checks them."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_REQUEST_BYTES // 2:
            raise ApiError(413, f"an action has at most {MAX_REQUEST_BYTES // 2} bytes")
    if not body.strip():
        return {}
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body must be a JSON object: {shortened(str(error))}") from error


class _Outcome(msgspec.Struct):
    ok: bool
    error: str | None = None


def _status_of(answer: bytes) -> int:
    """200: done; 400: the action is not valid; 409: something was not done."""
    outcome = msgspec.json.decode(answer, type=_Outcome)
    if outcome.error is not None:
        return 400
    return 200 if outcome.ok else 409


async def _rest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> AsyncIterator[bytes]:
    try:
        while chunk := await reader.read(CHUNK_BYTES):
            yield chunk
    finally:
        writer.close()
