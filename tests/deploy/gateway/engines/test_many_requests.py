"""As many requests as a gateway may have: the work for an event grows with what the event is about,
and no iteration of the event loop does all of what happens to all of them."""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final

import pytest

from longshore.deploy.gateway.engines.engine_client import (
    NOTIFIED_PER_TURN,
    RESUMED_PER_TURN,
    EngineClient,
)
from longshore.deploy.gateway.engines.engines import MOVED_PER_TURN, Engines
from longshore.deploy.gateway.router.router import Router
from longshore.deploy.requests.live_requests import LiveRequest
from longshore.protocol.handshake import ClientHello, EngineReady, ToClient, ToEngine
from longshore.protocol.outputs import EngineFailed, EngineOutputs, FinishedRequest, FinishReason
from longshore.protocol.requests import AbortRequests, AddRequest
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.transport.channel import Endpoint
from tests.deploy.gateway.fake_engine import CAPACITY, IDENTITY
from tests.harness.operations import count_operations, grows_at_most_n_log_n

SIZES: Final = (128, 256, 512, 1024)
LARGE_SIZES: Final = (1024, 8192)
SAMPLING: Final = SamplingParams(seed=1)
READY: Final = EngineReady("engine", IDENTITY, 100, CAPACITY)


class ManualLoop:
    """Runs an iteration at a time, when the test says so."""

    def __init__(self) -> None:
        self._soon: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        self._soon.append((function, args))

    def time(self) -> float:
        return 0.0

    def run_once(self) -> bool:
        """False if there was nothing to do."""
        due, self._soon = self._soon, deque()
        for function, args in due:
            function(*args)
        return bool(due)


class FakeChannel:
    """Keeps what is sent, and has the messages that the test puts there."""

    def __init__(self) -> None:
        self.socket = SimpleNamespace(closed=False)
        self.sent: list[ToEngine] = []
        self.arrived: deque[ToClient] = deque()

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)

    def drain(self) -> Iterator[ToClient]:
        while self.arrived:
            yield self.arrived.popleft()


class Offline:
    """Engines without sockets, and a loop that the test runs."""

    def __init__(self, engines: Engines, loop: ManualLoop) -> None:
        self.engines, self.loop = engines, loop

    def channel(self, number: int) -> Any:
        return self.engines.clients[number]._channel

    def receive(self, number: int, *messages: ToClient) -> None:
        self.channel(number).arrived.extend(messages)
        self.engines.clients[number]._receive()

    def submit(self, count: int, on_change: Callable[[], None] = lambda: None) -> list[LiveRequest]:
        return [
            self.engines.submit("r", (1, 2, 3), SAMPLING, on_change=on_change) for _ in range(count)
        ]

    def sent(self, number: int) -> list[AddRequest]:
        return [each for each in self.channel(number).sent if isinstance(each, AddRequest)]

    def run(self) -> None:
        while self.loop.run_once():
            pass

    def most_per_turn(self, count: Callable[[], int]) -> int:
        """By how much the count grows at most in one iteration of the loop, until it is idle."""
        most, before = 0, count()
        while self.loop.run_once():
            most, before = max(most, count() - before), count()
        return most


def finished(live: LiveRequest) -> EngineOutputs:
    return EngineOutputs(finished=(FinishedRequest(live.handle, FinishReason.STOPPED, 0),))


@pytest.fixture
async def start(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[int], Offline]]:
    def connect(client: EngineClient) -> None:
        client._channel = FakeChannel()  # type: ignore[assignment]
        client._watcher = SimpleNamespace(check=lambda: None)  # type: ignore[assignment]
        client._next_ping = asyncio.get_running_loop().call_later(9999, lambda: None)

    monkeypatch.setattr(EngineClient, "_connect", connect)
    monkeypatch.setattr(EngineClient, "_disconnect", lambda client: client._next_ping.cancel())
    started: list[Engines] = []

    def begin(count: int) -> Offline:
        endpoints = [Endpoint(f"ipc://{number}") for number in range(count)]
        engines = Engines(
            endpoints,
            ClientHello("test", "a model"),
            router=Router(count),
            on_stats=lambda engine, stats: None,
        )
        started.append(engines)
        loop: Any = ManualLoop()
        for owner in (engines, *engines.clients.values()):
            owner._loop = loop
        offline = Offline(engines, loop)
        for number in range(count):
            offline.receive(number, READY)
        return offline

    yield begin
    for engines in started:
        engines.close()


