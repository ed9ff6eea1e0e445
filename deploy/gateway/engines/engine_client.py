"""The gateway's end of the channel to a scheduler, on an asyncio loop.

Performs the handshake, then sends requests and receives tokens. The death of the engine shows as a
disconnect, because the kernel closes the connection with the process.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from typing import Unpack, assert_never

import zmq
from zmq.utils.monitor import recv_monitor_message

from longshore.deploy.requests.live_requests import (
    LiveRequest,
    LiveRequests,
    RequestFields,
)
from longshore.protocol.errors import EngineDead, HandshakeRejected
from longshore.protocol.handshake import ClientHello, EngineReady, Rejected, ToClient, ToEngine
from longshore.protocol.outputs import EngineFailed, EngineOutputs
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.statistics import (
    BlockSnapshot,
    DescribeBlocks,
    DescribeEngine,
    EngineReport,
    SchedulerStats,
)
from longshore.protocol.transport.channel import (
    Channel,
    Endpoint,
    SocketWatcher,
    open_socket,
)

logger = logging.getLogger(__name__)


class EngineClient:
    """One engine. Create it inside a running loop.

    death:    set when the engine has died; nothing can be submitted then.
    seeds:    source of seeds for requests without one.
    on_stats: called with the engine's statistics, about once per second while anything changes,
              after the finished requests that they count.
    why_stopped: returns the supervisor's reason for stopping the engine, if any; the scheduler
              itself does not know it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        hello: ClientHello,
        *,
        seeds: random.Random,
        on_stats: Callable[[SchedulerStats], None],
        why_stopped: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._context = zmq.Context()
        socket = open_socket(self._context, zmq.DEALER, endpoint, bind=False)
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._channel: Channel[ToEngine, ToClient] = Channel(socket, ToClient)
        self._requests = LiveRequests(seeds)
        self._steps: list[EngineOutputs] = []  # received and not delivered yet
        self._on_stats = on_stats
        self._why_stopped = why_stopped
        self._ready: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()
        self._report: asyncio.Future[EngineReport] | None = None
        self._block_snapshot: asyncio.Future[BlockSnapshot] | None = None
        self.death: EngineDead | None = None
        self._watcher = SocketWatcher(socket, self._receive)
        self._monitor_watcher = SocketWatcher(self._monitor, self._disconnected)
        self._channel.send(hello)

    @property
    def num_live_requests(self) -> int:
        return len(self._requests)

    async def wait_until_ready(self) -> EngineReady:
        """The engine's description. Raises HandshakeRejected or EngineDead with its reason."""
        return await asyncio.shield(self._ready)

    async def describe(self, timeout_s: float) -> EngineReport:
        """The engine's report. Raises TimeoutError if the scheduler does not answer in time,
        EngineDead if the engine has died."""
        if self.death is not None:
            raise self.death
        if self._report is None:  # else share the answer to the pending query
            self._report = asyncio.get_running_loop().create_future()
            self._send(DescribeEngine())
        return await asyncio.wait_for(asyncio.shield(self._report), timeout_s)

    async def describe_blocks(self, timeout_s: float) -> BlockSnapshot:
        """The state of every KV block. Raises as `describe` does."""
        if self.death is not None:
            raise self.death
        if self._block_snapshot is None:
            self._block_snapshot = asyncio.get_running_loop().create_future()
            self._send(DescribeBlocks())
        return await asyncio.wait_for(asyncio.shield(self._block_snapshot), timeout_s)

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        **fields: Unpack[RequestFields],
    ) -> LiveRequest:
        """Queue one request; see `LiveRequests.open`. Raises EngineDead."""
        if self.death is not None:
            raise self.death
        live, message = self._requests.open(
            request_id,
            prompt_token_ids,
            sampling,
            **fields,
        )
        self._send(message)
        return live

    def abort(self, requests: Sequence[LiveRequest]) -> None:
        """Abort those that are still live; the scheduler frees their blocks within a step."""
        message = self._requests.abort(requests)
        if message is not None and self.death is None:
            with contextlib.suppress(EngineDead):  # the engine's death has already failed them
                self._send(message)

    def stop(self, live: LiveRequest, num_tokens: int) -> None:
        """End a request with its first `num_tokens` output tokens; see `LiveRequests.stop`."""
        message = self._requests.stop(live, num_tokens)
        if message is not None and self.death is None:
            with contextlib.suppress(EngineDead):
                self._send(message)

    def shut_down(self, reason: str) -> None:
        """Fail every live request with `reason`, and accept no more."""
        self._die(EngineDead(reason))

    def _send(self, message: ToEngine) -> None:
        try:
            self._channel.send(message)
        except EngineDead as error:
            self._die(error)
            raise
        self._watcher.check()

    def _receive(self) -> None:
        for message in self._channel.drain():
            match message:
                case EngineOutputs():
                    self._steps.append(message)
                    if message.stats is not None:
                        self._deliver()
                        self._on_stats(message.stats)
                case EngineReport():
                    if self._report is not None:
                        self._report.set_result(message)
                        self._report = None
                case BlockSnapshot():
                    if self._block_snapshot is not None:
                        self._block_snapshot.set_result(message)
                        self._block_snapshot = None
                case EngineReady():
                    if not self._ready.done():
                        self._ready.set_result(message)
                case Rejected(reason):
                    if self._ready.done():  # the engine has disconnected this client
                        self._die(EngineDead(f"the engine rejected this gateway: {reason}"))
                    else:
                        self._ready.set_exception(HandshakeRejected(reason))
                case EngineFailed(reason):
                    self._engine_ended(reason)
                case _:
                    assert_never(message)
        self._deliver()

    def _deliver(self) -> None:
        """Apply all received steps together: a request that got tokens in several steps while the
        gateway was busy is notified once."""
        steps, self._steps = self._steps, []
        self._requests.apply(*steps)

    def _disconnected(self) -> None:
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            self._receive()  # messages that the scheduler sent before it died
            self._engine_ended("its scheduler process has ended")

    def _engine_ended(self, reason: str) -> None:
        self._die(EngineDead(f"the engine has stopped: {self._why_stopped() or reason}"))

    def _die(self, death: EngineDead) -> None:
        if self.death is not None:
            return
        self._deliver()
        self.death = death
        logger.error("%s; %d requests are lost", self.death, len(self._requests))
        self._requests.fail_all(self.death)
        for answer in (self._ready, self._report, self._block_snapshot):
            if answer is not None and not answer.done():
                answer.set_exception(self.death)
                answer.exception()  # mark it as retrieved, for when no task awaits it
        self._report = self._block_snapshot = None

    def close(self) -> None:
        """Stop receiving. Requests that are still live never finish."""
        self._watcher.close()
        self._monitor_watcher.close()
        self._channel.socket.disable_monitor()
        self._monitor.close(linger=0)
        self._channel.close()
        self._context.term()
