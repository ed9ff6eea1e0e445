"""Requests that no client should send, over raw sockets to a real gateway process: each gets the
right status, and all other clients are served as before."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.deployment import Deployment, wait_until
from tests.integration.test_serving import metrics

TIMEOUT_S = 60.0
BODY = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
MAX_GROWTH_BYTES = 200 << 20


def post(body: bytes, *headers: bytes, path: bytes = b"/v1/completions") -> bytes:
    lines = [b"POST %s HTTP/1.1" % path, b"Host: localhost", *headers]
    lines += [b"Content-Type: application/json", b"Content-Length: %d" % len(body), b""]
    return b"\r\n".join([*lines, body])


def chunked(*chunks: bytes) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    coded = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + coded


class Client:
    """One connection to a deployment."""

    def __init__(self, deployment: Deployment) -> None:
        host, _, port = deployment.url.removeprefix("http://").partition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
        self._file = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self, *, has_body: bool = True) -> tuple[int, dict[bytes, bytes], bytes]:
        """Status, headers and body of the next response. Raises ConnectionError if there is
        none."""
        status_line = self._file.readline()
        if not status_line:
            raise ConnectionError("closed without an answer")
        headers = {}
        while (line := self._file.readline().rstrip()) != b"":
            name, _, value = line.partition(b":")
            headers[name.lower()] = value.strip()
        length = int(headers.get(b"content-length", b"0")) if has_body else 0
        return int(status_line.split()[1]), headers, self._file.read(length)

    def final_answer(self, *, has_body: bool = True) -> tuple[int, dict[bytes, bytes], bytes]:
        """The next one that is not `100 Continue`."""
        while (answer := self.answer(has_body=has_body))[0] == 100:
            continue
        return answer

    def rest(self) -> bytes:
        """All data until the server closes the connection."""
        return self._file.read()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.socket.close()


def say(deployment: Deployment, data: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    with Client(deployment) as client:
        client.send(data)
        return client.answer()


class Others(threading.Thread):
    """Streams, one after the other, until told to stop.

    ends: the last bytes of each.
    """

    def __init__(self, deployment: Deployment) -> None:
        super().__init__()
        self.must_stop = threading.Event()
        self.ends: list[bytes] = []
        self._deployment = deployment

    def run(self) -> None:
        asked = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True}
        while not self.must_stop.is_set():
            with Client(self._deployment) as client:
                client.send(post(json.dumps(asked).encode(), b"Connection: close"))
                client.answer(has_body=False)
                self.ends.append(client.rest()[-40:])


@pytest.fixture(scope="module", autouse=True)
def others_are_served(deployment: Deployment) -> Iterator[None]:
    """Streams that run during all these tests end as usual, the gateway's memory does not grow, and
    no request remains."""
    gateway = deployment.members["gateway"]
    before = gateway.memory_info().rss
    others = Others(deployment)
    others.start()
    yield
    others.must_stop.set()
    others.join()
    assert all(b"data: [DONE]" in end for end in others.ends)
    wait_until(lambda: metrics(deployment)["longshore_live_requests"] == 0)
    assert gateway.memory_info().rss - before < MAX_GROWTH_BYTES
    assert "Traceback" not in deployment.output
    assert say(deployment, post(BODY))[0] == 200


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
SMUGGLED = b"0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + SMUGGLED,
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n" + SMUGGLED,
        HEAD + b"Transfer-Encoding: xchunked\r\n\r\n" + SMUGGLED,
        HEAD + b"Transfer-Encoding : chunked\r\n\r\n" + SMUGGLED,
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Content-Length: 9999999999999999999999\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: \x00\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: b\r\n c\r\n\r\n",
        b"GET /health HTTP/1.1\nHost: localhost\n\n",
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + SMUGGLED,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=lambda data: repr(data[36:70]),
)
def test_what_is_no_http_is_rejected_once_and_the_connection_ends(
    deployment: Deployment, request_bytes: bytes
) -> None:
    with Client(deployment) as client:
        client.send(request_bytes)
        status, _, _ = client.answer()
        assert status == 400
        assert client.rest() == b""  # smuggled requests are not answered


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt":"\xff"}', None),
        (b'{"prompt":"\\ud800"}', None),
        (b'{"prompt":"\\udc00\\ud800"}', None),
        (b'{"prompt":"x","temperature":NaN}', None),
        (b'{"prompt":"x","temperature":-Infinity}', None),
        (b'{"prompt":"x","temperature":1e999}', "temperature"),
        (b'{"prompt":' + b"[" * 200_000, None),
        (b'{"prompt":' + b"[" * 50_000 + b"]" * 50_000 + b"}", None),
        (b'{"prompt":"x","tools":' + b"[" * 50_000 + b"]" * 50_000 + b"}", None),
        (b'{"prompt":"x","stop":["a"' + b',"a"' * 10**6 + b"]}", "stop"),
        (b'{"prompt":["x"' + b',"x"' * 10**6 + b"]}", "prompt"),
        (b'{"prompt":[5' + b",5" * 10**6 + b"]}", "prompt"),
        (
            json.dumps({"prompt": "x", "logit_bias": dict.fromkeys(range(10**5), 1)}).encode(),
            "logit_bias",
        ),
        (json.dumps(dict.fromkeys(map(str, range(10**5)))).encode(), None),
        (b'{"prompt":"x","n":100000000000000}', "n"),
        (b'{"prompt":"x","n":-1}', "n"),
        (b'{"prompt":"x","max_tokens":-1}', "max_tokens"),
        (b'{"prompt":"x","max_tokens":true}', "max_tokens"),
        (b'{"prompt":"x","max_tokens":1.5}', "max_tokens"),
        (b'{"prompt":"x","max_tokens":"1.5"}', "max_tokens"),
        (b'{"prompt":[-1]}', "prompt"),
        (b'{"prompt":[true]}', "prompt"),
        (b'{"prompt":[' + b"1" * 5000 + b"]}", "prompt"),
        (b'{"prompt":"x","seed":' + b"9" * 30 + b"}", "seed"),
        (b'{"prompt":"x","stream":2}', "stream"),
        (b"", None),
        (b"null", None),
    ],
    ids=lambda value: repr(value[:40]) if isinstance(value, bytes) else "",
)
def test_what_is_no_request_is_a_400_that_names_the_field(
    deployment: Deployment, body: bytes, param: str | None
) -> None:
    status, _, answer = say(deployment, post(body))
    assert status == 400
    error = json.loads(answer)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert len(answer) < 2000  # the response does not contain the request


def test_of_equal_keys_the_last_one_counts(deployment: Deployment) -> None:
    body = b'{"prompt":"x","max_tokens":9,"ignore_eos":true,"max_tokens":3}'
    status, _, answer = say(deployment, post(body))
    assert status == 200
    assert json.loads(answer)["usage"]["completion_tokens"] == 3


def test_millions_of_values_that_nobody_reads_stay_bytes(deployment: Deployment) -> None:
    ignored = b"[" + b"[]," * 4_000_000 + b"[]]"
    body = b'{"prompt":"x","max_tokens":1,"metadata":' + ignored + b"}"
    assert say(deployment, post(body))[0] == 200


@pytest.mark.parametrize(
    ("kind", "is_taken"),
    [
        (b"application/json; charset=utf-8", True),
        (b"APPLICATION/JSON", True),
        (b"text/plain", False),
        (b"application/x-www-form-urlencoded", False),
        (b"multipart/form-data; boundary=a", False),
        (b"", False),
    ],
)
def test_a_body_that_is_not_said_to_be_json_is_a_415(
    deployment: Deployment, kind: bytes, is_taken: bool
) -> None:
    for path, body in ((b"/v1/completions", BODY), (b"/tokenize", b'{"prompt":"x"}')):
        head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: %s\r\n" % (path, kind)
        request = head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        status, _, answer = say(deployment, request)
        assert status == (200 if is_taken else 415)
        assert is_taken or json.loads(answer)["error"]["code"] == "unsupported_media_type"


def test_a_body_beyond_the_limit_is_rejected_before_it_has_come(deployment: Deployment) -> None:
    with Client(deployment) as client:
        client.send(HEAD + b"Content-Type: application/json\r\nContent-Length: 99999999\r\n\r\n")
        assert client.answer()[0] == 413
    with Client(deployment) as client:
        client.send(chunked(*[b"a" * (1 << 20)] * 20))
        assert client.answer()[0] == 413


def test_a_chunked_body_is_a_body(deployment: Deployment) -> None:
    assert say(deployment, chunked(BODY[:5], BODY[5:]))[0] == 200


@pytest.mark.parametrize("sent", [HEAD, post(BODY)[:-5], chunked(BODY)[:-20]])
def test_a_client_that_goes_away_halfway_leaves_nothing(
    deployment: Deployment, sent: bytes
) -> None:
    with Client(deployment) as client:
        client.send(sent)
        client.socket.shutdown(socket.SHUT_WR)
        assert client.rest() == b""


def test_a_client_that_resets_the_connection_mid_answer_is_aborted(deployment: Deployment) -> None:
    asked = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with Client(deployment) as client:
        client.send(post(json.dumps(asked).encode()))
        assert client.answer(has_body=False)[0] == 200
        client.socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00"
        )
    wait_until(lambda: metrics(deployment)["longshore_live_requests"] <= 1)


GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "path", [b"/v1/completions", b"/v1/chat/completions", b"/v1/messages", b"/v1/responses"]
)
def test_pipelined_requests_of_a_half_closed_connection_are_answered(
    deployment: Deployment, tiny_model: tuple[Path, Any], path: bytes
) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    bodies = {
        b"/v1/completions": {"prompt": "x", "max_tokens": 2},
        b"/v1/messages": {"model": tiny_model[0].name, **chat},
        b"/v1/responses": {"input": "x", "max_output_tokens": 2},
    }
    request = post(json.dumps(bodies.get(path, chat)).encode(), path=path)
    with Client(deployment) as client:
        client.send(request * 3 + GET_HEALTH)
        client.socket.shutdown(socket.SHUT_WR)
        assert [client.final_answer()[0] for _ in range(3)] == [200] * 3
        status, headers, body_ = client.final_answer()
        assert (status, headers[b"connection"], body_) == (200, b"close", b"alive\n")
        assert client.rest() == b""


def test_a_half_closed_stream_ends_as_usual_and_a_closed_one_is_aborted(
    deployment: Deployment,
) -> None:
    asked = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with Client(deployment) as client:
        client.send(post(json.dumps(asked).encode()))
        client.socket.shutdown(socket.SHUT_WR)
        assert client.final_answer(has_body=False)[0] == 200
        assert b"data: [DONE]" in client.rest()[-40:]
    whole = post(json.dumps(asked | {"max_tokens": 4000, "stream": False}).encode())
    with Client(deployment) as client:
        client.send(whole)
    wait_until(lambda: metrics(deployment)["longshore_live_requests"] <= 1)


def test_a_page_of_another_site_cannot_read_this_server(deployment: Deployment) -> None:
    """Its name resolves to this address (DNS rebinding)."""
    for request in (GET_HEALTH, post(BODY), GET_HEALTH.replace(b"/health", b"/metrics")):
        evil = request.replace(b"Host: localhost", b"Host: evil.example:8000")
        status, _, answer = say(deployment, evil)
        assert status == 403
        assert "--allowed-hosts" in json.loads(answer)["error"]["message"]
    name = socket.gethostname().encode()
    assert say(deployment, GET_HEALTH.replace(b"localhost", name))[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        (b"GET", b"/v1/completions", b"POST"),
        (b"HEAD", b"/v1/chat/completions", b"POST"),
        (b"OPTIONS", b"/v1/chat/completions", b"POST"),
        (b"DELETE", b"/v1/models/x", b"GET, HEAD"),
        (b"PUT", b"/tokenize", b"POST"),
        (b"POST", b"/health", b"GET, HEAD"),
    ],
)
def test_another_method_is_a_405_that_says_which_ones_there_are(
    deployment: Deployment, method: bytes, path: bytes, allowed: bytes
) -> None:
    with Client(deployment) as client:
        client.send(b"%s %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % (method, path))
        status, headers, body = client.answer(has_body=method != b"HEAD")
        assert status == 405
        assert sorted(headers[b"allow"].split(b", ")) == allowed.split(b", ")
        assert method == b"HEAD" or path.decode() in json.loads(body)["error"]["message"]
        assert b"access-control-allow-origin" not in headers  # closed, unless it is opened


def test_head_has_the_headers_of_get_and_no_body(deployment: Deployment) -> None:
    with Client(deployment) as client:
        client.send(b"HEAD /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        status, headers, _ = client.answer(has_body=False)
        assert (status, headers[b"content-length"]) == (200, b"6")
        assert client.rest() == b""


def test_http_1_0_is_answered_and_the_connection_ends(deployment: Deployment) -> None:
    with Client(deployment) as client:
        client.send(post(BODY).replace(b"HTTP/1.1", b"HTTP/1.0"))
        status, _, body = client.answer()
        assert status == 200
        assert json.loads(body)["choices"]
        assert client.rest() == b""


def test_a_connection_can_be_used_again_after_every_kind_of_rejection(
    deployment: Deployment,
) -> None:
    wrong: list[tuple[bytes, int]] = [
        (post(b"{"), 400),
        (post(b'{"prompt":"x","model":"other"}'), 404),
        (post(BODY, path=b"/v1/moderations"), 404),
        (b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (post(BODY).replace(b"application/json", b"text/plain"), 415),
        (post(b'{"prompt":"' + b"x" * (17 << 20) + b'"}'), 413),
    ]
    with Client(deployment) as client:
        for request, expected in wrong:
            client.send(request)
            assert client.answer()[0] == expected
            client.send(post(BODY))
            assert client.answer()[0] == 200


def test_paths_of_any_bytes_are_a_404(deployment: Deployment) -> None:
    for path in (b"/%ff%00%0d%0a", b"/v1/models/%ff%0d%0aX:%20y", b"/v1//models", b"//v1/models"):
        request = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path
        status, headers, body = say(deployment, request)
        assert status == 404
        assert b"x" not in headers
        assert json.loads(body)["error"]["type"] == "not_found_error"


def test_a_template_s_endless_text_is_not_reached_by_a_request(
    deployment: Deployment, tiny_model: tuple[Path, Any]
) -> None:
    """Templates come only from the model's folder and from the operator."""
    asked = {"messages": [{"role": "user", "content": "{{ 9 * 9 }}"}], "chat_template": "{{ 1 }}"}
    status, _, body = say(
        deployment, post(json.dumps(asked).encode(), path=b"/v1/chat/completions")
    )
    assert status == 400
    assert json.loads(body)["error"]["param"] == "chat_template"
    del asked["chat_template"]
    status, _, body = say(deployment, post(json.dumps(asked).encode(), path=b"/tokenize"))
    assert json.loads(body)["count"] == len("<s>[user]{{ 9 * 9 }}</s>[assistant]") - 2 - 3
