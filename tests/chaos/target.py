"""The deployment that faults are applied to, and what must be true of it after each of them."""

import base64
import contextlib
import json
import re
import socket
import time
import urllib.request
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np
import psutil

from longshore.scheduler.process.structured_output.client import MODULE
from tests.chaos.proxy import Proxies
from tests.chaos.streams import Load, Prompt, Stream, check_streams
from tests.connectors.offloading.remote.servers import RedisServer, SlowLink
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until

RECOVERY_S: Final = 2 * PATIENCE_S
POLL_S: Final = 0.2
GRAMMAR_SOCKET: Final = re.compile(r"grammars.*\.\d+")
IDLE_STATES: Final = {"reserved", "free", "cached"}


class Target:
    """One running deployment, its clients, and what is attached to it.

    folder:  of this deployment alone; it has a short path.
    calm:    the streams of a run without faults, by prompt.
    load:    the clients while a fault is applied.
    redis, link, proxies: None if this deployment has none. link: to redis.
    """

    load: Load

    def __init__(
        self,
        deployment: Deployment,
        prompts: Sequence[Prompt],
        *,
        folder: Path,
        redis: RedisServer | None = None,
        link: SlowLink | None = None,
        proxies: Proxies | None = None,
    ) -> None:
        self.deployment = deployment
        self.prompts = prompts
        self.folder = folder
        self.redis = redis
        self.link = link
        self.proxies = proxies
        self.victims: list[psutil.Process] = []
        self.cut_ports: set[int] = set()
        self._names = set(self.members())
        self._num_engines = sum(name.startswith("scheduler") for name in self._names)
        self._files = self._runtime_files()
        self.calm: list[Stream] = []

    def run_calmly(self) -> None:
        """Ask for every prompt once. All other runs are compared with the first one."""
        with Load(self.deployment.url, self.prompts, once=True) as load:
            streams = sorted(load.finish(), key=lambda stream: stream.prompt)
        if not self.calm:
            self.calm = streams
            self._num_descriptors = self.deployment.process.num_fds()
        assert not (wrong := check_streams(streams, self.calm)), wrong
        self.check_books()

    # What faults use

    def members(self) -> dict[str, psutil.Process]:
        """The processes that run, by name."""
        members = {"supervisor": self.deployment.process}
        for child in self.deployment.process.children():
            try:
                if child.status() != psutil.STATUS_ZOMBIE:
                    members[Path(child.cmdline()[-1]).stem] = child
            except (psutil.NoSuchProcess, IndexError):  # it has just ended, or begun
                continue
        return members

    def kill(self, *names: str) -> None:
        """Kill processes. Streams of a gateway that is among them may be cut."""
        members = self.members()
        for name in names:
            self._stop(members[name], name)
            members[name].kill()

    def stop(self, name: str) -> None:
        """Stop a process for ever; it is expected to be replaced. Streams of a gateway that is
        stopped may be cut."""
        self._stop(self.members()[name], name)

    def _stop(self, victim: psutil.Process, name: str) -> None:
        self.victims.append(victim)
        victim.suspend()  # a gateway accepts no more connections
        if name.startswith("gateway"):
            self.cut_ports |= {c.raddr.port for c in victim.net_connections("tcp") if c.raddr}

    def disturb_grammars(self, number: int) -> None:
        """Send a signal to the grammar process, which is expected to be replaced, and wait for
        that."""
        (former,) = self._grammar_processes()
        self.victims.append(former)
        former.send_signal(number)
        wait_until(lambda: any(one != former for one in self._grammar_processes()))

    def _grammar_processes(self) -> list[psutil.Process]:
        found = []
        for name, member in self.members().items():
            with contextlib.suppress(psutil.NoSuchProcess):
                children = member.children() if name.startswith("scheduler") else []
                found += [
                    child
                    for child in children
                    if child.status() != psutil.STATUS_ZOMBIE and MODULE in child.cmdline()
                ]
        return found

    def pause(self, name: str, duration_s: float) -> None:
        """Stop a process for some time."""
        process = self.members()[name]
        process.suspend()
        time.sleep(duration_s)
        process.resume()

    def fill_queue_and_hang_up(self, num_connections: int, num_prompts: int) -> None:
        """Queue many requests, whose connections close when an engine has half of them, and wait
        until they are gone."""
        url = urlsplit(self.deployment.url)
        body = json.dumps(
            {"prompt": [[5, 6, 7]] * num_prompts, "max_tokens": 40, "ignore_eos": True}
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.hostname}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with contextlib.ExitStack() as stack:
            for _ in range(num_connections):
                connection = socket.create_connection((url.hostname, url.port))
                stack.enter_context(connection).sendall(head.encode() + body)
            self._wait_for_waiting(lambda num: num > num_connections * num_prompts // 2)
        self._wait_for_waiting(lambda num: num < 100)

    def _wait_for_waiting(self, condition: Callable[[float], bool]) -> None:
        wait_until(lambda: condition(self.metric("scheduler_waiting_requests")), RECOVERY_S)

    def disturb_hook(self, what: str) -> None:
        """See `switch` of `Faults`; waits until the hook was called."""
        new = self.folder / "switch.new"
        new.write_text(what)
        new.rename(self.switch)
        wait_until(lambda: not self.switch.exists())

    def metric(self, name: str) -> float:
        """The sum of the series of `longshore_NAME`."""
        text = self._get("/metrics")
        return sum(map(float, re.findall(rf"^longshore_{name}{{.*}} (\S+)$", text, re.M)))

    def is_replaced(self, name: str, former: psutil.Process) -> bool:
        return self.members().get(name, former) != former

    @property
    def switch(self) -> Path:
        return self.folder / "switch"

    @property
    def disk(self) -> Path:
        return self.folder / "tier"

    # What must be true

    def wrong_streams(self, streams: Sequence[Stream]) -> list[str]:
        """What is wrong with the streams of a run. Only those of a killed gateway, or of a client
        that has hung up, may be cut. A gateway that is starting rejects new ones."""
        wrong = []
        for stream in streams:
            may_end = ["hung up"]
            if stream.port in self.cut_ports:
                may_end.append("closed")
            if self.cut_ports and not stream.token_ids:
                may_end.append("status 503")
            wrong += check_streams([stream], self.calm, may_end)
        return wrong

    def wait_until_whole(self) -> None:
        """Wait until what had to die is dead, and all processes are there and ready."""
        wait_until(lambda: not any(map(_runs, self.victims)), RECOVERY_S)
        deadline_s = time.monotonic() + RECOVERY_S
        while not self._is_whole():
            assert time.monotonic() < deadline_s, f"only {self.members().keys()} are ready"
            time.sleep(POLL_S)

    def _is_whole(self) -> bool:
        try:
            self._get("/ready")
            reports = [self._get(f"/engine/report?engine={n}") for n in range(self._num_engines)]
        except OSError:  # a status, or no connection
            return False
        return bool(reports) and set(self.members()) == self._names

    def check_books(self) -> None:
        """Nothing runs; every block is free; no process, socket, file or descriptor is left over.
        Fails if that is not so after a while."""
        for engine in range(self._num_engines):
            wait_until(lambda engine=engine: self._is_idle(engine), RECOVERY_S)
        tmp_dir = self.deployment.tmp_dir
        wait_until(
            lambda: (
                processes_with_tmpdir(tmp_dir)
                == _ids([*self.members().values(), *self._grammar_processes()])
            )
        )
        wait_until(lambda: self._runtime_files() == self._files)
        assert "were overwritten" not in self.deployment.output  # said by --poison-kv
        wait_until(lambda: self.deployment.process.num_fds() == self._num_descriptors)

    def _is_idle(self, engine: int) -> bool:
        try:
            state = json.loads(self._get(f"/dashboard/state?engine={engine}"))
        except OSError:
            return False
        report = state["report"]
        counts = _block_counts(state)
        return (
            not (report["num_running"] or report["num_waiting"] or report["steps_in_flight"])
            and counts.keys() <= IDLE_STATES
            and counts["free"] + counts["cached"] == report["num_free_blocks"]
            and counts.total() == report["num_blocks"] == report["num_free_blocks"] + 1
        )

    def _get(self, path: str) -> str:
        url = f"{self.deployment.url}{path}"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
            text: str = response.read().decode()
        return text

    def _runtime_files(self) -> list[list[str]]:
        """Without the sockets of grammar processes, each of which has a name of its own."""
        return [
            sorted(f.name for f in path.iterdir() if not GRAMMAR_SOCKET.fullmatch(f.name))
            for path in self.deployment.runtime_dirs
        ]


def check_nothing_is_left(deployment: Deployment) -> None:
    """The deployment has ended, and left no process and no file."""
    wait_until(lambda: not processes_with_tmpdir(deployment.tmp_dir), RECOVERY_S)
    wait_until(lambda: deployment.runtime_dirs == [], RECOVERY_S)
    assert [file.name for file in deployment.tmp_dir.iterdir()] == ["output.txt"]


def processes_with_tmpdir(tmp_dir: Path) -> set[int]:
    """Ids of the processes that have this value of TMPDIR."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(tmp_dir):
                found.add(process.pid)
        except psutil.Error:  # it has ended, or belongs to another user
            continue
    return found


def _ids(processes: Iterable[psutil.Process]) -> set[int]:
    return {process.pid for process in processes}


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _block_counts(state: dict[str, Any]) -> Counter[str]:
    states = np.frombuffer(zlib.decompress(base64.b64decode(state["states"])), np.uint8)
    return Counter(state["state_names"][each] for each in states.tolist())
