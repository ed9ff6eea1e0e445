"""What an owner answers to readers that are of another model, not valid, or not known."""

import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import pytest
import zmq

from longshore.connectors.pull.layout import RankLayout
from longshore.connectors.pull.messages import (
    GREET_FIRST,
    NOT_READY,
    SIDE_CHANNEL_VERSION,
    Accepted,
    Claim,
    Granted,
    Hello,
    KVDescription,
    Offer,
    RankInfo,
    Refused,
    Renew,
    ToOwner,
    ToReader,
    digest_blocks,
    tables_of,
)
from longshore.connectors.pull.options import read_options
from longshore.connectors.pull.owner import Owner
from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import FullAttentionSpec, KVCacheGroup
from longshore.protocol.transport.security import new_secret, use_secret
from tests.integration.deployment import wait_until

FULL: Final = FullAttentionSpec(16, 2, 8, 4)
LAYOUT: Final = RankLayout((KVCacheGroup(("layer.0",), FULL),), 1 << 14, 40)
KV: Final = KVDescription("local", "fingerprint", "float32", "auto", "layout", "", (LAYOUT,))
HELLO: Final = Hello(SIDE_CHANNEL_VERSION, "reader.1", KV)
TABLES: Final = tables_of([int32_array([3, 4])])
OFFER: Final = Offer("t", "request", 1, 30, b"tokens", TABLES)
CLAIM: Final = Claim("t", "owner.1", "request", b"tokens", digest_blocks(TABLES))


class Client:
    """A reader's socket."""

    def __init__(self, port: int, secret: str | None = None) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        if secret is not None:
            use_secret(self.socket, secret, bind=False)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def send(self, message: ToOwner | bytes) -> None:
        data = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        self.socket.send(data)

    def receive(self, timeout_s: float = 30.0) -> ToReader | None:
        if not self.socket.poll(int(timeout_s * 1e3)):
            return None
        return msgspec.msgpack.decode(self.socket.recv(), type=ToReader)

    def ask(self, message: ToOwner | bytes) -> ToReader | None:
        self.send(message)
        return self.receive()

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., tuple[Owner, Client]]]:
    closing: list[Any] = []

    def make(*, is_ready: bool = True, **options: Any) -> tuple[Owner, Client]:
        settings = read_options("local", options)
        kv = msgspec.structs.replace(KV, ranks=())
        owner = Owner(settings, "owner.1", kv, lambda ended, expired: None)
        owner.start()
        client = Client(owner.port, settings.secret)
        closing.extend([client, owner])
        if is_ready:
            owner.put((RankInfo(LAYOUT, b"agent", owner.port),))
            other = Client(owner.port, settings.secret)
            wait_until(lambda: other.ask(HELLO) != Refused("", NOT_READY))  # its thread has them
            other.close()
        return owner, client

    yield make
    for each in closing:
        each.close()


def changed(**fields: Any) -> Hello:
    return msgspec.structs.replace(HELLO, kv=msgspec.structs.replace(KV, **fields))


def layout_of(spec: FullAttentionSpec) -> RankLayout:
    return RankLayout((KVCacheGroup(("layer.0",), spec),), 1 << 14, 40)


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (msgspec.structs.replace(HELLO, version=99), "version 99 of the side channel"),
        (changed(transport="mooncake"), "transport is 'mooncake' on the reader and 'local'"),
        (changed(model_fingerprint="other"), "model_fingerprint is 'other' on the reader"),
        (changed(dtype="bfloat16"), "dtype is 'bfloat16'"),
        (changed(kv_cache_dtype="fp8_e4m3"), "kv_cache_dtype is 'fp8_e4m3'"),
        (changed(kv_layout="rows"), "kv_layout is 'rows'"),
        (changed(kv_rotation="yarn"), "kv_rotation is 'yarn'"),
        (changed(ranks=(layout_of(FullAttentionSpec(16, 2, 4, 4)),)), "head_size=4 here and 8"),
        (changed(ranks=()), "must have the same KV cache groups"),
    ],
    ids=lambda value: "" if isinstance(value, Hello) else value.split()[0],
)
def test_another_model_or_layout_is_refused_by_name(
    hello: Hello, reason: str, start: Callable[..., tuple[Owner, Client]]
) -> None:
    _, client = start()
    answer = client.ask(hello)
    assert isinstance(answer, Refused)
    assert reason in answer.reason


def test_other_block_sizes_and_numbers_are_accepted(
    start: Callable[..., tuple[Owner, Client]],
) -> None:
    _, client = start()
    answer = client.ask(changed(ranks=(layout_of(FullAttentionSpec(32, 2, 8, 4)),)))
    assert answer == Accepted("owner.1", KV, (b"agent",))


