"""Engines of other nodes: over TCP, with the keys of the nodes."""

from typing import Any

import msgspec
import pytest
import zmq

from longshore.deploy.gateway.engines import engine_client
from longshore.deploy.gateway.engines.engines import Engines
from longshore.protocol.handshake import ClientHello
from longshore.protocol.transport.channel import Endpoint, open_socket
from longshore.protocol.transport.security import CurveKeys
from tests.deploy.gateway import fake_engine
from tests.deploy.gateway.fake_engine import IDENTITY, FakeEngine, never_answer
from tests.integration.deployment import wait_until
from tests.integration.topologies import free_ports


def keypair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def connect(
    server: tuple[str, str], client: tuple[str, str], *, authorized: tuple[str, str]
) -> tuple[FakeEngine, Engines]:
    """An engine that accepts the keys `authorized`, and a gateway with those of `client`."""
    address = f"tcp://127.0.0.1:{free_ports('127.0.0.1', 1)}"
    keys = CurveKeys(*server, also_authorized=(authorized[0],))
    engines = [Endpoint(address, CurveKeys(*client, server=server[0]))]
    hello = ClientHello("test", IDENTITY.model_fingerprint)
    fake = FakeEngine(Endpoint(address, keys), never_answer)
    return fake, Engines(engines, hello, on_stats=lambda engine, stats: None)


async def test_an_engine_that_rejects_a_gateway_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its node may run another version until it is upgraded, too."""
    monkeypatch.setattr(engine_client, "REJECTED_INTERVAL_S", 0.05)
    other = msgspec.structs.replace(IDENTITY, model_fingerprint="another")
    monkeypatch.setattr(fake_engine, "IDENTITY", other)
    server, client = keypair(), keypair()
    fake, engines = connect(server, client, authorized=client)
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


async def test_keys_that_are_rejected_before_the_first_message_can_be_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """libzmq ends a connection whose handshake fails, and a busy machine may let that happen before
    the gateway's next instruction."""

    def open_slowly(*args: Any, **options: Any) -> "zmq.Socket[bytes]":
        socket = open_socket(*args, **options)
        wait_until(lambda: not socket.poll(0, zmq.POLLOUT))
        return socket

    monkeypatch.setattr(engine_client, "open_socket", open_slowly)
    server, known, unknown = keypair(), keypair(), keypair()
    fake, engines = connect(server, unknown, authorized=known)
    try:
        await fake.wait_for(lambda: engines.clients[0].loss is not None)
        assert engines.death is None
        assert engines.not_ready_reason is not None
    finally:
        engines.close()
        fake.close()
