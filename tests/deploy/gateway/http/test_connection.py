"""What a connection may send before the gateway handles a request."""

import asyncio
import contextlib
import json
from collections.abc import Callable

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from longshore.deploy.gateway import process
from longshore.deploy.gateway.http import connection
from longshore.deploy.gateway.http.connection import (
    MAX_HEAD_BYTES,
    MAX_URL_BYTES,
    MIN_BODY_BYTES,
    BoundedConnection,
)
from longshore.protocol.logs.limits import LogLimit
from tests.deploy.gateway.conftest import RunningGateway, StartGateway
from tests.deploy.gateway.fake_engine import echo, never_answer, tokens_of

TIMEOUT_S = 60
CUT_OFF = b"reset"
BODY = json.dumps({"model": "tiny", "prompt": "one", "max_tokens": 3}).encode()
POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
)


async def exchange(gateway: RunningGateway, *parts: bytes) -> bytes:
    """All data from the server until it closes the connection, or CUT_OFF. The result is CUT_OFF if
    the server closed the connection with unread data, because the reset may overtake the response.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            try:
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                return await reader.read()
            except ConnectionError:
                return CUT_OFF
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("start", "flood"),
    [
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: ", b"a" * 4096),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"a: b\r\n" * 600),
        (b"GET /" + b"a" * 1000, b"a" * 4096),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n",
            b"a: b\r\n" * 600,
        ),
    ],
    ids=["one header", "many headers", "url", "trailers"],
)
async def test_endless_head_is_cut_off(
    start_gateway: StartGateway, start: bytes, flood: bytes
) -> None:
    status = b"HTTP/1.1 414" if start.startswith(b"GET /a") else b"HTTP/1.1 431"
    async with start_gateway() as gateway:
        num_floods = 4 * MAX_HEAD_BYTES // len(flood)
        answer = await exchange(gateway, start, *[flood] * num_floods)
        assert answer == CUT_OFF or answer.startswith(status)
        assert (await gateway.get("/health")).status == 200


def head_of(size: int, url: bytes = b"/health") -> bytes:
    """A complete request without a body."""
    lines = [b"GET %s HTTP/1.1" % url, b"Host: localhost", b"Connection: close", b"A: "]
    head = b"\r\n".join(lines)
    return head + b"a" * (size - len(head) - 4) + b"\r\n\r\n"


LONGEST_URL = b"/health?" + b"a" * (MAX_URL_BYTES - len(b"/health?"))


@pytest.mark.parametrize(
    ("request_", "status", "error"),
    [
        (head_of(MAX_HEAD_BYTES - 100), 200, b""),
        (head_of(MAX_HEAD_BYTES + 100), 431, b"the URL and the header fields are larger than"),
        (head_of(2 * MAX_URL_BYTES, LONGEST_URL), 200, b""),
        (head_of(2 * MAX_URL_BYTES, LONGEST_URL + b"a"), 414, b"the URL is longer than 8192"),
    ],
    ids=["head that fits", "large head", "URL that fits", "long URL"],
)
async def test_head_that_arrives_at_once_has_the_same_limits(
    start_gateway: StartGateway,
    request_: bytes,
    status: int,
    error: bytes,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "_rejections", LogLimit(connection.logger))
    async with start_gateway() as gateway:
        answer = await exchange(gateway, request_)
        logged = [each.getMessage() for each in caplog.records if "rejected" in each.getMessage()]
        assert len(logged) == (status != 200)
        assert all(error.decode() in line for line in logged)
        if status != 200 and answer == CUT_OFF:
            return
        assert answer.startswith(b"HTTP/1.1 %d" % status)
        assert error in answer
        if error:
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == (
                "invalid_request_error"
            )


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_for_http_1_0_ends_with_the_connection_and_has_no_chunks(
    start_gateway: StartGateway, path: str
) -> None:
    prompt: dict[str, object] = {"prompt": "one"}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": "one"}]}
    body = json.dumps({"model": "tiny", "max_tokens": 3, "stream": True, **prompt}).encode()

    def post(version: bytes, *headers: bytes) -> bytes:
        lines = [b"POST %s HTTP/%s" % (path.encode(), version), b"Host: localhost", *headers]
        lines += [b"Content-Type: application/json", b"Content-Length: %d" % len(body), b""]
        return b"\r\n".join([*lines, body])

    async with start_gateway() as gateway:
        old = await exchange(gateway, post(b"1.0", b"Connection: keep-alive"))
        new = await exchange(gateway, post(b"1.1", b"Connection: close"))
        plain = await exchange(gateway, POST.replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, events = old.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    lines = events.split(b"\n\n")
    assert lines[-2:] == [b"data: [DONE]", b""]
    assert all(json.loads(line.removeprefix(b"data: ")) for line in lines[:-2])
    new_head, _, chunks = new.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in new_head.lower()
    assert chunks.endswith(b"0\r\n\r\n")
    assert b"data: [DONE]" in chunks
    assert json.loads(plain.partition(b"\r\n\r\n")[2])["choices"]


async def test_connections_without_descriptors_are_refused_and_the_others_go_on(
    start_gateway: StartGateway,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(process, "connections_left", lambda num_processes: 2)
    monkeypatch.setattr(connection, "MAX_REFUSED", 1)
    async with start_gateway() as gateway:
        open_ = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(2)]
        async with asyncio.timeout(TIMEOUT_S):
            for reader, writer in open_:  # a response shows that the gateway has accepted it
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert (await reader.readuntil(b"alive\n")).startswith(b"HTTP/1.1 200")
            answered, aborted = [
                await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(2)
            ]
            with contextlib.suppress(ConnectionError):
                assert await aborted[0].read() == b""
            answered[1].write(POST)
            answer = await answered[0].read()
            for reader, writer in open_:
                writer.write(POST)
                assert (await reader.readuntil(b"}]")).startswith(b"HTTP/1.1 200")
        for _, writer in (*open_, answered, aborted):
            writer.close()
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"too many connections" in answer
    (line,) = [record for record in caplog.records if "refusing connections" in record.message]
    assert "2 are open" in line.message


@pytest.mark.parametrize(
    "said",
    [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n"],
    ids=["nothing", "half a head"],
)
async def test_connection_that_asks_for_nothing_makes_room(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    async with start_gateway() as gateway:
        assert await exchange(gateway, said) == b""


@pytest.mark.parametrize("how_much", ["nothing", "drops"])
async def test_body_that_does_not_come_makes_room(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch, how_much: str
) -> None:
    monkeypatch.setattr(connection, "BODY_TIMEOUT_S", 0.1)
    head = POST.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    async with start_gateway() as gateway:
        answer = await exchange(gateway, head, b"" if how_much == "nothing" else BODY[:20])
        assert answer.startswith(b"HTTP/1.1 408")
        assert gateway.engine.requests == []


async def test_body_that_comes_is_waited_for(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BODY_TIMEOUT_S", 0.1)
    checks = []
    check = connection.BoundedConnection._check_body
    checked = asyncio.Event()

    def noted_check(self: connection.BoundedConnection) -> None:
        checks.append(self)
        checked.set()
        check(self)

    monkeypatch.setattr(connection.BoundedConnection, "_check_body", noted_check)
    body = json.dumps({"model": "tiny", "prompt": "one", "user": "u" * 8 * MIN_BODY_BYTES}).encode()
    head = POST.partition(b"Content-Length")[0] + b"Content-Length: %d\r\n\r\n" % len(body)
    async with start_gateway(max_body_bytes=1 << 20) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        async with asyncio.timeout(TIMEOUT_S):
            writer.write(head)
            for start in range(0, 4 * MIN_BODY_BYTES, MIN_BODY_BYTES):
                writer.write(body[start : start + MIN_BODY_BYTES])
                checked.clear()
                await checked.wait()
            writer.write(body[4 * MIN_BODY_BYTES :])
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
    assert len(checks) == 4


async def test_large_body_is_no_large_head(start_gateway: StartGateway) -> None:
    async with start_gateway(max_body_bytes=1 << 20) as gateway:
        text = "one " * MAX_HEAD_BYTES
        body = {"model": "tiny", "prompt": text, "truncate_prompt_tokens": 8}
        assert (await gateway.post("/v1/completions", body)).status == 200


def get(path: bytes, *headers: bytes, version: bytes = b"1.1") -> bytes:
    lines = [b"GET %s HTTP/%s" % (path, version), b"Host: localhost", *headers, b"", b""]
    return b"\r\n".join(lines)


def post(body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST /v1/completions HTTP/1.1", b"Host: localhost", *headers]
    lines += [b"Content-Type: application/json", b"Content-Length: %d" % len(body), b""]
    return b"\r\n".join([*lines, body])


LAST = get(b"/health", b"Connection: close")


async def test_pipelined_requests_are_answered_in_order(start_gateway: StartGateway) -> None:
    stream = json.dumps({"prompt": "one", "max_tokens": 3, "stream": True}).encode()
    sent = [POST, get(b"/v1/models"), post(stream), get(b"/none"), LAST]
    async with start_gateway() as gateway:
        at_once = await exchange(gateway, b"".join(sent))
        in_pieces = await exchange(gateway, *[b"".join(sent)[n : n + 7] for n in range(0, 2000, 7)])
    for answer in (at_once, in_pieces):
        marks = (b'"text_completion"', b'"list"', b"data: [DONE]", b"not_found", b"alive")
        places = [answer.index(mark) for mark in marks]
        assert places == sorted(places)
        assert answer.count(b"HTTP/1.1 200") == 4
        assert answer.count(b"HTTP/1.1 404") == 1
        assert answer.count(b"connection: close") == 1


@pytest.mark.parametrize(
    ("after", "num_responses"),
    [
        (get(b"/health") * 100, 1 + connection.MAX_PIPELINED),
        (b"this is no HTTP\r\n\r\n", 1),
        (get(b"/health", b"Host: localhost"), 1),
        (get(b"/" + b"a" * MAX_URL_BYTES), 1),
        (get(b"/health") + get(b"/health", b"A: " + b"a" * MAX_HEAD_BYTES), 2),
        (get(b"/health", version=b"0.9"), 1),
    ],
    ids=["too many", "garbage", "two hosts", "long URL", "large head", "old version"],
)
async def test_what_cannot_wait_is_unanswered_and_the_last_response_says_so(
    start_gateway: StartGateway, after: bytes, num_responses: int
) -> None:
    async with start_gateway() as gateway:
        answer = await exchange(gateway, POST + after)
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.count(b"HTTP/1.1 200") == answer.count(b"HTTP/1.1 ") == num_responses
    *_, last = answer.split(b"HTTP/1.1 ")
    assert b"connection: close" in last
    assert answer.count(b"connection: close") == 1


async def test_what_comes_during_a_stream_does_not_enter_it(start_gateway: StartGateway) -> None:
    stream = json.dumps({"prompt": "one", "max_tokens": 3, "stream": True}).encode()
    async with start_gateway() as gateway:
        answer = await exchange(gateway, post(stream) + b"this is no HTTP\r\n\r\n")
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_pipelined_body_that_is_large_or_late_is_answered_in_turn(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BODY_TIMEOUT_S", 0.1)
    large = post(b"a" * (connection.MAX_PIPELINED_BYTES + 1))
    async with start_gateway(max_body_bytes=1 << 20) as gateway:
        answer = await exchange(gateway, POST + large + LAST)
        assert answer == CUT_OFF or answer.index(b"HTTP/1.1 200") < answer.index(b"HTTP/1.1 413")
        assert b"alive" not in answer
    async with start_gateway(never_answer) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(POST + POST[:-5])
        await gateway.engine.wait_for(lambda: len(gateway.engine.requests) == 1)
        await five_timeouts(0.1)
        (request,) = gateway.engine.requests
        echo(gateway.engine, request)
        async with asyncio.timeout(TIMEOUT_S):
            answer = await reader.read()
        writer.close()
    assert answer.index(b"HTTP/1.1 200") < answer.index(b"HTTP/1.1 408")


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_client_that_sends_no_more_gets_its_responses(
    start_gateway: StartGateway, is_stream: bool, version: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "FIRST_PROBE_S", 0.01)
    monkeypatch.setattr(connection, "PROBE_INTERVAL_S", 0.01)
    body = json.dumps({"prompt": "one", "max_tokens": 3, "stream": is_stream}).encode()
    sent = post(body).replace(b"HTTP/1.1", b"HTTP/" + version)
    is_new = version == b"1.1"
    async with start_gateway(never_answer) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(sent + (get(b"/health") if is_new else b""))
        writer.write_eof()
        await gateway.engine.wait_for(lambda: len(gateway.engine.requests) == 1)
        await five_timeouts()
        assert gateway.engine.aborted == []
        (request,) = gateway.engine.requests
        echo(gateway.engine, request)
        async with asyncio.timeout(TIMEOUT_S):
            answer = await reader.read()
        writer.close()
    assert (b"HTTP/1.1 100 Continue" in answer) == is_new
    assert answer.count(b"HTTP/1.1 200") == 1 + is_new
    assert (b"alive" in answer) == is_new
    assert answer.count(b"connection: close") == 1
    assert (b"data: [DONE]" in answer) == is_stream


async def test_a_client_of_http_1_0_that_sends_no_more_waits_for_so_long(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be sent to find out whether it has gone."""
    monkeypatch.setattr(connection, "MAX_UNPROBED_S", 0.1)
    async with start_gateway(never_answer) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(POST.replace(b"HTTP/1.1", b"HTTP/1.0"))
        writer.write_eof()
        await gateway.engine.wait_for(lambda: len(gateway.engine.aborted) == 1)
        writer.close()


