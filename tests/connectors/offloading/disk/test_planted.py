"""What another user could have planted in a store is neither used nor waited for."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from longshore.connectors.offloading.disk import catalog
from longshore.connectors.offloading.disk.errors import DiskStoreError
from longshore.connectors.offloading.disk.identity import IDENTITY_FILE
from longshore.connectors.offloading.disk.index import INDEX_FILE
from longshore.connectors.offloading.disk.lock import LOCK_FILE
from longshore.connectors.offloading.disk.results import Outcome
from longshore.protocol.errors import LongshoreError
from tests.connectors.offloading.disk.stores import (
    IDENTITY,
    expected,
    key,
    open_store,
    rank_directory,
    read_all,
    write,
)

OTHER_UID: Final = 12345
SEGMENT: Final = "segment-000000.kv"
SLOTS: Final = {key(n): n for n in range(8)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed store with a block in each of the first slots."""
    path = tmp_path / "store"
    with open_store(path) as store:
        assert write(store, SLOTS) == [Outcome.OK] * len(SLOTS)
    return path


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file that this user may write, and a link could lead to."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious" * 4096)
    return victim


@pytest.mark.parametrize("name", [SEGMENT, INDEX_FILE, LOCK_FILE])
def test_a_link_in_place_of_a_file_is_rejected_and_not_written_through(
    path: Path, victim: Path, name: str
) -> None:
    (rank_directory(path) / name).unlink()
    (rank_directory(path) / name).symlink_to(victim)
    with pytest.raises(DiskStoreError, match=rf"cannot use .*{name}"):
        open_store(path)
    assert victim.read_bytes() == b"precious" * 4096


def test_a_link_to_a_segment_that_appears_later_fails_the_writes(
    path: Path, victim: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(path) as store:
        (rank_directory(path) / SEGMENT).unlink()
        (rank_directory(path) / SEGMENT).symlink_to(victim)
        assert write(store, {key(9): 9}) == [Outcome.FAILED]
    assert "it is a symbolic link, which is not followed" in caplog.text
    assert victim.read_bytes() == b"precious" * 4096


@pytest.mark.parametrize("stem", ["probe", f"../{IDENTITY_FILE}"])
def test_a_link_in_place_of_a_temporary_file_is_replaced(
    path: Path, victim: Path, stem: str
) -> None:
    name = f"{stem}.{os.getpid()}"
    (path / IDENTITY.digest / IDENTITY_FILE).unlink()
    (rank_directory(path) / name).symlink_to(victim)
    with open_store(path) as store:
        assert read_all(store) == expected(SLOTS)
    assert victim.read_bytes() == b"precious" * 4096
    assert not (rank_directory(path) / name).is_symlink()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", [SEGMENT, INDEX_FILE, LOCK_FILE, f"../{IDENTITY_FILE}"])
def test_a_pipe_in_place_of_a_file_is_rejected_at_once(path: Path, name: str) -> None:
    (rank_directory(path) / name).unlink()
    os.mkfifo(rank_directory(path) / name)
    with pytest.raises(DiskStoreError, match=r"cannot use .*it is not a regular file"):
        open_store(path)
    (report,) = catalog.stores(path)  # `longshore kv ls` and `verify` do not wait either
    if name == SEGMENT:
        problems = [check.problem for check in catalog.check_blocks(report.ranks[0])]
        assert len(problems) == len(SLOTS)
        assert all("not a regular file" in problem for problem in problems)


def link_folder(path: Path, elsewhere: Path) -> None:
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


def open_to_others(path: Path, _: Path) -> None:
    path.chmod(0o777)


def of_another_user(path: Path, _: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    os.chown(path, OTHER_UID, OTHER_UID)


@pytest.mark.parametrize("level", [1, 2], ids=["identity", "rank"])
@pytest.mark.parametrize("plant", [link_folder, open_to_others, of_another_user])
def test_a_folder_within_that_another_user_could_have_planted_is_rejected(
    path: Path, tmp_path: Path, level: int, plant: Callable[[Path, Path], None]
) -> None:
    planted = [path, path / IDENTITY.digest, rank_directory(path)][level]
    plant(planted, tmp_path / "elsewhere")
    with pytest.raises(LongshoreError, match=str(planted)):
        open_store(path)


@pytest.mark.parametrize("plant", [open_to_others, of_another_user])
def test_a_path_that_another_user_can_write_to_is_rejected(
    path: Path, plant: Callable[[Path, Path], None]
) -> None:
    plant(path, path)
    with pytest.raises(LongshoreError, match=rf"{path} .*Run: ch"):
        open_store(path)


def test_a_path_that_is_a_pipe_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DiskStoreError, match="Not a directory"):
        open_store(tmp_path / "pipe")


def test_a_segment_of_another_user_is_rejected(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    with open_store(path) as store:
        os.chown(rank_directory(path) / SEGMENT, OTHER_UID, OTHER_UID)
        assert write(store, {key(9): 9}) == [Outcome.FAILED]


def test_a_link_to_a_store_is_not_listed_and_its_target_not_deleted(
    path: Path, tmp_path: Path
) -> None:
    link_folder(path / IDENTITY.digest, tmp_path / "elsewhere")
    assert catalog.stores(path) == []
