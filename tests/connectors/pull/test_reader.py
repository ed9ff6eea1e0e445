"""One reader and an owner, without engines: which leases are renewed, and which reads fail."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from longshore.connectors.pull.layout import RankLayout
from longshore.connectors.pull.messages import (
    Offer,
    Pull,
    PullOutcome,
    RankInfo,
    Renew,
    Source,
    digest_blocks,
    tables_of,
)
from longshore.connectors.pull.options import PullOptions, read_options
from longshore.connectors.pull.owner import Owner
from longshore.connectors.pull.reader import (
    MAX_POLL_S,
    MIN_POLL_S,
    Drop,
    EndedPull,
    Keep,
    Reader,
    poll_interval_s,
)
from longshore.connectors.pull.transport import Memory, ReadState
from longshore.connectors.pull.worker import reader_name
from longshore.protocol.arrays import int32_array
from longshore.protocol.kv_cache_spec import FullAttentionSpec, KVCacheGroup
from tests.connectors.pull.local import LocalTransport, Network, network
from tests.connectors.pull.test_side_channel import KV, LAYOUT

LIMIT_S: Final = 60.0
TABLES: Final = tables_of([int32_array([3, 4])])


class Renewals:
    """The transfers that an owner was asked to renew, in order."""

    def __init__(self, owner: Owner) -> None:
        self._seen: list[str] = []
        self._changed = threading.Condition()
        renew = owner._leases.renew

        def noted(message: Renew, reader: str, now: float) -> Any:
            with self._changed:
                self._seen += message.transfer_ids
                self._changed.notify_all()
            return renew(message, reader, now)

        owner._leases.renew = noted  # type: ignore[method-assign]

    def wait_for_another(self, transfer_id: str) -> None:
        with self._changed:
            num_seen = self._seen.count(transfer_id)
            assert self._changed.wait_for(lambda: self._seen.count(transfer_id) > num_seen, LIMIT_S)


class Pair:
    def __init__(self, transport: type[LocalTransport] = LocalTransport) -> None:
        self.options: PullOptions = read_options("local", {"lease_s": 3.0})
        self.blocks = np.zeros((2, LAYOUT.num_blocks, LAYOUT.block_bytes), np.uint8)
        self.server = transport()
        self.agent = self.server.register(self._memory(0))
        self.owner = Owner(
            self.options,
            "owner.1",
            msgspec.structs.replace(KV, ranks=()),
            lambda ended, expired: None,
        )
        self.renewals = Renewals(self.owner)
        self.owner.start()
        self.offer_ranks(self.agent)
        client = transport()
        client.register(self._memory(1))
        self._numbers = itertools.count()
        self._ended: list[EndedPull] = []
        self._has_ended = threading.Condition()
        self.reader = Reader(client, self.options, "reader", 0, self._end)
        self.reader.start()
        self.reader.put(KV)

    def offer_ranks(self, *agents: bytes, layout: RankLayout = LAYOUT) -> None:
        self.owner.put(tuple(RankInfo(layout, agent, self.owner.port) for agent in agents))

    def _memory(self, side: int) -> Memory:
        blocks = self.blocks[side]
        return Memory(blocks.ctypes.data, blocks.nbytes, LAYOUT.block_bytes)

    def _end(self, ended: EndedPull) -> None:
        with self._has_ended:
            self._ended.append(ended)
            self._has_ended.notify_all()

    def offer(self, transfer_id: str, host: str = "127.0.0.1") -> Source:
        self.owner.put(Offer(transfer_id, transfer_id, 1, 30, b"tokens", TABLES))
        return Source(
            host,
            self.owner.port,
            "owner.1",
            transfer_id,
            transfer_id,
            self.options.lease_s,
            b"tokens",
            digest_blocks(TABLES),
        )

    def pull(self, source: Source) -> PullOutcome:
        request_id = f"request {next(self._numbers)}"
        self.reader.put(Pull(request_id, source, 0, 30, TABLES))

        def found() -> list[EndedPull]:
            return [each for each in self._ended if each.request_id == request_id]

        with self._has_ended:
            assert self._has_ended.wait_for(found, LIMIT_S)
            (ended,) = found()
        return ended.outcome

    def close(self) -> None:
        self.reader.close()
        self.owner.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Pair]]:
    network.__dict__.update(Network().__dict__)
    pairs: list[Pair] = []

    def make(*args: Any) -> Pair:
        pairs.append(Pair(*args))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


@pytest.mark.req("CON-08")
@pytest.mark.parametrize("fault", ["failed", "unconfirmed", "late"])
def test_a_failed_pull_ends_no_lease_of_a_waiting_request(
    fault: str, start: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next renewal connects to the owner again."""
    pair = start()
    waiting = pair.offer("waiting")
    pair.reader.put(Keep(waiting))
    pair.renewals.wait_for_another("waiting")
    match fault:
        case "failed":
            network.state = lambda number: ReadState.FAILED
        case "unconfirmed":
            network.state = lambda number: ReadState.UNCONFIRMED
        case "late":
            network.state = lambda number: ReadState.IN_PROGRESS
            short = msgspec.structs.replace(pair.options, read_timeout_s=0.1)
            monkeypatch.setattr(pair.reader, "_options", short)
    outcome = pair.pull(pair.offer("other"))
    assert outcome is (PullOutcome.LATE if fault == "late" else PullOutcome.FAILED)
    assert network.num_resets == (0 if fault == "failed" else 1)
    pair.renewals.wait_for_another("waiting")
    network.state = lambda number: ReadState.DONE
    assert pair.pull(waiting) is PullOutcome.COMPLETE


