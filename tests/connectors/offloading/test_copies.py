"""Copies between the device and host memory: what is joined, and that every copier copies exactly
what it is told. The CUDA runtime is played by one that copies host memory."""

import ctypes
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.connectors.offloading import copies as module
from longshore.connectors.offloading import copy_method
from longshore.connectors.offloading.copies import Copier, Copies, CudaCopier, HostCopier, joined
from longshore.connectors.offloading.copy_method import (
    COPY_METHODS_FILE,
    HostCopySpeed,
    choose_host_copies,
    measure_host_copies,
    thread_counts,
)


def int64s(*values: int) -> Any:
    return np.array(values, np.int64)


class Runtime:
    """The calls of the CUDA runtime that a CudaCopier makes, for addresses in host memory. A copy
    takes place when the stream is synchronised."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.calls: list[str] = []
        self.pending: list[tuple[int, int, int]] = []

    def cudaRuntimeGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0

    def cudaMemcpyAsync(self, target: Any, source: Any, size: Any, kind: Any, stream: Any) -> int:
        assert (kind.value, stream.value) == (4, 77)
        self.calls.append("one")
        self.pending.append((target.value, source.value, size.value))
        return 0

    def cudaMemcpyBatchAsync(
        self,
        targets: Any,
        sources: Any,
        sizes: Any,
        count: Any,
        attributes: Any,
        first: Any,
        num_attributes: Any,
        *others: Any,
    ) -> int:
        *failed, stream = others
        assert len(failed) == (self.version < 13_000)
        assert (num_attributes.value, first._obj.value, stream.value) == (1, 0, 77)
        assert attributes._obj.order == 1
        assert ctypes.sizeof(attributes._obj) == 24
        self.calls.append("batch")
        lists = [
            list((ctypes.c_int64 * count.value).from_address(each.value))
            for each in (targets, sources, sizes)
        ]
        self.pending += zip(*lists, strict=True)
        return 0

    def synchronize(self) -> None:
        for copy in self.pending:
            ctypes.memmove(*copy)
        self.pending.clear()

    def copier(self) -> CudaCopier:
        return CudaCopier(self, 77, nullcontext, self.synchronize)


COPIERS = {
    "one thread": lambda: HostCopier(1),
    "three threads": lambda: HostCopier(3),
    "no batches": lambda: Runtime(12_060).copier(),
    "CUDA 12.8": lambda: Runtime(12_080).copier(),
    "CUDA 13": lambda: Runtime(13_000).copier(),
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


@pytest.mark.req("WRK-08", "ERR-29")
@pytest.mark.parametrize(("version", "calls"), [(13_000, ["batch"]), (12_060, ["one"] * 3)])
def test_a_job_is_one_call_of_a_runtime_with_batches(version: int, calls: list[str]) -> None:
    runtime = Runtime(version)
    copier = runtime.copier()
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    starts = int64s(0, 16, 48)
    copier.copy(target.ctypes.data + starts, source.ctypes.data + starts, int64s(8, 8, 8))
    assert runtime.calls == calls
    copier.copy(int64s(), int64s(), int64s())
    assert runtime.calls == calls, "nothing to copy needs no call"


def test_an_error_of_the_cuda_runtime_is_raised() -> None:
    runtime = Runtime(13_000)
    runtime.cudaMemcpyBatchAsync = lambda *_: 700  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="error 700"):
        runtime.copier().copy(int64s(1), int64s(2), int64s(3))


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
