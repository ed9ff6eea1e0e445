"""The actions of an operator over HTTP, with a scripted supervisor on the admin socket."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.admin.actions import ACTION_NAMES
from longshore.deploy.bench.sse_client import HttpAnswer, HttpEndpoint
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from tests.deploy.gateway.conftest import PATIENCE_S, RunningGateway, StartGateway

KEY = "an-admin-key-of-its-own"
API_KEY = "an-api-key"
DONE = b'{"ok":true,"results":[],"error":null}\n'


@dataclass
class Supervisor:
    """Answers each action with `answer`, and then closes the connection."""

    answer: bytes = DONE
    actions: list[dict[str, Any]] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.actions.append(json.loads(await reader.readline()))
        writer.write(self.answer)
        await writer.drain()
        writer.close()


@dataclass
class Administered:
    gateway: RunningGateway
    supervisor: Supervisor

    async def send(
        self, name: str, body: bytes = b"", *, method: str = "POST", key: str | None = KEY
    ) -> HttpAnswer:
        client = HttpEndpoint(f"http://127.0.0.1:{self.gateway.port}", api_key=key)
        return await client.request(method, f"/admin/{name}", body, timeout_s=PATIENCE_S)


@pytest.fixture
def start_administered(start_gateway: StartGateway) -> Any:
    @asynccontextmanager
    async def start(**settings: Any) -> AsyncIterator[Administered]:
        runtime_dir, supervisor = RuntimeDir(), Supervisor()
        path = runtime_dir.socket_path("admin")
        server = await asyncio.start_unix_server(supervisor.serve, path)
        settings = {"admin_key": KEY, "runtime_dir": str(runtime_dir.path)} | settings
        try:
            async with start_gateway(**settings) as gateway:
                yield Administered(gateway, supervisor)
        finally:
            server.close()
            runtime_dir.remove()

    return start


async def test_an_action_is_passed_on_and_answered(start_administered: Any) -> None:
    async with start_administered(api_keys=(API_KEY,)) as run:
        answer = await run.send("pause", b'{"engine": 1, "mode": "keep", "action": "drain"}')
        assert (answer.status, answer.body) == (200, DONE)
        assert run.supervisor.actions == [{"engine": 1, "mode": "keep", "action": "pause"}]
        assert (await run.send("status", method="GET")).status == 200
        for name in ACTION_NAMES:
            if name != "status":
                assert (await run.send(name)).status == 200
        assert run.supervisor.actions[1:] == [{"action": name} for name in ACTION_NAMES]


async def test_without_an_admin_key_there_is_no_path(start_administered: Any) -> None:
    async with start_administered(admin_key=None) as run:
        for name in ACTION_NAMES:
            assert (await run.send(name)).status == 404
        assert run.supervisor.actions == []


@pytest.mark.parametrize("key", [None, API_KEY, KEY[:-1], KEY + "x", "\xff"])
async def test_only_the_admin_key_opens(start_administered: Any, key: str | None) -> None:
    async with start_administered(api_keys=(API_KEY,)) as run:
        answer = await run.send("drain", key=key)
        assert answer.status == 401
        assert json.loads(answer.body)["error"]["code"] == "invalid_admin_key"
        assert run.supervisor.actions == []


async def test_the_admin_key_is_no_api_key(start_administered: Any) -> None:
    async with start_administered(api_keys=(API_KEY,)) as run:
        client = HttpEndpoint(f"http://127.0.0.1:{run.gateway.port}", api_key=KEY)
        answer = await client.request("GET", "/v1/models", timeout_s=PATIENCE_S)
        assert answer.status == 401


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b'{"ok":false,"results":[],"error":null}\n', 409),
        (b'{"ok":false,"results":[],"error":"engine=7 does not exist"}\n', 400),
        (b"", 503),
    ],
)
async def test_the_status_tells_how_it_ended(
    start_administered: Any, answer: bytes, status: int
) -> None:
    async with start_administered() as run:
        run.supervisor.answer = answer
        assert (await run.send("resume")).status == status


async def test_a_snapshot_is_the_lines_after_the_answer(start_administered: Any) -> None:
    async with start_administered() as run:
        lines = b'{"engine":0}\n' + b'{"type":"BlockStored"}\n' * 50_000
        run.supervisor.answer = DONE + lines
        answer = await run.send("kv-snapshot")
        assert (answer.status, answer.body) == (200, lines)


@pytest.mark.parametrize(
    ("body", "status"), [(b"[1]", 400), (b"{", 400), (b"\xff", 400), (b"x" * 40_000, 413)]
)
async def test_a_body_that_is_no_action_is_rejected(
    start_administered: Any, body: bytes, status: int
) -> None:
    async with start_administered() as run:
        assert (await run.send("pause", body)).status == status
        assert run.supervisor.actions == []


async def test_a_supervisor_that_is_gone_is_named(start_administered: Any) -> None:
    async with start_administered() as run:
        (Path(run.gateway.process._config.runtime_dir) / "admin.sock").unlink()
        answer = await run.send("resume")
        assert answer.status == 503
        assert "the supervisor does not answer" in json.loads(answer.body)["error"]["message"]
