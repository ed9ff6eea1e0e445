"""An engine in its own processes, for `LLM`: starts them, exchanges messages and stops them."""

import sys
from collections import deque
from typing import Final, assert_never

import zmq

from longshore.deploy.supervisor.engine_config import (
    EnginePlan,
    engine_processes,
)
from longshore.deploy.supervisor.process import STOP_TIMEOUT_S
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.deploy.supervisor.supervisor import Supervisor
from longshore.protocol.errors import EngineDead, HandshakeRejected, MessagesLost
from longshore.protocol.handshake import ClientHello, EngineReady, Rejected, ToClient, ToEngine
from longshore.protocol.outputs import (
    AdmissionChanged,
    EngineContinues,
    EngineFailed,
    EngineOutputs,
    EnginePaused,
)
from longshore.protocol.requests import ClientRequest
from longshore.protocol.statistics import BlockSnapshot, DescribeBlocks, EngineReport
from longshore.protocol.transport.channel import ClientChannel, open_socket

HELLO_TIMEOUT_S: Final = 10.0
# Interval of checks that the processes are alive, while no message arrives.
DEATH_CHECK_S: Final = 0.2
# A failing engine reports before its process ends. Wait this long to learn how the process ended.
DEATH_TIMEOUT_S: Final = 2.0


class RemoteEngine:
    """A scheduler and its worker processes, and the channel to them. Not thread-safe."""

    def __init__(self, plan: EnginePlan) -> None:
        """Raises ConfigError or StartFailed if the engine cannot start, after cleaning up."""
        self._outputs: deque[EngineOutputs] = deque()  # received, but not returned yet
        self._supervisor = Supervisor(RuntimeDir(), sys.stderr)
        self._context = zmq.Context()
        try:
            specs, clients = engine_processes(plan, self._supervisor.runtime_dir)
            self._supervisor.start(specs, timeout_s=plan.options.startup_timeout_s)
            self._channel: ClientChannel[ToEngine, ToClient] = ClientChannel(
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
        """The next outputs; None if none arrived within DEATH_CHECK_S. Raises EngineDead."""
        if self._outputs:
            return self._outputs.popleft()
        message = self._receive()
        return message if isinstance(message, EngineOutputs) else None

    def describe_blocks(self) -> BlockSnapshot:
        """What each block is used for. Raises EngineDead. `receive` returns outputs that arrive
        meanwhile."""
        self._channel.send(DescribeBlocks())
        while not isinstance(message := self._receive(), BlockSnapshot):
            if message is not None:
                self._outputs.append(message)
        return message

    def _receive(self) -> EngineOutputs | BlockSnapshot | None:
        try:
            message = self._channel.receive(DEATH_CHECK_S)
        except MessagesLost as error:
            raise self._dead(str(error)) from None
        match message:
            case EngineOutputs() | BlockSnapshot():
                return message
            case None:
                death = self._supervisor.find_death()
                if death is not None:
                    raise self._dead(death)
                return None
            case EngineFailed(reason):
                raise self._dead(self._supervisor.wait_for_death(DEATH_TIMEOUT_S) or reason)
            case EngineReady() | Rejected() | EngineReport() | AdmissionChanged():
                return None  # a second handshake; not requested; no operator pauses this engine
            case EnginePaused() | EngineContinues():
                return None  # only of engines whose workers are restarted
            case _:
                assert_never(message)

    def _dead(self, reason: str) -> EngineDead:
        self._supervisor.stop_now()
        return EngineDead(f"the engine has stopped: {reason}")

    def close(self) -> None:
        """Stop the processes and remove their files. May be called twice."""
        self._supervisor.stop(drain_timeout_s=STOP_TIMEOUT_S)
        self._context.destroy(linger=0)
