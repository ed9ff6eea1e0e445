"""A gateway's streams without connections: messages of the engine go in, bytes for the clients come
out. Everything between them is what `longshore serve` runs, but for the HTTP server."""

import asyncio
import json
from typing import Any, Final, cast

import numpy as np
from gateway_capacity import CHAT, VOCAB_SIZE, tokens_of_the_demo_model

from longshore.deploy.gateway.api.endpoint import Service, Services
from longshore.deploy.gateway.api.prompts import PromptReader
from longshore.deploy.gateway.engines.engines import Engines
from longshore.deploy.gateway.http.exchange import OUTLET_KEY
from longshore.deploy.gateway.http.middleware import RequestMiddleware
from longshore.deploy.gateway.key_usage import KeyUsage
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.gateway.openai.chat import ChatCompletionsEndpoint
from longshore.deploy.gateway.text.tokenizer import load_tokenizer
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.deploy.model.folder import SamplingDefaults
from longshore.protocol.handshake import ToClient
from longshore.protocol.outputs import EngineOutputs
from longshore.protocol.transport.codec import Decoder, Encoder
from tests.deploy.gateway.direct_engines import DirectEngines

MAX_MODEL_LEN: Final = 1 << 20
BODY: Final = json.dumps({**CHAT, "stream": True}).encode()


class Client:
    """One request and the connection on which it is answered. num_bytes: that it has read."""

    is_writable = True

    def __init__(self) -> None:
        self.num_bytes = 0
        self._sends = iter([{"type": "http.request", "body": BODY}])
        self._never = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        for message in self._sends:
            return message
        await self._never.wait()
        raise AssertionError("it does not disconnect")

    async def send(self, message: dict[str, Any]) -> None:
        assert message["type"] == "http.response.start"
        assert message["status"] == 200

    def begin_stream(self, comment: bytes) -> None:
        return None

    def write_part(self, data: bytes) -> None:
        self.num_bytes += len(data)

    async def until_read(self) -> None:
        return None


class Streams:
    """Streamed chat completions, which have begun. Each step has a token for each of them.

    num_steps: most that there are.
    """

    def __init__(self, num_streams: int, num_steps: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._engines = DirectEngines()
        self._app = self._make_app()
        self._decoder: Decoder[ToClient] = Decoder(ToClient)
        self._loop.run_until_complete(self._begin(num_streams))
        self._steps = iter(self._encoded(num_steps + 1))
        self.step()  # the first token is shown in a turn of the event loop, others at once
        self._loop.run_until_complete(self._settle())
        assert all(client.num_bytes for client in self.clients)

    def _make_app(self) -> RequestMiddleware:
        tokenizer = load_tokenizer(DEMO_MODEL_DIR)
        prompts = PromptReader(
            tokenizer, SamplingDefaults(), vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN
        )
        metrics = GatewayMetrics("demo")
        endpoint = ChatCompletionsEndpoint()
        service = Service(
            "demo",
            cast(Engines, self._engines),
            tokenizer,
            prompts,
            metrics,
            max_body_bytes=1 << 20,
            max_live_requests=1 << 20,
            key_usage=KeyUsage((), metrics),
        )
        endpoint.services = Services([service])
        return RequestMiddleware(endpoint, (), metrics)

    async def _begin(self, num_streams: int) -> None:
        self.clients = [Client() for _ in range(num_streams)]
        scope = {"type": "http", "method": "POST", "path": ChatCompletionsEndpoint.path}
        headers = [(b"content-type", b"application/json")]
        self._tasks = [
            self._loop.create_task(
                self._app(
                    {**scope, "headers": headers, OUTLET_KEY: client}, client.receive, client.send
                )
            )
            for client in self.clients
        ]
        while len(self._engines.sent) < num_streams:
            await asyncio.sleep(0)
        await self._settle()

    async def _settle(self) -> None:
        """Until all tasks wait for tokens."""
        for _ in range(2 * len(self.clients)):
            await asyncio.sleep(0)

    def _encoded(self, num_steps: int) -> list[list[bytes]]:
        """The frames of the messages of all steps."""
        encoder: Encoder[ToClient] = Encoder()
        token_ids = np.array(tokens_of_the_demo_model()[0], np.int32)
        handles = np.array([live.handle for live in self._engines.sent], np.int32)
        outputs = (
            EngineOutputs(handles, token_ids[(handles * 61 + step) % len(token_ids)])
            for step in range(num_steps)
        )
        return [[bytes(frame) for frame in encoder.encode(each)] for each in outputs]

    def close(self) -> None:
        """The clients disconnect."""
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.wait(self._tasks))
        self._loop.close()

    def step(self) -> None:
        outputs = self._decoder.decode(next(self._steps))
        assert isinstance(outputs, EngineOutputs)
        self._engines.requests.apply(outputs)
