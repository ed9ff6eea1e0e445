"""A real gateway on a real port, in the test's own loop, with scripted engines."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from longshore.deploy.bench.sse_client import HttpAnswer, HttpEndpoint
from longshore.deploy.gateway.config import GatewayConfig, ModelConfig
from longshore.deploy.gateway.process import GatewayProcess
from longshore.deploy.gateway.settings import GatewaySettings
from longshore.deploy.model.folder import SamplingDefaults
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.protocol.commands import EngineMember, Role
from longshore.protocol.transport.lifeline import Lifeline
from tests.deploy.gateway.fake_engine import IDENTITY, FakeEngine, Script, echo
from tests.deploy.gateway.forms import encode_form
from tests.deploy.tiny_tokenizer import EOS_ID, VOCAB_SIZE, save_tokenizer

PATIENCE_S = 60.0  # for an answer that should arrive at once; other tests may use the processors


@dataclass
class RunningGateway:
    """The gateway under test, its engines, and a client of it."""

    process: GatewayProcess
    engines: list[FakeEngine]
    port: int

    @property
    def engine(self) -> FakeEngine:
        """The first one."""
        return self.engines[0]

    @property
    def client(self) -> HttpEndpoint:
        return HttpEndpoint(f"http://127.0.0.1:{self.port}")

    async def get(self, path: str) -> HttpAnswer:
        return await self.client.request("GET", path, timeout_s=PATIENCE_S)

    async def metrics(self) -> str:
        """The text of /metrics without the label `model_name`, which all series have."""
        text = (await self.get("/metrics")).body.decode()
        return text.replace('{model_name="tiny"}', "").replace('{model_name="tiny",', "{")

    async def post_form(
        self, path: str, *, file: bytes | None = None, **fields: str | list[str]
    ) -> HttpAnswer:
        kind, body = encode_form(fields, {} if file is None else {"file": file})
        return await self.client.request(
            "POST", path, body, timeout_s=PATIENCE_S, content_type=kind
        )

    async def post(self, path: str, body: dict[str, Any] | bytes) -> HttpAnswer:
        encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.client.request("POST", path, encoded, timeout_s=PATIENCE_S)


StartGateway = Callable[..., AbstractAsyncContextManager[RunningGateway]]


@pytest.fixture
def start_gateway(tmp_path: Path) -> StartGateway:
    """`async with start_gateway(script, **config) as gateway`; `tokenizer=False` for none. There is
    one engine, or one for each of `roles`; and one for each model of `further`, which has changes
    of the first one's configuration."""

    @asynccontextmanager
    async def start(
        script: Script = echo,
        *,
        tokenizer: bool = True,
        roles: Sequence[Role] = ("unified",),
        further: Sequence[Mapping[str, Any]] = (),
        **settings: Any,
    ) -> AsyncIterator[RunningGateway]:
        if tokenizer:
            save_tokenizer(tmp_path)
        runtime_dir = RuntimeDir()
        num_engines = len(roles) + len(further)
        endpoints = [runtime_dir.endpoint(f"clients-{number}") for number in range(num_engines)]
        members = [
            EngineMember(number, "unified" if number >= len(roles) else roles[number], endpoint)
            for number, endpoint in enumerate(endpoints)
        ]
        engines = [FakeEngine(endpoint, script) for endpoint in endpoints]
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        names = {each.name for each in fields(GatewaySettings)} & settings.keys()
        of_users = GatewaySettings(**{name: settings.pop(name) for name in names})
        names = {*ModelConfig.__struct_fields__} & settings.keys()
        model = ModelConfig(
            **{
                "settings": of_users,
                "folder": str(tmp_path),
                "name": "tiny",
                "fingerprint": IDENTITY.model_fingerprint,
                "vocab_size": VOCAB_SIZE,
                "eos_token_ids": (EOS_ID,),
                "max_model_len": IDENTITY.max_model_len,
                "sampling_defaults": SamplingDefaults(),
                "members": tuple(members[: len(roles)]),
            }
            | {name: settings.pop(name) for name in names}
        )
        others = (
            msgspec.structs.replace(model, members=(member,), **changes)
            for member, changes in zip(members[len(roles) :], further, strict=True)
        )
        config = GatewayConfig(
            **{
                "settings": of_users,
                "models": (model, *others),
                "listen_fd": listener.detach(),
                "max_body_bytes": 4096,
            }
            | settings
        )
        process = GatewayProcess(config)
        serving = asyncio.create_task(process.serve())
        try:
            await process.start(Lifeline(None))
            yield RunningGateway(process, engines, port)
        finally:
            process.stop()
            await serving
            process.close()
            for engine in engines:
                engine.close()
            runtime_dir.remove()

    return start
