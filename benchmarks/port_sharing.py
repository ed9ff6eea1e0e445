"""How connections to one port are distributed over processes that accept them: on a socket per
process (`own`, as `deploy/supervisor/listeners.py` makes them), or on one inherited socket
(`shared`).

    python benchmarks/port_sharing.py [--repeats 3] [--json F]

Like gateways, the processes run uvloop servers; they answer a byte after `busy_ms` of computing.
`least` and `most` are the numbers of connections of the processes with the fewest and the most,
averaged over the repeats.
"""

import asyncio
import multiprocessing
import socket
import time
from collections import Counter
from contextlib import ExitStack
from multiprocessing.synchronize import Barrier
from typing import Any, Final

import report
import uvloop

from longshore.deploy.supervisor.listeners import bind

HOST: Final = "127.0.0.1"


class Answering(asyncio.Protocol):
    """Answers with the number of its process."""

    def __init__(self, number: int, busy_s: float) -> None:
        self._number, self._busy_s = number, busy_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        end_s = time.perf_counter() + self._busy_s
        while time.perf_counter() < end_s:
            continue
        self._transport.write(bytes([self._number]))


def serve(listener: socket.socket, number: int, busy_s: float, started: Barrier) -> None:
    async def run() -> None:
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.create_server(lambda: Answering(number, busy_s), sock=listener, backlog=2048)
        started.wait()
        await asyncio.Event().wait()

    uvloop.run(run())


async def connect(port: int, num_connections: int) -> Counter[int]:
    """Open all connections at once, and keep each until all have been answered."""

    async def one() -> tuple[int, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"?")
        return (await reader.readexactly(1))[0], writer

    answers = await asyncio.gather(*(one() for _ in range(num_connections)))
    for _, writer in answers:
        writer.close()
    return Counter(number for number, _ in answers)


def measure(kind: str, num_processes: int, busy_ms: float, options: Any) -> list[dict[str, Any]]:
    started = multiprocessing.Barrier(num_processes + 1)
    with ExitStack() as stack:
        listeners = bind(HOST, 0, num_processes if kind == "own" else 1)
        for listener in listeners:
            stack.enter_context(listener)
        processes = [
            multiprocessing.Process(
                target=serve,
                args=(listeners[number % len(listeners)], number, busy_ms / 1e3, started),
                daemon=True,
            )
            for number in range(num_processes)
        ]
        for process in processes:
            process.start()
            stack.callback(process.join)
            stack.callback(process.terminate)
        started.wait()
        port = listeners[0].getsockname()[1]
        for listener in listeners:
            listener.close()  # as the supervisor does
        rows = []
        for count in options.connections:
            counts = [asyncio.run(connect(port, count)) for _ in range(options.repeats)]
            spread = [[each[number] for number in range(num_processes)] for each in counts]
            rows.append(
                {
                    "kind": kind,
                    "processes": num_processes,
                    "busy_ms": busy_ms,
                    "connections": count,
                    "least": sum(map(min, spread)) / options.repeats,
                    "most": sum(map(max, spread)) / options.repeats,
                }
            )
    return rows


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--connections", type=int, nargs="+", default=[8, 32, 256, 1000])
    options = arguments.parse_args()
    multiprocessing.set_start_method("fork")
    rows = [
        row
        for num_processes in (2, 4)
        for busy_ms in (0.0, 1.0)
        for kind in ("own", "shared")
        for row in measure(kind, num_processes, busy_ms, options)
    ]
    report.write(options.json, rows)


if __name__ == "__main__":
    main()
