"""Engines with a pull connector, each a `longshore serve` on a host of its own, and what a router
does between them. Requests go to the sockets of the schedulers, as those of a gateway do."""

import json
import os
import time
import urllib.request
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
import zmq
from prometheus_client.parser import text_string_to_metric_families

from longshore.deploy.gateway.config import GatewayConfig
from longshore.deploy.llm.remote_engine import RemoteEngine
from longshore.protocol.arrays import int32_array
from longshore.protocol.handshake import ClientHello, EngineReady, ToClient
from longshore.protocol.outputs import EngineOutputs, FinishReason
from longshore.protocol.statistics import BlockState
from longshore.protocol.transport.channel import ClientChannel, open_socket
from longshore.testing.engines import settle
from tests.conftest import ROOT
from tests.connectors.engine import SETTINGS, Answer, Engine
from tests.hosts.network import Host
from tests.hosts.program import FILE
from tests.hosts.staged import CONNECTORS, STAGES_DIR
from tests.integration.deployment import Deployment, wait_until

SIDE_CHANNEL_PORT: Final = 5600
LIMIT_S: Final = 300.0
"""Other tests may use the processors."""


class _Processes:
    """Of a deployment; see EngineProcesses."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment

    def find_death(self) -> str | None:
        if self._deployment.process.poll() is None:
            return None
        return self._deployment.output

    def wait_for_death(self, timeout_s: float) -> str | None:
        return self.find_death()

    def stop_now(self) -> None:
        pass

    def send_command(self, command: object) -> "Future[Any]":
        raise NotImplementedError

    def close(self) -> None:
        self._deployment.__exit__()


class _Served(RemoteEngine):
    """The scheduler of a deployment."""

    def __init__(self, deployment: Deployment) -> None:
        file = deployment.tmp_dir / FILE
        config = msgspec.json.decode(file.read_bytes(), type=GatewayConfig)
        self._outputs = deque()
        self._stats = None
        self._processes = _Processes(deployment)  # type: ignore[assignment]
        self._context = zmq.Context()
        self._channel = ClientChannel(
            open_socket(self._context, zmq.DEALER, config.models[0].members[0].clients, bind=False),
            ToClient,
        )
        self._channel.send(ClientHello("tests", config.models[0].fingerprint))
        ready = self._channel.receive(LIMIT_S)
        assert isinstance(ready, EngineReady)
        self.ready = ready

    def receive(self) -> EngineOutputs | None:
        """Returns soon, as a test receives from several engines in turn."""
        if self._outputs:
            return self._outputs.popleft()
        message = self._receive(0.01)
        return message if isinstance(message, EngineOutputs) else None


class HostEngine(Engine):
    """One engine on a host: `longshore serve` with a pull connector, whose engine is restarted when
    it dies.

    stages: folder of `staged`. settings: of `longshore serve`, over `SETTINGS`.
    """

    def __init__(
        self,
        host: Host,
        model: Path,
        folder: Path,
        *,
        connector: str = "nixl",
        options: Mapping[str, Any] = {},
        remote_hosts: list[str],
        stages: Path | None = None,
        **settings: Any,
    ) -> None:
        self.host, self._answers, self.num_computed = host, [], 0
        settings = SETTINGS | settings
        settings["kv_connector"] = connector if stages is None else CONNECTORS[connector]
        settings["kv_connector_config"] = json.dumps(
            {
                "host": host.address,
                "port": SIDE_CHANNEL_PORT,
                "remote_hosts": remote_hosts,
                **options,
            }
        )
        del settings["threads"], settings["max_num_seqs"]  # Deployment sets them
        given = [word for pair in settings.items() for word in _flag(*pair)]
        environment = {
            "UCX_TLS": "tcp",
            "UCX_LOG_LEVEL": "fatal",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        if stages is not None:
            environment[STAGES_DIR] = str(stages)
        folder.mkdir()
        with host.entered():
            self.deployment = Deployment(
                model,
                folder,
                *given,
                num_blocks=None,
                environment=environment,
                program="tests.hosts.program",
                is_forked=False,  # forks are in the network of the process that they are copies of
            )
        try:
            wait_until(self.deployment._is_ready_or_ended, LIMIT_S)
            self.deployment.wait_until_ready()
            self.engine = _Served(self.deployment)
        except BaseException:
            self.deployment.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self.deployment.__exit__()
        self.engine.close()

    def signal(self, number: int) -> None:
        """To all of its processes."""
        self.deployment.find_members()
        for process in self.deployment.members.values():
            with suppress(psutil.Error):
                process.send_signal(number)

    @property
    def snapshot(self) -> Counter[str]:
        """The number of blocks in each state."""
        assert isinstance(self.engine, RemoteEngine)
        states = self.engine.describe_blocks().states.tolist()
        return Counter(BlockState(state).name for state in states)

    @property
    def num_restarts(self) -> float:
        """Of its workers, as Prometheus counts them."""
        with self.host.entered(), urllib.request.urlopen(f"{self.deployment.url}/metrics") as page:
            text = page.read().decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "longshore_process_restarts_total"
            and sample.labels["process"].startswith("worker")
        )


def _flag(name: str, value: object) -> tuple[str, str]:
    return f"--{name.replace('_', '-')}", str(value)


@dataclass
class Leg:
    """A request: its second leg is None before the first has ended. is_aborted: by the client."""

    prompt: list[int]
    engine: HostEngine
    first: Answer
    second: Answer | None = None
    is_aborted: bool = False

    @property
    def current(self) -> Answer:
        return self.second or self.first

    @property
    def token_ids(self) -> list[int]:
        return [*self.first.token_ids, *(self.second.token_ids if self.second else ())]

    @property
    def num_cached_tokens(self) -> int:
        """Tokens whose KV the decode engine had or has pulled."""
        end = self.second.end if self.second else None
        return 0 if end is None else end.num_cached_tokens


class Router:
    """What a router does with prefill and decode engines, which take turns."""

    def __init__(self, prefill: Sequence[HostEngine], decode: Sequence[HostEngine]) -> None:
        self.prefill, self.decode = prefill, decode

    def until(self, is_over: Callable[[], bool], *engines: HostEngine) -> None:
        """Receive from these engines, or all, until then."""
        deadline = time.monotonic() + LIMIT_S
        while not is_over():
            assert time.monotonic() < deadline
            for engine in engines or (*self.prefill, *self.decode):
                engine.receive()

    def send(self, prompt: list[int], number: int = 0) -> Leg:
        """Begin the first leg."""
        engine = self.prefill[number % len(self.prefill)]
        params = {"do_remote_decode": True}
        answer = engine.add(prompt, max_tokens=1, kv_transfer_params=params)
        return Leg(prompt, engine, answer)

    def go_on(self, leg: Leg, number: int = 0, *, max_tokens: int = 12) -> None:
        """Begin the second leg."""
        assert leg.first.end is not None
        assert leg.first.end.reason is FinishReason.LENGTH_CAPPED, leg.first.end.message
        leg.engine = self.decode[number % len(self.decode)]
        leg.second = leg.engine.add(
            leg.prompt,
            max_tokens=max_tokens,
            kv_transfer_params=leg.first.end.kv_transfer_params,
            output_token_ids=int32_array(leg.first.token_ids),
        )

    def run(
        self,
        prompts: Sequence[list[int]],
        *,
        max_tokens: int,
        abort: Callable[[int, Answer | None], bool] = lambda number, second: False,
    ) -> list[Leg]:
        """All at once. abort: called with a request's number and its second leg; True: the client
        aborts it."""
        legs = [self.send(prompt, number) for number, prompt in enumerate(prompts)]

        def advance() -> bool:
            for number, leg in enumerate(legs):
                if leg.current.end is None and not leg.is_aborted and abort(number, leg.second):
                    leg.is_aborted = True
                    leg.engine.abort(leg.current)
                elif leg.second is None and leg.first.end is not None and not leg.is_aborted:
                    self.go_on(leg, number, max_tokens=max_tokens)
            return all(leg.current.end is not None for leg in legs)

        self.until(advance)
        for leg in legs:
            assert leg.current.end is not None
            wanted = {FinishReason.LENGTH_CAPPED}
            if leg.is_aborted:  # or it had ended at that moment
                wanted.add(FinishReason.ABORTED)
            assert leg.current.end.reason in wanted, leg.current.end.message
        return legs

    def wait(self, leg: Leg) -> list[int]:
        """The tokens of a request whose second leg has begun."""
        self.until(lambda: leg.current.end is not None, leg.engine)
        assert leg.current.end is not None
        assert leg.current.end.reason is FinishReason.LENGTH_CAPPED, leg.current.end.message
        return leg.token_ids

    def settle(self) -> None:
        """Every block of every engine is free, and none is in quarantine."""
        for engine in (*self.prefill, *self.decode):
            assert settle(engine.engine) == 0

    @property
    def num_preemptions(self) -> int:
        """On decode engines."""
        found = [engine.engine.stats() for engine in self.decode]  # type: ignore[union-attr]
        return sum(stats.num_preemptions for stats in found if stats is not None)
