"""Each transport reads from another process over TCP, and survives the other one."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import psutil
import pytest

import longshore.connectors.pull.nixl as nixl_transport
from longshore.connectors.pull.layout import Pattern
from longshore.connectors.pull.options import read_options
from longshore.connectors.pull.transport import BlockReads, Read, ReadState, Transport
from longshore.connectors.pull.transports import TRANSPORTS
from longshore.protocol.arrays import Int64Array
from tests.connectors.pull.owner_process import content, memory_of

pytestmark = [pytest.mark.services, pytest.mark.timeout(180)]

BLOCK_BYTES: Final = 1 << 12
LARGE: Final = 1 << 20
LIMIT_S: Final = 60.0


class Owner:
    def __init__(self, transport: str, num_blocks: int, block_bytes: int) -> None:
        module = "tests.connectors.pull.owner_process"
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, transport, str(num_blocks), str(block_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        lines = (line.split() for line in self.process.stdout)
        self.metadata = next(
            bytes.fromhex(words[1]) for words in lines if words[:1] == ["metadata"]
        )

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        state = f"/proc/{self.process.pid}/stat"
        while True:
            with open(state, encoding="ascii") as file:
                if file.read().rpartition(")")[2].split()[0] == "T":
                    return
            time.sleep(0.01)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start_owner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Owner]]:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")
    owners: list[Owner] = []

    def start(transport: str, num_blocks: int = 16, block_bytes: int = BLOCK_BYTES) -> Owner:
        owners.append(Owner(transport, num_blocks, block_bytes))
        return owners[-1]

    yield start
    for owner in owners:
        owner.close()


class Reader:
    def __init__(self, transport: str, num_blocks: int = 16, block_bytes: int = BLOCK_BYTES):
        self.transport: Transport = TRANSPORTS[transport](read_options(transport, {}))
        self.blocks = np.zeros((num_blocks, block_bytes), np.uint8)
        self.transport.register(memory_of(self.blocks))

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.close()

    def read(self, peer: str, *reads: BlockReads) -> ReadState:
        return wait(self.transport.post(peer, reads))


@pytest.fixture(params=["mooncake", "nixl", "p2p_nccl"])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")
    return str(request.param)


def wait(reads: Any) -> ReadState:
    """DONE if all of them are."""
    waiting: list[Read] = list(reads)
    states: set[ReadState] = set()
    deadline = time.monotonic() + LIMIT_S
    while waiting:
        assert time.monotonic() < deadline
        found = [(read, read.poll()) for read in waiting]
        states.update(state for _, state in found if state is not ReadState.IN_PROGRESS)
        waiting = [read for read, state in found if state is ReadState.IN_PROGRESS]
        time.sleep(0.001)
    return ReadState.FAILED if ReadState.FAILED in states else ReadState.DONE


def ids(*values: int) -> Int64Array:
    return np.array(values, np.int64)


HALVES: Final = Pattern(ids(0, 3000), ids(2000, 0), ids(1000, 500))
WHOLE: Final = Pattern(ids(0), ids(0), ids(BLOCK_BYTES))


@pytest.mark.req("CRG-06")
@pytest.mark.req("CRG-03")
@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("mooncake", {}),
        ("p2p_nccl", {}),
        ("nixl", {}),
        pytest.param("nixl", {"MAX_PREPARED": 0}, marks=pytest.mark.long),
        ("nixl", {"MAX_POSTED": 3}),
    ],
    ids=str,
    indirect=["name"],
)
def test_runs_of_bytes_are_read_from_blocks_of_another_process(
    name: str,
    limits: dict[str, int],
    start_owner: Callable[..., Owner],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key, value in limits.items():
        monkeypatch.setattr(nixl_transport, key, value)
    source = content(16, BLOCK_BYTES)
    with Reader(name, num_blocks=12) as reader:
        peer = reader.transport.connect(start_owner(name).metadata)
        first = BlockReads(HALVES, ids(15, 3, 8, 1), ids(1, 11, 5, 2))
        second = BlockReads(WHOLE, ids(4), ids(7))
        assert reader.read(peer, first, second) is ReadState.DONE
        wanted = np.zeros_like(reader.blocks)
        for owner_block, reader_block in zip(first.owner_blocks, first.reader_blocks, strict=True):
            wanted[reader_block, 2000:3000] = source[owner_block, 0:1000]
            wanted[reader_block, 0:500] = source[owner_block, 3000:3500]
        wanted[7] = source[4]
        np.testing.assert_array_equal(reader.blocks, wanted)
        reader.transport.disconnect(peer)


def test_by_default_nixl_listens_on_loopback_only(
    start_owner: Callable[..., Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    owner = start_owner("nixl")
    connections = psutil.Process(owner.process.pid).net_connections()
    listening = {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}


def test_a_transport_without_reads_leaves_the_processor_to_others(
    name: str, start_owner: Callable[..., Owner]
) -> None:
    owner = start_owner(name)
    with Reader(name) as reader:
        reader.transport.connect(owner.metadata)
        owner_times = psutil.Process(owner.process.pid).cpu_times
        before, owner_before = time.process_time(), sum(owner_times()[:2])
        time.sleep(1.0)
        assert time.process_time() - before < 0.3
        assert sum(owner_times()[:2]) - owner_before < 0.3


@pytest.mark.req("CRG-06")
@pytest.mark.req("CRG-03")
def test_a_killed_owner_fails_its_reads_only(name: str, start_owner: Callable[..., Owner]) -> None:
    with Reader(name) as reader:
        first, second = start_owner(name), start_owner(name)
        peers = [reader.transport.connect(owner.metadata) for owner in (first, second)]
        read = BlockReads(WHOLE, ids(4), ids(7))
        assert [reader.read(peer, read) for peer in peers] == [ReadState.DONE] * 2
        first.stop()
        posted = reader.transport.post(peers[0], [read])
        assert posted[0].poll() is ReadState.IN_PROGRESS
        first.close()
        assert wait(posted) is ReadState.FAILED
        reader.transport.disconnect(peers[0])
        assert reader.read(peers[1], read) is ReadState.DONE


@pytest.mark.req("CRG-06")
@pytest.mark.req("CRG-03")
def test_after_a_reset_nothing_is_written_any_more(
    name: str, start_owner: Callable[..., Owner]
) -> None:
    """Neither when a stopped owner goes on."""
    if name == "mooncake":
        pytest.skip("its reads end by themselves only; then the worker is replaced")
    with Reader(name, 64, LARGE) as reader:
        owner = start_owner(name, 64, LARGE)
        peer = reader.transport.connect(owner.metadata)
        owner.stop()
        every = np.arange(64)
        whole = Pattern(ids(0), ids(0), ids(LARGE))
        posted = reader.transport.post(peer, [BlockReads(whole, every, every)])
        assert posted[0].poll() is ReadState.IN_PROGRESS
        reader.transport.reset()
        assert wait(posted) is ReadState.FAILED
        reader.blocks[:] = 0
        owner.process.send_signal(signal.SIGCONT)
        time.sleep(2)
        assert not reader.blocks.any()
        peer = reader.transport.connect(start_owner(name, 64, LARGE).metadata)
        assert reader.read(peer, BlockReads(whole, ids(3), ids(5))) is ReadState.DONE
        np.testing.assert_array_equal(reader.blocks[5], content(64, LARGE)[3])
