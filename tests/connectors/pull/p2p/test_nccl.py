"""Links by NCCL, with a fake of CuPy: what is called, in which order, and how they end."""

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from longshore.connectors.offloading.copies import HostCopier
from longshore.connectors.pull.options import read_options
from longshore.connectors.pull.p2p import link, staging
from longshore.connectors.pull.p2p.communicator import CommunicatorError, Library
from longshore.connectors.pull.p2p.nccl import NcclLibrary
from longshore.connectors.pull.p2p.peer_memory import PeerMemory
from longshore.connectors.pull.p2p.transport import P2PTransport
from longshore.connectors.pull.transport import BlockReads, Memory, ReadState, TransportError
from longshore.protocol.errors import ConfigError
from longshore.protocol.install_command import install_command
from tests.connectors.pull.p2p.fake_cupy import World, installed
from tests.connectors.pull.p2p.fake_ipc import Driver, Runtime
from tests.connectors.pull.p2p.sides import WHOLE, Rank, ids, two_ranks, until, wait

pytestmark = [pytest.mark.timeout(60), pytest.mark.req("CRG-03")]

READ = BlockReads(WHOLE, ids(3), ids(5))


class GpuTransport(P2PTransport):
    """What it takes for a GPU is host memory."""

    runtime = Runtime(can_export=False)

    def _library(self) -> Library:
        return NcclLibrary(0, HostCopier, torch.device("cpu"))

    def _open_peer_memory(self, index: int) -> PeerMemory:
        return PeerMemory(self.runtime, Driver(), nullcontext)


class MappingTransport(GpuTransport):
    pass


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with installed(monkeypatch) as world:
        yield world


def gpus(**options: Any) -> Any:
    return two_ranks(transport=GpuTransport, device=0, **options)


