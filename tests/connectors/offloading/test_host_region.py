"""The memory of the host tier, as the ranks of a node share it."""

import errno
import logging
import mmap
import os
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from longshore.connectors.offloading.host_region import HostRegion
from longshore.protocol.errors import ConfigError

SHARES = (24, 40, 9)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("tier")
    yield fd
    os.close(fd)


def regions(
    fd: int | None, num_slots: int = 5, shares: tuple[int, ...] = SHARES
) -> list[HostRegion]:
    return [
        HostRegion(fd, num_slots=num_slots, share_bytes=shares, rank=rank)
        for rank in range(len(shares))
    ]


@pytest.mark.req("WRK-02")
def test_ranks_share_the_slots_and_no_share_overlaps_another(fd: int) -> None:
    ranks = regions(fd)
    assert [rank.slot_bytes for rank in ranks] == [73] * 3
    for slot in range(5):
        for number, rank in enumerate(ranks):
            rank.share(slot, SHARES[number])[:] = 10 * slot + number + 1
    expected = [
        10 * slot + number + 1 for slot in range(5) for number in (0,) * 24 + (1,) * 40 + (2,) * 9
    ]
    for number, rank in enumerate(ranks):
        assert rank.memory.tolist() == expected
        assert [rank.offset(slot) for slot in range(5)] == [
            73 * slot + sum(SHARES[:number]) for slot in range(5)
        ]


def test_every_rank_has_a_column_of_checksums_after_the_slots(fd: int) -> None:
    ranks = regions(fd)
    table = np.arange(15, dtype=np.uint64).reshape(5, 3) + np.uint64(1 << 63)
    for number, rank in enumerate(ranks):
        rank.checksums[:, number] = table[:, number]
    for rank in ranks:
        np.testing.assert_array_equal(rank.checksums, table)
        assert not rank.memory.any(), "checksums are no part of the slots"
        assert rank.checksums.ctypes.data % 8 == 0
        assert rank.size_bytes == 368 + 8 * (15 + 3) == os.fstat(fd).st_size


def test_the_memory_outlives_the_rank_that_wrote_it(fd: int) -> None:
    first, *others = regions(fd)
    assert not any(rank.is_kept for rank in (first, *others))
    first.share(4, 24)[:] = 7
    first.close()
    again, *_ = regions(fd)
    assert (again.share(4, 24) == 7).all()
    assert again.is_kept


def test_a_single_rank_needs_no_descriptor() -> None:
    (one,) = regions(None, shares=(16,))
    (other,) = regions(None, shares=(16,))
    one.share(0, 16)[:] = 1
    assert not other.memory.any()
    one.close()
    assert len(one.memory) == len(one.checksums) == 0


@pytest.mark.req("CFG-05")
def test_too_little_memory_is_an_error_that_names_the_option(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"cannot have .* bytes: .*Lower cpu_bytes_to_use"):
        HostRegion(fd, num_slots=1 << 40, share_bytes=(1 << 20,), rank=0)

    class FullMemory(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", FullMemory)
    with pytest.raises(ConfigError, match=r"Cannot allocate memory. Lower cpu_bytes_to_use"):
        regions(fd)


@pytest.mark.req("CFG-05")
def test_more_memory_than_the_host_has_is_rejected_before_it_is_touched(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would kill processes instead of refusing it."""

    class Touched(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise AssertionError("the memory was touched")

    monkeypatch.setattr(mmap, "mmap", Touched)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with pytest.raises(ConfigError, match=r"bytes of memory are available. Lower cpu_bytes_to_use"):
        HostRegion(fd, num_slots=total // 4096, share_bytes=(4096,), rank=0)


def test_an_older_kernel_allocates_at_the_first_access(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OlderKernel(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", OlderKernel)
    for rank in regions(fd):
        rank.memory[:] = 1


def test_each_rank_allocates_its_part_of_the_pages(
    fd: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    advised: list[tuple[int, int]] = []

    class Recorder(mmap.mmap):
        def madvise(self, advice: int, start: int, length: int) -> None:
            advised.append((start, start + length))
            super().madvise(advice, start, length)

    monkeypatch.setattr(mmap, "mmap", Recorder)
    caplog.set_level(logging.INFO)
    ranks = regions(fd, num_slots=1000, shares=(4096, 1000, 8192))
    ends = sorted(advised)
    assert ends[0][0] == 0
    assert ends[-1][1] == ranks[0].size_bytes
    assert all(end == start for (_, end), (start, _) in pairwise(ends))
    assert "host tier: 1000 blocks of 13288 bytes, 0.01 GiB" in caplog.text
