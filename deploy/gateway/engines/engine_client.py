"""The gateway's end of the channel to a scheduler, on an asyncio loop.

Performs the handshake, then sends requests and receives tokens. The death of the scheduler shows as
a disconnect, because the kernel closes the connection with the process, and a lost message as a gap
in the numbers of the next ones. The requests stay live: a new connection waits for the scheduler,
which continues each of them after its last token.
"""

import asyncio
import logging
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Final, assert_never

import zmq
from zmq.utils.monitor import recv_monitor_message

from longshore.deploy.requests.live_requests import MAX_LOST, LiveRequest, LiveRequests
from longshore.protocol.arrays import int32_array
from longshore.protocol.commands import DRAINED, DRAINING
from longshore.protocol.errors import EngineDead, HandshakeRejected, MessagesLost
from longshore.protocol.handshake import ClientHello, EngineReady, Rejected, ToClient, ToEngine
from longshore.protocol.logs.records import fields
from longshore.protocol.outputs import (
    AdmissionChanged,
    EngineContinues,
    EngineFailed,
    EngineOutputs,
    EnginePaused,
    FinishedRequest,
)
from longshore.protocol.requests import NO_OPTIONS, AbortRequests, AddRequest, RequestOptions
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.statistics import (
    BlockSnapshot,
    DescribeBlocks,
    DescribeEngine,
    EngineReport,
    SchedulerStats,
)
from longshore.protocol.transport.channel import (
    ClientChannel,
    Endpoint,
    SocketWatcher,
    has_input,
    open_socket,
)

logger = logging.getLogger(__name__)

RECONNECT_INTERVAL_MS: Final = 5
"""How often a lost scheduler is tried; it starts in about 0.3 s. ZMQ waits up to twice as long."""

REMOTE_RECONNECT_INTERVAL_MS: Final = 100
"""The same for an engine on another node."""

UNREACHABLE_INTERVAL_S: Final = 1.0
"""How often one is tried that ends connections before the handshake."""

REJECTED_INTERVAL_S: Final = 5.0
"""How often an engine on another node is tried that has rejected this client: its node may be
upgraded later than this one."""

NOTIFIED_PER_TURN: Final = 64
"""Requests whose tokens or ends are passed on in one iteration of the event loop. Writing a token
to a client takes about 30 us, answering a request that fails about 300."""

RESUMED_PER_TURN: Final = 16
"""Requests that are sent again in one iteration of the event loop, at about 0.1 ms each."""

PING_INTERVAL_S: Final = 1.0
"""A message that was lost is noticed after this time, if no other message follows it."""


