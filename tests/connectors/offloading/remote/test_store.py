"""Blocks in remote stores: each test with every kind of server."""

import random
import subprocess

import msgspec
import pytest

from longshore.connectors.offloading.disk.identity import StoreIdentity
from longshore.connectors.offloading.disk.results import Outcome
from longshore.connectors.offloading.remote.record import HEADER_BYTES, MAGIC
from tests.connectors.offloading.disk.stores import IDENTITY, SLOT_BYTES, content, expected, key
from tests.connectors.offloading.remote.servers import RedisServer, RemoteServer, free_port
from tests.connectors.offloading.remote.stores import get, open_remote, put, value_names

KEYS = [key(number) for number in range(40)]


def test_what_is_read_is_what_was_written(server: RemoteServer) -> None:
    writer, reader = open_remote(server), open_remote(server)
    assert put(writer, KEYS) == [Outcome.OK] * len(KEYS)
    assert len(value_names(server)) == len(KEYS)
    assert reader.exists(KEYS) == [True] * len(KEYS)
    assert get(reader, KEYS) == expected(KEYS)
    stats, written = reader.stats(), writer.stats()
    assert (written.num_written, written.written_bytes) == (len(KEYS), len(KEYS) * SLOT_BYTES)
    assert (stats.num_present, stats.num_read) == (len(KEYS), len(KEYS))
    assert (stats.read_bytes, stats.num_failed, stats.bytes_in_flight) == (
        len(KEYS) * SLOT_BYTES, 0, 0,
    )  # fmt: skip
    writer.close()
    reader.close()


def test_leading_blocks_are_counted_up_to_the_first_absent_one(server: RemoteServer) -> None:
    store = open_remote(server)
    put(store, KEYS[:20] + KEYS[25:])
    assert store.exists(KEYS, leading=True) == [True] * 20 + [False] * 20
    assert store.exists(KEYS) == [True] * 20 + [False] * 5 + [True] * 15
    assert store.exists(KEYS[20:], leading=True) == [False] * 20
    assert store.exists([]) == []
    store.close()


def test_a_block_that_is_there_is_not_written_again(server: RemoteServer) -> None:
    first, second = open_remote(server), open_remote(server)
    put(first, KEYS[:3])
    assert put(second, KEYS[:5]) == [Outcome.OK] * 5
    stats = second.stats()
    assert (stats.num_skipped, stats.num_written) == (3, 2)
    assert stats.written_bytes == 2 * SLOT_BYTES
    first.close()
    second.close()


@pytest.mark.parametrize(
    "other",
    [
        {"model_fingerprint": "f2"},
        {"kv_layout": "tokens first"},
        {"dtype": "float16"},
        {"hash_seed": "0ther"},
        {"num_ranks": 2},
        {"groups": "two groups"},
        {"block_size": 32},
    ],
)
def test_blocks_of_others_are_never_found(server: RemoteServer, other: dict[str, object]) -> None:
    ours = open_remote(server)
    theirs = open_remote(server, identity=msgspec.structs.replace(IDENTITY, **other))
    put(theirs, KEYS[:2])
    assert ours.exists(KEYS[:2]) == [False, False]
    assert set(get(ours, KEYS[:2]).values()) == {Outcome.MISSING}
    assert len(value_names(server)) == 2, "theirs are left alone"
    ours.close()
    theirs.close()


def test_ranks_have_blocks_of_their_own(server: RemoteServer) -> None:
    identity = msgspec.structs.replace(IDENTITY, num_ranks=2)
    ranks = [open_remote(server, identity=identity, rank=rank) for rank in range(2)]
    put(ranks[0], KEYS[:1])
    assert [rank.exists(KEYS[:1]) for rank in ranks] == [[True], [False]]
    for rank in ranks:
        rank.close()


def test_a_renamed_model_keeps_its_blocks(server: RemoteServer) -> None:
    before = open_remote(server)
    after = open_remote(server, identity=msgspec.structs.replace(IDENTITY, model_name="new"))
    put(before, KEYS[:1])
    assert get(after, KEYS[:1]) == expected(KEYS[:1])
    before.close()
    after.close()


def test_people_find_out_whose_blocks_a_folder_has(server: RemoteServer) -> None:
    open_remote(server).close()
    (name,) = server.names()
    assert name == f"longshore-kv/{IDENTITY.digest}/identity.json"
    assert msgspec.json.decode(server.read(name), type=StoreIdentity) == IDENTITY


