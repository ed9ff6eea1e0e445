"""An engine in processes of its own, for `LLM`: started, talked to and stopped from plain code."""

import sys
from typing import Final, assert_never

import zmq

from longshore.deploy.supervisor.engine_config import (
    EnginePlan,
    check_workers,
    engine_processes,
)
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.deploy.supervisor.supervisor import STOP_TIMEOUT_S, Supervisor
from longshore.protocol.errors import EngineDead, HandshakeRejected
from longshore.protocol.handshake import ClientHello, EngineReady, Rejected, ToClient, ToEngine
from longshore.protocol.outputs import EngineFailed, EngineOutputs
from longshore.protocol.requests import ClientRequest
from longshore.protocol.statistics import BlockSnapshot, EngineReport
from longshore.protocol.transport.channel import Channel, open_socket

HELLO_TIMEOUT_S: Final = 10.0
# While nothing comes, the processes are looked after this often.
DEATH_CHECK_S: Final = 0.2
# A failing engine says so before its process ends; how it ended is worth this much patience.
DEATH_TIMEOUT_S: Final = 2.0


class RemoteEngine:
    """A scheduler and its worker processes, and the channel to them. Not thread-safe."""

    def __init__(self, plan: EnginePlan) -> None:
        """Raises ConfigError or StartFailed if the engine cannot start; nothing is left then."""
        check_workers(plan)
        self._supervisor = Supervisor(RuntimeDir(), sys.stderr)
        self._context = zmq.Context()
        try:
            specs, clients = engine_processes(plan, self._supervisor.runtime_dir)
            self._supervisor.start(specs, timeout_s=plan.options.startup_timeout_s)
            self._channel: Channel[ToEngine, ToClient] = Channel(
                open_socket(self._context, zmq.DEALER, clients, bind=False), ToClient
            )
            self.ready = self._greet(plan)
        except BaseException:
            self.close()
            raise

    def _greet(self, plan: EnginePlan) -> EngineReady:
        self._channel.send(
            ClientHello(name="LLM", model_fingerprint=plan.identity.model_fingerprint)
        )
        match self._channel.receive(HELLO_TIMEOUT_S):
            case EngineReady() as ready:
                return ready
            case Rejected(reason):
                raise HandshakeRejected(reason)
            case _:
                raise self._dead("the scheduler did not answer")

    @property
    def num_blocks(self) -> int:
        return self.ready.num_blocks

    def send(self, message: ClientRequest) -> None:
        self._channel.send(message)

    def receive(self) -> EngineOutputs | None:
        """The next outputs; None when none came for a moment. Raises EngineDead."""
        message = self._channel.receive(DEATH_CHECK_S)
        match message:
            case EngineOutputs():
                return message
            case None:
                death = self._supervisor.find_death()
                if death is not None:
                    raise self._dead(death)
                return None
            case EngineFailed(reason):
                raise self._dead(self._supervisor.wait_for_death(DEATH_TIMEOUT_S) or reason)
            case Rejected(reason):  # it has dropped this client: nothing will come back
                raise self._dead(reason)
            case EngineReady() | EngineReport() | BlockSnapshot():
                return None  # a second answer to the same greeting; nobody asks for reports
            case _:
                assert_never(message)

    def _dead(self, reason: str) -> EngineDead:
        self._supervisor.stop_now()
        return EngineDead(f"the engine is gone: {reason}")

    def close(self) -> None:
        """Stop the processes and remove every trace of them. May be called twice."""
        self._supervisor.stop(drain_timeout_s=STOP_TIMEOUT_S)
        self._context.destroy(linger=0)
