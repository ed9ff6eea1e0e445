"""Engines of other nodes: over TCP, with the keys of the nodes."""

import msgspec
import pytest
import zmq

from longshore.deploy.gateway.engines import engine_client
from longshore.deploy.gateway.engines.engines import Engines
from longshore.protocol.handshake import ClientHello
from longshore.protocol.transport.channel import Endpoint
from longshore.protocol.transport.security import CurveKeys
from tests.deploy.gateway import fake_engine
from tests.deploy.gateway.fake_engine import IDENTITY, FakeEngine, never_answer
from tests.integration.topologies import free_ports


def keypair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


async def test_an_engine_that_rejects_a_gateway_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its node may run another version until it is upgraded, too."""
    monkeypatch.setattr(engine_client, "REJECTED_INTERVAL_S", 0.05)
    other = msgspec.structs.replace(IDENTITY, model_fingerprint="another")
    monkeypatch.setattr(fake_engine, "IDENTITY", other)
    server, client = keypair(), keypair()
    address = f"tcp://127.0.0.1:{free_ports('127.0.0.1', 1)}"
    fake = FakeEngine(
        Endpoint(address, CurveKeys(*server, also_authorized=(client[0],))), never_answer
    )
    connecting = Endpoint(address, CurveKeys(*client, server=server[0]))
    engines = Engines(
        [connecting],
        ClientHello("test", IDENTITY.model_fingerprint),
        on_stats=lambda engine, stats: None,
    )
    try:
        await fake.wait_for(lambda: engines.clients[0].loss is not None)
        assert engines.death is None
        assert "is another" in str(engines.not_ready_reason)
        monkeypatch.setattr(fake_engine, "IDENTITY", IDENTITY)
        ready = await engines.wait_until_ready()
        assert ready.identity == IDENTITY
    finally:
        engines.close()
        fake.close()
