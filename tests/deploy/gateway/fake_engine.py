"""A scripted scheduler with the real protocol; a gateway cannot tell the difference."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import zmq

from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import MessagesLost
from longshore.protocol.handshake import (
    ClientHello,
    EngineIdentity,
    EngineReady,
    Rejected,
    ToClient,
    ToEngine,
)
from longshore.protocol.kv_cache_spec import FullAttentionSpec, KVCapacity, LongestRequest
from longshore.protocol.outputs import (
    EngineFailed,
    EngineOutputs,
    FinishedRequest,
    FinishReason,
    TokenLogprobs,
)
from longshore.protocol.requests import (
    AbortRequests,
    AddRequest,
    ContinueSession,
    StopFound,
)
from longshore.protocol.statistics import (
    BlockHolder,
    BlockSnapshot,
    BlockState,
    DescribeBlocks,
    DescribeEngine,
    EngineReport,
    GroupUse,
    PullStats,
    SchedulerStats,
    TenantStats,
    TierStats,
    TransferStats,
    WaitingReport,
)
from longshore.protocol.transport.channel import (
    Endpoint,
    ServerChannel,
    SocketWatcher,
    close_context,
    open_socket,
)
from longshore.scheduler.step.planner import PauseState
from tests.harness.sockets import sending
from tests.scheduler.worker_reports import report

IDENTITY = EngineIdentity(
    model_fingerprint="a model",
    dtype="float32",
    block_size=16,
    max_model_len=64,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    hash_seed_digest="a seed",
)
CAPACITY = KVCapacity(
    99, 49, (FullAttentionSpec(16, 1, 2, 4),), LongestRequest(IDENTITY.max_model_len)
)
STATS = SchedulerStats(
    accepted_by_position=(3, 1),
    num_running=3,
    num_waiting=1,
    num_blocks=100,
    num_free_blocks=75,
    kv_usage=0.25,
    steps_in_flight=2.0,
    num_steps=7,
    num_preemptions=0,
    num_prefix_queried_tokens=40,
    num_prefix_hit_tokens=16,
    num_preempted_queried_tokens=0,
    num_preempted_hit_tokens=0,
    num_stale_tokens=0,
    num_bad_messages=0,
    tenants=(TenantStats("alice", 2, 1),),
    tiers=(TierStats("CPU", 40, 64, 512, 3), TierStats("DISK", 90, 1024, 128, 0)),
    transfers=(
        TransferStats("CPU", "GPU", (0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0), 40, 40_000, 0.5, 1, 2, 7),
    ),
    pulls=PullStats(1, 20, 3, 2, {"complete": 9, "late": 1}),
    workers=(report(epoch=1, num_steps=7, compute_s=1.5),),
)
REPORT = EngineReport(
    engine_id="engine-0.1",
    num_running=3,
    num_waiting=1,
    num_blocks=100,
    num_free_blocks=75,
    kv_usage=0.25,
    steps_in_flight=2,
    idle_s=0.5,
    pause=PauseState.UNPAUSED.value,
    waiting=(WaitingReport("cmpl-1", "WAITING", "blocks: 9 are needed, 3 are free", 12.5, 140, 1),),
)
BLOCK_MAP = BlockSnapshot(
    REPORT,
    states=np.array([0] + [3] * 20 + [5] * 5 + [2] * 30 + [1] * 44, np.uint8),
    groups=(GroupUse("full attention", 16, 2, 4096, 20),),
    num_steps=7,
    num_preemptions=0,
    num_prefix_queried_tokens=40,
    num_prefix_hit_tokens=16,
    holders=(
        BlockHolder("cmpl-0", BlockState.HELD, (20,), (20,), 0, 300, 310, 309, 16, 0, 1.5),
        BlockHolder("a session", BlockState.KEPT, (5,), (2,)),
    ),
    block_ids=np.array([*range(1, 21), 24, 25], np.int32),
)


def tokens_of(
    request: AddRequest, token_ids: list[int], scores: TokenLogprobs | None = None
) -> EngineOutputs:
    """The message that has the next tokens of a request."""
    handles = np.full(len(token_ids), request.handle, np.int32)
    return EngineOutputs(handles, int32_array(token_ids), scores)


Script = Callable[["FakeEngine", AddRequest], None]


def echo(engine: "FakeEngine", request: AddRequest) -> None:
    """Answer with the prompt's own ids, one per message, and stop as requested."""
    token_ids = request.prompt_token_ids.tolist()[: request.sampling.max_tokens]
    for token_id in token_ids:
        engine.send_tokens(request, [token_id])
    engine.finish(request, FinishReason.LENGTH_CAPPED, num_output_tokens=len(token_ids))


def never_answer(engine: "FakeEngine", request: AddRequest) -> None:
    """Accept the request and never answer."""


def score_of(position: int, num_best: int) -> tuple[float, int, list[tuple[int, float]]]:
    """The scores that this engine gives to any token at `position`: log probability, rank, best
    tokens."""
    best = [(2 + (position + place) % 90, -0.25 * (place + 1)) for place in range(num_best)]
    return -0.125 * (position + 1), position + 1, best


