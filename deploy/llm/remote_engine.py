"""An engine in its own processes, for `LLM`: exchanges messages with it."""

from collections import deque
from typing import Final, assert_never

import zmq

from longshore.deploy.llm.engine_processes import EngineProcesses
from longshore.deploy.supervisor.engine_plan import EnginePlan
from longshore.protocol.commands import ResetCache
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
from longshore.protocol.statistics import (
    BlockSnapshot,
    DescribeBlocks,
    EngineReport,
    SchedulerStats,
)
from longshore.protocol.transport.channel import ClientChannel, open_socket

HELLO_TIMEOUT_S: Final = 10.0
# Interval of checks that the processes are alive, while no message arrives.
DEATH_CHECK_S: Final = 0.2
# The scheduler answers a command at once, between two steps.
COMMAND_POLL_S: Final = 0.005
# A failing engine reports before its process ends. Wait this long to learn how the process ended.
DEATH_TIMEOUT_S: Final = 2.0


class RemoteEngine:
    """A scheduler and its worker processes, and the channel to them. Not thread-safe."""

    def __init__(self, plan: EnginePlan) -> None:
        """Raises ConfigError or StartFailed if the engine cannot start, after cleaning up."""
        self._outputs: deque[EngineOutputs] = deque()  # received, but not returned yet
        self._stats: SchedulerStats | None = None
        self._processes = EngineProcesses(plan)
        self._context = zmq.Context()
        try:
            self._channel: ClientChannel[ToEngine, ToClient] = ClientChannel(
                open_socket(self._context, zmq.DEALER, self._processes.endpoint, bind=False),
                ToClient,
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

    def stats(self) -> SchedulerStats | None:
        """The latest statistics; None before the first. Raises EngineDead."""
        while (message := self._receive(0.0)) is not None:
            if isinstance(message, EngineOutputs):
                self._outputs.append(message)
        return self._stats

    def reset_prefix_cache(self) -> bool:
        """Uncache all prefixes; False while a request holds blocks. Raises EngineDead."""
        answer = self._processes.send_command(ResetCache("prefix"))
        while not answer.done():
            if isinstance(message := self._receive(COMMAND_POLL_S), EngineOutputs):
                self._outputs.append(message)
        try:
            return answer.result().ok
        except OSError as error:
            raise self._dead(f"the scheduler did not answer: {error}") from error

    def describe_blocks(self) -> BlockSnapshot:
        """What each block is used for. Raises EngineDead. `receive` returns outputs that arrive
        meanwhile."""
        self._channel.send(DescribeBlocks())
        while not isinstance(message := self._receive(), BlockSnapshot):
            if message is not None:
                self._outputs.append(message)
        return message

    def _receive(self, timeout_s: float = DEATH_CHECK_S) -> EngineOutputs | BlockSnapshot | None:
        try:
            message = self._channel.receive(timeout_s)
        except MessagesLost as error:
            raise self._dead(str(error)) from None
        match message:
            case EngineOutputs():
                self._stats = message.stats or self._stats
                return message
            case BlockSnapshot():
                return message
            case None:
                self._check_alive()
                return None
            case EngineFailed(reason):
                raise self._dead(self._processes.wait_for_death(DEATH_TIMEOUT_S) or reason)
            case EngineReady() | Rejected() | EngineReport() | AdmissionChanged():
                return None  # a second handshake; not requested; no operator pauses this engine
            case EnginePaused() | EngineContinues():
                return None  # only of engines whose workers are restarted
            case _:
                assert_never(message)

    def _check_alive(self) -> None:
        if (death := self._processes.find_death()) is not None:
            raise self._dead(death)

    def _dead(self, reason: str) -> EngineDead:
        self._processes.stop_now()
        return EngineDead(f"the engine has stopped: {reason}")

    def close(self) -> None:
        """Stop the processes and remove their files. May be called twice."""
        self._processes.close()
        self._context.destroy(linger=0)
