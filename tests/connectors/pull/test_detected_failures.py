"""Blocks of pulls and leases are reported, to be freed, in the step that detects the loss of an
owner or a reader; and this step is not late. A test calls the steps, and has the clock."""

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from longshore.connectors.pull import owner as owner_module
from longshore.connectors.pull import reader as reader_module
from longshore.connectors.pull.messages import (
    Offer,
    Pull,
    PullOutcome,
    RankInfo,
    Source,
    digest_blocks,
    tables_of,
)
from longshore.connectors.pull.options import read_options
from longshore.connectors.pull.owner import Owner
from longshore.connectors.pull.reader import ANSWER_TIMEOUT_S, EndedPull, Phase, Reader
from longshore.connectors.pull.transport import Memory, ReadState
from longshore.protocol.arrays import int32_array
from tests.connectors.pull.local import LocalTransport, Network, network
from tests.connectors.pull.test_side_channel import KV, LAYOUT

LIMIT_S: Final = 60.0
FREE_WITHIN_S: Final = 1.0
"""Of the detection."""

LEASE_S: Final = 10.0
READ_TIMEOUT_S: Final = 30.0
TABLES: Final = tables_of([int32_array([3, 4])])


class Clock:
    """The `time` of a module."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Pair:
    """An owner and a reader without threads.

    ended, expired: pulls of the reader, and leases of the owner.
    wake_at: when the reader is to be called next.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.ended: list[EndedPull] = []
        self.expired: list[Offer] = []
        options = read_options("local", {"lease_s": LEASE_S, "read_timeout_s": READ_TIMEOUT_S})
        self._blocks = np.zeros((2, LAYOUT.num_blocks, LAYOUT.block_bytes), np.uint8)
        server, client = LocalTransport(), LocalTransport()
        client.register(self._memory(1))
        kv = msgspec.structs.replace(KV, ranks=())
        self.owner = Owner(options, "owner.1", kv, self._leases_ended)
        self.step_owner((RankInfo(LAYOUT, server.register(self._memory(0)), self.owner.port),))
        self.reader = Reader(client, options, "reader", 0, self.ended.append)
        self.wake_at: float | None = None
        self.step_reader(KV)

    def _memory(self, side: int) -> Memory:
        blocks = self._blocks[side]
        return Memory(blocks.ctypes.data, blocks.nbytes, LAYOUT.block_bytes)

    def _leases_ended(self, ended: list[Offer], expired: list[Offer]) -> None:
        self.expired += expired

    def close(self) -> None:
        self.reader.close()
        self.owner.close()

    def step_owner(self, *items: Any) -> float | None:
        return self.owner._step(list(items))

    def step_reader(self, *items: Any) -> None:
        self.wake_at = self.reader._step(list(items))

    def offer(self, transfer_id: str) -> Source:
        self.step_owner(Offer(transfer_id, transfer_id, 1, 30, b"tokens", TABLES))
        return Source(
            "127.0.0.1",
            self.owner.port,
            "owner.1",
            transfer_id,
            transfer_id,
            LEASE_S,
            b"tokens",
            digest_blocks(TABLES),
        )

    def begin(self, source: Source) -> None:
        """A pull, whose request has the id of the transfer."""
        self.step_reader(Pull(source.transfer_id, source, 0, 30, TABLES))

    def exchange_until(self, is_over: Callable[[], bool]) -> None:
        """Step both, while the clock stands still."""
        deadline = time.monotonic() + LIMIT_S
        while not is_over():
            assert time.monotonic() < deadline
            self.step_owner()
            self.step_reader()
            time.sleep(0.001)

    def phase(self, name: str) -> Phase:
        return self.reader._pulls[name].phase

    def step_when_due(self) -> None:
        """Step the reader alone, whenever its thread would, until a pull has ended."""
        while not self.ended:
            assert self.wake_at is not None
            self.clock.now = max(self.clock.now, self.wake_at)
            self.step_reader()

    @property
    def outcomes(self) -> dict[str, PullOutcome]:
        return {each.request_id: each.outcome for each in self.ended}


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    network.__dict__.update(Network().__dict__)
    clock = Clock()
    monkeypatch.setattr(reader_module, "time", clock)
    monkeypatch.setattr(owner_module, "time", clock)
    made = Pair(clock)
    yield made
    made.close()