def scored_echo(engine: "FakeEngine", request: AddRequest) -> None:
    """As `echo`, with log probabilities if they are requested. Those of the prompt come in two
    messages."""
    prompt, sampling = request.prompt_token_ids.tolist(), request.sampling
    if sampling.prompt_logprobs is not None:
        half = len(prompt) // 2
        for part in (range(1, half), range(max(half, 1), len(prompt))):
            engine.send(EngineOutputs(logprobs=_scores(request, part, sampling.prompt_logprobs)))
    outputs = prompt[: sampling.max_tokens]
    for index, token_id in enumerate(outputs):
        position = len(prompt) + index
        scores = None
        if sampling.logprobs is not None:
            scores = _scores(request, range(position, position + 1), sampling.logprobs)
        engine.send_tokens(request, [token_id], scores)
    engine.finish(request, FinishReason.LENGTH_CAPPED, num_output_tokens=len(outputs))


def _scores(request: AddRequest, positions: range, num_best: int) -> TokenLogprobs:
    prompt = request.prompt_token_ids.tolist()
    entries = [(prompt[p % len(prompt)], *score_of(p, num_best)) for p in positions]
    return TokenLogprobs(
        owners=np.full(len(entries), request.handle, np.int32),
        positions=np.array(positions, np.int32),
        ranks=np.array([rank for _, _, rank, _ in entries], np.int32),
        num_listed=np.full(len(entries), 1 + num_best, np.int32),
        token_ids=np.array(
            [i for own, _, _, best in entries for i in (own, *dict(best))], np.int32
        ),
        logprobs=np.array(
            [p for _, own, _, best in entries for p in (own, *dict(best).values())], np.float32
        ),
    )


class FakeEngine:
    """Binds the clients' endpoint on the running loop and follows a script per request.

    requests: all requests.
    aborted:  handles of aborted requests.
    stopped:  ends that clients found.
    num_lost: number of connections that ended because a message of the client was lost.
    num_describes: number of requests for a report or a snapshot of its blocks. It answers these
        while `report` or `block_snapshot` is set.
    """

    def __init__(self, endpoint: Endpoint, script: Script = echo) -> None:
        self.script = script
        self.requests: list[AddRequest] = []
        self.aborted: list[int] = []
        self.stopped: list[StopFound] = []
        self.num_describes = 0
        self.num_lost = 0
        self.report: EngineReport | None = REPORT
        self.block_snapshot: BlockSnapshot | None = BLOCK_MAP
        self.arrived = asyncio.Event()
        self._has_failed = False
        self._peer = self._lost_peer = b""
        self._context = zmq.Context()
        socket = open_socket(self._context, zmq.ROUTER, endpoint, bind=True)
        self._channel: ServerChannel[ToClient, ToEngine] = ServerChannel(socket, ToEngine)
        self._watcher = SocketWatcher(socket, self._receive)

    def _receive(self) -> None:
        for peer, message in self._channel.drain():
            self._peer = peer
            match message:
                case _ if self._has_failed:
                    pass
                case ClientHello(model_fingerprint=fingerprint):
                    if fingerprint == IDENTITY.model_fingerprint:
                        self.send(EngineReady("engine-0.1", IDENTITY, 100, CAPACITY))
                    else:
                        self.send(Rejected(f"model_fingerprint={fingerprint!r} is another"))
                case AddRequest():
                    self.requests.append(message)
                    self.script(self, message)
                case AbortRequests(handles):
                    self.aborted += handles.tolist()
                case DescribeEngine():
                    self.num_describes += 1
                    if self.report is not None:
                        self.send(self.report)
                case DescribeBlocks():
                    self.num_describes += 1
                    if self.block_snapshot is not None:
                        self.send(self.block_snapshot)
                case StopFound():
                    self.stopped.append(message)
                case MessagesLost():
                    self.num_lost += 1
                case ContinueSession():
                    raise AssertionError("the gateway does not continue sessions")
            self.arrived.set()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until a message has made the condition true; fail after a minute."""
        async with asyncio.timeout(60):
            while not condition():
                self.arrived.clear()
                await self.arrived.wait()

    def send(self, message: ToClient) -> None:
        self._channel.send(self._peer, message)
        self._watcher.check()  # sending may have consumed the event of a message that arrived

    def lose(self, message: ToClient) -> None:
        """Send a message that does not arrive."""
        with sending(self._channel, times=0):
            self.send(message)

    def send_tokens(
        self, request: AddRequest, token_ids: list[int], scores: TokenLogprobs | None = None
    ) -> None:
        self.send(tokens_of(request, token_ids, scores))

    def finish(
        self,
        request: AddRequest,
        reason: FinishReason,
        *,
        num_output_tokens: int = 0,
        message: str | None = None,
        token_ids: Sequence[int] = (),
    ) -> None:
        """token_ids: the last ones, which arrive with the end."""
        end = FinishedRequest(
            request.handle, reason, num_output_tokens, num_cached_tokens=2, message=message
        )
        outputs = tokens_of(request, [*token_ids])
        self.send(msgspec.structs.replace(outputs, finished=(end,), stats=STATS))

    def fail(self, reason: str) -> None:
        """Say so, and answer nothing from now on."""
        self.send(EngineFailed(reason))
        self._has_failed, self._lost_peer = True, self._peer

    async def return_to_life(self) -> None:
        """A new engine with the same address, once the client has connected again."""
        await self.wait_for(lambda: self._peer != self._lost_peer)
        self._has_failed = False
        self.send(EngineReady("engine-0.2", IDENTITY, 100, CAPACITY))

    def close(self) -> None:
        """Break the connection, as if the process had died."""
        self._watcher.close()
        self._channel.socket.close(linger=100)
        close_context(self._context)
