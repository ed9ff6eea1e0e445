"""What Mooncake says about a read, and what that means. With a fake of its engine."""

import os
import sys
import threading
import types
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import pytest

from longshore.connectors.pull.layout import Pattern
from longshore.connectors.pull.mooncake import LIBRARY_TIMEOUT_NAME, MooncakeTransport
from longshore.connectors.pull.options import read_options
from longshore.connectors.pull.transport import BlockReads, Memory, Read, ReadState, TransportError

ZERO = np.zeros(1, np.int64)
READ = BlockReads(Pattern(ZERO, ZERO, np.array([4], np.int64)), ZERO, ZERO)


class FakeEngine:
    """may_end: a read fails once this is set."""

    may_end: ClassVar[threading.Event]

    def initialize(self, *arguments: str) -> int:
        return 0

    def register_memory(self, address: int, size: int) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return 5000

    def batch_transfer_sync_read(self, *arguments: object) -> int:
        self.may_end.wait()
        return -1


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeTransport]:
    module = types.ModuleType("mooncake.engine")
    module.TransferEngine = FakeEngine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    monkeypatch.setenv(LIBRARY_TIMEOUT_NAME, "1")
    FakeEngine.may_end = threading.Event()
    yield MooncakeTransport(read_options("mooncake", {"read_timeout_s": 20}))
    FakeEngine.may_end.set()


def begin(transport: MooncakeTransport) -> Read:
    peer = transport.connect(transport.register(Memory(0, 64, 64)))
    (posted,) = transport.post(peer, [READ])
    assert posted.poll() is ReadState.IN_PROGRESS
    return posted


def test_the_library_waits_longer_than_the_reader(transport: MooncakeTransport) -> None:
    assert os.environ[LIBRARY_TIMEOUT_NAME] == "21"


def test_a_read_that_fails_in_time_has_ended(transport: MooncakeTransport) -> None:
    posted = begin(transport)
    transport._threads.submit(FakeEngine.may_end.set)
    transport.reset()
    assert posted.poll() is ReadState.FAILED


def test_a_read_that_the_library_gave_up_may_still_write(transport: MooncakeTransport) -> None:
    """Only a new process ends it, and nothing is gained by waiting."""
    transport._timeout_s = 0
    posted = begin(transport)
    FakeEngine.may_end.set()
    with pytest.raises(TransportError, match="1 reads of Mooncake cannot be ended"):
        transport.reset()
    assert posted.poll() is ReadState.IN_PROGRESS
