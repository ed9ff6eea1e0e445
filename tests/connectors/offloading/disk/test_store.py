"""Blocks survive a restart, and each call returns what became of each block."""

import errno
import fcntl
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

from longshore.connectors.offloading.disk import catalog, lock, opening, segments
from longshore.connectors.offloading.disk.errors import DiskStoreError, StoreInUse
from longshore.connectors.offloading.disk.index import MAX_KEY_BYTES
from longshore.connectors.offloading.disk.io import IoBackend, ThreadIo
from longshore.connectors.offloading.disk.nixl_io import NixlIo
from longshore.connectors.offloading.disk.results import BlockRead, BlockWrite, Outcome
from longshore.connectors.offloading.disk.segments import aligned_memory
from longshore.connectors.offloading.disk.store import DiskStore
from longshore.protocol.errors import ConfigError
from tests.connectors.offloading.disk.stores import (
    IDENTITY,
    SLOT_BYTES,
    capacity,
    content,
    expected,
    key,
    open_store,
    rank_directory,
    read,
    read_all,
    write,
)


@pytest.fixture(params=["threads", pytest.param("nixl", marks=pytest.mark.services)])
def backend(request: pytest.FixtureRequest) -> IoBackend:
    return ThreadIo() if request.param == "threads" else NixlIo()


def test_blocks_survive_a_restart_in_the_order_in_which_they_were_stored(
    tmp_path: Path, backend: IoBackend
) -> None:
    slots = {key(n): 31 - 2 * n for n in range(12)}
    with open_store(tmp_path, io=backend) as store:
        assert write(store, slots) == [Outcome.OK] * 12
    with open_store(tmp_path) as store:
        assert sorted(store.entries()) == sorted(slots.items())
        assert read_all(store) == expected(slots)
        write(store, {key(50): 0})
        write(store, {key(3): 1})
        assert [k for k, _ in store.entries()][-2:] == [key(50), key(3)]


@pytest.mark.parametrize("size", [1, 4095, 4096, 5000, SLOT_BYTES])
@pytest.mark.parametrize("offset", [0, 64])
def test_a_block_of_any_size_and_alignment_is_read_back(
    tmp_path: Path, backend: IoBackend, size: int, offset: int
) -> None:
    memory = aligned_memory(4 * SLOT_BYTES)
    data = memory[offset : offset + size]
    data[:] = content(key(1), size)
    wanted = data.tobytes()
    with open_store(tmp_path, io=backend) as store:
        assert write(store, {key(0): 2, key(1): 3, key(2): 4}, {key(1): data}) == [Outcome.OK] * 3
        assert store.read([BlockRead(key(1), 3, memory[offset : offset + size])]) == [Outcome.OK]
        assert data.tobytes() == wanted
        data[:] = 0
        assert store.read([BlockRead(key(1), 3, memory[offset : offset + size])]) == [Outcome.OK]
        assert data.tobytes() == wanted
        assert read(store, [(key(0), 2), (key(2), 4)]) == expected([key(0), key(2)])


def test_blocks_in_neighbouring_slots_are_one_transfer(tmp_path: Path) -> None:
    class Counting(ThreadIo):
        offsets: list[tuple[int, int]] = []  # noqa: RUF012  # of the one instance

        def submit(self, direction, transfers):
            self.offsets += [(t.offset, len(t.pieces)) for t in transfers]
            return super().submit(direction, transfers)

    counting = Counting()
    with open_store(tmp_path, io=counting) as store:
        write(store, {key(n): n for n in (7, 3, 4, 5, 9, 10)})
    sizes = [(3 * SLOT_BYTES, 3), (7 * SLOT_BYTES, 1), (9 * SLOT_BYTES, 2)]
    assert counting.offsets == sizes


def test_more_blocks_than_are_moved_at_a_time(tmp_path: Path, backend: IoBackend) -> None:
    slot_bytes, num = 512 << 10, 40  # chunks have 16
    with open_store(tmp_path, io=backend, slot_bytes=slot_bytes, num_slots=num) as store:
        data = {key(n): content(key(n), slot_bytes) for n in range(num)}
        slots = {key(n): (n * 7) % num for n in range(num)}
        assert write(store, slots, data) == [Outcome.OK] * num
        found = read(store, slots.items(), slot_bytes)
        assert found == {k: block.tobytes() for k, block in data.items()}


def test_a_store_spans_several_segment_files(tmp_path: Path, backend: IoBackend) -> None:
    slot_bytes = 16 << 20  # segments have 4 slots
    with open_store(tmp_path, io=backend, slot_bytes=slot_bytes, num_slots=6) as store:
        data = {key(n): content(key(n), 4096) for n in range(6)}
        assert write(store, {key(n): n for n in range(6)}, data) == [Outcome.OK] * 6
        segments = sorted(rank_directory(tmp_path).glob("segment-*"))
        assert [path.stat().st_size for path in segments] == [4 * slot_bytes, 2 * slot_bytes]
        found = read(store, [(key(n), n) for n in range(6)], 4096)
        assert found == {k: block.tobytes() for k, block in data.items()}
        store.delete([key(0), key(1), key(2)])
        assert segments[0].exists()
        store.delete([key(3)])
        assert [path.exists() for path in segments] == [False, True]
        assert write(store, {key(0): 0}, data) == [Outcome.OK]
        assert read(store, [(key(0), 0)], 4096) == {key(0): data[key(0)].tobytes()}


