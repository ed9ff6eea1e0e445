"""Streams never wait long for another request's input or answer: every parameter of every endpoint,
at its largest size and far beyond it, at the default limit of a body."""

import asyncio
import contextlib
import http.client
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from longshore.deploy.gateway.anthropic.requests import Conversation, MessagesRequest
from longshore.deploy.gateway.api.embeddings import EmbeddingRequest
from longshore.deploy.gateway.api.parameters import MAX_OBJECTS, MAX_PARAMETER_BYTES, MAX_TOKEN_IDS
from longshore.deploy.gateway.api.pooled_inputs import MAX_INPUTS
from longshore.deploy.gateway.api.requests import MAX_PROMPTS, ChatRequest
from longshore.deploy.gateway.http.multipart import MAX_FIELD_BYTES, MAX_FIELDS
from longshore.deploy.gateway.openai.requests import CompletionRequest
from longshore.deploy.gateway.openai.scoring import RerankRequest, ScoreRequest
from longshore.deploy.gateway.openai.tokenization import DetokenizeRequest, TokenizeRequest
from longshore.deploy.gateway.responses_api.requests import ResponsesRequest
from longshore.deploy.model.embedding import EmbeddingModel
from longshore.deploy.model.folder import AudioInput
from longshore.protocol.outputs import EngineOutputs, FinishedRequest, FinishReason, TokenLogprobs
from longshore.protocol.requests import AddRequest
from tests.deploy.gateway import fake_engine
from tests.deploy.gateway.conftest import PATIENCE_S, RunningGateway, StartGateway
from tests.deploy.gateway.fake_engine import FakeEngine, Script, never_answer
from tests.deploy.gateway.forms import encode_form
from tests.deploy.sounds import as_file
from tests.deploy.tiny_whisper import save_whisper_settings, save_whisper_tokenizer

MAX_GAP_S: Final = 0.25
NUM_ATTEMPTS: Final = 3
TICK_S: Final = 0.01
TOKEN: Final = 64
MAX_BODY_BYTES: Final = 16 << 20  # the default
BODY_BYTES: Final = MAX_BODY_BYTES - 1000
MAX_MODEL_LEN: Final = 131_072
MIN_LARGE_BYTES: Final = 3 << 20

PATHS: Final = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/score": ScoreRequest,
    "/v1/rerank": RerankRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": Conversation,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
PROMPTS: Final = {
    "/v1/completions": b'"prompt":"x"',
    "/v1/chat/completions": b'"messages":[{"role":"user","content":"x"}]',
    "/v1/embeddings": b'"input":"x"',
    "/v1/score": b'"text_2":"x"',
    "/v1/rerank": b'"documents":["x"]',
    "/v1/responses": b'"input":"x"',
    "/v1/responses/input_tokens": b'"input":"x"',
    "/v1/messages": b'"messages":[{"role":"user","content":"x"}]',
    "/v1/messages/count_tokens": b'"messages":[{"role":"user","content":"x"}]',
    "/tokenize": b'"prompt":"x"',
    "/detokenize": b'"tokens":[1]',
}
REQUIRED: Final = {
    "/v1/score": b'"text_1":"x",',
    "/v1/rerank": b'"query":"x",',
    "/v1/messages": b'"model":"tiny","max_tokens":1,',
    "/v1/messages/count_tokens": b'"model":"tiny",',
}
UNSERVED: Final = frozenset({"tools", "metadata"})
OTHERS: Final = (
    *("bad_words", "chat_template_kwargs", "logit_bias", "model", "stop", "stop_token_ids"),
    *("stop_sequences", "text", "tool_choice", "output_config", "thinking"),
    *UNSERVED,
)
"""Parameters besides the prompt; all others have a fixed size."""
CALL: Final = b'"tool_calls":[{"function":{"name":"f","arguments":%b}}]'
USE: Final = b'{"type":"tool_use","id":"1","name":"f","input":%b}'