@pytest.mark.parametrize("tokens", [0, 1], ids=["before the response", "in a stream"])
async def test_a_client_that_closes_its_connection_is_found_without_a_token(
    start_gateway: StartGateway, tokens: int
) -> None:
    async with start_gateway(never_answer) as gateway:
        body = json.dumps({"prompt": "one", "max_tokens": 3, "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(post(body))
        await gateway.engine.wait_for(lambda: len(gateway.engine.requests) == 1)
        (request,) = gateway.engine.requests
        if tokens:
            gateway.engine.send(tokens_of(request, [4]))
            await reader.readuntil(b"data: ")
        writer.close()
        await gateway.engine.wait_for(lambda: len(gateway.engine.aborted) == 1)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (b"GET /health\r\n\r\n", b"HTTP/0.9 is not supported"),
        (get(b"/health", version=b"2.0"), b"HTTP/2.0 is not supported"),
        (b"GET /health HTTP/1.1\r\n\r\n", b"one Host header"),
        (get(b"/health", b"Host: other"), b"one Host header"),
        (get(b"/health", b"Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n", b"transfer coding"),
        (get(b"/health", b"Transfer-Encoding: chunked", version=b"1.0"), b"transfer coding"),
    ],
    ids=lambda value: repr(value[:40]),
)
async def test_a_head_that_other_servers_may_read_otherwise_is_rejected(
    start_gateway: StartGateway, request_: bytes, reason: bytes
) -> None:
    async with start_gateway() as gateway:
        answer = await exchange(gateway, request_)
    assert answer.startswith(b"HTTP/1.1 400")
    assert reason in answer


async def test_connect_is_not_allowed(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        answer = await exchange(gateway, b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 405")


async def test_an_offer_to_upgrade_is_ignored_and_the_body_is_read(
    start_gateway: StartGateway,
) -> None:
    """As Java's client makes it with every request."""
    offer = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AA")
    chunked = post(BODY, *offer).partition(b"Content-Length")[0] + (
        b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    )
    async with start_gateway() as gateway:
        for request in (post(BODY, *offer), chunked):
            for parts in ((request + LAST,), (request[:-20], request[-20:], LAST)):
                answer = await exchange(gateway, *parts)
                assert answer.count(b"HTTP/1.1 200") == 2
                assert b'"text_completion"' in answer
                assert b"alive" in answer


async def test_a_whole_url_is_for_its_own_host(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        ours = get(b"http://127.0.0.1:1/health", b"Connection: close")
        assert (await exchange(gateway, ours)).startswith(b"HTTP/1.1 200")
        other = get(b"http://evil.example/health", b"Connection: close")
        assert (await exchange(gateway, other)).startswith(b"HTTP/1.1 403")


async def test_a_compressed_body_is_a_415(start_gateway: StartGateway) -> None:
    def sent(coding: bytes) -> bytes:
        return post(BODY, b"Content-Encoding: " + coding, b"Connection: close")

    async with start_gateway() as gateway:
        for path in (b"/v1/completions", b"/v1/messages", b"/v1/responses", b"/tokenize"):
            for coding in (b"gzip", b"deflate, identity", b"br"):
                request = sent(coding).replace(b"/v1/completions", path)
                answer = await exchange(gateway, request)
                assert answer.startswith(b"HTTP/1.1 415")
                assert b"content encoding " + coding in answer
        assert (await exchange(gateway, sent(b"Identity"))).startswith(b"HTTP/1.1 200")


async def test_requests_one_after_the_other_share_a_connection(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway() as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        async with asyncio.timeout(TIMEOUT_S):
            for _ in range(3):
                writer.write(POST)
                head = await reader.readuntil(b"\r\n\r\n")
                (length,) = (
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                )
                assert json.loads(await reader.readexactly(length))["choices"]
        writer.close()


async def test_client_that_pipelined_and_goes_away_is_aborted(start_gateway: StartGateway) -> None:
    async with start_gateway(never_answer) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(POST + POST)
        await gateway.engine.wait_for(lambda: len(gateway.engine.requests) == 1)
        writer.write(POST)
        writer.close()
        await gateway.engine.wait_for(lambda: len(gateway.engine.aborted) == 1)


class Unread(asyncio.Transport):
    """A transport whose client has read as much as `sizes` say, in turn, and then nothing more."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self._is_closing = False
        self._sizes = sizes
        self.is_dropped = asyncio.Event()

    def get_write_buffer_size(self) -> int:
        return self._sizes.pop(0) if len(self._sizes) > 1 else self._sizes[0]

    def is_closing(self) -> bool:
        return self._is_closing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def close(self) -> None:
        self._is_closing = True

    def abort(self) -> None:
        self.sizes_left = len(self._sizes)
        self.is_dropped.set()


def connected(client: Unread) -> BoundedConnection:
    made = BoundedConnection(
        uvicorn.Config(never_called, ws="none"),
        uvicorn.server.ServerState(),
        {},
        asyncio.get_running_loop(),
        unread_timeout_s=0.01,
        max_connections=lambda: 1,
    )
    made.connection_made(client)
    return made


async def five_timeouts(timeout_s: float = 0.01) -> None:
    passed = asyncio.Event()
    asyncio.get_running_loop().call_later(5 * timeout_s, passed.set)
    await passed.wait()


def fill(made: BoundedConnection) -> None:
    made.pause_writing()


def answer(made: BoundedConnection) -> None:
    """With less data than fills the connection."""
    made.on_response_complete()


def refuse(made: BoundedConnection) -> None:
    made.send_400_response("that is no HTTP")


def flood(made: BoundedConnection) -> None:
    made.data_received(b"GET / HTTP/1.1\r\nA: " + b"a" * MAX_HEAD_BYTES)


@pytest.mark.parametrize("write", [fill, answer, refuse, flood])
async def test_client_is_dropped_when_it_reads_nothing_not_when_it_reads_slowly(
    write: Callable[[BoundedConnection], None],
) -> None:
    client = Unread([9, 7, 4, 4])
    made = connected(client)
    write(made)
    async with asyncio.timeout(TIMEOUT_S):
        await client.is_dropped.wait()
    assert client.sizes_left == 1  # it was checked until the client no longer read
    made.connection_lost(ConnectionResetError())


async def test_client_that_has_read_is_watched_no_more() -> None:
    resumed, finished, asking = Unread([9]), Unread([9, 4, 0, 9]), Unread([9])
    clients = (resumed, finished, asking)
    made = [connected(each) for each in clients]
    made[0].pause_writing()
    made[0].resume_writing()
    made[1].on_response_complete()
    made[2].on_response_complete()
    made[2].on_message_begin()
    await five_timeouts()
    for client, each in zip(clients, made, strict=True):
        assert not client.is_dropped.is_set()
        each.connection_lost(ConnectionResetError())


async def test_the_rest_of_an_answer_is_watched_when_there_is_room_again() -> None:
    client = Unread([9])
    made = connected(client)
    made.pause_writing()
    client.close()
    made.resume_writing()
    async with asyncio.timeout(TIMEOUT_S):
        await client.is_dropped.wait()
    made.connection_lost(ConnectionResetError())


async def test_client_that_has_gone_is_watched_no_more() -> None:
    client = Unread([9])
    made = connected(client)
    made.pause_writing()
    made.connection_lost(ConnectionResetError())
    await five_timeouts()
    assert not client.is_dropped.is_set()


async def never_called(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("no request was sent")
