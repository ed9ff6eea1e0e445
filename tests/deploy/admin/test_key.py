"""The file with the key of /admin."""

import os
from pathlib import Path

import pytest

from longshore.deploy.admin.key import read_private_key
from longshore.protocol.errors import ConfigError


def key_file(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_the_key_is_the_line_of_the_file(tmp_path: Path) -> None:
    assert (
        read_private_key(key_file(tmp_path, b"0123456789abcdef\n"), "admin_key_file")
        == "0123456789abcdef"
    )


@pytest.mark.parametrize(
    "content", [b"", b"too short", b"two lines of a key\nand more", b"\xff" * 20, b"x" * 10_000]
)
def test_a_file_without_a_usable_key_is_rejected(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match="must contain one line of 16 to 512") as raised:
        read_private_key(key_file(tmp_path, content), "admin_key_file")
    assert "too short" not in str(raised.value)  # it may be a secret


def test_a_file_that_others_can_read_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        read_private_key(key_file(tmp_path, b"0123456789abcdef\n", 0o640), "admin_key_file")


def test_a_pipe_is_rejected_without_waiting_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "key", 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_private_key(tmp_path / "key", "admin_key_file")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*No such file"):
        read_private_key(tmp_path / "nowhere", "admin_key_file")