class LiveStream:
    """A client with a stream that gets a token every TICK_S, and the longest gap between two.

    Other processes may take the processors away for as long as they like, so a gap counts by the
    processor time that this process used in it, if that is less than its duration: computing on the
    loop's thread, or in a thread that holds the interpreter lock, uses processor time.
    """

    def __init__(self, port: int, path: str, kind: str, body: bytes) -> None:
        self._request = ("POST", path, body, {"content-type": kind})
        self._longest_s = 0.0
        self.num_events = 0
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._is_over = False
        self._thread.start()

    def _read(self) -> None:
        self._connection.request(*self._request)
        answer = self._connection.getresponse()
        at_s, used_s = time.perf_counter(), time.process_time()
        while not self._is_over and (line := answer.readline()):
            if not line.startswith(b"data: "):
                continue
            now_s, now_used_s = time.perf_counter(), time.process_time()
            self._longest_s = max(self._longest_s, min(now_s - at_s, now_used_s - used_s))
            at_s, used_s = now_s, now_used_s
            self.num_events += 1

    async def take_longest_s(self) -> float:
        """The longest gap since the last call; two more events have arrived."""
        until = self.num_events + 2
        async with asyncio.timeout(PATIENCE_S):
            while self.num_events < until:
                await asyncio.sleep(TICK_S)
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s

    async def longest_during_s(self, ask: Callable[[], Awaitable[None]]) -> float:
        """The longest gap while `ask` runs. One above MAX_GAP_S must show in every one of
        NUM_ATTEMPTS, as the tests that run at the same time cause one now and then."""
        longest_s = math.inf
        for _ in range(NUM_ATTEMPTS):
            await self.take_longest_s()
            await ask()
            longest_s = min(longest_s, await self.take_longest_s())
            if longest_s <= MAX_GAP_S:
                break
        return longest_s

    async def close(self) -> None:
        self._is_over = True
        await asyncio.to_thread(self._thread.join)
        self._connection.close()


@asynccontextmanager
async def live_stream(gateway: RunningGateway, path: str = "") -> AsyncIterator[LiveStream]:
    """path: of a speech model's endpoint; else it is a stream of text. The first request."""
    body = {"prompt": "x", "max_tokens": 100_000, "stream": True, "ignore_eos": True}
    kind, encoded = "application/json", json.dumps(body).encode()
    if path:
        file = as_file(np.zeros(1600, np.float32))
        kind, encoded = encode_form({"stream": "true", "language": "en"}, {"file": file})
    stream = LiveStream(gateway.port, path or "/v1/completions", kind, encoded)
    try:
        await stream.take_longest_s()
        yield stream
    finally:
        await stream.close()


def beside_stream(script: Script) -> Script:
    """Answer the first request with a token per TICK_S, and others as `script` does."""

    def run(engine: FakeEngine, request: AddRequest) -> None:
        def tick() -> None:
            if request.handle not in engine.aborted:
                engine.send_tokens(request, [TOKEN])
                asyncio.get_running_loop().call_later(TICK_S, tick)

        if len(engine.requests) == 1:
            tick()
        else:
            asyncio.get_running_loop().call_soon(script, engine, request)

    return run


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
    return b'{%b%b%b"%b":%b}' % (deadline, REQUIRED.get(path, b""), small, name.encode(), value)


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
            b'[{"role":"assistant",%b}]' % CALL % b'{"a":%b}' % filled(b"[]", BODY_BYTES - 200),
            b'[{"role":"assistant",%b}]' % CALL % b'{"a":%b}' % filled(b"1", BODY_BYTES - 200),
            b'[{"role":"assistant",%b}]'
            % CALL
            % b"{%b}"
            % b",".join(b'"%x":1' % i for i in range(10**6)),
            b'[{"role":"assistant",%b}]' % CALL % text_of("[],", BODY_BYTES - 200),
            b'[{"role":"assistant",%b}]' % CALL % text_of(r"\n", BODY_BYTES - 200),
            b'[{"role":"assistant","content":[%b]}]'
            % USE
            % b'{"a":%b}'
            % filled(b"[]", BODY_BYTES - 200),
            b'[{"role":"user","content":%b}]'
            % lists(MAX_OBJECTS - 1, b'{"type":"text","text":""}'),
        ):
            yield f"messages {messages[:70]!r}", body_of(path, prompt, messages)
    if path == "/v1/responses":
        for items in (
            lists(200_000, b'{"type":"function_call","call_id":"","name":"","arguments":""}'),
            lists(MAX_OBJECTS, b'{"role":"user","content":""}'),
            b'[{"role":"user","content":%b}]'
            % lists(MAX_OBJECTS - 1, b'{"type":"input_text","text":""}'),
        ):
            yield f"items {items[:50]!r}", body_of(path, prompt, items)
        yield "instructions", body_of(path, "instructions", text_of("a word, ", BODY_BYTES - 100))
    if prompt == "documents":
        document = b'{"text":%b}' % text_of("a word, ", 4000)
        for documents in (
            lists(MAX_INPUTS, document),
            b'[{"text":"x","y":%b}]' % filled(b"[]", BODY_BYTES - 100),
        ):
            yield f"documents {documents[:50]!r}", body_of(path, prompt, documents)
        yield "a query", b'{"documents":["x"],"query":%b}' % text_of("a word, ", BODY_BYTES - 100)
    yield "an unknown name", b'{"%b":1}' % (b"n" * BODY_BYTES)
    yield "many names", b"{%b}" % b",".join(b'"%d":1' % i for i in range(10**6))


