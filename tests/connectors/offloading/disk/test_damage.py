"""Whatever is damaged, no call fails in an unexpected way, and no read returns wrong bytes."""

import errno
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from longshore.connectors.offloading.disk import index as index_module
from longshore.connectors.offloading.disk.errors import DiskStoreError
from longshore.connectors.offloading.disk.identity import IDENTITY_FILE
from longshore.connectors.offloading.disk.index import HEADER_BYTES, INDEX_FILE, RECORD_BYTES
from longshore.connectors.offloading.disk.io import Direction, ThreadIo, Transfer, run_all
from longshore.connectors.offloading.disk.results import Outcome
from tests.connectors.offloading.disk.stores import (
    IDENTITY,
    SLOT_BYTES,
    expected,
    flip,
    key,
    open_store,
    rank_directory,
    read,
    read_all,
    write,
)

NUM = 16
SLOTS = {key(n): n for n in range(NUM)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed store with NUM blocks in the first slots."""
    with open_store(tmp_path) as store:
        assert write(store, SLOTS) == [Outcome.OK] * NUM
    return tmp_path


@pytest.fixture
def segment(path: Path) -> Path:
    return rank_directory(path) / "segment-000000.kv"


@pytest.fixture
def index(path: Path) -> Path:
    return rank_directory(path) / INDEX_FILE


def test_a_flipped_bit_of_a_block_makes_it_corrupt_and_then_absent(
    path: Path, segment: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(1)
    damaged = {n: rng.randrange(SLOT_BYTES) for n in (0, 3, 15)}
    damaged[7], damaged[8] = 0, SLOT_BYTES - 1
    for n, position in damaged.items():
        flip(segment, n * SLOT_BYTES + position, rng.randrange(8))
    bad, good = [key(n) for n in damaged], [k for n, k in enumerate(SLOTS) if n not in damaged]
    with open_store(path) as store:
        assert read_all(store) == expected(good) | dict.fromkeys(bad, Outcome.CORRUPT)
        assert store.stats().num_corrupt == len(bad)
        assert read(store, [(k, SLOTS[k]) for k in bad]) == dict.fromkeys(bad, Outcome.MISSING)
        assert f"block {key(3).hex()} in {segment} (slot 3) does not match" in caplog.text
        assert write(store, {key(3): 3}) == [Outcome.OK]
    with open_store(path) as store:
        assert read_all(store) == expected([*good, key(3)])


def test_a_block_in_the_slot_of_another_is_corrupt(path: Path, segment: Path) -> None:
    content = segment.read_bytes()
    segment.write_bytes(
        content[SLOT_BYTES : 2 * SLOT_BYTES] + content[:SLOT_BYTES] + content[2 * SLOT_BYTES :]
    )
    with open_store(path) as store:
        found = read_all(store)
    assert found == expected(SLOTS) | dict.fromkeys([key(0), key(1)], Outcome.CORRUPT)


def test_a_block_of_another_rank_is_corrupt(path: Path, segment: Path) -> None:
    with open_store(path, rank=1) as store:
        write(store, SLOTS)
    shutil.copy(rank_directory(path, rank=1) / segment.name, segment)
    shutil.copy(rank_directory(path, rank=1) / INDEX_FILE, rank_directory(path) / INDEX_FILE)
    with open_store(path) as store:
        assert set(read_all(store).values()) == {Outcome.CORRUPT}


@pytest.mark.parametrize("seed", range(12))
def test_flipped_bits_of_the_index_lose_entries_and_nothing_else(
    path: Path, index: Path, seed: int
) -> None:
    rng = random.Random(seed)
    for _ in range(6):
        flip(index, HEADER_BYTES + rng.randrange(NUM * RECORD_BYTES), rng.randrange(8))
    with open_store(path) as store:
        found = read_all(store)
        assert expected(SLOTS).items() >= found.items()
        assert NUM - 6 <= len(found) < NUM
        assert write(store, SLOTS) == [Outcome.OK] * NUM
    with open_store(path) as store:
        assert read_all(store) == expected(SLOTS)


@pytest.mark.parametrize("position", [0, 8, 12, 16, 24, 32, 39, 40, HEADER_BYTES - 1])
def test_a_damaged_header_of_the_index_empties_the_store(
    path: Path, index: Path, position: int, caplog: pytest.LogCaptureFixture
) -> None:
    flip(index, position)
    with open_store(path) as store:
        assert list(store.entries()) == []
        assert write(store, SLOTS) == [Outcome.OK] * NUM
    assert f"{index} is unusable" in caplog.text
    with open_store(path) as store:
        assert read_all(store) == expected(SLOTS)


@pytest.mark.parametrize(
    "size", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + 5 * 64 + 20]
)
def test_an_index_that_is_cut_off_loses_the_entries_after_the_cut(
    path: Path, index: Path, size: int
) -> None:
    with open(index, "r+b") as file:
        file.truncate(size)
    left = max(0, (size - HEADER_BYTES) // RECORD_BYTES)
    with open_store(path) as store:
        assert read_all(store) == expected(key(n) for n in range(left))
        assert write(store, SLOTS) == [Outcome.OK] * NUM


def test_an_index_of_random_bytes_empties_the_store(path: Path, index: Path) -> None:
    index.write_bytes(random.Random(3).randbytes(index.stat().st_size))
    with open_store(path) as store:
        assert list(store.entries()) == []
        assert write(store, SLOTS) == [Outcome.OK] * NUM


def test_random_records_behind_a_good_header_are_not_entries(path: Path, index: Path) -> None:
    content = index.read_bytes()
    index.write_bytes(content[:HEADER_BYTES] + random.Random(3).randbytes(32 * RECORD_BYTES))
    with open_store(path) as store:
        assert list(store.entries()) == []


def test_any_flipped_bit_of_the_identity_file_is_repaired(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = path / IDENTITY.digest / IDENTITY_FILE
    good = file.read_bytes()
    for position in range(0, len(good), 7):
        flip(file, position, position % 7)
        with open_store(path) as store:
            assert len(list(store.entries())) == NUM
        assert file.read_bytes() == good
    assert f"{file} was damaged; written again" in caplog.text
    file.unlink()
    with open_store(path) as store:
        assert read_all(store) == expected(SLOTS)
    assert file.read_bytes() == good


def test_entries_of_a_deleted_segment_are_removed_at_the_start(
    path: Path, segment: Path, caplog: pytest.LogCaptureFixture
) -> None:
    segment.unlink()
    with open_store(path) as store:
        assert list(store.entries()) == []
        assert "16 blocks are lost" in caplog.text
        assert write(store, SLOTS) == [Outcome.OK] * NUM
        assert read_all(store) == expected(SLOTS)


def test_entries_after_the_end_of_a_segment_are_removed_at_the_start(
    path: Path, segment: Path
) -> None:
    with open(segment, "r+b") as file:
        file.truncate(5 * SLOT_BYTES + 100)
    with open_store(path) as store:
        assert read_all(store) == expected(key(n) for n in range(5))
        assert write(store, SLOTS) == [Outcome.OK] * NUM
        assert read_all(store) == expected(SLOTS)


@pytest.mark.parametrize("io", ["threads", "auto"])
def test_a_segment_cut_off_while_it_is_open_fails_only_the_blocks_after_the_cut(
    path: Path, segment: Path, io: str, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(path, io=io) as store:
        read(store, [(key(0), 0)])  # opens the segment
        with open(segment, "r+b") as file:
            file.truncate(5 * SLOT_BYTES + 100)
        found = read_all(store)
        lost = [key(n) for n in range(5, NUM)]
        assert {k: found[k] for k in map(key, range(5))} == expected(map(key, range(5)))
        assert {found[k] for k in lost} <= {Outcome.FAILED, Outcome.CORRUPT}
        assert read(store, [(k, SLOTS[k]) for k in lost]) == dict.fromkeys(lost, Outcome.MISSING)
        assert "the segment file is cut off" in caplog.text
        assert write(store, SLOTS) == [Outcome.OK] * NUM
        assert read_all(store) == expected(SLOTS)


def test_a_segment_deleted_before_its_first_use_fails_the_reads(
    path: Path, segment: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(path) as store:
        segment.unlink()
        assert read_all(store) == dict.fromkeys(SLOTS, Outcome.FAILED)
        assert "No such file or directory" in caplog.text
        assert list(store.entries()) == []
        assert write(store, SLOTS) == [Outcome.OK] * NUM
        assert read_all(store) == expected(SLOTS)


def test_a_segment_that_is_a_directory_fails_reads_and_writes(path: Path, segment: Path) -> None:
    with open_store(path) as store:
        segment.unlink()
        segment.mkdir()
        assert read_all(store) == dict.fromkeys(SLOTS, Outcome.FAILED)
        assert write(store, SLOTS) == [Outcome.FAILED] * NUM
        assert store.stats().num_failed == 2 * NUM


def test_an_index_that_cannot_be_opened_is_an_error_with_its_name(path: Path, index: Path) -> None:
    index.unlink()
    index.mkdir()
    with pytest.raises(DiskStoreError, match=INDEX_FILE):
        open_store(path)


class FailingDisk(ThreadIo):
    """Transfers that begin at an offset in `errors` fail, after half of their bytes are written."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: dict[int, OSError] = {}

    def submit(self, direction: Direction, transfers: Sequence[Transfer]) -> "Failing":
        return Failing(self.errors, direction, transfers)


class Failing:
    def __init__(
        self, errors: dict[int, OSError], direction: Direction, transfers: Sequence[Transfer]
    ) -> None:
        self._errors, self._direction, self._transfers = errors, direction, transfers

    def wait(self) -> list[OSError | None]:
        results: list[OSError | None] = []
        for transfer in self._transfers:
            error = self._errors.get(transfer.offset)
            if error is not None and self._direction is Direction.WRITE:
                half = [piece[: len(piece) // 2] for piece in transfer.pieces[:1]]
                run_all(self._direction, [transfer._replace(pieces=half)])
            results += [error] if error else run_all(self._direction, [transfer])
        return results


def test_a_full_disk_fails_the_write_and_deletes_what_was_there(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FailingDisk()
    disk.errors[4 * SLOT_BYTES] = OSError(errno.ENOSPC, "No space left on device")
    with open_store(path, io=disk) as store:
        outcomes = write(store, {key(20): 4, key(21): 6})
        assert outcomes == [Outcome.FAILED, Outcome.OK]
        assert "1 blocks in" in caplog.text
        assert "could not be written: [Errno 28] No space left on device" in caplog.text
        wanted = expected(k for n, k in enumerate(SLOTS) if n not in (4, 6)) | expected([key(21)])
        disk.errors.clear()
        assert read_all(store) == wanted
    with open_store(path) as store:
        assert read_all(store) == wanted


@pytest.fixture
def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system can allocate a part of a file before it notices that it is full."""
    fallocate = os.posix_fallocate

    def half(fd: int, offset: int, num_bytes: int) -> None:
        fallocate(fd, offset, num_bytes // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", half)


def test_an_index_for_which_there_is_no_space_is_deleted(tmp_path: Path, fill_disk: None) -> None:
    with pytest.raises(DiskStoreError, match="No space left on device"):
        open_store(tmp_path)
    assert not list(tmp_path.rglob(INDEX_FILE))


def test_a_segment_for_which_there_is_no_space_is_deleted(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with open_store(tmp_path) as store:
        request.getfixturevalue("fill_disk")
        assert write(store, {key(1): 1}) == [Outcome.FAILED]
        assert not list(tmp_path.rglob("segment-*"))


def test_a_read_error_is_an_outcome_and_the_entry_is_deleted(path: Path) -> None:
    disk = FailingDisk()
    with open_store(path, io=disk) as store:
        disk.errors[5 * SLOT_BYTES] = OSError(errno.EIO, "Input/output error")
        assert read(store, [(key(5), 5)]) == {key(5): Outcome.FAILED}
        assert read(store, [(key(5), 5)]) == {key(5): Outcome.MISSING}
        assert store.stats().num_failed == 1
    with open_store(path) as store:
        assert len(list(store.entries())) == NUM - 1


@pytest.fixture
def break_index(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets the index's writes fail after some more of them."""
    write_all = index_module._write_all

    def break_after(num_writes: int) -> None:
        left = num_writes

        def failing(fd: int, view: memoryview, offset: int) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(errno.EIO, "Input/output error")
            write_all(fd, view, offset)

        monkeypatch.setattr(index_module, "_write_all", failing)

    return break_after


def test_a_slot_whose_record_cannot_be_cleared_is_not_overwritten(
    path: Path, break_index: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(path) as store:
        break_index(0)
        assert write(store, {key(20): 4, key(21): 30}) == [Outcome.FAILED] * 2
        assert read(store, [(key(4), 4)]) == {key(4): Outcome.MISSING}
    monkeypatch.undo()
    with open_store(path) as store:
        assert read_all(store) == expected(SLOTS)


def test_blocks_whose_records_cannot_be_written_are_absent(
    path: Path, break_index: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(path) as store:
        break_index(1)
        assert write(store, {key(20): 4, key(21): 30}) == [Outcome.FAILED] * 2
        monkeypatch.undo()
        assert key(20) not in dict(store.entries())
        assert write(store, {key(22): 4, key(21): 31}) == [Outcome.OK] * 2
    wanted = expected([*(k for n, k in enumerate(SLOTS) if n != 4), key(21), key(22)])
    with open_store(path) as store:
        assert read_all(store) == wanted


def test_blocks_that_cannot_be_deleted_are_absent_until_the_next_start(
    path: Path, break_index: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(path) as store:
        break_index(0)
        store.delete([key(0)])
        assert read(store, [(key(0), 0)]) == {key(0): Outcome.MISSING}
        assert "Input/output error" in caplog.text
