"""The sockets of a deployment's port."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from longshore.deploy.supervisor.listeners import bind, url_of
from longshore.protocol.errors import ConfigError


@contextmanager
def bound(count: int, port: int = 0) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(one) for one in bind("127.0.0.1", port, count)]


@pytest.mark.parametrize("count", [1, 3])
def test_all_sockets_have_one_port_and_clients_reach_each(count: int) -> None:
    with bound(count) as listeners, ExitStack() as clients:
        (url,) = {url_of(listener) for listener in listeners}
        port = int(url.rpartition(":")[2])
        for listener in listeners:
            listener.listen(256)
            listener.setblocking(False)
        for _ in range(60):
            clients.enter_context(socket.create_connection(("127.0.0.1", port)))
        num_accepted = [_accept_all(listener) for listener in listeners]
        assert sum(num_accepted) == 60
        assert min(num_accepted) > 0


def _accept_all(listener: socket.socket) -> int:
    count = 0
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("second", [1, 2])
def test_a_port_that_another_deployment_serves_is_rejected(first: int, second: int) -> None:
    with bound(first) as listeners:
        for listener in listeners:
            listener.listen()
        port = listeners[0].getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*--port"):
            bind("127.0.0.1", port, second)


def test_an_address_of_every_interface_is_shown_as_the_host_itself() -> None:
    (listener,) = bind("0.0.0.0", 0)
    with listener:
        assert url_of(listener).startswith("http://127.0.0.1:")