async def post(
    gateway: RunningGateway,
    path: str,
    body: bytes,
    kind: str = "application/json",
    timeout_s: float = PATIENCE_S,
) -> tuple[int | None, bytes]:
    """Status and body, None if none has arrived after the timeout; sent and received on another
    thread."""

    def ask() -> tuple[int | None, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=timeout_s)
        with contextlib.closing(connection):
            try:
                connection.request("POST", path, body, {"content-type": kind})
                answer = connection.getresponse()
            except TimeoutError:
                return None, b""
            return answer.status, answer.read()

    return await asyncio.to_thread(ask)


@pytest.fixture(autouse=True)
def long_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes long prompts."""
    identity = msgspec.structs.replace(fake_engine.IDENTITY, max_model_len=MAX_MODEL_LEN)
    monkeypatch.setattr(fake_engine, "IDENTITY", identity)


QUICK: Final = "/v1/completions"
COUNTS: Final = ("/v1/messages/count_tokens", "/v1/responses/input_tokens")
LONG: Final = (*COUNTS, "/v1/score", "/v1/rerank", "/tokenize", "/detokenize")
"""They read bodies as another path does."""


def marked(path: str) -> Any:
    marks = pytest.mark.long if path in LONG else pytest.mark.slow
    return pytest.param(path, marks=() if path == QUICK else marks)


@pytest.mark.parametrize("path", [marked(path) for path in PATHS])
async def test_no_parameter_of_any_size_blocks_the_event_loop(
    start_gateway: StartGateway, path: str
) -> None:
    too_long = {}
    settings = {"max_body_bytes": MAX_BODY_BYTES, "embedding": EmbeddingModel(size=4)}
    async with (
        start_gateway(beside_stream(never_answer), **settings) as gateway,
        live_stream(gateway) as stream,
    ):
        for what, body in bodies(path):
            assert len(body) <= MAX_BODY_BYTES

            async def ask(body: bytes = body) -> None:
                status, answer = await post(gateway, path, body)
                assert status in (200, 400, 404, 504), answer[:300]
                assert len(answer) < 2000 or status == 200, answer[:300]

            if (longest_s := await stream.longest_during_s(ask)) > MAX_GAP_S:
                too_long[what] = longest_s
        assert too_long == {}


def answer_at_length(engine: FakeEngine, request: AddRequest) -> None:
    """A vector, or all tokens with their scores, in messages as large as those of an engine."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    if request.options.pooling is not None:
        vector = np.linspace(-1.0, 1.0, EMBEDDING_SIZE, dtype=np.float32)
        engine.send(
            EngineOutputs(
                finished=(FinishedRequest(request.handle, FinishReason.STOPPED, 0, pooled=vector),)
            )
        )
        return
    if sampling.prompt_logprobs is not None:
        for first in range(1, len(prompt), STEP_TOKENS):
            last = min(first + STEP_TOKENS, len(prompt))
            engine.send(
                EngineOutputs(logprobs=scores(request, first, last, sampling.prompt_logprobs))
            )
    num_tokens, scored = sampling.max_tokens or 0, None
    if sampling.logprobs is not None and num_tokens:
        scored = scores(request, len(prompt), len(prompt) + num_tokens, sampling.logprobs)
    engine.send_tokens(request, [TOKEN] * num_tokens, scored)
    engine.finish(request, FinishReason.LENGTH_CAPPED, num_output_tokens=num_tokens)


def scores(request: AddRequest, first: int, last: int, num_best: int) -> TokenLogprobs:
    number, listed = last - first, (last - first) * (1 + num_best)
    return TokenLogprobs(
        owners=np.full(number, request.handle, np.int32),
        positions=np.arange(first, last, dtype=np.int32),
        ranks=np.ones(number, np.int32),
        num_listed=np.full(number, 1 + num_best, np.int32),
        token_ids=np.resize(np.arange(2, 3 + num_best, dtype=np.int32), listed),
        logprobs=np.full(listed, -0.5, np.float32),
    )


