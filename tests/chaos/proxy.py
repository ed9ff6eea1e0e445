"""A proxy for one private socket of a deployment: it delays, holds, cuts, drops, repeats and swaps.

Run as a program, this module is `longshore` itself, with one difference: processes that connect to
another one's socket connect to the proxy's, which a test opens (`Proxies`).
"""

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeAlias

import msgspec

from longshore.deploy.cli.main import main
from longshore.deploy.gateway.config import GatewayConfig
from longshore.deploy.supervisor import process_set
from longshore.deploy.supervisor.process import ManagedProcess, ProcessSpec
from longshore.protocol.commands import EngineMember
from longshore.protocol.transport.channel import Endpoint
from longshore.worker.config import WorkerProcessConfig

PREFIX: Final = "via-"
GREETING_BYTES: Final = 64
MORE_FLAG: Final = 1
LONG_FLAG: Final = 2

Toward: TypeAlias = Literal["bound", "connected"]
"""The end that gets the message: the one that has bound the socket, or the one that connected."""
Spoiling: TypeAlias = Literal["drop", "repeat", "swap"]


class Proxy:
    """Forwards connections from `PREFIX + name` to `name`. All methods are thread-safe.

    delay_s: how long every piece of data waits.
    """

    def __init__(self, path: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.path = path
        self.delay_s = 0.0
        self._loop = loop
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._faults: dict[Toward, tuple[Spoiling, int]] = {}

    async def listen(self) -> None:
        path = self.path.with_name(PREFIX + self.path.name)
        self._server = await asyncio.start_unix_server(self._accept, path)

    def end(self) -> None:
        """On the loop: accept no more, and close all connections."""
        self._server.close()
        self._open.set()
        self._abort()

    @property
    def is_used(self) -> bool:
        """A connection goes through it."""
        return bool(self._writers)

    def hold(self) -> None:
        """Nothing passes any more, in either direction."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._open.set)

    def cut(self) -> None:
        """Close all connections; what is on its way is lost, also in the middle of a message."""
        self._loop.call_soon_threadsafe(self._abort)

    def _abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def spoil_next(self, toward: Toward, what: Spoiling, min_bytes: int = 0) -> None:
        """Drop or repeat the next message of at least `min_bytes`, or deliver it after the one that
        follows it."""
        self._faults[toward] = (what, min_bytes)

    def has_spoiled(self, toward: Toward) -> bool:
        return toward not in self._faults

    def _take_fault(self, toward: Toward, num_bytes: int) -> Spoiling | None:
        what, min_bytes = self._faults.get(toward, (None, 0))
        if what is None or num_bytes < min_bytes:
            return None
        del self._faults[toward]
        return what

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_reader, to_writer = await asyncio.open_unix_connection(self.path)
        except OSError:  # nobody listens yet; the other side tries again
            writer.transport.abort()
            return
        pair = {writer, to_writer}
        self._writers |= pair
        pumps = [
            asyncio.create_task(self._pump(reader, to_writer, "bound")),
            asyncio.create_task(self._pump(to_reader, writer, "connected")),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for each in pair:
            each.transport.abort()
        await asyncio.gather(*pumps)
        self._writers -= pair

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, toward: Toward
    ) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            for _ in range(GREETING_BYTES):  # each end waits for a part of the other's
                writer.write(await reader.readexactly(1))
            late = b""
            while True:
                message = await _next_message(reader)
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._open.wait()
                match self._take_fault(toward, len(message)):
                    case "drop":
                        continue
                    case "repeat":
                        message += message
                    case "swap":
                        late = message
                        continue
                writer.write(message + late)
                late = b""
                await writer.drain()


async def _next_message(reader: asyncio.StreamReader) -> bytes:
    """All frames of the next message, or one command, as in ZMTP 3."""
    message = b""
    while True:
        flags = await reader.readexactly(1)
        size = await reader.readexactly(8 if flags[0] & LONG_FLAG else 1)
        message += flags + size + await reader.readexactly(int.from_bytes(size))
        if not flags[0] & MORE_FLAG:
            return message


class Proxies:
    """The proxies of one runtime directory, by the name of the socket: `clients`, `worker-0` and so
    on. A context manager: they end with it."""

    def __init__(self, runtime_dir: Path, names: Sequence[str]) -> None:
        self._loop = asyncio.new_event_loop()
        self._by_name = {name: Proxy(runtime_dir / f"{name}.sock", self._loop) for name in names}
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies")

    def __getitem__(self, name: str) -> Proxy:
        return self._by_name[name]

    @property
    def unused(self) -> list[str]:
        """Those through which nobody has connected."""
        return [name for name, proxy in self._by_name.items() if not proxy.is_used]

    def __enter__(self) -> Self:
        self._thread.start()
        for proxy in self._by_name.values():
            asyncio.run_coroutine_threadsafe(proxy.listen(), self._loop).result()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        for proxy in self._by_name.values():
            proxy.end()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))


def through_proxies(config: Any) -> Any:
    """The configuration of a process, with which it connects to the proxies."""
    if isinstance(config, WorkerProcessConfig):
        return msgspec.structs.replace(config, endpoint=_proxied(config.endpoint))
    if isinstance(config, GatewayConfig):
        models = tuple(
            msgspec.structs.replace(each, members=tuple(map(_proxied_member, each.members)))
            for each in config.models
        )
        return msgspec.structs.replace(config, models=models)
    return config


def _proxied_member(member: EngineMember) -> EngineMember:
    return msgspec.structs.replace(member, clients=_proxied(member.clients))


def _proxied(endpoint: Endpoint) -> Endpoint:
    folder, _, name = endpoint.address.rpartition("/")
    return msgspec.structs.replace(endpoint, address=f"{folder}/{PREFIX}{name}")


class _ProxiedProcess(ManagedProcess):
    def __init__(self, spec: ProcessSpec, *others: Any) -> None:
        config = through_proxies(spec.config)
        super().__init__(msgspec.structs.replace(spec, config=config), *others)
        self.spec = spec  # the next start begins with it


if __name__ == "__main__":
    process_set.ManagedProcess = _ProxiedProcess  # type: ignore[misc]
    main()
