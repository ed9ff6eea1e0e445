"""Reads over gloo between two ranks of this process, and what ends their links."""

import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
import zmq

from longshore.connectors.offloading.copies import HostCopier
from longshore.connectors.pull.layout import Pattern
from longshore.connectors.pull.p2p import channel, link, staging
from longshore.connectors.pull.p2p.messages import Join, Send, array_bytes
from longshore.connectors.pull.transport import BlockReads, ReadState, TransportError
from tests.connectors.pull.p2p.sides import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    WHOLE,
    Rank,
    ids,
    two_ranks,
    until,
    wait,
)

pytestmark = pytest.mark.timeout(60)

SECRETS = [zmq.curve_keypair()[1].decode() for _ in range(2)]


@pytest.mark.req("CRG-03")
@pytest.mark.parametrize("chunk_bytes", [staging.CHUNK_BYTES, 1000])
def test_runs_of_bytes_are_read(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (staging, link):
        monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    halves = Pattern(ids(0, 3000), ids(2000, 0), ids(1000, 500))
    with two_ranks() as (reader, owner):
        first = BlockReads(halves, ids(15, 3, 8, 1), ids(1, 11, 5, 2))
        second = BlockReads(WHOLE, ids(4), ids(7))
        wanted = np.zeros_like(reader.blocks)
        for source, target in zip(first.owner_blocks, first.reader_blocks, strict=True):
            wanted[target, 2000:3000] = owner.blocks[source, 0:1000]
            wanted[target, 0:500] = owner.blocks[source, 3000:3500]
        wanted[7] = owner.blocks[4]
        assert reader.read(owner, first, second) is ReadState.DONE
        np.testing.assert_array_equal(reader.blocks, wanted)


def test_both_ranks_read_from_each_other_at_the_same_time() -> None:
    with two_ranks() as (first, second):
        first.fill()
        before = first.blocks.copy()
        posted = [
            one.transport.post(
                one.transport.connect(other.metadata), [BlockReads(WHOLE, ids(8), ids(target))]
            )
            for _ in range(50)
            for one, other, target in ((first, second, 1), (second, first, 2))
        ]
        assert {wait(reads) for reads in posted} == {ReadState.DONE}
        np.testing.assert_array_equal(first.blocks[1], before[8])
        np.testing.assert_array_equal(second.blocks[2], before[8])


@pytest.mark.req("CRG-03")
def test_a_restarted_owner_gets_a_new_link() -> None:
    read = BlockReads(WHOLE, ids(3), ids(5))
    with two_ranks(read_timeout_s=1.0) as (reader, owner):
        before = Rank()
        assert reader.read(before, read) is ReadState.DONE
        (receiving,) = reader.transport._links.values()
        before.transport.close()
        until(lambda: receiving.failure is not None)
        assert "shutting down" in reader.reason
        assert reader.read(before, read) is ReadState.FAILED, "nobody answers at the old address"
        assert reader.read(owner, read) is ReadState.DONE
        np.testing.assert_array_equal(reader.blocks[5], owner.blocks[3])


@pytest.mark.req("CRG-03")
@pytest.mark.parametrize("ending", ["reset", "disconnect"])
def test_after_a_link_has_ended_nothing_is_written(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the link goes on until the owner has sent, which it does afterwards."""
    may_send = threading.Event()
    begin = link.SendingLink._begin

    def late(self: Any, request: Send) -> None:
        assert may_send.wait(30)
        begin(self, request)

    monkeypatch.setattr(link.SendingLink, "_begin", late)
    with two_ranks() as (reader, owner):
        peer = reader.transport.connect(owner.metadata)
        posted = reader.transport.post(peer, [BlockReads(WHOLE, ids(3), ids(5))])
        (receiving,) = reader.transport._links.values()
        until(lambda: bool(receiving._in_flight))
        if ending == "reset":
            reader.transport.reset()
        else:
            reader.transport.disconnect(peer)
        assert posted[0].poll() is ReadState.FAILED
        may_send.set()
        receiving.thread.join(30)
        assert not reader.blocks.any()
        assert reader.read(owner, BlockReads(WHOLE, ids(4), ids(6))) is ReadState.DONE
        assert not reader.blocks[5].any()


def test_a_reset_waits_for_a_copy_that_has_begun() -> None:
    """Blocks are used again as soon as it returns."""
    copying, may_copy = threading.Event(), threading.Event()

    class SlowCopier(HostCopier):
        def copy(self, *arrays: Any) -> None:
            copying.set()
            assert may_copy.wait(30)
            super().copy(*arrays)

    with two_ranks() as (reader, owner):
        reader.transport._receiving_here.library.copier = SlowCopier()
        peer = reader.transport.connect(owner.metadata)
        posted = reader.transport.post(peer, [BlockReads(WHOLE, ids(3), ids(5))])
        assert copying.wait(30)
        resetting = threading.Thread(target=reader.transport.reset)
        resetting.start()
        until(lambda: all(each.failure is not None for each in reader.transport._ending))
        assert posted[0].poll() is ReadState.IN_PROGRESS
        resetting.join(0.2)
        assert resetting.is_alive()
        may_copy.set()
        resetting.join(30)
        assert not resetting.is_alive()
        assert posted[0].poll() in (ReadState.FAILED, ReadState.DONE)
        np.testing.assert_array_equal(reader.blocks[5], owner.blocks[3])


@pytest.mark.req("CRG-03")
def test_a_transfer_that_times_out_ends_its_link_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo closes the process group; the other owner is read meanwhile and afterwards."""
    hanging = threading.Event()
    begin = link.SendingLink._begin

    def hang(self: Any, request: Send) -> None:
        if self._memory.address == stuck.blocks.ctypes.data:
            assert hanging.wait(30)
        else:
            begin(self, request)

    monkeypatch.setattr(link.SendingLink, "_begin", hang)
    with two_ranks(read_timeout_s=1.0) as (reader, owner):
        stuck = Rank(read_timeout_s=1.0)
        try:
            read = BlockReads(WHOLE, ids(3), ids(5))
            posted = reader.transport.post(reader.transport.connect(stuck.metadata), [read])
            assert reader.read(owner, read) is ReadState.DONE
            assert posted[0].poll() is ReadState.IN_PROGRESS
            assert wait(posted) is ReadState.FAILED
            assert reader.read(owner, BlockReads(WHOLE, ids(4), ids(6))) is ReadState.DONE
            np.testing.assert_array_equal(reader.blocks[[5, 6]], owner.blocks[[3, 4]])
        finally:
            hanging.set()
            stuck.transport.close()


def test_a_silent_owner_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process was stopped, or its host is gone, while nothing is read."""
    with two_ranks(read_timeout_s=1.0) as (reader, owner):
        assert reader.read(owner, BlockReads(WHOLE, ids(3), ids(5))) is ReadState.DONE
        monkeypatch.setattr(
            channel.Channel, "_handle_reader", lambda self, reader_id, message, now: None
        )
        (receiving,) = reader.transport._links.values()
        until(lambda: receiving.failure is not None)
        assert "silent for 0.8 s" in reader.reason


@pytest.mark.parametrize(
    ("offsets", "lengths"),
    [
        ((NUM_BLOCKS * BLOCK_BYTES - 8,), (16,)),
        ((-8,), (16,)),
        ((0,), (0,)),
        ((0,), (-1,)),
        ((0, 8), (8,)),
        ((), ()),
        ((0,), (staging.CHUNK_BYTES + 1,)),
        ((1 << 62,), (1 << 62,)),
    ],
    ids=str,
)
@pytest.mark.req("CRG-03")
def test_an_owner_sends_nothing_but_its_blocks(
    offsets: tuple[int, ...], lengths: tuple[int, ...]
) -> None:
    with two_ranks() as (reader, owner):
        assert reader.read(owner, BlockReads(WHOLE, ids(3), ids(5))) is ReadState.DONE
        (receiving,) = reader.transport._links.values()
        receiving._send(Send(9, array_bytes(ids(*offsets)), array_bytes(ids(*lengths))))
        until(lambda: receiving.failure is not None)
        assert "outside the owner's memory" in reader.reason


def test_a_reader_that_asks_for_too_much_at_once_gets_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_send = threading.Event()
    monkeypatch.setattr(link.SendingLink, "_begin", lambda *_: may_send.wait(30))
    with two_ranks() as (reader, owner):
        reader.transport.post(
            reader.transport.connect(owner.metadata), [BlockReads(WHOLE, ids(3), ids(5))]
        )
        (receiving,) = reader.transport._links.values()
        until(lambda: bool(receiving._in_flight))
        for number in range(link.MAX_REQUESTS + 1):
            receiving._send(Send(number, array_bytes(ids(0)), array_bytes(ids(8))))
        until(lambda: receiving.failure is not None)
        may_send.set()
        assert "asks for more than it receives" in reader.reason


def test_who_does_not_know_the_metadata_reads_nothing() -> None:
    with two_ranks() as (reader, owner):
        fields = msgspec.msgpack.decode(owner.metadata)
        owner.metadata = msgspec.msgpack.encode({**fields, "session": b"x" * 16})
        assert reader.read(owner, BlockReads(WHOLE, ids(3), ids(5))) is ReadState.FAILED
        assert "does not know this engine" in reader.reason
        assert not reader.blocks.any()


@pytest.mark.parametrize("is_same", [True, False], ids=["same secret", "other secret"])
def test_with_a_secret_only_who_knows_it_reads(is_same: bool, tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "two"]
    for file, secret in zip(files, SECRETS, strict=True):
        file.write_text(secret)
        file.chmod(0o600)
    owner = Rank(secret_file=str(files[0]))
    reader = Rank(secret_file=str(files[0 if is_same else 1]), read_timeout_s=1.0)
    try:
        owner.fill()
        state = reader.read(owner, BlockReads(WHOLE, ids(3), ids(5)))
        assert state is (ReadState.DONE if is_same else ReadState.FAILED)
        assert reader.blocks.any() == is_same
    finally:
        reader.transport.close()
        owner.transport.close()


def test_metadata_of_others_is_validated() -> None:
    with two_ranks() as (reader, owner):
        fields = msgspec.msgpack.decode(owner.metadata)
        for change, message in (
            ({"host": "10.9.8.7"}, "10.9.8.7 is not one of the 'remote_hosts'"),
            ({"library": "nccl"}, "read by nccl, not gloo"),
            ({"block_bytes": 0}, "not valid"),
            ({"other": 1}, "not valid"),
        ):
            with pytest.raises(TransportError, match=message):
                reader.transport.connect(msgspec.msgpack.encode({**fields, **change}))
        peer = reader.transport.connect(owner.metadata)
        with pytest.raises(TransportError, match="outside the owner's memory"):
            reader.transport.post(peer, [BlockReads(WHOLE, ids(NUM_BLOCKS), ids(1))])


def test_everything_listens_on_the_host_only() -> None:
    process = psutil.Process()
    before = {each.laddr for each in process.net_connections("inet")}
    with two_ranks() as (reader, owner):
        assert reader.read(owner, BlockReads(WHOLE, ids(3), ids(5))) is ReadState.DONE
        listening = {
            each.laddr
            for each in process.net_connections("inet")
            if each.status == psutil.CONN_LISTEN
        } - before
        assert len(listening) == 4, "two side channels, and two of gloo"
        assert {address.ip for address in listening} == {"127.0.0.1"}


def test_invalid_messages_end_nothing_else() -> None:
    with two_ranks() as (reader, owner):
        port = msgspec.msgpack.decode(owner.metadata)["port"]
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.connect(f"tcp://127.0.0.1:{port}")
            stranger.send(b"nonsense")
            stranger.send(msgspec.msgpack.encode(Send(0, b"", b"")))
            assert b"no such link" in stranger.recv()
            stranger.send(msgspec.msgpack.encode(Join(b"y" * 16, "gloo")))
            assert b"does not know this engine" in stranger.recv()
            stranger.linger = 0
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert reader.read(owner, BlockReads(WHOLE, ids(3), ids(5))) is ReadState.DONE


def test_links_of_several_owners_share_the_staging_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """More links than buffers, all at once."""
    monkeypatch.setattr(staging, "CHUNK_BYTES", 2048)
    monkeypatch.setattr(link, "CHUNK_BYTES", 2048)
    allocated: list[torch.Tensor] = []
    with two_ranks() as (reader, owner):
        others = [Rank() for _ in range(5)]
        for number, each in enumerate(others):
            each.blocks[:] = 100 + number
        here = reader.transport._receiving_here
        pool = staging.StagingPool(here.library, num_buffers=2)
        reader.transport._receiving_here = here._replace(staging=pool)
        allocate = here.library.allocate

        def counted(num_bytes: int) -> torch.Tensor:
            allocated.append(allocate(num_bytes))
            return allocated[-1]

        monkeypatch.setattr(pool._library, "allocate", counted)
        every = np.arange(NUM_BLOCKS)
        try:
            posted = [
                reader.transport.post(
                    reader.transport.connect(each.metadata),
                    [BlockReads(WHOLE, every, np.full(NUM_BLOCKS, number))],
                )
                for number, each in enumerate(others)
            ]
            assert {wait(reads) for reads in posted} == {ReadState.DONE}
            assert (reader.blocks[:5, 0] == np.arange(100, 105)).all()
            assert len(allocated) == 2
        finally:
            for each in others:
                each.transport.close()
        assert reader.read(owner, BlockReads(WHOLE, ids(4), ids(9))) is ReadState.DONE