STEP_TOKENS: Final = 2048
EMBEDDING_SIZE: Final = 8192
LONG_TEXT: Final = "a word, " * 500
LARGE_ANSWERS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "scores of prompts": (
        "/v1/completions",
        {"prompt": [[2 + i % 90 for i in range(1000)]] * 24, "prompt_logprobs": 20},
    ),
    "scores of an echoed prompt": (
        "/v1/completions",
        {"prompt": [2 + i % 90 for i in range(24_000)], "echo": True, "logprobs": 20},
    ),
    "echoes of a long prompt": (
        "/v1/completions",
        {"prompt": LONG_TEXT * 8, "echo": True, "n": 128, "max_tokens": 1},
    ),
    "scores of many samples": (
        "/v1/completions",
        {"prompt": "x", "n": 128, "max_tokens": 150, "logprobs": 20},
    ),
    "scores of many chats": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "x"}],
            **{"n": 128, "max_tokens": 150, "logprobs": True, "top_logprobs": 20},
        },
    ),
    "many vectors": ("/v1/embeddings", {"input": ["a word"] * 400}),
    "many cosines and texts": (
        "/v1/rerank",
        {"query": "x", "documents": [index * " " + "\n" * 800 for index in range(9)] * 227},
    ),
    "many vectors in base64": (
        "/v1/embeddings",
        {"input": ["a word"] * MAX_INPUTS, "encoding_format": "base64"},
    ),
}


@pytest.mark.parametrize("what", LARGE_ANSWERS)
async def test_no_large_answer_blocks_the_event_loop(
    start_gateway: StartGateway, what: str
) -> None:
    path, body = LARGE_ANSWERS[what]
    settings = {"max_body_bytes": MAX_BODY_BYTES, "embedding": EmbeddingModel(EMBEDDING_SIZE)}
    async with (
        start_gateway(beside_stream(answer_at_length), **settings) as gateway,
        live_stream(gateway) as stream,
    ):

        async def ask() -> None:
            status, answer = await post(gateway, path, json.dumps(body).encode())
            assert status == 200, answer[:300]
            assert len(answer) > MIN_LARGE_BYTES

        assert await stream.longest_during_s(ask) < MAX_GAP_S


def forms() -> Iterator[tuple[str, str, bytes]]:
    """What is large, the content type and the body of a form."""
    file = as_file(np.zeros(16_000, np.float32))
    most = "a word, " * (MAX_FIELD_BYTES // 8)
    yield "a prompt", *encode_form({"prompt": most, "language": "en"}, {"file": file})
    yield "a language", *encode_form({"language": most}, {"file": file})
    many = {f"field {number}": most for number in range(MAX_FIELDS - 1)}
    yield "many fields", *encode_form(many, {"file": file})
    yield "a field", *encode_form({"prompt": most * 256}, {"file": file})
    yield "parts", *encode_form({"prompt": ["x"] * 100_000}, {"file": file})
    yield "no file", *encode_form({}, {"file": b"R" * (25 << 20)})
    yield "a long file", *encode_form({}, {"file": as_file(np.zeros(12 << 20, np.float32))})
    head = b"--b\r\nContent-Disposition: form-data; name=" + b"n" * (25 << 20)
    yield "a head", "multipart/form-data; boundary=b", head
    yield "borders", "multipart/form-data; boundary=b", b"--b\r\n" * (4 << 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    ["/v1/audio/transcriptions", pytest.param("/v1/audio/translations", marks=pytest.mark.long)],
)
async def test_no_form_of_any_size_blocks_the_event_loop(
    start_gateway: StartGateway, tmp_path: Path, path: str
) -> None:
    save_whisper_tokenizer(tmp_path)
    save_whisper_settings(tmp_path)
    too_long = {}
    audio = AudioInput(sampling_rate=16_000, max_samples=480_000, num_tokens=1500)
    async with (
        start_gateway(
            beside_stream(never_answer), tokenizer=False, audio=audio, vocab_size=400
        ) as gateway,
        live_stream(gateway, path) as stream,
    ):
        for what, kind, body in forms():

            async def ask(kind: str = kind, body: bytes = body) -> None:
                status, answer = await post(gateway, path, body, kind, timeout_s=3.0)
                assert status in (None, 400, 413), answer[:300]
                assert len(answer) < 2000

            if (longest_s := await stream.longest_during_s(ask)) > MAX_GAP_S:
                too_long[what] = longest_s
        assert too_long == {}