@pytest.mark.parametrize("damage", ["bit", "cut", "longer", "empty", "junk", "huge", "moved"])
def test_a_damaged_value_is_a_miss_and_is_deleted(
    server: RemoteServer, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(damage)
    store = open_remote(server)
    put(store, KEYS[:4])
    name = next(name for name in server.names() if name.endswith(KEYS[1].hex()))
    value = bytearray(server.read(name))
    match damage:
        case "bit":
            value[chance.randrange(len(value))] ^= 1 << chance.randrange(8)
        case "cut":
            del value[-1]
        case "longer":
            value += b"x"
        case "empty":
            value.clear()
        case "junk":
            value = bytearray(chance.randbytes(len(value)))
        case "huge":
            value += bytes(8 << 20)
        case "moved":  # of another key
            value = bytearray(
                server.read(
                    name.replace(KEYS[1].hex(), KEYS[2].hex()).replace(
                        f"/{KEYS[1].hex()[:2]}/", f"/{KEYS[2].hex()[:2]}/"
                    )
                )
            )
    server.write(name, bytes(value))
    assert get(store, KEYS[:4]) == expected(KEYS[:4]) | {KEYS[1]: Outcome.CORRUPT}
    assert name not in server.names()
    assert store.stats().num_corrupt == 1
    assert f"{KEYS[1].hex()} is not intact" in caplog.text
    assert "it is deleted" in caplog.text
    assert put(store, KEYS[:4]) == [Outcome.OK] * 4
    assert get(store, KEYS[:4]) == expected(KEYS[:4]), "it has been written again"
    store.close()


def test_every_bit_of_a_value_is_verified(server: RemoteServer) -> None:
    store = open_remote(server)
    size = 24
    name = None
    for position in range(HEADER_BYTES + size):
        put(store, KEYS[:1], size)
        name = name or value_names(server)[0]
        value = bytearray(server.read(name))
        assert value.startswith(MAGIC)
        value[position] ^= 1 << position % 8
        server.write(name, bytes(value))
        assert get(store, KEYS[:1], size) == {KEYS[0]: Outcome.CORRUPT}
    assert store.stats().num_corrupt == HEADER_BYTES + size
    store.close()


def test_a_value_of_another_size_is_not_read_into_the_buffer(server: RemoteServer) -> None:
    store = open_remote(server)
    put(store, KEYS[:1], SLOT_BYTES // 2)
    assert get(store, KEYS[:1]) == {KEYS[0]: Outcome.CORRUPT}
    store.close()


def test_a_block_that_was_absent_is_not_looked_up_again_for_a_while(server: RemoteServer) -> None:
    store, other = open_remote(server, negative_ttl_s=1e9), open_remote(server)
    assert store.exists(KEYS[:3]) == [False] * 3
    put(other, KEYS[:2])
    assert store.exists(KEYS[:3]) == [False] * 3
    assert (store.stats().num_absent, store.stats().num_known_absent) == (3, 3)
    put(store, KEYS[:1])  # this store knows that it is there now
    assert store.exists(KEYS[:3]) == [True, False, False]
    assert other.exists(KEYS[:3]) == [True, True, False], "without a time limit it asks each time"
    store.close()
    other.close()


def test_no_more_bytes_are_in_flight_than_allowed(server: RemoteServer) -> None:
    store = open_remote(server, max_bytes_in_flight=2 * (HEADER_BYTES + SLOT_BYTES), concurrency=8)
    acquire, seen = store._budget.acquire, []

    def counted(num_bytes: int, timeout_s: float) -> bool:
        is_free = acquire(num_bytes, timeout_s)
        seen.append(store._budget.used_bytes)
        return is_free

    store._budget.acquire = counted  # type: ignore[method-assign]
    put(store, KEYS)
    assert get(store, KEYS) == expected(KEYS)
    assert max(seen) <= 2 * (HEADER_BYTES + SLOT_BYTES)
    assert sum(map(bool, seen)) >= 2 * len(KEYS)
    large = [key(1000)]
    assert put(store, large, 4 * SLOT_BYTES) == [Outcome.OK], "one larger than the limit goes alone"
    assert get(store, large, 4 * SLOT_BYTES) == {
        large[0]: content(large[0], 4 * SLOT_BYTES).tobytes()
    }
    store.close()


@pytest.mark.services
def test_redis_keeps_a_block_for_the_time_that_was_asked_for(redis_server: RedisServer) -> None:
    store = open_remote(redis_server, ttl_s=100_000)
    put(store, KEYS[:2])
    (name, _) = value_names(redis_server)
    assert 90_000 < redis_server.client.ttl(name) <= 100_000
    redis_server.client.expire(name, 500)
    assert put(store, KEYS[:2]) == [Outcome.OK] * 2
    assert store.stats().num_skipped == 2
    assert redis_server.client.ttl(name) > 90_000, "it is kept as long again"
    redis_server.client.delete(name)
    assert list(get(store, KEYS[:2]).values()).count(Outcome.MISSING) == 1
    store.close()
    forever = open_remote(redis_server, identity=replace_seed("other"))
    put(forever, KEYS[:1])
    assert {redis_server.client.ttl(name) for name in value_names(redis_server)[1:]} >= {-1}
    forever.close()


def replace_seed(seed: str) -> StoreIdentity:
    return msgspec.structs.replace(IDENTITY, hash_seed=seed)


@pytest.mark.services
def test_redis_can_be_used_with_tls(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path_factory.mktemp("r")
    made, certificate, port = folder / "key", folder / "certificate", str(free_port())
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost", "-keyout", made, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    files = ("--tls-cert-file", str(certificate), "--tls-key-file", str(made))
    with RedisServer(
        folder, "--tls-port", port, *files, "--tls-auth-clients", "no", "--bind", "127.0.0.1"
    ) as server:
        url = f"rediss://localhost:{port}/0"
        trusted = {"ssl_ca_certs": str(certificate)}
        store = open_remote(server, url=url, options=trusted)
        put(store, KEYS[:3])
        assert get(store, KEYS[:3]) == expected(KEYS[:3])
        store.close()
        stranger = open_remote(server, url=url, options={})
        assert set(get(stranger, KEYS[:3]).values()) == {Outcome.FAILED}
        assert "certificate verify failed" in caplog.text
        stranger.close()
