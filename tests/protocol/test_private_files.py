"""What another user of the machine can plant is neither read nor written."""

import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from longshore.protocol.errors import ConfigError
from longshore.protocol.private_files import Folder, check_private, read_private

OTHER_UID = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    with Folder.make(tmp_path / "folder") as folder:
        yield folder


@pytest.mark.parametrize("bits", [0o020, 0o002, 0o777])
def test_a_folder_that_others_can_write_to_is_rejected_with_the_fix(
    tmp_path: Path, bits: int
) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(0o700 | bits)
    with pytest.raises(ConfigError, match=f"{path} has mode 07.*write to it.*chmod 700 {path}"):
        Folder.make(path)


def test_a_folder_that_others_can_only_read_is_accepted_but_not_within_a_folder(
    tmp_path: Path,
) -> None:
    (tmp_path / "top" / "within").mkdir(parents=True)
    for path in (tmp_path / "top", tmp_path / "top" / "within"):
        path.chmod(0o755)
    with (
        Folder.make(tmp_path / "top") as top,
        pytest.raises(ConfigError, match=r"within has mode 0755.*can use it"),
    ):
        top.make_folder("within")


@needs_root
def test_a_folder_or_file_of_another_user_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "top" / "within").mkdir(parents=True, mode=0o700)
    (tmp_path / "file").touch(0o600)
    os.chown(tmp_path / "top" / "within", OTHER_UID, OTHER_UID)
    os.chown(tmp_path / "file", OTHER_UID, OTHER_UID)
    match = rf"belongs to another user \(uid {OTHER_UID}\)"
    with Folder.make(tmp_path / "top") as top, pytest.raises(ConfigError, match=match):
        top.make_folder("within")
    with pytest.raises(ConfigError, match=match):
        Folder.make(tmp_path / "top" / "within")
    with pytest.raises(ConfigError, match=match):
        read_private(tmp_path / "file", 10)
    with Folder.make(tmp_path) as folder, pytest.raises(OSError, match=match):
        folder.open_own_file("file", os.O_RDWR)


@needs_root
@pytest.mark.parametrize(
    ("mode", "is_read"), [(0o440, True), (0o640, True), (0o660, False), (0o444, False)]
)
def test_a_file_that_root_shares_with_the_group_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, is_read: bool
) -> None:
    """As Kubernetes mounts a secret with `fsGroup`, through a link of root."""
    (tmp_path / "data").write_bytes(b"key")
    (tmp_path / "data").chmod(mode)
    (tmp_path / "key").symlink_to("data")
    monkeypatch.setattr(os, "geteuid", lambda: OTHER_UID)
    if is_read:
        assert read_private(tmp_path / "key", 10) == b"key"
    else:
        with pytest.raises(ConfigError, match=r"other users can use it.*chmod 440"):
            read_private(tmp_path / "key", 10)


@needs_root
def test_a_link_of_another_user_to_a_private_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    Folder.make(tmp_path / "link").close()
    check_private(tmp_path / "link")
    os.chown(tmp_path / "link", OTHER_UID, OTHER_UID, follow_symlinks=False)
    for use in (Folder.make, check_private):
        with pytest.raises(ConfigError, match=r"link is a link of another user \(uid 12345\)"):
            use(tmp_path / "link")


def test_a_link_within_a_folder_is_not_followed(folder: Folder, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (folder.path / "name").symlink_to(victim)
    (folder.path / "within").symlink_to(tmp_path)
    for use in (
        lambda: folder.open_file("name", os.O_RDWR | os.O_CREAT),
        lambda: folder.make_folder("within"),
        lambda: Folder.open(folder.path / "within"),
    ):
        with pytest.raises(OSError, match="it is a symbolic link, which is not followed"):
            use()
    with open(folder.create_file("name"), "wb") as file:
        file.write(b"new")
    assert (folder.path / "name").read_bytes() == b"new"
    assert victim.read_bytes() == b"precious"


def fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))  # a short name
    path.chmod(0o600)


@pytest.mark.parametrize("plant", [fifo, unix_socket, Path.mkdir])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_RDWR | os.O_CREAT])
def test_what_is_no_regular_file_is_rejected_without_waiting(
    folder: Folder, plant: Callable[[Path], None], flags: int
) -> None:
    path = folder.path / "name"
    plant(path)
    path.chmod(0o700)
    with pytest.raises(OSError, match=str(path)):
        folder.open_file("name", flags)
    with pytest.raises(OSError, match="not a regular file"):
        folder.file_size("name")
    with pytest.raises(OSError, match=str(path)):
        read_private(path, 10)


def test_a_folder_stays_the_same_when_its_path_leads_elsewhere(
    folder: Folder, tmp_path: Path
) -> None:
    os.close(folder.create_file("file"))
    kept = folder.path.rename(tmp_path / "kept")
    (tmp_path / "folder").mkdir()
    with open(folder.open_own_file("file", os.O_RDWR), "wb") as file:
        file.write(b"here")
    with folder.make_folder("within") as within:
        os.close(within.create_file("another"))
    assert (kept / "file").read_bytes() == b"here"
    assert stat.S_IMODE((kept / "within" / "another").stat().st_mode) == 0o600
    assert list((tmp_path / "folder").iterdir()) == []


def test_a_regular_file_is_opened_in_blocking_mode(folder: Folder) -> None:
    """With io_uring, a file in non-blocking mode fails reads for which it would have to wait."""
    descriptor = folder.create_file("file")
    assert os.get_blocking(descriptor)
    os.close(descriptor)


def test_no_descriptor_is_left_open_by_a_rejection(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    fifo(tmp_path / "pipe")
    with Folder.make(tmp_path) as folder:
        before = os.listdir("/proc/self/fd")
        with pytest.raises(ConfigError):
            Folder.make(tmp_path / "open")
        with pytest.raises(ConfigError):
            folder.make_folder("open")
        with pytest.raises(OSError, match="not a regular file"):
            folder.open_file("pipe", os.O_RDONLY)
        assert os.listdir("/proc/self/fd") == before
