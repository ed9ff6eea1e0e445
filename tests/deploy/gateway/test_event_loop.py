"""The event loop never waits long for one request's input or answer: every parameter of every
endpoint, at its largest size and far beyond it, at the default limit of a body."""

import asyncio
import contextlib
import http.client
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec
import pytest

from longshore.deploy.gateway.openai.embeddings import EmbeddingRequest
from longshore.deploy.gateway.openai.parameters import (
    MAX_OBJECTS,
    MAX_PARAMETER_BYTES,
    MAX_TOKEN_IDS,
)
from longshore.deploy.gateway.openai.requests import MAX_PROMPTS, ChatRequest, CompletionRequest
from longshore.deploy.gateway.openai.tokenization import DetokenizeRequest, TokenizeRequest
from longshore.deploy.model.embedding import EmbeddingModel
from tests.deploy.gateway import fake_engine
from tests.deploy.gateway.conftest import PATIENCE_S, RunningGateway, StartGateway
from tests.deploy.gateway.fake_engine import never_answer

MAX_GAP_S: Final = 0.25
TICK_S: Final = 0.005
MAX_BODY_BYTES: Final = 16 << 20  # the default
BODY_BYTES: Final = MAX_BODY_BYTES - 1000
MAX_MODEL_LEN: Final = 131_072

PATHS: Final = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
PROMPTS: Final = {
    "/v1/completions": b'"prompt":"x"',
    "/v1/chat/completions": b'"messages":[{"role":"user","content":"x"}]',
    "/v1/embeddings": b'"input":"x"',
    "/tokenize": b'"prompt":"x"',
    "/detokenize": b'"tokens":[1]',
}
UNSERVED: Final = frozenset({"tools", "metadata"})
OTHERS: Final = (
    *("bad_words", "chat_template_kwargs", "logit_bias", "model", "stop", "stop_token_ids"),
    *UNSERVED,
)
"""Parameters besides the prompt; all others have a fixed size."""


class LoopMeter:
    """Measures how long the event loop cannot run because of this process.

    Other processes may take the processors away for as long as they like, so a gap counts by the
    processor time that this process used in it, if that is less than its duration: computing on the
    loop's thread, or in a thread that holds the interpreter lock, uses processor time.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def run(self) -> None:
        while True:
            started_s, used_s = time.perf_counter(), time.process_time()
            await asyncio.sleep(TICK_S)
            gap_s = min(time.perf_counter() - started_s, time.process_time() - used_s)
            self.longest_s = max(self.longest_s, gap_s)


@asynccontextmanager
async def metered() -> AsyncIterator[LoopMeter]:
    meter = LoopMeter()
    task = asyncio.create_task(meter.run())
    try:
        yield meter
    finally:
        task.cancel()


def filled(unit: bytes, size_bytes: int) -> bytes:
    """A list of as many `unit` as fit."""
    return b"[" + b",".join([unit] * (size_bytes // (len(unit) + 1))) + b"]"


def text_of(unit: str, size_bytes: int) -> bytes:
    return b'"' + unit.encode() * (size_bytes // len(unit)) + b'"'


def lists(number: int, item: bytes) -> bytes:
    return b"[" + b",".join([item] * number) + b"]"


def body_of(path: str, name: str, value: bytes) -> bytes:
    """name: the parameter under test; the prompt is small if it is another."""
    small = b"" if PROMPTS[path].startswith(b'"%b"' % name.encode()) else PROMPTS[path] + b","
    deadline = b'"deadline_s":0.1,' if "/v1/" in path else b""
    return b'{%b%b"%b":%b}' % (deadline, small, name.encode(), value)


def bodies(path: str) -> Iterator[tuple[str, bytes]]:
    """Bodies with one large parameter each, and what is large. Made one by one: each has 16 MiB."""
    prompt = PROMPTS[path][1:].partition(b'"')[0].decode()
    for name in OTHERS:
        if name in PATHS[path].__struct_fields__ or (name in UNSERVED and "/v1/" in path):
            yield f"lists as {name}", body_of(path, name, filled(b"[]", BODY_BYTES))
            small = filled(b'"a"', MAX_PARAMETER_BYTES - 2)
            yield f"64 KiB of texts as {name}", body_of(path, name, small)
    yield "a text", body_of(path, prompt, text_of("a word, ", BODY_BYTES))
    for unit in (b"[]", b"1", b'"a"', b"[1]", b'{"role":"user"}'):
        yield f"{unit!r}", body_of(path, prompt, filled(unit, BODY_BYTES))
    for number, item in (
        (MAX_TOKEN_IDS, b"1"),
        (MAX_PROMPTS, lists(MAX_TOKEN_IDS // MAX_PROMPTS - 1, b"1")),
        (MAX_PROMPTS, text_of("a word, ", 4000)),
    ):
        yield f"{number} x {item[:9]!r}", body_of(path, prompt, lists(number, item))
    if prompt == "messages":
        for messages in (
            lists(MAX_OBJECTS, b'{"role":"user"}'),
            b'[{"role":"user","content":%b}]' % lists(MAX_OBJECTS - 1, b'{"type":"text"}'),
            b'[{"role":"user","annotations":%b}]' % filled(b"[]", BODY_BYTES - 100),
            b'[{"role":"user","content":%b}]' % text_of("a word, ", BODY_BYTES - 100),
            lists(16_384, b'{"role":"user","content":"a word, a word, a word"}'),
        ):
            yield f"messages {messages[:50]!r}", body_of(path, prompt, messages)
    yield "an unknown name", b'{"%b":1}' % (b"n" * BODY_BYTES)
    yield "many names", b"{%b}" % b",".join(b'"%d":1' % i for i in range(10**6))


async def post(gateway: RunningGateway, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body; sent and received on another thread."""

    def ask() -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request("POST", path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()

    return await asyncio.to_thread(ask)


@pytest.fixture(autouse=True)
def long_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes long prompts."""
    identity = msgspec.structs.replace(fake_engine.IDENTITY, max_model_len=MAX_MODEL_LEN)
    monkeypatch.setattr(fake_engine, "IDENTITY", identity)


@pytest.mark.parametrize("path", PATHS)
async def test_no_parameter_of_any_size_blocks_the_event_loop(
    start_gateway: StartGateway, path: str
) -> None:
    too_long = {}
    settings = {"max_body_bytes": MAX_BODY_BYTES, "embedding": EmbeddingModel(size=4)}
    async with start_gateway(never_answer, **settings) as gateway:
        for what, body in bodies(path):
            assert len(body) <= MAX_BODY_BYTES
            async with metered() as meter:
                status, answer = await post(gateway, path, body)
            assert status in (200, 400, 404, 504), answer[:300]
            assert len(answer) < 2000 or status == 200, answer[:300]
            if meter.longest_s > MAX_GAP_S:
                too_long[what] = meter.longest_s
        assert too_long == {}