def operations_by_event(offline: Offline, num_requests: int) -> dict[str, int]:
    """Of each event, for each of so many requests."""
    lives: list[LiveRequest] = []

    def arrive() -> None:
        lives.extend(offline.submit(num_requests))

    def move() -> None:
        offline.receive(0, EngineFailed("it has failed"))
        offline.run()
        assert {live.engine for live in lives} == {1}

    def resume() -> None:
        offline.receive(1, EngineFailed("it has failed"))
        offline.receive(1, READY)
        offline.run()
        assert len(offline.sent(1)) == num_requests

    def finish() -> None:
        for live in lives[: num_requests // 4]:
            offline.receive(1, finished(live))

    def abort() -> None:
        for live in reversed(lives[num_requests // 4 : num_requests // 2]):
            offline.engines.abort([live])

    def stop_and_abort_while_it_is_lost() -> None:
        offline.receive(1, EngineFailed("it has failed"))
        for live in reversed(lives[num_requests // 2 :]):
            offline.engines.stop(live, 0)
            offline.engines.abort([live])
        assert not offline.engines.num_own_requests

    events = (arrive, move, resume, finish, abort, stop_and_abort_while_it_is_lost)
    return {event.__name__: count_operations(event) for event in events}


@pytest.mark.parametrize(
    "sizes",
    [SIZES, pytest.param(LARGE_SIZES, marks=(pytest.mark.slow, pytest.mark.timeout(900)))],
)
async def test_the_work_for_an_event_of_every_request_grows_with_their_number(
    start: Callable[[int], Offline], sizes: tuple[int, ...]
) -> None:
    counts: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for size in sizes:
        for event, operations in operations_by_event(start(2), size).items():
            counts[event][size] = operations
    grown = {event: each for event, each in counts.items() if not grows_at_most_n_log_n(each)}
    assert not grown


async def test_an_iteration_of_the_loop_sends_few_requests_again(
    start: Callable[[int], Offline],
) -> None:
    offline = start(2)
    lives = offline.submit(400)
    offline.receive(0, EngineFailed("it has failed"))
    assert len(offline.sent(1)) == 200 + MOVED_PER_TURN
    assert offline.most_per_turn(lambda: len(offline.sent(1))) == MOVED_PER_TURN
    assert [live.engine for live in lives] == [1] * 400

    offline.receive(1, EngineFailed("it has failed"))
    offline.receive(1, READY)
    assert len(offline.sent(1)) == RESUMED_PER_TURN
    assert offline.most_per_turn(lambda: len(offline.sent(1))) == RESUMED_PER_TURN
    assert [each.handle for each in offline.sent(1)] == [live.handle for live in lives]


async def test_an_iteration_of_the_loop_passes_on_few_of_many_ends(
    start: Callable[[int], Offline],
) -> None:
    num_changes = 0

    def on_change() -> None:
        nonlocal num_changes
        num_changes += 1

    offline = start(1)
    lives = offline.submit(1000, on_change)
    ends = [FinishedRequest(live.handle, FinishReason.STOPPED, 0) for live in lives[:500]]
    offline.receive(0, EngineOutputs(finished=tuple(ends)))
    assert num_changes == NOTIFIED_PER_TURN
    assert offline.most_per_turn(lambda: num_changes) == NOTIFIED_PER_TURN
    assert num_changes == 500
    offline.engines.shut_down("the server is shutting down")
    assert num_changes == 500 + NOTIFIED_PER_TURN
    assert offline.most_per_turn(lambda: num_changes) == NOTIFIED_PER_TURN
    assert num_changes == 1000


async def test_requests_that_wait_to_be_sent_again_can_be_aborted_and_stopped(
    start: Callable[[int], Offline],
) -> None:
    offline = start(1)
    lives = offline.submit(100)
    offline.receive(0, EngineFailed("it has failed"))
    offline.receive(0, READY)
    offline.engines.abort([lives[98]])
    offline.engines.stop(lives[97], 0)
    assert lives[97].failure is not None
    (new,) = offline.submit(1)
    offline.run()
    left = [*lives[:97], lives[99], new]
    assert [message.handle for message in offline.channel(0).sent] == [each.handle for each in left]


async def test_an_engine_that_is_lost_again_is_not_charged_with_what_it_had_not_got(
    start: Callable[[int], Offline],
) -> None:
    offline = start(1)
    lives = offline.submit(3 * RESUMED_PER_TURN)
    for _ in range(3):
        offline.receive(0, EngineFailed("it has failed"))
        offline.receive(0, READY)
    offline.run()
    was_sent = [True] * RESUMED_PER_TURN + [False] * 2 * RESUMED_PER_TURN
    assert [live.failure is not None for live in lives] == was_sent


async def test_a_removed_engine_is_disconnected_once_its_requests_are_moved(
    start: Callable[[int], Offline],
) -> None:
    offline = start(2)
    lives, engines, removed = offline.submit(200), offline.engines, offline.channel(0)
    engines._router.remove_engine(0)
    engines.remove_engine(0)
    assert sum(live.engine == 0 for live in lives) == 100 - MOVED_PER_TURN
    assert engines.num_own_requests == 200
    engines.abort([lives[198]])  # which is not moved yet
    offline.run()
    assert [live.engine for live in lives] == [1] * 198 + [0, 1]
    assert engines.num_own_requests == 199
    aborts = [each for each in removed.sent if isinstance(each, AbortRequests)]
    aborted = [handle for each in aborts for handle in each.handles.tolist()]
    assert len(aborted) == len(set(aborted)) == 100
