"""Servers that fail: an operation is a miss, the circuit breaker opens, and closes again."""

import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from longshore.connectors.offloading.disk.results import Outcome
from longshore.connectors.offloading.remote.address import remote_address
from longshore.connectors.offloading.remote.backend import open_backend
from longshore.connectors.offloading.remote.breaker import BreakerState
from longshore.connectors.offloading.remote.store import RemoteStore
from tests.connectors.offloading.disk.stores import expected, key
from tests.connectors.offloading.remote.servers import (
    PATIENCE_S,
    Liar,
    RedisServer,
    S3Server,
    free_port,
    sends,
    wait_until,
)
from tests.connectors.offloading.remote.stores import get, open_remote, put, value_names

KEYS = [key(number) for number in range(12)]

QUICK = {"timeout_s": 0.1, "failure_threshold": 3, "retry_s": 0.2}


@pytest.fixture(params=[pytest.param("redis", marks=pytest.mark.services), "s3"])
def own_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer | S3Server]:
    """A server of this test, to be damaged."""
    with (
        RedisServer(tmp_path_factory.mktemp("r")) if request.param == "redis" else S3Server()
    ) as server:
        yield server


def assert_works_again(store: RemoteStore) -> None:
    def works() -> bool:
        is_written = put(store, KEYS) == [Outcome.OK] * len(KEYS)
        return is_written and get(store, KEYS) == expected(KEYS)

    wait_until(works, "the breakers close")
    stats = store.stats()
    assert (stats.reads, stats.writes) == (BreakerState.CLOSED, BreakerState.CLOSED)


