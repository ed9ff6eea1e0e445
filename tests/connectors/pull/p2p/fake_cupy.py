"""CuPy with streams, events and NCCL, for threads of this process and host memory.

A communicator has the rules of the library: creating it blocks until both ranks do, transfers match
in the order of the calls, and one that has no match never ends, until the communicator is aborted.
"""

import ctypes
import itertools
import sys
import threading
import types
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

UINT8: Final = 1
LIMIT_S: Final = 20.0
_numbers: Final = itertools.count(1)


class NcclError(RuntimeError):
    pass


class Call:
    """is_done: its work on the device has ended."""

    def __init__(self, kind: str, rank: int, address: int, count: int, stream: "Stream") -> None:
        self.kind, self.rank, self.address, self.count = kind, rank, address, count
        self.is_done = False
        stream.calls.append(self)


class Pair:
    """The two ranks of one unique id.

    calls:     transfers that were begun, in order.
    waiting:   those without a match, by kind.
    aborts:    rank and thread of each abort.
    error:     what `check_async_error` reports.
    """

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.calls: list[Call] = []
        self.waiting: dict[str, deque[Call]] = {"send": deque(), "recv": deque()}
        self.aborts: list[tuple[int, str]] = []
        self.error: str | None = None


class World:
    """All pairs, by unique id, and what happens to them. transfers: whether transfers with a match
    end. blocked: kind of call that does not return before its communicator is aborted."""

    def __init__(self) -> None:
        self.pairs: dict[tuple[int, ...], Pair] = {}
        self.changed = threading.Condition()
        self.transfers = True
        self.blocked: str | None = None

    @property
    def pair(self) -> Pair:
        (pair,) = self.pairs.values()
        return pair

    def transfer(self) -> None:
        with self.changed:
            for pair in self.pairs.values():
                while self.transfers and all(pair.waiting.values()):
                    sent, received = (pair.waiting[kind].popleft() for kind in ("send", "recv"))
                    assert sent.count == received.count
                    ctypes.memmove(received.address, sent.address, sent.count)
                    sent.is_done = received.is_done = True


class Stream:
    def __init__(self, *, non_blocking: bool = False) -> None:
        assert non_blocking, "it would wait for the default stream"
        self.ptr = next(_numbers)
        self.calls: list[Call] = []

    @property
    def done(self) -> bool:
        return all(call.is_done for call in self.calls)


class Event:
    def __init__(self, *, disable_timing: bool = False) -> None:
        self._calls: list[Call] = []

    def record(self, stream: Stream) -> None:
        self._calls = list(stream.calls)

    @property
    def done(self) -> bool:
        world.transfer()
        return all(call.is_done for call in self._calls)


class Device:
    def __init__(self, index: int) -> None:
        assert index == 0

    def use(self) -> None:
        _of_thread.device = self


class NcclCommunicator:
    def __init__(self, ndev: int, commId: tuple[int, ...], rank: int) -> None:
        assert _of_thread.device is not None
        assert (ndev, len(commId)) == (2, 128)
        self._pair = world.pairs.setdefault(commId, Pair())
        self._rank = rank
        with world.changed:
            self._pair.ranks.add(rank)
            world.changed.notify_all()
            if not world.changed.wait_for(lambda: len(self._pair.ranks) == 2, LIMIT_S):
                raise NcclError("NCCL_ERROR_SYSTEM_ERROR: the other rank does not come")

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._call("send", sendbuf, count, datatype, peer, stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._call("recv", recvbuf, count, datatype, peer, stream)

    def _call(
        self, kind: str, address: int, count: int, datatype: int, peer: int, stream: int
    ) -> None:
        assert (datatype, peer) == (UINT8, 1 - self._rank)
        if kind == world.blocked:
            with world.changed:
                world.changed.wait_for(lambda: bool(self._own_aborts), LIMIT_S)
            raise NcclError("NCCL_ERROR_INTERNAL_ERROR: aborted")
        call = Call(kind, self._rank, address, count, _streams[stream])
        with world.changed:
            self._pair.calls.append(call)
            self._pair.waiting[kind].append(call)

    @property
    def _own_aborts(self) -> list[tuple[int, str]]:
        return [each for each in self._pair.aborts if each[0] == self._rank]

    def check_async_error(self) -> None:
        assert not self._own_aborts
        if self._pair.error is not None:
            raise NcclError(self._pair.error)

    def abort(self) -> None:
        with world.changed:
            assert not self._own_aborts, "the library would free its memory twice"
            self._pair.aborts.append((self._rank, threading.current_thread().name))
            for kind, calls in self._pair.waiting.items():
                for call in [each for each in calls if each.rank == self._rank]:
                    call.is_done = True
                self._pair.waiting[kind] = deque(each for each in calls if each.rank != self._rank)
            world.changed.notify_all()

    def destroy(self) -> None:
        raise AssertionError("it would wait for the peer")


def get_unique_id() -> tuple[int, ...]:
    """As C's signed characters."""
    number = next(_numbers)
    return tuple((number * 37 + index * 91) % 256 - 128 for index in range(128))


world = World()
_of_thread = threading.local()
_streams: dict[int, Stream] = {}


def _new_stream(**kwargs: Any) -> Stream:
    stream = Stream(**kwargs)
    _streams[stream.ptr] = stream
    return stream


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch, *, has_nccl: bool = True) -> Iterator[World]:
    world.__dict__.update(World().__dict__)
    cupy, cuda, nccl = (types.ModuleType(name) for name in ("cupy", "cuda", "nccl"))
    nccl.__dict__.update(
        available=has_nccl,
        NCCL_UINT8=UINT8,
        NcclCommunicator=NcclCommunicator,
        get_unique_id=get_unique_id,
    )
    cuda.__dict__.update(Stream=_new_stream, Event=Event, Device=Device, nccl=nccl)
    cupy.cuda = cuda  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    yield world
