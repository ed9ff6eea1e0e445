"""Sizes in bytes as text, and folders."""

from pathlib import Path

import pytest

from longshore.connectors.options import make_folder, parse_size
from longshore.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GiB", 8 << 30),
        (" 1.5 mib ", 3 << 19),
        ("2 GB", 2 << 30),
        ("4096", 4096),
        ("1TiB", 1 << 40),
        ("8G", 8 << 30),
    ],
)
def test_a_size_is_a_number_with_a_unit(text: str, size_bytes: int) -> None:
    assert parse_size("size", text) == size_bytes


@pytest.mark.parametrize("value", ["8 apples", "", "-1", "GiB", "1e3", 0, -5])
def test_what_is_no_size_is_rejected_by_name(value: int | str) -> None:
    with pytest.raises(ConfigError, match=f"size={value!r} (is not a size|must be at least one)"):
        parse_size("size", value)


def test_a_folder_that_cannot_be_created_is_rejected_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"connector example cannot use its folder, path: .*file"):
        make_folder("example", tmp_path / "file")
    make_folder("example", tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_other_users_can_write_to_is_rejected_by_name(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(
        ConfigError, match=r"connector example cannot use its folder, path: .*chmod 700"
    ):
        make_folder("example", tmp_path)
