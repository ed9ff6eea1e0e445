"""The key file: what it sets, and what is said about one that is wrong."""

import os
from pathlib import Path

import pytest

from longshore.deploy.gateway import key_file
from longshore.deploy.gateway.api_keys import digest_of, find_key
from longshore.deploy.gateway.key_file import (
    MAX_FILE_BYTES,
    MAX_KEYS,
    DeploymentKeys,
    read_key_file,
)
from longshore.protocol.errors import ConfigError

DIGEST = digest_of(b"of-bob")


def write(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_keys_have_their_names_shares_and_limits(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f"""
        [[key]]
        name = "alice"
        key = "of-alice"
        weight = 3
        max_live_requests = 8
        tokens_per_minute = 10_000
        min_priority = -2
        cache_share = 0.5

        [[key]]
        name = "bob"
        sha256 = "{DIGEST.upper()}"
        """,
    )
    alice, bob = keys = read_key_file(path, "key")
    assert find_key(keys, b"of-alice") is alice
    assert find_key(keys, b"of-bob") is bob
    assert (alice.name, alice.weight, alice.max_live_requests) == ("alice", 3, 8)
    assert (alice.tokens_per_minute, alice.min_priority) == (10_000, -2)
    assert (alice.tenant.cache_share, bob.tenant.cache_share) == (0.5, 0.25)
    assert (bob.weight, bob.max_live_requests, bob.tokens_per_minute) == (1, None, None)
    assert bob.min_priority == 0  # nothing more urgent than the default
    assert "of-alice" not in repr(keys)
    assert [key.cache_id for key in keys] == ["alice", "bob"]
    assert [key.cache_id for key in read_key_file(path, "all")] == [None, None]


KEY = '[[key]]\nname = "a"\nkey = "secret-value"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["missing required field `key`"]),
        ("key = []", ["$.key"]),
        ("[[key]]\nname = a\n", ["line 2"]),
        (f"{KEY}weight = 0\n", ["$.key[0].weight"]),
        (f"{KEY}weight = 'much'\n", ["$.key[0].weight", "int"]),
        (f"{KEY}max_live_requests = -1\n", ["$.key[0].max_live_requests"]),
        (f"{KEY}wieght = 2\n", ["wieght"]),
        (f"{KEY}\n[[key]]\nname = 'b c'\nkey = 'd'\n", ["$.key[1].name"]),
        ("[[key]]\nname = 'a'\nkey = 'secret-value with spaces'\n", ["$.key[0].key"]),
        ("[[key]]\nname = 'a'\n", ["entry 0 (a)", "either `key` or `sha256`"]),
        (f"{KEY}sha256 = '{DIGEST}'\n", ["entry 0 (a)", "either `key` or `sha256`"]),
        (KEY + KEY.replace("secret-value", "other"), ["entry 1 (a)", "unique"]),
        (KEY + KEY.replace('"a"', '"b"'), ["entry 1 (b)", "key of another entry"]),
        (f"{KEY}{'x' * 10_000} = 1\n", ["unknown field"]),
        ("".join(f"[[key]]\nname='{n}'\nkey='{n}'\n" for n in range(MAX_KEYS + 1)), ["$.key"]),
        ("#" * (MAX_FILE_BYTES + 1), ["larger than"]),
    ],
)
def test_what_is_wrong_is_named_and_no_key_is_shown(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as rejection:
        read_key_file(path, "key")
    message = str(rejection.value).replace(str(path), "PATH")
    assert all(word in message for word in ["api_key_file=PATH", *words]), message
    assert "secret-value" not in message
    assert len(message) < 500


def test_a_file_that_others_can_read_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"0640.*chmod 600"):
        read_key_file(write(tmp_path, KEY, 0o640), "key")


def test_what_is_no_readable_file_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    (tmp_path / "folder").mkdir(mode=0o700)
    (tmp_path / "latin").write_bytes(b"\xff")
    (tmp_path / "latin").chmod(0o600)
    for name, words in (
        ("missing", "cannot be read: No such file"),
        ("fifo", "not a regular file"),
        ("folder", "not a regular file"),
        ("latin", "utf-8"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_key_file(tmp_path / name, "key")


def entries(*names: str) -> str:
    return "".join(f'[[key]]\nname = "{name}"\nkey = "of-{name}"\n' for name in names)


def test_keys_that_are_read_again_keep_their_slots_and_no_other_key_gets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, entries("alice", "bob"))
    current = DeploymentKeys(read_key_file(path, "key"), path, "key")

    def slots_after(*names: str) -> dict[str, int]:
        write(tmp_path, entries(*names))
        current.use(current.read_again())
        return {key.name: key.slot for key in current.keys}

    assert slots_after("carol", "bob") == {"carol": 2, "bob": 1}
    assert slots_after("bob") == {"bob": 1}
    assert slots_after("alice", "bob") == {"alice": 3, "bob": 1}
    before = current.keys
    for text, reason in ((entries("bob", "bob"), "name of another"), ("", "key")):
        write(tmp_path, text)
        with pytest.raises(ConfigError, match=reason):
            current.read_again()
    monkeypatch.setattr(key_file, "MAX_SLOTS", 4)
    with pytest.raises(ConfigError, match="has had 4 API keys, and can have 4"):
        slots_after("dora", "bob")
    assert current.keys is before


def test_keys_that_are_from_no_file_cannot_be_read_again() -> None:
    with pytest.raises(ConfigError, match="started without api_key_file"):
        DeploymentKeys().read_again()
