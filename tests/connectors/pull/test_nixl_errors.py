"""After an error of NIXL a read counts as ended only if its connection is closed."""

from typing import Any, Final

import numpy as np
import pytest

from longshore.connectors.base.nixl_library import NixlLibrary
from longshore.connectors.pull.layout import Pattern
from longshore.connectors.pull.nixl import NixlTransport
from longshore.connectors.pull.options import read_options
from longshore.connectors.pull.transport import BlockReads, Memory, Read, ReadState, TransportError

READ: Final = BlockReads(
    Pattern(np.array([0]), np.array([0]), np.array([64])), np.array([3]), np.array([5])
)


class BackendError(Exception):
    """Any error of the library."""


class Disconnected(Exception):
    """The connection to the peer is closed."""


class Agent:
    """transfers, checks, preparations: what the next calls return, or raise."""

    transfers: list[str | Exception]
    checks: list[str | Exception]
    preparations: list[Exception]
    released: list[object]

    def __init__(self, name: str, config: Any) -> None:
        self.agent: object = object()

    def register_memory(self, regions: Any, kind: str) -> None:
        pass

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def add_remote_agent(self, metadata: bytes) -> str:
        return "peer"

    def prep_xfer_dlist(self, *of_side: Any) -> object:
        return object()

    def make_prepped_xfer(self, *of_read: Any) -> object:
        if self.preparations:
            raise self.preparations.pop()
        return object()

    def transfer(self, handle: object) -> str:
        return _next(self.transfers)

    def check_xfer_state(self, handle: object) -> str:
        return _next(self.checks)

    def release_xfer_handle(self, handle: object) -> None:
        self.released.append(handle)


def _next(results: list[str | Exception]) -> str:
    result = results.pop(0)
    if isinstance(result, Exception):
        raise result
    return result


class Api:
    nixl_agent = Agent

    @staticmethod
    def nixl_agent_config(backends: list[str]) -> object:
        return object()


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> NixlTransport:
    """Connected to one peer."""
    for name in ("transfers", "checks", "preparations", "released"):
        monkeypatch.setattr(Agent, name, [], raising=False)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    library = NixlLibrary(Api, (BackendError, Disconnected), Disconnected)
    monkeypatch.setattr("longshore.connectors.pull.nixl.load_nixl", lambda: library)
    transport = NixlTransport(read_options("nixl", {}))
    transport.connect(transport.register(Memory(1 << 20, 1 << 12, 64)))
    return transport


def post(transport: NixlTransport) -> Read:
    (read,) = transport.post("peer", [READ])
    return read


@pytest.mark.parametrize("error", [BackendError(), "ERR"], ids=["raised", "returned"])
@pytest.mark.parametrize("is_posted", [True, False], ids=["polled", "posting"])
def test_a_read_with_an_error_may_write_until_a_reset(
    error: str | Exception, is_posted: bool, transport: NixlTransport
) -> None:
    """A part of it may have been posted before the error."""
    Agent.transfers[:] = ["PROC"] if is_posted else [error]
    Agent.checks[:] = [error]
    read = post(transport)
    for _ in range(2):
        assert read.poll() is ReadState.UNCONFIRMED
    assert Agent.released == []
    transport.reset()
    assert len(Agent.released) == 1
    assert read.poll() is ReadState.FAILED


def test_a_read_whose_connection_is_closed_has_ended(transport: NixlTransport) -> None:
    for transfers, checks in ([["PROC"], [Disconnected()]], [[Disconnected()], []]):
        Agent.transfers[:], Agent.checks[:] = transfers, checks
        assert post(transport).poll() is ReadState.FAILED
    assert len(Agent.released) == 2


def test_a_read_that_cannot_be_prepared_has_not_begun(transport: NixlTransport) -> None:
    Agent.preparations[:] = [BackendError()]
    with pytest.raises(TransportError):
        post(transport)
