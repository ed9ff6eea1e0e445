"""Copies between the device and host memory: what is joined, and that every copier copies exactly
what it is told. The CUDA runtime is played by one that copies host memory."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.connectors.offloading import copies as module
from longshore.connectors.offloading import copy_method
from longshore.connectors.offloading.copies import (
    Copier,
    Copies,
    HostCopier,
    divide,
    divided_at,
    joined,
)
from longshore.connectors.offloading.copy_method import (
    COPY_METHODS_FILE,
    HostCopySpeed,
    choose_host_copies,
    measure_host_copies,
    thread_counts,
)
from tests.connectors.offloading.cuda_runtime import Runtime


def int64s(*values: int) -> Any:
    return np.array(values, np.int64)


COPIERS = {
    "one thread": lambda: HostCopier(1),
    "three threads": lambda: HostCopier(3),
    "runs": lambda: Runtime(12_060).copier("runs"),
    "batches of CUDA 12.8": lambda: Runtime(12_080).copier("batch"),
    "batches of CUDA 13": lambda: Runtime(13_000).copier("batch"),
    "kernel": lambda: Runtime(13_000).copier("kernel"),
}


@pytest.mark.req("WRK-03", "WRK-08")
@pytest.mark.parametrize("kind", COPIERS)
def test_every_copier_copies_exactly_what_it_is_told(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MIN_THREAD_BYTES", 16)  # so that threads share small jobs
    copier: Copier = COPIERS[kind]()

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90)), max_size=12), st.randoms())
    def check(runs: list[tuple[int, int]], chance: Any) -> None:
        source = np.frombuffer(chance.randbytes(2048), np.uint8).copy()
        target = np.zeros(2048, np.uint8)
        expected = target.copy()
        ends, at = [], 0
        for gap, size in runs:
            ends.append((at + gap, size))
            at += gap + size
        starts = [start for start, _ in ends]
        chance.shuffle(ends)
        sizes = [size for _, size in ends]
        for (to, size), start in zip(ends, starts, strict=True):
            expected[to : to + size] = source[start : start + size]
        copier.copy(
            int64s(*(to for to, _ in ends)) + target.ctypes.data,
            int64s(*starts) + source.ctypes.data,
            int64s(*sizes),
        )
        np.testing.assert_array_equal(target, expected)

    check()
    copier.close()


def test_the_error_of_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_THREAD_BYTES", 1)
    copier = HostCopier(2)
    move = module._move

    def fail(targets: Any, sources: Any, sizes: Any) -> None:
        if sources[0] != source.ctypes.data:
            raise OSError("the second half")
        move(targets, sources, sizes)

    monkeypatch.setattr(module, "_move", fail)
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    with pytest.raises(OSError, match="the second half"):
        copier.copy(int64s(target.ctypes.data), int64s(source.ctypes.data), int64s(64))
    copier.close()


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(1, 9)), max_size=9))
def test_neighbours_on_both_sides_are_joined(runs: list[tuple[int, int, int]]) -> None:
    device = host = 0
    entries = []
    for device_gap, host_gap, size in runs:
        device, host = device + device_gap, host + host_gap
        entries.append((device, host, size))
        device, host = device + size, host + size
    columns = zip(*entries, strict=True) if entries else ([], [], [])
    copies = joined(Copies(*(np.array(column, np.int64) for column in columns)))
    num_gaps = sum(bool(a or b) for a, b, _ in runs[1:])
    assert len(copies.sizes) == (num_gaps + 1 if runs else 0)
    assert copies.num_bytes == sum(size for _, _, size in runs)
    bytes_copied = {
        (int(d) + i, int(h) + i)
        for d, h, size in zip(*copies, strict=True)
        for i in range(int(size))
    }
    assert bytes_copied == {(d + i, h + i) for d, h, size in entries for i in range(size)}


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), max_size=6), st.integers(1, 17))
def test_ranges_are_divided_at_all_borders(ranges: list[tuple[int, int]], border: int) -> None:
    starts, sizes = int64s(*(r[0] for r in ranges)), int64s(*(r[1] for r in ranges))
    expected = []
    for index, (start, size) in enumerate(ranges):
        cuts = [at for at in range(start + 1, start + size) if at % border == 0]
        edges = [start, *cuts, start + size] if size else []
        expected += [(index, begin - start, end - begin) for begin, end in pairwise(edges)]
    assert list(zip(*map(list, divide(starts, sizes, border)), strict=True)) == expected
    divided = divided_at(Copies(starts + 1000, starts, sizes), border)
    assert list(zip(*map(list, divided), strict=True)) == [
        (1000 + ranges[index][0] + offset, ranges[index][0] + offset, size)
        for index, offset, size in expected
    ]


def test_the_choice_is_measured_once_per_machine_and_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []

    def measure(block_bytes: int) -> HostCopySpeed:
        measured.append(block_bytes)
        return HostCopySpeed(2, 1e9)

    monkeypatch.setattr(copy_method, "measure_host_copies", measure)
    assert choose_host_copies(4096, tmp_path) == HostCopySpeed(2, 1e9)
    assert choose_host_copies(4096, tmp_path) == HostCopySpeed(2, 1e9)
    assert choose_host_copies(8192, tmp_path) == HostCopySpeed(2, 1e9)
    assert measured == [4096, 8192]
    monkeypatch.setattr(copy_method, "machine_name", lambda: "another machine")
    choose_host_copies(4096, tmp_path)
    assert measured == [4096, 8192, 4096]
    choose_host_copies(4096, None)
    assert len(measured) == 4, "without a state directory, each start measures"
    assert [path.name for path in tmp_path.iterdir()] == [COPY_METHODS_FILE]
    kept = msgspec.json.decode((tmp_path / COPY_METHODS_FILE).read_bytes())
    assert len(kept) == 3


@pytest.mark.parametrize("content", [b"", b"{", b'{"key": {"num_threads": "many"}}', b"\xff"])
def test_a_damaged_file_of_choices_is_replaced(content: bytes, tmp_path: Path) -> None:
    (tmp_path / COPY_METHODS_FILE).write_bytes(content)
    speed = choose_host_copies(4096, tmp_path)
    assert speed.bytes_per_s > 0
    assert choose_host_copies(4096, tmp_path) == speed


def test_more_threads_are_chosen_only_if_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {1: 1.0, 2: 0.9, 4: 0.4}
    monkeypatch.setattr(
        copy_method, "_seconds", lambda copier, *_: seconds[int(copier.name.split()[-1])]
    )
    assert measure_host_copies(4096, [1, 2]).num_threads == 1
    assert measure_host_copies(4096, [1, 2, 4]).num_threads == 4
    assert 1 in thread_counts()
