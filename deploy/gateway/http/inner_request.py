"""A request of the gateway to itself: it is read, limited, counted and logged as those of clients,
but needs no connection."""

import asyncio
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Scope

from longshore.deploy.gateway.api_keys import ApiKey
from longshore.deploy.gateway.http.exchange import OUTLET_KEY
from longshore.deploy.gateway.http.middleware import use_api_key


class InnerAnswer(NamedTuple):
    """headers: by lower-case name."""

    status: int
    headers: dict[str, str]
    body: bytes


class _NoStream:
    """The outlet of a response that is no stream."""

    is_writable = True

    def begin_stream(self, comment: bytes) -> None:
        raise AssertionError("a request of the gateway to itself asks for no stream")

    def write_part(self, data: bytes) -> None:
        raise AssertionError("there is no stream")

    async def until_read(self) -> None:
        pass


async def ask(app: ASGIApp, path: str, body: bytes, key: ApiKey) -> InnerAnswer:
    """POST a body of JSON as the owner of the key. app: with its RequestMiddleware."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        OUTLET_KEY: _NoStream(),
    }
    use_api_key(scope, key)
    is_read = False
    status = 500
    headers: dict[str, str] = {}
    parts: list[bytes] = []

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            await asyncio.Event().wait()  # the client does not disconnect
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update(
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in message["headers"]
            )
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return InnerAnswer(status, headers, b"".join(parts))