def test_an_owner_that_is_not_ready_says_so(start: Callable[..., tuple[Owner, Client]]) -> None:
    _, client = start(is_ready=False)
    assert client.ask(HELLO) == Refused("", NOT_READY)


def test_no_reader_gets_blocks_without_a_handshake(
    start: Callable[..., tuple[Owner, Client]],
) -> None:
    owner, client = start()
    owner.put(OFFER)
    assert client.ask(CLAIM) == Refused("t", GREET_FIRST)
    assert client.ask(Renew(("t",), 1)) == Refused("", GREET_FIRST)
    client.ask(HELLO)
    assert client.ask(CLAIM) == Granted("t", 30, TABLES)


def test_a_claim_may_come_before_its_offer(start: Callable[..., tuple[Owner, Client]]) -> None:
    owner, client = start()
    client.ask(HELLO)
    client.send(CLAIM)
    assert client.receive(0.2) is None
    owner.put(OFFER)
    assert client.receive() == Granted("t", 30, TABLES)


WIDE: Final = {
    "groups": [{"layer_names": ["layer"] * 1025, "spec": FULL}],
    "block_bytes": 1 << 30,
    "num_blocks": 1,
}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04pickle",
        msgspec.msgpack.encode({"type": "unknown"}),
        msgspec.msgpack.encode({"type": "claim", "transfer_id": "t"}),
        msgspec.msgpack.encode({"type": "renew", "transfer_ids": ["t"] * 5000}),
        msgspec.msgpack.encode({"type": "hello", "version": 1, "engine_id": "x" * 300, "kv": {}}),
        b"\x91" * 5000,
        msgspec.msgpack.encode(msgspec.structs.replace(CLAIM, token_digest=b"x" * 33)),
        msgspec.msgpack.encode(
            changed(dtype="bfloat16", ranks=(msgspec.structs.replace(LAYOUT, groups=()),) * 1025)
        ),
        msgspec.msgpack.encode(changed(ranks=(WIDE,) * 2)),
    ],
    ids=range(10),
)
def test_invalid_messages_are_dropped(
    data: bytes, start: Callable[..., tuple[Owner, Client]]
) -> None:
    owner, client = start()
    client.send(data)
    assert isinstance(client.ask(HELLO), Accepted)  # as the first answer
    assert owner.failure is None


def test_a_flood_of_messages_delays_no_end_of_a_lease(
    start: Callable[..., tuple[Owner, Client]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More messages wait at each step than a step handles."""
    owner, _ = start(lease_s=0.1)
    has_ended = threading.Event()
    monkeypatch.setattr(owner, "_on_end", lambda ended, expired: has_ended.set())
    monkeypatch.setattr(owner, "_receive", lambda frames: None)
    owner.put(OFFER)
    with monkeypatch.context() as patch:
        patch.setattr(owner, "_socket", Flood())
        assert has_ended.wait(60)


class Flood:
    """A socket that always has a message."""

    def recv_multipart(self, flags: int) -> list[bytes]:
        return [b"reader", b""]


def test_with_a_secret_only_those_who_know_it_are_answered(
    start: Callable[..., tuple[Owner, Client]], tmp_path: Any
) -> None:
    path = tmp_path / "secret"
    path.write_text(new_secret())
    path.chmod(0o600)
    owner, client = start(secret_file=str(path))
    assert isinstance(client.ask(HELLO), Accepted)
    for secret in (None, new_secret()):
        other = Client(owner.port, secret)
        other.send(HELLO)
        assert other.receive(0.5) is None
        other.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"host": "0.0.0.0"}, "'host' to be an address that other engines can reach"),
        ({"port": 70000}, "'port' to be at most 65535"),
        ({"remote_hosts": "10.0.0.1"}, "'remote_hosts' to be a list"),
        ({"max_leased_share": 2}, "'max_leased_share' to be at most 1"),
        ({"lease_s": 0}, "'lease_s' to be a finite number of at least 0.1"),
        ({"secret_file": "/nowhere/key"}, "'secret_file' to be readable"),
        ({"secret_file": "/etc/passwd"}, "other users can use it"),
        ({"read_timeout_s": 60}, "'read_timeout_s' to be at most 30"),
        ({"hosts": []}, "no option 'hosts'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_are_not_valid_are_named(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_options("nixl", options)


def test_by_default_only_this_machine_is_asked() -> None:
    options = read_options("nixl", {})
    assert (options.host, options.remote_hosts) == ("127.0.0.1", ("127.0.0.1",))