def test_an_owner_that_was_restarted_is_not_asked_to_renew(start: Callable[..., Pair]) -> None:
    pair = start()
    source = msgspec.structs.replace(pair.offer("t"), engine_id="owner.0")
    pair.reader.put(Keep(source))
    assert pair.pull(source) is PullOutcome.REFUSED
    assert pair.reader._kept == {}


class OneName(LocalTransport):
    """Names a peer after its agent, as NIXL and Mooncake do."""

    def connect(self, metadata: bytes) -> str:
        self._peers[metadata.hex()] = self._peers.pop(super().connect(metadata))
        return metadata.hex()


def test_an_engine_with_two_addresses_stays_connected_until_neither_is_used(
    start: Callable[..., Pair],
) -> None:
    pair = start(OneName)
    first, second = pair.offer("first"), pair.offer("second", "localhost")
    network.state = lambda number: ReadState.FAILED if number in (1, 2) else ReadState.DONE
    outcomes = [pair.pull(first), pair.pull(second)]  # the second read fails
    assert outcomes == [PullOutcome.COMPLETE, PullOutcome.FAILED]
    assert pair.pull(first) is PullOutcome.FAILED
    assert pair.pull(second) is PullOutcome.COMPLETE
    assert pair.reader.failure is None


def test_an_owner_whose_ranks_have_the_same_agent_is_refused(
    start: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    pair = start()
    half = RankLayout((KVCacheGroup(("layer.0",), FullAttentionSpec(16, 1, 8, 4)),), 1 << 14, 40)
    pair.offer_ranks(pair.agent, pair.agent, layout=half)
    assert pair.pull(pair.offer("t")) is PullOutcome.REFUSED
    assert "two of its ranks have the same agent" in caplog.text


def test_leases_that_are_dropped_are_not_renewed(start: Callable[..., Pair]) -> None:
    pair = start()
    first, second = pair.offer("first"), pair.offer("second")
    for source in (first, second):
        pair.reader.put(Keep(source))
    pair.renewals.wait_for_another("second")
    pair.reader.put(Drop(first))
    pair.renewals.wait_for_another("second")
    num_seen = pair.renewals._seen.count("first")
    pair.renewals.wait_for_another("second")
    assert pair.renewals._seen.count("first") == num_seen


def test_readers_of_two_hosts_have_different_names() -> None:
    names = {reader_name("engine-0.3", host) for host in ("10.0.0.1", "10.0.0.2")}
    assert len(names) == 2
    assert reader_name("engine-0.4", "10.0.0.1") in names  # a lease outlives an epoch


def test_a_read_is_polled_in_proportion_to_its_time() -> None:
    assert poll_interval_s(0.0) == MIN_POLL_S
    assert poll_interval_s(0.002) == pytest.approx(0.0002)
    assert poll_interval_s(60.0) == MAX_POLL_S


def test_a_reader_whose_reads_have_ended_waits_for_events(start: Callable[..., Pair]) -> None:
    """It would cost CPU time for ever if it went on polling."""
    pair = start()
    is_waiting = threading.Event()
    step = pair.reader._thread._step

    def noted(items: Any) -> float | None:
        wake_at = step(items)
        if wake_at is None or wake_at > time.monotonic() + 1.0:
            is_waiting.set()
        else:
            is_waiting.clear()
        return wake_at

    pair.reader._thread._step = noted
    assert pair.pull(pair.offer("t")) is PullOutcome.COMPLETE
    assert is_waiting.wait(LIMIT_S)
