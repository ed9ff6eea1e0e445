"""The bytes of a store are bounded, also when its capacity changes between two starts."""

import random
from pathlib import Path

import pytest

from longshore.connectors.offloading.disk.errors import DiskStoreError
from longshore.connectors.offloading.disk.index import SlotIndex
from longshore.connectors.offloading.disk.results import Outcome
from tests.connectors.offloading.disk.stores import (
    SLOT_BYTES,
    capacity,
    content,
    expected,
    flip,
    key,
    open_store,
    rank_directory,
    read,
    read_all,
    write,
)

LARGE = 16 << 20
"""Bytes of a slot, so that a segment has four."""


def size_of(path: Path) -> int:
    return sum(
        file.stat().st_size for file in rank_directory(path).iterdir() if file.name != "lock"
    )


def fill(path: Path, num_slots: int) -> list[bytes]:
    """A store whose slots are all in use, in a random order. Returns the keys, oldest first."""
    slots = random.Random(num_slots).sample(range(num_slots), num_slots)
    keys = [key(n) for n in range(num_slots)]
    with open_store(path, num_slots=num_slots) as store:
        for k, slot in zip(keys, slots, strict=True):
            assert write(store, {k: slot}) == [Outcome.OK]
    return keys


def test_a_full_store_has_no_more_bytes_than_its_capacity(tmp_path: Path) -> None:
    fill(tmp_path, 20)
    assert size_of(tmp_path) <= capacity(20)


@pytest.mark.parametrize("num_slots", [31, 20, 1])
def test_a_lower_capacity_keeps_the_newest_blocks_and_their_order(
    tmp_path: Path, num_slots: int, caplog: pytest.LogCaptureFixture
) -> None:
    keys = fill(tmp_path, 32)[32 - num_slots :]
    with open_store(tmp_path, num_slots=num_slots) as store:
        assert store.capacity_slots == num_slots
        assert [k for k, _ in store.entries()] == keys
        assert sorted(slot for _, slot in store.entries()) == list(range(num_slots))
        assert read_all(store) == expected(keys)
        assert size_of(tmp_path) <= capacity(num_slots)
        lowered = f"the capacity was lowered to {num_slots} blocks; {32 - num_slots} of 32"
        assert lowered in caplog.text
        assert write(store, {key(99): 0}) == [Outcome.OK]
    with open_store(tmp_path, num_slots=num_slots) as store:
        assert [k for k, _ in store.entries()][-1] == key(99)


def test_a_lower_capacity_removes_and_shortens_segments(tmp_path: Path) -> None:
    keys = [key(n) for n in range(11)]
    data = {k: content(k, 4096) for k in keys}
    with open_store(tmp_path, slot_bytes=LARGE, num_slots=11) as store:
        write(store, {k: n for n, k in enumerate(keys)}, data)
    with open_store(tmp_path, slot_bytes=LARGE, num_slots=6) as store:
        found = read(store, store.entries(), 4096)
        assert found == {k: data[k].tobytes() for k in keys[5:]}
    sizes = [path.stat().st_size for path in sorted(rank_directory(tmp_path).glob("segment-*"))]
    assert sizes == [4 * LARGE, 2 * LARGE]


def test_a_capacity_that_is_lowered_and_raised_again(tmp_path: Path) -> None:
    keys = fill(tmp_path, 12)
    with open_store(tmp_path, num_slots=6):
        pass
    with open_store(tmp_path, num_slots=40) as store:
        assert [k for k, _ in store.entries()] == keys[6:]
        assert write(store, {key(50): 39}) == [Outcome.OK]
        assert read_all(store) == expected([*keys[6:], key(50)])
    with open_store(tmp_path, num_slots=40) as store:
        assert read_all(store) == expected([*keys[6:], key(50)])


def test_a_lower_capacity_that_was_interrupted_continues_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = fill(tmp_path, 32)[12:]
    put = SlotIndex.put
    for _ in range(2):

        def fail_later(*arguments: object, calls: list[int] = [3]) -> None:  # noqa: B006
            calls[0] -= 1
            if not calls[0]:
                raise OSError(5, "Input/output error")
            put(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(SlotIndex, "put", fail_later)
            with pytest.raises(DiskStoreError, match="Input/output error"):
                open_store(tmp_path, num_slots=20)
    with open_store(tmp_path, num_slots=20) as store:
        found = read_all(store)
        assert expected(keys).items() >= found.items()
        assert len(found) == 20 - 2  # each failure lost the block that was being moved


def test_damage_in_a_block_that_is_moved_is_found_when_it_is_read(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        write(store, {key(0): 0, key(1): 30})
    flip(rank_directory(tmp_path) / "segment-000000.kv", 30 * SLOT_BYTES + 77)
    with open_store(tmp_path, num_slots=8) as store:
        assert dict(store.entries()) == {key(0): 0, key(1): 1}
        assert read_all(store) == expected([key(0)]) | {key(1): Outcome.CORRUPT}
