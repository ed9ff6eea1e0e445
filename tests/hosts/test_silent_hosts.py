"""A host that does not answer any more: gateways and its engine lose each other, although neither
has closed the connection."""

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

import pytest
import zmq

from longshore.deploy.gateway.engines.engines import Engines
from longshore.protocol.handshake import ClientHello, WorkerReady
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.transport.channel import Endpoint
from longshore.protocol.transport.security import CurveKeys
from tests.hosts.network import Host, Network
from tests.integration.engine_process import (
    IDENTITY,
    VOCAB_SIZE,
    EngineProcess,
    ScriptedWorker,
    running_engine,
)

pytestmark = [pytest.mark.services, pytest.mark.timeout(300)]

PORT: Final = 9000
SILENCE_S: Final = 6.0
"""After this time, docs/topology.md says, a silent host counts as lost."""

PATIENCE_S: Final = 40.0
"""In addition, because other tests use the processors."""

PROMPT_TOKENS: Final = 40
MAX_TOKENS: Final = 1900
STEP_S: Final = 0.05
"""Of the engine that is cut off: all tokens would take it 95 s."""


def keypair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


async def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_requests_of_a_silent_host_go_on_with_another_engine(network: Network) -> None:
    client_keys = keypair()
    hosts = [network.host("first"), network.host("second")]
    cut_off: set[Host] = set()
    with ExitStack() as stack:
        endpoints: list[Endpoint] = []
        workers: list[ScriptedWorker] = []
        for host in hosts:
            address, keys = f"tcp://{host.address}:{PORT}", keypair()
            listening = CurveKeys(*keys, also_authorized=(client_keys[0],))
            endpoints.append(Endpoint(address, CurveKeys(*client_keys, server=keys[0])))
            with host.entered():
                engine = stack.enter_context(running_engine(clients=Endpoint(address, listening)))
            workers.append(start_worker(engine, lambda host=host: host in cut_off))  # type: ignore[misc]
        with network.host("gateway").entered():
            engines = Engines(
                endpoints,
                ClientHello("gateway", IDENTITY.model_fingerprint),
                on_stats=lambda engine, stats: None,
            )
        stack.callback(engines.close)
        await engines.wait_until_ready()
        live = engines.submit(
            "r",
            range(PROMPT_TOKENS),
            SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True),
            on_change=lambda: None,
        )
        lost, other = live.engine, 1 - live.engine
        cut_off.add(hosts[lost])
        await wait_until(lambda: live.num_tokens > 0, PATIENCE_S)

        hosts[lost].cut()
        began = time.monotonic()
        await wait_until(lambda: not engines.clients[lost].is_ready, SILENCE_S + PATIENCE_S)
        print(f"the gateway lost the engine after {time.monotonic() - began:.1f} s")
        assert (live.engine, live.num_lost) == (other, 0)
        # The engine has freed the request before it has computed all tokens for a lost gateway.
        await wait_until(lambda: has_finished(workers[lost]), SILENCE_S + PATIENCE_S)
        print(f"the engine lost the gateway after {time.monotonic() - began:.1f} s")
        assert len(workers[lost].plans) < MAX_TOKENS

        await wait_until(lambda: live.finished is not None, PATIENCE_S)
        wanted = [n % VOCAB_SIZE for n in range(PROMPT_TOKENS, PROMPT_TOKENS + MAX_TOKENS)]
        assert live.take_token_ids() == wanted
        assert engines.clients[other].is_ready
        hosts[lost].heal()
        await wait_until(lambda: engines.clients[lost].is_ready, PATIENCE_S)


def start_worker(engine: EngineProcess, is_slow: Callable[[], bool]) -> ScriptedWorker:
    def slow_down(plan: SchedulerOutput) -> None:
        if is_slow():
            time.sleep(STEP_S)

    engine.start_worker()
    worker = ScriptedWorker(engine, before_answer=slow_down)
    engine.worker.send(WorkerReady(0))
    return worker


def has_finished(worker: ScriptedWorker) -> bool:
    """Whether its engine has freed a request."""
    return any(len(plan.finished_rows) for plan in worker.plans)