@pytest.mark.parametrize("phase", [Phase.GREETING, Phase.CLAIMING, Phase.CHECKING])
def test_all_pulls_from_an_owner_that_does_not_answer_end_with_the_first(
    phase: Phase, pair: Pair
) -> None:
    before, first, second = map(pair.offer, ("before", "first", "second"))
    if phase is not Phase.GREETING:
        pair.begin(before)
        pair.exchange_until(lambda: bool(pair.ended))
        pair.ended.clear()
    network.state = lambda number: ReadState.IN_PROGRESS
    pair.begin(first)
    if phase is Phase.CHECKING:
        pair.exchange_until(lambda: pair.phase("first") is Phase.READING)
        network.state = lambda number: ReadState.DONE
        pair.step_reader()
    assert pair.phase("first") is phase
    detected = pair.clock.now + ANSWER_TIMEOUT_S
    pair.clock.now += 3.0
    pair.begin(second)
    pair.step_when_due()
    assert detected <= pair.clock.now <= detected + FREE_WITHIN_S
    names = ("first", "second")
    assert pair.outcomes == dict.fromkeys(names, PullOutcome.UNREACHABLE)
    assert all(each.failed == [3, 4] for each in pair.ended)


@pytest.mark.parametrize("state", [ReadState.FAILED, ReadState.UNCONFIRMED])
def test_a_pull_ends_as_soon_as_its_read_has_failed(state: ReadState, pair: Pair) -> None:
    network.state = lambda number: ReadState.IN_PROGRESS
    for source in map(pair.offer, ("read", "other")):
        pair.begin(source)
        name = source.transfer_id
        pair.exchange_until(lambda name=name: pair.phase(name) is Phase.READING)  # type: ignore[misc]
    pair.clock.now += READ_TIMEOUT_S / 2
    pair.step_reader()
    detected = pair.clock.now
    network.state = lambda number: state if number == 0 else ReadState.IN_PROGRESS
    pair.step_when_due()
    assert pair.clock.now <= detected + FREE_WITHIN_S
    # A read that the transport does not confirm is ended by force, and so are all others.
    names = ("read",) if state is ReadState.FAILED else ("read", "other")
    assert pair.outcomes == dict.fromkeys(names, PullOutcome.FAILED)
    assert network.num_resets == len(names) - 1


def test_a_late_read_ends_at_its_deadline(pair: Pair) -> None:
    network.state = lambda number: ReadState.IN_PROGRESS
    pair.begin(pair.offer("read"))
    pair.exchange_until(lambda: pair.phase("read") is Phase.READING)
    detected = pair.clock.now + READ_TIMEOUT_S
    pair.clock.now = detected - 0.1  # it is polled often
    pair.step_reader()
    assert not pair.ended
    pair.step_when_due()
    assert detected <= pair.clock.now <= detected + FREE_WITHIN_S
    assert pair.outcomes == {"read": PullOutcome.LATE}


def test_an_owner_reports_a_lease_as_soon_as_it_expires(pair: Pair) -> None:
    """Its reader has used it, and is lost."""
    network.state = lambda number: ReadState.IN_PROGRESS
    source = pair.offer("lease")
    pair.clock.now += LEASE_S / 2
    pair.begin(source)
    pair.exchange_until(lambda: pair.phase("lease") is Phase.READING)
    detected = pair.clock.now + LEASE_S
    wake_at = pair.step_owner()
    while not pair.expired:
        assert wake_at is not None
        pair.clock.now = wake_at
        wake_at = pair.step_owner()
    assert detected <= pair.clock.now <= detected + FREE_WITHIN_S
    assert [each.transfer_id for each in pair.expired] == ["lease"]