def test_both_sides_call_with_the_same_sizes_in_the_same_order(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (staging, link):
        monkeypatch.setattr(module, "CHUNK_BYTES", 3000)
    with gpus() as (reader, owner):
        blocks = BlockReads(WHOLE, ids(1, 4, 9), ids(2, 8, 3))
        assert reader.read(owner, blocks) is ReadState.DONE
        np.testing.assert_array_equal(reader.blocks[[2, 8, 3]], owner.blocks[[1, 4, 9]])
        assert reader.read(owner, READ) is ReadState.DONE
        np.testing.assert_array_equal(reader.blocks[5], owner.blocks[3])
        pair = world.pair
        sizes = {
            kind: [call.count for call in pair.calls if (call.kind, call.rank) == (kind, rank)]
            for kind, rank in (("send", 1), ("recv", 0))
        }
        assert sizes["send"] == sizes["recv"] == [3000] * 4 + [288, 3000, 1096]
        assert len(pair.calls) == 14, "the reader only receives, and the owner only sends"
        assert not pair.aborts
    assert sorted(rank for rank, _ in pair.aborts) == [0, 1], "each end once"


def test_an_error_that_nccl_finds_by_itself_ends_the_link(world: World) -> None:
    """The transfer alone would wait forever."""
    with gpus() as (reader, owner):
        assert reader.read(owner, READ) is ReadState.DONE
        world.transfers = False
        posted = reader.transport.post(
            reader.transport.connect(owner.metadata), [BlockReads(WHOLE, ids(3), ids(6))]
        )
        until(lambda: len(world.pair.calls) == 4)
        assert posted[0].poll() is ReadState.IN_PROGRESS
        first = world.pair
        first.error = "NCCL_ERROR_SYSTEM_ERROR: remote process exited"
        assert wait(posted) is ReadState.FAILED
        assert not reader.blocks[6].any()
        until(lambda: len(first.aborts) == 2)
        world.transfers = True
        assert reader.read(owner, READ) is ReadState.DONE, "by a new communicator"
        assert len(world.pairs) == 2


def test_a_transfer_that_does_not_end_is_aborted(world: World) -> None:
    with gpus(read_timeout_s=1.0) as (reader, owner):
        assert reader.read(owner, READ) is ReadState.DONE
        world.transfers = False
        first = world.pair
        assert reader.read(owner, BlockReads(WHOLE, ids(3), ids(6))) is ReadState.FAILED
        until(lambda: len(first.aborts) == 2)
        world.transfers = True
        assert reader.read(owner, READ) is ReadState.DONE
        assert not reader.blocks[6].any()


@pytest.mark.parametrize("call", ["send", "recv"])
def test_a_call_that_does_not_return_is_aborted_by_another_thread(call: str, world: World) -> None:
    with gpus(read_timeout_s=1.0) as (reader, owner):
        world.blocked = call
        assert reader.read(owner, READ) is ReadState.FAILED
        blocked_rank = 1 if call == "send" else 0
        until(lambda: (blocked_rank, "p2p-abort") in world.pair.aborts)
        until(lambda: len(world.pair.aborts) == 2)
        world.blocked = None
        assert reader.read(owner, READ) is ReadState.DONE


def test_calls_that_never_return_hold_a_bounded_number_of_threads(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connecting cannot be aborted."""
    may_return = threading.Event()

    def connect(*_: object) -> None:
        may_return.wait()
        raise CommunicatorError("it has failed at last")

    monkeypatch.setattr(link, "MAX_STUCK", 2)
    with gpus(read_timeout_s=0.5) as (reader, owner):
        with monkeypatch.context() as patch:
            patch.setattr(NcclLibrary, "connect", connect)
            assert reader.read(owner, READ) is ReadState.FAILED
            until(lambda: reader.transport._links[owner_of(reader)].failure is not None)
            assert reader.read(owner, READ) is ReadState.FAILED
            until(lambda: reader.transport._links[owner_of(reader)].failure is not None)
            with pytest.raises(TransportError, match=r"2 ended links.*NCCL_SOCKET_IFNAME"):
                reader.read(owner, READ)
            may_return.set()
        until(lambda: not any(each.thread.is_alive() for each in reader.transport._started._links))
        until(lambda: reader.read(owner, READ) is ReadState.DONE)


def owner_of(reader: Rank) -> str:
    (peer,) = reader.transport._links
    return peer


def test_staging_memory_of_an_aborted_transfer_is_not_used_again(world: World) -> None:
    with gpus(read_timeout_s=1.0) as (reader, owner):
        world.transfers = False
        assert reader.read(owner, READ) is ReadState.FAILED
        (received,) = (each.address for each in world.pair.calls if each.kind == "recv")
        until(lambda: len(world.pair.aborts) == 2)
        pool = reader.transport._receiving_here.staging
        until(lambda: pool._num_new == staging.NUM_BUFFERS)
        assert received not in [each.data_ptr() for each in pool._free]


@pytest.mark.parametrize(
    ("has_cupy", "message"),
    [
        (False, "needs CuPy.*" + re.escape(install_command("cuda"))),
        (True, "needs NCCL.*nvidia-nccl"),
    ],
)
def test_without_its_library_it_does_not_start(
    has_cupy: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with installed(monkeypatch, has_nccl=False):
        if not has_cupy:
            monkeypatch.setitem(sys.modules, "cupy", None)
        transport = P2PTransport(read_options("p2p_nccl", {}))
        with pytest.raises(ConfigError, match=message):
            transport.register(Memory(0, 64, 64, device=0))


# Memory that is mapped


def mapped(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(MappingTransport, "runtime", runtime)
    return two_ranks(transport=MappingTransport, device=0, read_timeout_s=1.0)


def test_on_one_node_the_reader_copies_from_mapped_memory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime()
    with mapped(runtime, monkeypatch) as (reader, owner):
        for source, target in ((3, 5), (4, 6)):
            blocks = BlockReads(WHOLE, ids(source), ids(target))
            assert reader.read(owner, blocks) is ReadState.DONE
            np.testing.assert_array_equal(reader.blocks[target], owner.blocks[source])
        assert not world.pairs, "NCCL is not needed"
        assert runtime.num_opened == 1, "once per owner"
        assert len(runtime.mapped) == 1
    assert not runtime.mapped


def test_a_mapping_is_closed_when_its_owner_is_gone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the memory of the owner is not free, even after its process has ended."""
    runtime = Runtime()
    with mapped(runtime, monkeypatch) as (reader, owner):
        assert reader.read(owner, READ) is ReadState.DONE
        with monkeypatch.context() as patch:
            patch.setattr(type(owner.transport._channel), "_handle_reader", lambda *_: None)
            until(lambda: not runtime.mapped)
        assert "silent" in reader.reason
        assert reader.read(owner, READ) is ReadState.DONE
        assert runtime.num_opened == 2


@pytest.mark.parametrize("reason", ["export", "open", "node"])
def test_memory_that_cannot_be_mapped_is_copied_by_nccl(
    reason: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "node":
        nodes = iter(["one node", "another node"])
        module = "longshore.connectors.pull.p2p"
        monkeypatch.setattr(f"{module}.peer_memory.this_node", lambda: next(nodes))
        monkeypatch.setattr(f"{module}.transport.this_node", lambda: "a third node")
    runtime = Runtime(can_export=reason != "export", can_open=reason != "open")
    with mapped(runtime, monkeypatch) as (reader, owner):
        assert reader.read(owner, READ) is ReadState.DONE
        np.testing.assert_array_equal(reader.blocks[5], owner.blocks[3])
        assert len(world.pairs) == 1
        assert not runtime.mapped