def test_a_block_is_missing_unless_it_is_in_the_slot_asked_for(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        write(store, {key(0): 0, key(1): 1})
        asked = [(key(0), 1), (key(1), 0), (key(2), 2)]
        assert read(store, asked) == {k: Outcome.MISSING for k, _ in asked}
        assert store.stats().num_missing == 3
        assert read_all(store) == expected([key(0), key(1)])


def test_a_slot_or_a_key_that_is_written_again_has_only_the_new_block(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        write(store, {key(0): 0, key(1): 1})
        write(store, {key(2): 0, key(1): 5})
        assert dict(store.entries()) == {key(2): 0, key(1): 5}
    with open_store(tmp_path) as store:
        assert read_all(store) == expected([key(2), key(1)])


def test_deleted_blocks_are_gone_after_a_restart(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        write(store, {key(n): n for n in range(4)})
        store.delete([key(1), key(2), key(9)])
        assert [k for k, _ in store.entries()] == [key(0), key(3)]
    with open_store(tmp_path) as store:
        assert read_all(store) == expected([key(0), key(3)])


def test_invalid_calls_are_rejected_and_change_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path, num_slots=4) as store:
        write(store, {key(0): 0})
        for slots, data, words in [
            ({key(1): 4}, {}, "slot 4 is not below 4"),
            ({key(1): -1}, {}, "slot -1"),
            ({bytes(MAX_KEY_BYTES + 1): 0}, {}, "a key has 1 to 36 bytes, not 37"),
            ({key(1): 0}, {key(1): np.zeros(SLOT_BYTES + 1, np.uint8)}, "a block has 1 to 8192"),
            ({key(1): 0, key(2): 0}, {}, "the same slot twice"),
        ]:
            with pytest.raises(ValueError, match=words):
                write(store, slots, data)
        with pytest.raises(ValueError, match="the same key twice"):
            store.write([BlockWrite(key(1), slot, content(key(1)), 0) for slot in (1, 2)])
        with pytest.raises(ValueError, match="has 100 bytes, and the stored block 8192"):
            read(store, [(key(0), 0)], 100)
        assert read_all(store) == expected([key(0)])
        assert store.stats().queued_blocks == 0


def test_threads_share_a_store(tmp_path: Path, backend: IoBackend) -> None:
    def work(worker: int) -> dict[bytes, bytes | Outcome]:
        slots = {key(100 * worker + n): 8 * n + worker for n in range(8)}
        found: dict[bytes, bytes | Outcome] = {}
        for _ in range(10):
            assert write(store, slots) == [Outcome.OK] * 8
            found = read(store, slots.items())
            store.delete(list(slots)[:4])
        return found

    with open_store(tmp_path, num_slots=64, io=backend) as store, ThreadPoolExecutor(4) as pool:
        for worker, found in enumerate(pool.map(work, range(4))):
            assert found == expected(key(100 * worker + n) for n in range(8))
        assert len(read_all(store)) == 16


def test_stats_count_blocks_bytes_and_time(tmp_path: Path) -> None:
    with open_store(tmp_path, num_slots=8) as store:
        write(store, {key(n): n for n in range(3)})
        read_all(store)
        stats = store.stats()
    assert (stats.num_entries, stats.capacity_slots, stats.used_bytes) == (3, 8, 3 * SLOT_BYTES)
    assert stats.written_bytes == stats.read_bytes == 3 * SLOT_BYTES
    assert stats.write_s > 0 < stats.read_s
    assert (stats.num_corrupt, stats.num_failed, stats.num_missing) == (0, 0, 0)


def test_directories_and_files_are_private(tmp_path: Path) -> None:
    with open_store(tmp_path / "new") as store:
        write(store, {key(0): 0})
    for parent, folders, files in os.walk(tmp_path):
        for name in folders:
            assert stat.S_IMODE((Path(parent) / name).stat().st_mode) == 0o700, name
        for name in files:
            assert stat.S_IMODE((Path(parent) / name).stat().st_mode) == 0o600, name


def test_a_second_writer_is_refused_by_name(tmp_path: Path) -> None:
    with open_store(tmp_path), pytest.raises(StoreInUse, match=f"process {os.getpid()} on host"):
        open_store(tmp_path)
    with open_store(tmp_path), open_store(tmp_path, rank=1):
        pass


def test_other_identities_are_ignored_and_listed_by_name(tmp_path: Path) -> None:
    other = msgspec.structs.replace(
        IDENTITY, model_name="other", dtype="float16", kv_layout="other"
    )
    with open_store(tmp_path, identity=other) as store:
        write(store, {key(0): 0})
    with open_store(tmp_path) as store:
        assert list(store.entries()) == []
        (found,) = store.others()
        assert found.name == "other (other kv layout, dtype)"
        assert found.size_bytes >= SLOT_BYTES
    with open_store(tmp_path, identity=other) as store:
        assert read_all(store) == expected([key(0)])


def test_a_renamed_model_keeps_its_blocks(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        write(store, {key(0): 0})
    renamed = msgspec.structs.replace(IDENTITY, model_name="renamed")
    with open_store(tmp_path, identity=renamed) as store:
        assert read_all(store) == expected([key(0)])


def test_another_block_size_empties_the_store_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(tmp_path) as store:
        write(store, {key(0): 0})
    with open_store(tmp_path, slot_bytes=2 * SLOT_BYTES) as store:
        assert list(store.entries()) == []
    assert "its slots have 8192 bytes, not 16384; the store is emptied" in caplog.text


def test_a_capacity_below_one_block_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no block of 8192 bytes"):
        DiskStore.open(tmp_path, IDENTITY, slot_bytes=8192, capacity_bytes=capacity(1) - 1)


def test_a_capacity_above_the_whole_disk_is_rejected(tmp_path: Path) -> None:
    capacity_bytes = 2 * shutil.disk_usage(tmp_path).total
    with pytest.raises(ConfigError, match=r"more than the disk of .* has, .*Lower disk_bytes"):
        DiskStore.open(tmp_path, IDENTITY, slot_bytes=8192, capacity_bytes=capacity_bytes)
    assert not list(tmp_path.rglob("slots.index"))


def test_an_unknown_backend_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="io='posix' is unknown; use one of auto, nixl, threads"):
        open_store(tmp_path, io="posix")


def test_without_nixl_auto_takes_threads_and_nixl_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nixl._api", None)
    with open_store(tmp_path, io="auto") as store:
        assert write(store, {key(0): 0}) == [Outcome.OK]
    with pytest.raises(ConfigError, match="pip install --no-deps nixl nixl-cu13"):
        open_store(tmp_path, io="nixl")


def test_a_path_that_is_no_directory_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskStoreError, match=r"file.*Not a directory.*Give it a writable path"):
        open_store(tmp_path / "file" / "store")


def test_a_read_only_path_is_an_error_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(DiskStoreError, match=r"cannot use .*new.*Read-only file system"):
        open_store(tmp_path / "new")


def test_a_closed_store_has_no_file_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(2):  # created, and loaded
        open_store(tmp_path).close()
    assert os.listdir("/proc/self/fd") == before


def test_a_store_with_many_segments_keeps_few_of_them_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capacity was raised since the store was created, and the size of its segments was not."""
    monkeypatch.setattr(opening, "_MIN_SEGMENT_BYTES", SLOT_BYTES)
    num = 2 * segments.MAX_OPEN
    with open_store(tmp_path, num_slots=1) as store:
        assert store.capacity_slots == 1
    slots = {key(n): n for n in range(num)}
    with open_store(tmp_path, num_slots=num) as store:
        before = len(os.listdir("/proc/self/fd"))
        assert write(store, slots) == [Outcome.OK] * num
        assert len(list(rank_directory(tmp_path).glob("segment-*"))) == num
        assert read_all(store) == expected(slots)
        assert len(os.listdir("/proc/self/fd")) - before <= segments.MAX_OPEN


def test_a_file_system_that_cannot_allocate_space_stores_blocks_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With direct I/O, the C library's replacement for a missing fallocate fails with EINVAL."""

    def fail(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    with open_store(tmp_path) as store:
        monkeypatch.setattr(os, "posix_fallocate", fail)
        assert write(store, {key(0): 0, key(1): 31}) == [Outcome.OK] * 2
        monkeypatch.undo()
    with open_store(tmp_path) as store:
        assert read_all(store) == expected([key(0), key(1)])


def test_a_look_at_the_lock_does_not_prevent_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`longshore kv ls` holds the lock for a moment to see whether an engine has it."""
    open_store(tmp_path).close()
    looking = os.open(rank_directory(tmp_path) / lock.LOCK_FILE, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr(lock.time, "sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
    open_store(tmp_path).close()
    os.close(looking)


def test_no_engine_can_open_a_store_that_is_being_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(tmp_path).close()
    refused = []

    def delete(path: Path) -> None:
        with pytest.raises(StoreInUse):
            open_store(tmp_path)
        refused.append(path)

    monkeypatch.setattr(catalog.shutil, "rmtree", delete)
    (report,) = catalog.stores(tmp_path)
    catalog.remove(report)
    assert refused == [tmp_path / IDENTITY.digest]
    monkeypatch.undo()
    catalog.remove(report)
    assert catalog.stores(tmp_path) == []


def test_a_store_that_is_deleted_while_stores_are_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(tmp_path).close()

    def read_identity(directory: Path) -> None:
        shutil.rmtree(directory)

    monkeypatch.setattr(catalog, "read_identity", read_identity)
    assert catalog.stores(tmp_path) == []
