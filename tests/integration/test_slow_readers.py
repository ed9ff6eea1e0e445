"""Clients that do not read, or do not finish their requests, with a separate gateway process."""

import asyncio
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from longshore.deploy.bench.sse_client import HttpEndpoint
from longshore.deploy.gateway.config import GatewayConfig, ModelConfig
from longshore.deploy.gateway.settings import GatewaySettings
from longshore.deploy.model.folder import SamplingDefaults
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.protocol.arrays import int32_array
from longshore.protocol.commands import EngineMember
from longshore.protocol.outputs import EngineOutputs, FinishReason
from longshore.protocol.requests import AddRequest
from longshore.protocol.transport.lifeline import STOP_SIGNAL
from tests.deploy.gateway.fake_engine import IDENTITY, FakeEngine, never_answer
from tests.deploy.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

COMPLETIONS = "/v1/completions"
TIMEOUT_S = 60
NUM_TOKENS = 1000
MAX_GROWTH_BYTES = 16 << 20
# A long name makes long chunks, so that a few tokens fill the kernel's buffers of a connection.
MODEL_NAME = "m" * 16_000
BODY = json.dumps({"prompt": "x", "stream": True, "max_tokens": NUM_TOKENS}).encode()


class GatewayProcess:
    """pid: of the process
    engine: runs in this process, on the test's loop.
    """

    def __init__(self, engine: FakeEngine, port: int, pid: int) -> None:
        self.engine = engine
        self.port = port
        self._pid = pid

    @property
    def client(self) -> HttpEndpoint:
        return HttpEndpoint(f"http://127.0.0.1:{self.port}")

    @property
    def resident_bytes(self) -> int:
        num_pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
        return num_pages * os.sysconf("SC_PAGE_SIZE")

    async def stream_beside(self, slow: AddRequest) -> list[str]:
        """The texts of another stream, whose client reads every token before both streams get the
        next one."""
        came = asyncio.Event()
        asking = asyncio.create_task(
            self.client.request(
                "POST", COMPLETIONS, BODY, timeout_s=TIMEOUT_S, on_event=lambda _: came.set()
            )
        )
        await self.engine.wait_for(lambda: len(self.engine.requests) == 2)
        fast = self.engine.requests[1]
        handles = int32_array([slow.handle, fast.handle])
        async with asyncio.timeout(TIMEOUT_S):
            for step in range(NUM_TOKENS):
                came.clear()
                self.engine.send(EngineOutputs(handles, int32_array([letter(step)] * 2)))
                await came.wait()
        self.finish(fast)
        return texts_of([event for _, event in (await asking).events])

    def finish(self, request: AddRequest) -> None:
        self.engine.finish(request, FinishReason.LENGTH_CAPPED, num_output_tokens=NUM_TOKENS)


def letter(step: int) -> int:
    """Tokens of one letter, in turn."""
    return 34 + 32 + step % 26


@asynccontextmanager
async def gateway_process(folder: Path, **settings: Any) -> AsyncIterator[GatewayProcess]:
    save_tokenizer(folder)
    runtime_dir = RuntimeDir()
    endpoint = runtime_dir.endpoint("clients")
    engine = FakeEngine(endpoint, never_answer)
    lifeline, child_end = socket.socketpair()
    lifeline.setblocking(False)
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener, child_end, lifeline:
        port = listener.getsockname()[1]
        own = GatewaySettings(**{"drain_timeout_s": 0.0, **settings})
        config = GatewayConfig(
            models=(
                ModelConfig(
                    folder=str(folder),
                    name=MODEL_NAME,
                    fingerprint=IDENTITY.model_fingerprint,
                    vocab_size=VOCAB_SIZE,
                    eos_token_ids=(),
                    max_model_len=IDENTITY.max_model_len,
                    sampling_defaults=SamplingDefaults(),
                    members=(EngineMember(0, "unified", endpoint),),
                    settings=own,
                ),
            ),
            listen_fd=listener.fileno(),
            lifeline_fd=child_end.fileno(),
            settings=own,
        )
        config_file = folder / "gateway.json"
        config_file.write_bytes(msgspec.json.encode(config))
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "longshore.deploy.gateway", str(config_file)],
            pass_fds=(listener.fileno(), child_end.fileno()),
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                said = b""
                while b'"ready"' not in said:
                    said += await asyncio.get_running_loop().sock_recv(lifeline, 4096)
                yield GatewayProcess(engine, port, process.pid)
        finally:
            process.send_signal(STOP_SIGNAL)
            process.wait(TIMEOUT_S)
            engine.close()
            runtime_dir.remove()


@contextmanager
def slow_client(port: int) -> Iterator[socket.socket]:
    """A client that has requested a stream, and reads nothing unless the test does."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        client.sendall(request_of(BODY))
        client.setblocking(False)
        yield client


def request_of(body: bytes) -> bytes:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\n"
    )
    return b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body)


async def read_all(client: socket.socket) -> bytes:
    loop = asyncio.get_running_loop()
    parts = []
    while part := await loop.sock_recv(client, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def texts_of(events: list[bytes]) -> list[str]:
    assert events[-1] == b"[DONE]"
    return [json.loads(event)["choices"][0]["text"] for event in events[:-1]]


async def test_client_that_reads_late_holds_up_nobody_and_gets_everything(tmp_path: Path) -> None:
    async with gateway_process(tmp_path) as gateway:
        engine = gateway.engine
        with slow_client(gateway.port) as slow:
            await engine.wait_for(lambda: len(engine.requests) == 1)
            before = gateway.resident_bytes
            fast = await gateway.stream_beside(engine.requests[0])
            assert gateway.resident_bytes - before < MAX_GROWTH_BYTES
            gateway.finish(engine.requests[0])
            received = await read_all(slow)
        late = texts_of([line[6:] for line in received.split(b"\n") if line.startswith(b"data: ")])
        assert len("".join(fast)) == NUM_TOKENS <= len(fast)
        assert "".join(late) == "".join(fast)
        assert len(late) < len(fast)  # the tokens that had to wait came together


async def test_client_that_never_reads_is_dropped(tmp_path: Path) -> None:
    async with gateway_process(tmp_path, unread_timeout_s=0.2) as gateway:
        engine = gateway.engine
        with slow_client(gateway.port) as slow:
            await engine.wait_for(lambda: len(engine.requests) == 1)
            await gateway.stream_beside(engine.requests[0])
            await engine.wait_for(lambda: bool(engine.aborted))
            assert engine.aborted == [engine.requests[0].handle]
            received = await read_all(slow)
            assert not received.endswith(b"0\r\n\r\n")  # the client sees that it is cut


async def test_clients_with_half_a_request_keep_nobody_from_being_served(tmp_path: Path) -> None:
    whole = request_of(b'{"prompt": "x"}')
    halves = [whole[:30], whole[:-5]] * 128
    async with gateway_process(tmp_path) as gateway:
        clients = [socket.create_connection(("127.0.0.1", gateway.port)) for _ in halves]
        for client, half in zip(clients, halves, strict=True):
            client.sendall(half)
        health = await gateway.client.request("GET", "/health", timeout_s=TIMEOUT_S)
        assert health.status == 200
        asking = asyncio.create_task(
            gateway.client.request("POST", COMPLETIONS, b'{"prompt": "x"}', timeout_s=TIMEOUT_S)
        )
        await gateway.engine.wait_for(lambda: len(gateway.engine.requests) == 1)
        gateway.finish(gateway.engine.requests[0])
        assert (await asking).status == 200
        assert select.select(clients, [], [], 0) == ([], [], [])  # the test waits for all of them
        for client in clients:
            client.close()
