"""Which peers are rejected, and with which message."""

from pathlib import Path

import msgspec
import pytest

from longshore.protocol.errors import HandshakeRejected
from longshore.protocol.handshake import (
    PROTOCOL_VERSION,
    ClientHello,
    EngineIdentity,
    ToEngine,
    check_identity,
    hash_seed_digest,
    model_fingerprint,
)
from longshore.protocol.transport.codec import Decoder

IDENTITY = EngineIdentity(
    model_fingerprint="abc",
    dtype="float32",
    block_size=16,
    max_model_len=1024,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
    hash_seed_digest="d1",
)


def test_equal_identities_pass() -> None:
    check_identity(IDENTITY, msgspec.structs.replace(IDENTITY), peer="worker 0")


@pytest.mark.parametrize("field", EngineIdentity.__struct_fields__)
def test_a_field_that_differs_is_reported_with_both_values(field: str) -> None:
    ours = getattr(IDENTITY, field)
    theirs = "other" if isinstance(ours, str) else ours + 1
    other = msgspec.structs.replace(IDENTITY, **{field: theirs})
    with pytest.raises(HandshakeRejected) as caught:
        check_identity(IDENTITY, other, peer="worker 3")
    message = str(caught.value)
    assert f"worker 3 has {field}={theirs!r}" in message
    assert f"this engine has {ours!r}" in message


def test_another_protocol_version_is_reported_before_any_other_field() -> None:
    other = msgspec.structs.replace(IDENTITY, dtype="bfloat16", protocol_version=99)
    with pytest.raises(HandshakeRejected, match=rf"protocol_version=99.*has {PROTOCOL_VERSION}"):
        check_identity(IDENTITY, other, peer="worker 0")


def test_the_hello_of_a_newer_version_can_still_be_decoded_and_rejected() -> None:
    header = msgspec.msgpack.encode(
        {
            "type": "client_hello",
            "name": "newer",
            "model_fingerprint": "abc",
            "protocol_version": PROTOCOL_VERSION + 1,
            "a_field_of_the_future": [1, 2],
        }
    )
    hello = Decoder[ToEngine](ToEngine).decode([header])
    assert hello == ClientHello("newer", "abc", PROTOCOL_VERSION + 1)


def make_model(folder: Path, config: str = "{}", **weights: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config)
    for name, size in weights.items():
        (folder / f"{name}.safetensors").write_bytes(b"\0" * size)
    (folder / "README.md").write_text(str(folder))
    return folder


def test_the_fingerprint_depends_on_the_config_and_the_weight_files_only(tmp_path: Path) -> None:
    same = [model_fingerprint(make_model(tmp_path / name, model_a=8, model_b=4)) for name in "xy"]
    assert same[0] == same[1]
    others = [
        make_model(tmp_path / "config", '{"layers": 2}', model_a=8, model_b=4),
        make_model(tmp_path / "size", model_a=8, model_b=5),
        make_model(tmp_path / "name", model_a=8, model_c=4),
        make_model(tmp_path / "fewer", model_a=8),
        make_model(tmp_path / "swapped", model_a=4, model_b=8),
    ]
    assert len({same[0], *map(model_fingerprint, others)}) == 6


def test_digests_distinguish_two_seeds_without_revealing_them() -> None:
    assert hash_seed_digest(b"one") == hash_seed_digest(b"one")
    assert hash_seed_digest(b"one") != hash_seed_digest(b"two")
    assert b"one".hex() not in hash_seed_digest(b"one")