class EngineClient:
    """One engine, which may be restarted. Create it inside a running loop. Whatever happens to all
    requests at a time is done in parts, each in an iteration of the loop.

    is_ready: the engine accepts requests. Until then, and again once it is lost, they wait here.
    closed_reason: why new requests wait there, although it is ready; None: they do not.
    loss:     why the engine was lost; None once it is ready.
    pause:    why a ready engine does not run its requests for now; None if it does.
    is_asleep: the pause is a sleep.
    death:    set when the engine will not return; nothing can be submitted then.
    ready:    what the engine last said of itself.
    number:   of this engine.
    seeds:    source of seeds for requests without one.
    on_stats: called with the engine's statistics, about once per second while anything changes,
              after the finished requests that they count.
    on_change: called when the engine is ready, lost, closed or open again.
    on_late_end: called with the end of a request that is not live any more.
    why_stopped: returns the supervisor's reason for stopping the deployment, if any; the scheduler
              itself does not know it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        hello: ClientHello,
        *,
        number: int = 0,
        seeds: random.Random,
        on_stats: Callable[[SchedulerStats], None],
        on_change: Callable[[], None] = lambda: None,
        on_late_end: Callable[[FinishedRequest], None] = lambda finished: None,
        why_stopped: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._endpoint = endpoint
        self._hello = hello
        self._about = fields(engine=f"engine-{number}")  # of all log records
        self._context = zmq.Context()
        self._is_remote = endpoint.address.startswith("tcp://")
        interval_ms = REMOTE_RECONNECT_INTERVAL_MS if self._is_remote else RECONNECT_INTERVAL_MS
        self._context.setsockopt(zmq.RECONNECT_IVL, interval_ms)
        self._loop = asyncio.get_running_loop()
        self._requests = LiveRequests(seeds, on_late_end, self._notify, engine=number)
        self._noted: OrderedDict[LiveRequest, None] = OrderedDict()  # changed, and not notified
        self._notifies_soon = False
        # Live here, but the engine that is ready has not got them yet.
        self._unsent: OrderedDict[LiveRequest, None] = OrderedDict()
        self._sends_soon = False
        self._leaving: deque[LiveRequest] = deque()  # for another engine
        self._steps: list[EngineOutputs] = []  # received and not delivered yet
        self._on_stats = on_stats
        self._on_change = on_change
        self._why_stopped = why_stopped
        self._first_ready: asyncio.Future[EngineReady] = self._loop.create_future()
        self._report: asyncio.Future[EngineReport] | None = None
        self._block_snapshot: asyncio.Future[BlockSnapshot] | None = None
        self.is_ready = False
        self.ready: EngineReady | None = None
        self.closed_reason: str | None = None
        self.loss: str | None = None
        self.pause: str | None = None
        self.is_asleep = False
        self.death: EngineDead | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._connect()

    def _connect(self) -> None:
        socket = open_socket(
            self._context, zmq.DEALER, self._endpoint, bind=False, detects_silence=self._is_remote
        )
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._channel: ClientChannel[ToEngine, ToClient] = ClientChannel(socket, ToClient)
        self._watcher = SocketWatcher(socket, self._receive)
        self._monitor_watcher = SocketWatcher(self._monitor, self._disconnected)
        self._ping_later()
        self._transmit(partial(self._channel.send, self._hello))  # fails once keys were rejected

    def _ping_later(self) -> None:
        self._next_ping = self._loop.call_later(PING_INTERVAL_S, self._ping)

    def _ping(self) -> None:
        self._ping_later()
        self._transmit(self._channel.ping)

    def _disconnect(self) -> None:
        self._next_ping.cancel()
        self._watcher.close()
        self._monitor_watcher.close()
        self._channel.socket.disable_monitor()
        self._monitor.close(linger=0)
        self._channel.socket.close(linger=0)

    @property
    def is_running(self) -> bool:
        """The engine is ready, and not paused."""
        return self.is_ready and self.pause is None

    @property
    def num_live_requests(self) -> int:
        return len(self._requests)

    async def wait_until_ready(self) -> EngineReady:
        """The engine's description. Raises HandshakeRejected or EngineDead with its reason."""
        return await asyncio.shield(self._first_ready)

    async def describe(self, timeout_s: float) -> EngineReport:
        """The engine's report. Raises TimeoutError if the scheduler does not answer in time,
        EngineDead if the engine is lost."""
        self._check_ready()
        if self._report is None:  # else share the answer to the pending query
            self._report = self._loop.create_future()
            self._send(DescribeEngine())
        return await asyncio.wait_for(asyncio.shield(self._report), timeout_s)

    async def describe_blocks(self, timeout_s: float) -> BlockSnapshot:
        """The state of every KV block. Raises as `describe` does."""
        self._check_ready()
        if self._block_snapshot is None:
            self._block_snapshot = self._loop.create_future()
            self._send(DescribeBlocks())
        return await asyncio.wait_for(asyncio.shield(self._block_snapshot), timeout_s)

    def _check_ready(self) -> None:
        if self.death is not None:
            raise self.death
        if not self.is_ready:
            raise EngineDead(f"the engine is being restarted: {self.loss or 'not ready yet'}")

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        options: RequestOptions = NO_OPTIONS,
        *,
        on_change: Callable[[], None],
        fork_of: LiveRequest | None = None,
        num_primed: int = 0,
    ) -> LiveRequest:
        """Queue one request; see `LiveRequests.open`. Raises EngineDead."""
        if self.death is not None:
            raise self.death
        live, message = self._requests.open(
            request_id,
            prompt_token_ids,
            sampling,
            options,
            on_change=on_change,
            fork_of=fork_of,
            num_primed=num_primed,
        )
        self._send_request(live, message)
        return live

    def resume(
        self, requests: Iterable[LiveRequest], *, fork_of: LiveRequest | None = None
    ) -> None:
        """Continue requests that another engine, or an earlier life of this one, had, or has lost;
        see `LiveRequests.resume`."""
        for live in requests:
            self._send_request(live, self._requests.resume(live, fork_of))

    def _send_request(self, live: LiveRequest, message: AddRequest) -> None:
        """If this loses the engine, another one may have the request afterwards."""
        if not self.is_ready or self._unsent:  # so the KV that it offers was not pulled
            live.kv_transfer_params = message.options.kv_transfer_params
        if self._unsent:
            self._unsent[live] = None  # behind those that came before it
        else:
            self._send(message)

    def _send_unsent(self) -> None:
        """Send the next requests that the engine has not got."""
        self._sends_soon = False
        for _ in range(min(RESUMED_PER_TURN, len(self._unsent))):
            if not self.is_ready:
                return
            live, _ = self._unsent.popitem(last=False)
            if live in self._requests:
                self._send(self._requests.resume(live))
        if self._unsent and not self._sends_soon:
            self._sends_soon = True
            self._loop.call_soon(self._send_unsent)

    def release_some(self, maximum: int) -> list[LiveRequest]:
        """Give up the first live requests, for another engine to resume. A paused engine drops
        them."""
        if not self._leaving:
            self._leaving.extend(self._requests.remove_finished())
        released: list[LiveRequest] = []
        while self._leaving and len(released) < maximum:
            live = self._leaving.popleft()
            if self._requests.release(live):
                released.append(live)
        if sent := self._sent(released):
            self._send(AbortRequests(int32_array([live.handle for live in sent])))
        return released

    def abort(self, requests: Sequence[LiveRequest]) -> None:
        """Abort those that are still live; the scheduler frees their blocks within a step."""
        message = self._requests.abort(self._sent(requests))
        self._requests.abort(requests)  # the others need no message
        if message is not None:
            self._send(message)

    def _sent(self, requests: Sequence[LiveRequest]) -> list[LiveRequest]:
        """Those that the engine has got. The others are not sent any more."""
        sent = [live for live in requests if live not in self._unsent]
        for live in requests if self._unsent else ():
            self._unsent.pop(live, None)
        return sent

    def release_transfers(self, transfer_ids: Sequence[str]) -> None:
        """No engine will pull the KV of these ended requests."""
        self._send(AbortRequests(int32_array([]), tuple(transfer_ids)))

    def stop(self, live: LiveRequest, num_tokens: int) -> None:
        """End a request with its first `num_tokens` output tokens; see `LiveRequests.stop`."""
        message = self._requests.stop(live, num_tokens)
        if message is None:
            return
        if self.is_ready and live not in self._unsent:
            self._send(message)
        else:  # it needs nothing more of the engine
            self._unsent.pop(live, None)
            self._requests.fail([live], EngineDead(f"the engine was lost: {self.loss}"))

    def shut_down(self, reason: str) -> None:
        """Fail every live request with `reason`, and accept no more."""
        self._die(EngineDead(reason))

    def _send(self, message: ToEngine) -> None:
        """Send if the engine is ready; else the message follows from the requests when it is."""
        if self.is_ready:
            self._transmit(partial(self._channel.send, message))

    def _transmit(self, send: Callable[[], None]) -> None:
        try:
            send()
        except EngineDead as error:  # it does not read
            self._lose(str(error))
            return
        self._watcher.check()

    def _receive(self) -> None:
        try:
            self._take_messages()
        except MessagesLost as error:
            self._lose(str(error))

    def _take_messages(self) -> None:
        channel = self._channel
        for message in channel.drain():
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
                    self._become_ready(message)
                case AdmissionChanged(reason):
                    self.closed_reason = reason
                    self._on_change()
                case Rejected(reason):
                    if not self._is_remote:
                        self._die(HandshakeRejected(reason))
                    else:
                        logger.warning(
                            "%s; trying again in %g s",
                            reason,
                            REJECTED_INTERVAL_S,
                            extra=self._about,
                        )
                        self._lose(reason, retry_after_s=REJECTED_INTERVAL_S)
                case EnginePaused():
                    self._begin_pause(message)
                case EngineContinues(engine_id):
                    self._end_pause(engine_id)
                case EngineFailed(reason):
                    self._lose(reason)
                case _:
                    assert_never(message)
            if self._channel is not channel or channel.socket.closed:  # lost
                return
        self._deliver()

    def _begin_pause(self, message: EnginePaused) -> None:
        """The engine has lost its workers, or they sleep. It keeps its requests until it has new
        ones, or they are awake."""
        self._deliver()
        self.pause = reason = message.reason
        self.is_asleep = message.is_asleep
        if self.is_asleep:
            logger.info("the engine sleeps: %s", reason, extra=self._about)
        else:
            logger.warning("the engine has lost its workers: %s", reason, extra=self._about)
            fatal = f"the engine's workers have died {MAX_LOST} times while it had this request"
            aborted = self._requests.fail_fatal(EngineDead(f"{fatal}: {reason}"), self._unsent)
            if aborted is not None:
                self._send(aborted)
        self._on_change()

    def _end_pause(self, engine_id: str) -> None:
        self.pause, self.is_asleep = None, False
        self._leaving.clear()
        logger.info(
            "%s runs again; %d requests continue",
            engine_id,
            len(self._requests),
            extra=self._about,
        )
        self._on_change()

    def _become_ready(self, message: EngineReady) -> None:
        self.is_ready, loss, self.loss = True, self.loss, None
        self.ready = message
        self.closed_reason = None
        if not self._first_ready.done():
            self._first_ready.set_result(message)
        if loss is not None:
            logger.info(
                "%s is ready; %d requests continue",
                message.engine_id,
                len(self._requests),
                extra=self._about,
            )
        self._leaving.clear()
        self._unsent = OrderedDict.fromkeys(self._requests.remove_finished())
        self._send_unsent()
        self._on_change()

    def _deliver(self) -> None:
        """Apply all received steps together: a request that got tokens in several steps while the
        gateway was busy is notified once."""
        steps, self._steps = self._steps, []
        self._requests.apply(*steps)

    def _notify(self, requests: Collection[LiveRequest]) -> None:
        if not self._noted and len(requests) <= NOTIFIED_PER_TURN:
            for live in requests:
                live.on_change()
            return
        self._noted.update(dict.fromkeys(requests))
        if not self._notifies_soon:
            self._notify_some()

    def _notify_some(self) -> None:
        self._notifies_soon = True
        try:
            for _ in range(min(NOTIFIED_PER_TURN, len(self._noted))):
                live, _ = self._noted.popitem(last=False)
                live.on_change()
        finally:
            self._notifies_soon = bool(self._noted)
            if self._noted:
                self._loop.call_soon(self._notify_some)

    def _disconnected(self) -> None:
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
        self._end_connection(self._channel)

    def _end_connection(self, channel: ClientChannel[ToEngine, ToClient]) -> None:
        """Take the messages that the scheduler sent before it died, then connect again."""
        if self._channel is not channel or channel.socket.closed:
            return
        self._receive()
        if self._channel is not channel or channel.socket.closed:
            return
        if has_input(channel.socket):
            self._loop.call_soon(self._end_connection, channel)
        else:
            self._lose("its scheduler process has ended")

    def _lose(self, reason: str, *, retry_after_s: float = 0.0) -> None:
        """The engine has died. Connect again; its requests wait, unless the deployment stops."""
        if self.death is not None or self._retry is not None:
            return
        was_ready, self.is_ready, self.loss = self.is_ready, False, reason
        self.pause, self.is_asleep = None, False
        self._deliver()
        if (stopped := self._why_stopped()) is not None:
            self._die(EngineDead(f"the engine has stopped: {stopped}"))
            return
        if was_ready:
            fatal = f"the engine has died {MAX_LOST} times while it had this request: {reason}"
            self._requests.fail_fatal(EngineDead(fatal), self._unsent)
            is_planned = self.closed_reason in (DRAINING, DRAINED)
            logger.log(
                logging.INFO if is_planned else logging.WARNING,
                "lost the engine: %s; %d requests wait",
                self.closed_reason if is_planned else reason,
                len(self._requests),
                extra=self._about,
            )
        self._requests.fail_stopped(EngineDead(f"the engine was lost: {self.loss}"))
        self._fail_queries(EngineDead(f"the engine is being restarted: {reason}"))
        self._unsent.clear()
        self._disconnect()
        if self._is_remote and not was_ready and not retry_after_s:
            retry_after_s = UNREACHABLE_INTERVAL_S  # it may not accept the keys of this node
        if retry_after_s:
            self._retry = self._loop.call_later(retry_after_s, self._try_again)
        else:
            self._connect()
        self._on_change()

    def _try_again(self) -> None:
        self._retry = None
        self._connect()

    def _die(self, death: EngineDead | HandshakeRejected) -> None:
        if self.death is not None:
            return
        self.is_ready = False
        self._deliver()
        self.death = death if isinstance(death, EngineDead) else EngineDead(str(death))
        self._next_ping.cancel()
        if self._retry is not None:
            self._retry.cancel()
        logger.error("%s; %d requests are lost", self.death, len(self._requests), extra=self._about)
        self._unsent.clear()
        self._requests.fail_all(self.death)
        if not self._first_ready.done():
            self._first_ready.set_exception(death)
            self._first_ready.exception()  # mark it as retrieved, for when no task awaits it
        self._fail_queries(self.death)

    def _fail_queries(self, error: EngineDead) -> None:
        for answer in (self._report, self._block_snapshot):
            if answer is not None and not answer.done():
                answer.set_exception(error)
                answer.exception()  # as above
        self._report = self._block_snapshot = None

    def close(self) -> None:
        """Stop receiving. Requests that are still live never finish."""
        if self._retry is None:
            self._disconnect()
        else:
            self._retry.cancel()
        self._context.term()
