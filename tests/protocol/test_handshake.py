"""Which peers are rejected, and with which message."""

import struct
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


def write_weights(path: Path, scale: float, *, num_elements: int = 2_000_000) -> None:
    """A file in the format of safetensors: a matrix, with a scale before and after it."""
    size = 4 * num_elements
    offsets = {"a_scale": (0, 4), "matrix": (4, 4 + size), "z_scale": (4 + size, 8 + size)}
    header = msgspec.json.encode(
        {"__metadata__": {"format": "pt"}}
        | {
            name: {"dtype": "F32", "shape": [(end - first) // 4], "data_offsets": (first, end)}
            for name, (first, end) in offsets.items()
        }
    )
    header += b" " * (600 - len(header))  # longer than a sample: the scales are not in the first
    number = struct.pack("<f", scale)
    content = len(header).to_bytes(8, "little") + header + number + bytes(size) + number
    path.write_bytes(content)


def test_small_tensors_belong_to_the_fingerprint(tmp_path: Path) -> None:
    """A scale of an fp8 KV cache changes all KV, and is too small to be sampled."""
    found = []
    for scale in (1.0, 2.0, 1.0):
        folder = make_model(tmp_path / str(len(found)))
        write_weights(folder / "model.safetensors", scale)
        found.append(model_fingerprint(folder))
    assert found[0] != found[1]
    assert found[0] == found[2]


@pytest.mark.parametrize(
    "header",
    [
        b"not JSON",
        b'{"t": {"data_offsets": [8, 4]}}',
        b'{"t": {"data_offsets": [-4, 4]}}',
        b'{"t": {"data_offsets": [0, 1e30]}}',
        b'{"t": [1, 2]}',
        b"[]",
    ],
)
def test_a_file_that_is_no_safetensors_file_has_a_fingerprint(
    tmp_path: Path, header: bytes
) -> None:
    """Whether it can be loaded is decided elsewhere."""
    folder = make_model(tmp_path / "model")
    (folder / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(9))
    (folder / "b.safetensors").write_bytes(b"")
    assert model_fingerprint(folder) == model_fingerprint(folder)


def test_digests_distinguish_two_seeds_without_revealing_them() -> None:
    assert hash_seed_digest(b"one") == hash_seed_digest(b"one")
    assert hash_seed_digest(b"one") != hash_seed_digest(b"two")
    assert b"one".hex() not in hash_seed_digest(b"one")
