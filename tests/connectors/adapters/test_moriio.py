"""The connector moriio with a fake of MoRI-IO's interface. The real library needs ROCm."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from longshore.connectors.pull import moriio
from longshore.connectors.pull.layout import Pattern
from longshore.connectors.pull.moriio import MoRIIOTransport
from longshore.connectors.pull.options import read_options
from longshore.connectors.pull.transport import BlockReads, ReadState, TransportError
from longshore.protocol.arrays import Int64Array
from longshore.protocol.errors import ConfigError
from tests.connectors.adapters import fake_mori
from tests.connectors.adapters.fake_mori import BackendType, network
from tests.connectors.engine import Engine, prompts_of
from tests.connectors.pull.owner_process import content, memory_of
from tests.connectors.pull.test_two_engines import Pair, wanted

ModelOf = Callable[[str], tuple[Path, Any]]
BLOCK_BYTES: Final = 64


def ids(*values: int) -> Int64Array:
    return np.array(values, np.int64)


WHOLE: Final = Pattern(ids(0), ids(0), ids(BLOCK_BYTES))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mori.install(monkeypatch)


class Reader:
    """A transport that reads, and an owner with `content`."""

    def __init__(self, **options: Any) -> None:
        self.blocks = np.zeros((12, BLOCK_BYTES), np.uint8)
        self.source = content(16, BLOCK_BYTES)
        self.transport = MoRIIOTransport(read_options("moriio", options))
        self.transport.register(memory_of(self.blocks))
        self.owner = MoRIIOTransport(read_options("moriio", {}))
        self.metadata = self.owner.register(memory_of(self.source))


@pytest.fixture
def reader(library: None) -> Iterator[Reader]:
    yield Reader()
    network.is_held = False


@pytest.mark.req("CRG-08")
def test_runs_of_bytes_are_read_from_blocks(reader: Reader) -> None:
    halves = Pattern(ids(0, 40), ids(20, 0), ids(10, 20))
    peer = reader.transport.connect(reader.metadata)
    reads = [BlockReads(halves, ids(15, 3), ids(1, 11)), BlockReads(WHOLE, ids(4), ids(7))]
    (read,) = reader.transport.post(peer, reads)
    assert read.poll() is ReadState.DONE
    expected = np.zeros_like(reader.blocks)
    for owner_block, reader_block in ((15, 1), (3, 11)):
        expected[reader_block, 20:30] = reader.source[owner_block, 0:10]
        expected[reader_block, 0:20] = reader.source[owner_block, 40:60]
    expected[7] = reader.source[4]
    np.testing.assert_array_equal(reader.blocks, expected)
    reader.transport.disconnect(peer)
    reader.transport.close()


def test_the_protocol_is_an_option(library: None) -> None:
    Reader(protocol="tcp")
    assert network.backends == [BackendType.TCP, BackendType.RDMA]  # rdma is the default
    with pytest.raises(ConfigError, match="'protocol' to be 'rdma' or 'tcp'"):
        read_options("moriio", {"protocol": "xgmi"})


def test_what_a_peer_sends_is_checked(library: None) -> None:
    reader = Reader(remote_hosts=["10.0.0.1"])
    with pytest.raises(TransportError, match=r"127\.0\.0\.1 is not one of the 'remote_hosts'"):
        reader.transport.connect(reader.metadata)
    with pytest.raises(TransportError, match="metadata is not valid"):
        reader.transport.connect(b"junk")
    bad = moriio._Region(b"junk", b"", 64, 64)
    with pytest.raises(TransportError, match="metadata is not valid: cannot unpack"):
        reader.transport.connect(msgspec.msgpack.encode(bad))


def test_a_block_outside_the_owner_is_not_read(reader: Reader) -> None:
    peer = reader.transport.connect(reader.metadata)
    with pytest.raises(TransportError, match="outside the owner's memory"):
        reader.transport.post(peer, [BlockReads(WHOLE, ids(16), ids(0))])


def test_a_read_that_fails_and_one_that_does_not_end(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moriio, "CONFIRM_TIMEOUT_S", 0.05)
    peer = reader.transport.connect(reader.metadata)
    network.fails = True
    (read,) = reader.transport.post(peer, [BlockReads(WHOLE, ids(4), ids(7))])
    assert read.poll() is ReadState.FAILED
    network.is_held = True
    (read,) = reader.transport.post(peer, [BlockReads(WHOLE, ids(4), ids(7))])
    assert read.poll() is ReadState.IN_PROGRESS
    with pytest.raises(TransportError, match="1 reads of MoRI cannot be ended"):
        reader.transport.reset()
    network.is_held = network.fails = False
    reader.transport.reset()
    reader.transport.connect(reader.metadata)


@pytest.mark.req("CRG-08")
def test_a_prompt_is_computed_on_one_engine_and_its_output_on_another(
    library: None, model_of: ModelOf
) -> None:
    model, _ = model_of("full")
    prompts = prompts_of(100, 33)
    expected = wanted(model, *prompts)
    with Pair(model, "moriio") as pair:
        assert [pair.run(prompt) for prompt in prompts] == expected
        pair.settle()
        assert pair.num_pulled >= 128
        assert pair.num_failed == 0


def test_a_missing_library_is_named(model_of: ModelOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mori.io", None)
    model, _ = model_of("full")
    with pytest.raises(ConfigError, match=r"moriio needs MoRI.*pip install amd_mori"):
        Engine(model, "moriio", {})
