"""Real servers of remote stores, and what can happen to them."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self
from urllib.request import Request, urlopen

import obstore
import redis
from obstore.store import S3Store

PATIENCE_S: Final = 30.0


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.02)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


class RemoteServer(Protocol):
    """A server with values, seen past the code under test."""

    url: str
    options: dict[str, str]

    def names(self) -> list[str]: ...

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, value: bytes) -> None: ...


class ServerProcess:
    """A server that is a process of its own."""

    def __init__(self, command: Iterable[str]) -> None:
        self._command = list(command)
        self._start()

    def _start(self) -> None:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_until(self.answers, f"{self._command[0]} answers")
        except BaseException:
            self.kill()
            raise

    def answers(self) -> bool:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    def stop(self) -> None:
        """It hangs: it accepts connections, and never answers."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Without anything that was stored."""
        self.kill()
        self._start()


class RedisServer(ServerProcess):
    """Listens on a Unix socket in `folder`, whose path must be short. arguments: as in redis.conf,
    each with two dashes."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._socket = folder / "redis"
        self.url = f"unix://{self._socket}"
        settings = dict(zip(arguments[::2], arguments[1::2], strict=True))
        password = settings.get("--requirepass")
        self.options = {} if password is None else {"password": password}
        self.client = redis.Redis(
            unix_socket_path=str(self._socket),
            password=password,
            socket_timeout=10,
        )
        self._arguments = ["--unixsocket", str(self._socket), "--save", "", *arguments]
        if "--port" not in arguments:
            self._arguments += ["--port", "0"]
        super().__init__(["redis-server", *self._arguments, "--dir", str(folder)])

    def answers(self) -> bool:
        with suppress(redis.ConnectionError, redis.BusyLoadingError):
            return bool(self.client.ping())
        return False

    def kill(self) -> None:
        super().kill()
        self._socket.unlink(missing_ok=True)

    def names(self) -> list[str]:
        return sorted(name.decode() for name in self.client.scan_iter(count=1000))

    def read(self, name: str) -> bytes:
        return bytes(self.client.get(name))  # type: ignore[arg-type]  # exists

    def write(self, name: str, value: bytes) -> None:
        self.client.set(name, value)


class S3Server(ServerProcess):
    """moto's server, with one bucket."""

    def __init__(self) -> None:
        self.endpoint = f"http://127.0.0.1:{free_port()}"
        port = self.endpoint.rpartition(":")[2]
        super().__init__([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port])
        self.url = "s3://kv-blocks/some/folder"
        self.options = {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": "an-id",
            "secret_access_key": "a-secret",
        }
        self.bucket = S3Store(
            "kv-blocks",
            config=self.options,  # type: ignore[arg-type]
            client_options={"allow_http": True},
        )
        urlopen(Request(f"{self.endpoint}/kv-blocks", method="PUT")).close()

    def answers(self) -> bool:
        try:
            urlopen(f"{self.endpoint}/moto-api/", timeout=1).close()
        except OSError:
            return False
        return True

    def names(self) -> list[str]:
        prefix = "some/folder/"
        pages = obstore.list(self.bucket, prefix)
        return sorted(each["path"].removeprefix(prefix) for page in pages for each in page)

    def read(self, name: str) -> bytes:
        return bytes(obstore.get(self.bucket, f"some/folder/{name}").bytes())

    def write(self, name: str, value: bytes) -> None:
        obstore.put(self.bucket, f"some/folder/{name}", value)

    def delete(self, name: str) -> None:
        obstore.delete(self.bucket, f"some/folder/{name}")


class SharedFolder:
    """A folder that engines share."""

    options: dict[str, str] = {}  # noqa: RUF012  # of RemoteServer

    def __init__(self, path: Path) -> None:
        self._path = path
        self.url = f"file://{path}"

    def names(self) -> list[str]:
        return sorted(
            str(path.relative_to(self._path)) for path in self._path.rglob("*") if path.is_file()
        )

    def read(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    def write(self, name: str, value: bytes) -> None:
        (self._path / name).write_bytes(value)


class Liar:
    """A server that accepts connections and answers with what it likes."""

    options: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, answer: Callable[[socket.socket], None], scheme: str) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        if scheme == "redis":
            self.url = f"redis://{address}/0"
        else:
            self.url = "s3://kv-blocks"
            self.options = {
                "endpoint": f"http://{address}", "region": "us-east-1", "skip_signature": "true",
            }  # fmt: skip
        self._answer = answer
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        try:
            while connection.recv(65536):
                self._answer(connection)
        except OSError:
            pass
        finally:
            connection.close()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


def sends(answer: bytes, *, again: bool = False) -> Callable[[socket.socket], None]:
    """A liar that answers with this; again: without end."""

    def lie(connection: socket.socket) -> None:
        connection.sendall(answer)
        while again:
            connection.sendall(answer)

    return lie


class SlowLink:
    """A link to a server, over which answers are slow: `delay_s` for each 64 KiB, or part of it.
    reply: sent in place of each answer, unless it is empty. Both may be set at any time."""

    CHUNK_BYTES: Final = 65_536

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        """connect: makes a connection to the server."""
        self.delay_s = 0.0
        self.reply = b""
        self._connect = connect
        self._is_closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = self._connect()
                except OSError:  # the server is gone
                    client.close()
                    continue
                self._sockets += [client, server]
                for source, target, is_slow in ((client, server, False), (server, client, True)):
                    thread = threading.Thread(target=self._pass, args=(source, target, is_slow))
                    thread.start()
                    self._threads.append(thread)

    def _pass(self, source: socket.socket, target: socket.socket, is_slow: bool) -> None:
        with suppress(OSError):
            while data := source.recv(self.CHUNK_BYTES):
                if is_slow and self.delay_s:
                    self._is_closed.wait(self.delay_s)
                target.sendall((is_slow and self.reply) or data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()


def slow_redis(server: RedisServer) -> SlowLink:
    """Its URL is redis://, the link's address and /0."""

    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(server.url.removeprefix("unix://"))
        return connection

    return SlowLink(connect)


def slow_s3(server: S3Server) -> SlowLink:
    """Its endpoint is http:// and the link's address."""
    host, _, port = server.endpoint.removeprefix("http://").rpartition(":")
    return SlowLink(lambda: socket.create_connection((host, int(port))))
