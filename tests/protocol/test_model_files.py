"""Files that are not what they should be."""

import os
from pathlib import Path

import pytest

from longshore.protocol import model_files
from longshore.protocol.model_files import exists, open_regular, parse_json, read_bytes, read_json


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b'{"a": 1}')
    (tmp_path / "link").symlink_to("file")
    assert exists(tmp_path / "link")
    assert read_bytes(tmp_path / "link") == b'{"a": 1}'
    assert read_json(tmp_path / "link") == {"a": 1}


@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "circle", "nowhere"])
def test_what_is_no_file_is_rejected_with_its_name_without_waiting(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "config.json"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
        case "circle":
            path.symlink_to(path)
        case "nowhere":
            path.symlink_to(tmp_path / "missing")
    assert exists(path)
    with pytest.raises(OSError, match=r"config\.json"):
        open_regular(path)


def test_a_missing_file_does_not_exist(tmp_path: Path) -> None:
    assert not exists(tmp_path / "config.json")
    assert not exists(Path("a" * 10_000))


def test_a_large_file_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "MAX_FILE_BYTES", 10)
    (tmp_path / "file").write_bytes(b"x" * 10)
    assert len(read_bytes(tmp_path / "file")) == 10
    (tmp_path / "file").write_bytes(b"x" * 11)
    with pytest.raises(OSError, match="more than 10 bytes"):
        read_bytes(tmp_path / "file")


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000, b"{", b"\xff"])
def test_json_that_cannot_be_decoded_is_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parse_json(content)