@pytest.mark.parametrize("fault", ["hang", "die"])
def test_a_server_that_fails_is_a_miss_until_it_works_again(
    own_server: RedisServer | S3Server, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    store = open_remote(own_server, **QUICK | {"timeout_s": 0.5})
    put(store, KEYS)
    assert get(store, KEYS) == expected(KEYS)
    (own_server.stop if fault == "hang" else own_server.kill)()
    assert set(get(store, KEYS).values()) == {Outcome.FAILED}
    while store.stats().reads is BreakerState.CLOSED:
        get(store, KEYS)
    num_failed = store.stats().num_failed
    for _ in range(3):
        assert set(get(store, KEYS).values()) <= {Outcome.FAILED}
        assert store.exists(KEYS, leading=True) == [False] * len(KEYS)
    stats = store.stats()
    assert stats.num_rejected > 0
    assert stats.num_opened >= 1
    assert stats.num_failed <= num_failed + 6, "only a probe asks the server now and then"
    assert stats.bytes_in_flight == 0
    assert put(store, [key(100 + number) for number in range(4)]) == [Outcome.FAILED] * 4
    assert "is not asked for a while; its blocks are misses until an attempt" in caplog.text
    if fault == "hang":
        own_server.go_on()
    elif isinstance(own_server, RedisServer):
        own_server.restart()
    else:
        store.close()
        return  # moto has lost its bucket
    assert_works_again(store)
    assert "reads work again" in caplog.text
    store.close()


def test_a_server_that_refuses_connections_is_a_warning_at_startup(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for url, options in (
        (f"redis://127.0.0.1:{free_port()}/0", {}),
        ("unix:///no/such/socket", {}),
        (
            "s3://kv-blocks",
            {"endpoint": f"http://127.0.0.1:{free_port()}", "skip_signature": "true"},
        ),
    ):
        caplog.clear()
        store = open_remote(_Nowhere(), url=url, options=options, **QUICK)
        assert "writes fail: " in caplog.text
        assert store.exists(KEYS) == [False] * len(KEYS)
        assert put(store, KEYS[:2]) == [Outcome.FAILED] * 2
        assert set(get(store, KEYS[:2]).values()) == {Outcome.FAILED}
        store.close()


class _Nowhere:
    url = ""
    options: dict[str, str] = {}  # noqa: RUF012


@pytest.mark.services
def test_wrong_credentials_are_a_warning_that_does_not_show_them(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="longshore")
    with RedisServer(tmp_path_factory.mktemp("r"), "--requirepass", "the-right-one") as server:
        for options in ({}, {"password": "a-wr0ng-one"}, {"username": "eve", "password": "n0ne"}):
            caplog.clear()
            store = open_remote(server, options=options, **QUICK)
            assert put(store, KEYS[:1]) == [Outcome.FAILED]
            assert store.exists(KEYS[:1]) == [False]
            assert re.search(r"writes fail: RedisRefused: (NOAUTH|WRONGPASS) ", caplog.text)
            for secret in ("a-wr0ng-one", "n0ne", "the-right-one"):
                assert secret not in caplog.text
            store.close()
        store = open_remote(server, options={"password": "the-right-one"}, **QUICK)
        put(store, KEYS)
        assert get(store, KEYS) == expected(KEYS)
        store.close()


@pytest.mark.services
def test_a_full_server_takes_no_blocks_but_still_gives_them(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisServer(
        tmp_path_factory.mktemp("r"), "--maxmemory", "3mb", "--maxmemory-policy", "noeviction"
    ) as server:
        store = open_remote(server, **QUICK | {"timeout_s": 5.0})
        many = [key(number) for number in range(1000)]
        outcomes = put(store, many)
        stored = [
            each for each, outcome in zip(many, outcomes, strict=True) if outcome is Outcome.OK
        ]
        assert 0 < len(stored) < len(many)
        assert "writes fail: RedisRefused: OOM command not allowed" in caplog.text
        stats = store.stats()
        assert (stats.reads, stats.writes) == (BreakerState.CLOSED, BreakerState.OPEN)
        assert get(store, stored) == expected(stored)
        server.client.config_set("maxmemory", "100mb")
        wait_until(lambda: put(store, KEYS) == [Outcome.OK] * len(KEYS), "writes work again")
        store.close()


def test_a_bucket_that_does_not_exist_is_a_warning(
    s3_server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_remote(s3_server, url="s3://no-such-bucket/kv", **QUICK | {"timeout_s": 5.0})
    assert "remote tier s3://no-such-bucket/kv: writes fail: " in caplog.text
    assert store.exists(KEYS[:2]) == [False] * 2
    assert put(store, KEYS[:2]) == [Outcome.FAILED] * 2
    assert set(get(store, KEYS[:2]).values()) <= {Outcome.FAILED, Outcome.MISSING}
    for secret in s3_server.options["secret_access_key"], s3_server.options["access_key_id"]:
        assert secret not in caplog.text
    store.close()


def junk(connection: socket.socket) -> None:
    connection.sendall(b"\x00\xff\x13 not a protocol \r\n" * 3)


def hang_up(connection: socket.socket) -> None:
    connection.close()


def trickle(connection: socket.socket) -> None:
    """A long answer, byte by byte: each one arrives within the timeout."""
    connection.sendall(b"$100000000\r\n")
    for _ in range(2000):
        connection.sendall(b"x")
        time.sleep(0.02)


HOSTILE = {
    "a huge array": sends(b"*2147483647\r\n"),
    "a huge string": sends(b"$2147483647\r\n"),
    "arrays in arrays": sends(b"*1\r\n" * 10_000, again=True),
    "a line without end": sends(b"+" * 100_000, again=True),
    "an error without end": sends(b"-" + b"a" * 100_000, again=True),
    "numbers without end": sends(b":0\r\n" * 10_000, again=True),
    "a number that is too large": sends(b":" + b"9" * 5000 + b"\r\n"),
    "a size that is no number": sends(b"$ 1_0\r\n"),
    "a size below zero": sends(b"$-2\r\n"),
    "a string without its end": sends(b"$1\r\nabc"),
    "another type": sends(b"%1\r\n+a\r\n:1\r\n"),
    "a status in place of a value": sends(b"+OK\r\n"),
}


def trickle_http(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")
    for _ in range(2000):
        connection.sendall(b"x")
        time.sleep(0.02)


def endless_http(connection: socket.socket) -> None:
    """Announces 100 GB, whatever part of it was asked for, and sends as fast as it can."""
    connection.sendall(
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000000000\r\nETag: a\r\n"
        b"Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n\r\n"
    )
    while True:
        connection.sendall(bytes(65536))


def test_of_an_object_that_is_too_large_only_the_beginning_is_read() -> None:
    liar = Liar(endless_http, "s3")
    address = remote_address(liar.url, liar.options, None)
    backend = open_backend(address, timeout_s=PATIENCE_S, ttl_s=None)
    value = backend.get("a", 1000)
    assert value is not None
    assert bytes(value) == bytes(1000)
    liar.close()


@pytest.mark.parametrize(
    ("scheme", "answer"),
    [
        ("redis", junk),
        ("redis", hang_up),
        ("redis", trickle),
        *(pytest.param("redis", lie, id=name) for name, lie in HOSTILE.items()),
        ("s3", junk),
        ("s3", hang_up),
        ("s3", trickle_http),
    ],
)
def test_a_server_that_does_not_speak_the_protocol_is_a_miss(
    scheme: str, answer: Callable[[socket.socket], None], caplog: pytest.LogCaptureFixture
) -> None:
    liar = Liar(answer, scheme)
    store = open_remote(liar, **QUICK)
    for _ in range(3):
        store.exists(KEYS[:4])
        outcomes = set(get(store, KEYS[:4]).values())
        assert Outcome.OK not in outcomes
        assert all(isinstance(outcome, Outcome) for outcome in outcomes)
    if answer is not trickle_http:  # which says of every block that it is there
        assert put(store, KEYS[:4]) == [Outcome.FAILED] * 4
    assert store.stats().num_failed >= QUICK["failure_threshold"]
    assert store.stats().num_opened >= 1
    store.close()
    liar.close()
    wait_until(lambda: store.stats().bytes_in_flight == 0, "abandoned operations have ended")


@pytest.mark.services
def test_an_operation_that_is_abandoned_does_not_write_into_its_buffer(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with RedisServer(tmp_path_factory.mktemp("r")) as server:
        store = open_remote(server, **QUICK)
        put(store, KEYS)
        server.stop()
        assert set(get(store, KEYS).values()) == {Outcome.FAILED}  # also checks the buffers
        server.go_on()
        assert len(value_names(server)) == len(KEYS)
        store.close()


def test_a_store_that_is_interrupted_does_not_wait_for_a_server_that_hangs(
    own_server: RedisServer | S3Server,
) -> None:
    store = open_remote(own_server, timeout_s=1000.0)
    put(store, KEYS)
    own_server.stop()
    with ThreadPoolExecutor(2) as pool:
        read, written = pool.submit(get, store, KEYS), pool.submit(put, store, [key(100)])
        wait_until(lambda: store.stats().bytes_in_flight > 0, "the operations have begun")
        store.interrupt()
        assert set(read.result(PATIENCE_S).values()) == {Outcome.FAILED}
        assert written.result(PATIENCE_S) == [Outcome.FAILED]
    assert set(get(store, KEYS).values()) == {Outcome.FAILED}
    own_server.kill()
    store.close()
