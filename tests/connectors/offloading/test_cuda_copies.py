"""Ways to submit copies to CUDA, and the choice between them. The runtime copies host memory, and
the kernel runs in Triton's interpreter."""

import ctypes
import logging
from typing import Any

import numpy as np
import pytest
import torch

from longshore.connectors.offloading import cuda_copies as module
from longshore.connectors.offloading.cuda_copies import (
    BatchSubmission,
    CudaCopier,
    common_word_bytes,
    copied_per_s,
    fastest,
    mapped_kernel,
)
from longshore.protocol.errors import ConfigError
from tests.connectors.offloading.cuda_runtime import Runtime


def int64s(*values: int) -> Any:
    return np.array(values, np.int64)


@pytest.mark.req("WRK-08", "ERR-29")
@pytest.mark.parametrize(("kind", "calls"), [("batch", ["batch"]), ("runs", ["one"] * 3)])
def test_a_batch_is_one_call(kind: Any, calls: list[str]) -> None:
    runtime = Runtime(13_000)
    copier = runtime.copier(kind)
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    starts = int64s(0, 16, 32, 48)
    copies = target.ctypes.data + starts, source.ctypes.data + starts, int64s(8, 8, 0, 8)
    copier.copy(*copies)
    assert runtime.calls == calls, "the runtime rejects empty copies"
    assert target[48:56].tolist() == list(range(48, 56))
    copier.copy(int64s(), int64s(), int64s())
    assert runtime.calls == calls, "nothing to copy needs no call"


def test_a_runtime_without_batches_is_rejected() -> None:
    with pytest.raises(RuntimeError, match="12060 has no cudaMemcpyBatchAsync"):
        BatchSubmission(Runtime(12_060), 77)


def test_a_failed_copy_is_raised_after_what_was_submitted_has_ended() -> None:
    runtime = Runtime(13_000)
    copier = runtime.copier("runs")
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    copy = runtime.cudaMemcpyAsync
    runtime.cudaMemcpyAsync = (  # type: ignore[method-assign]
        lambda *each: 700 if runtime.calls else copy(*each)
    )
    starts = int64s(0, 32)
    with pytest.raises(RuntimeError, match="error 700"):
        copier.copy(target.ctypes.data + starts, source.ctypes.data + starts, int64s(8, 8))
    assert not runtime.pending
    assert runtime.calls == ["one", "last error"], "torch would report it for its next kernel"
    assert target.tolist() == [*range(8), *[0] * 56]


def test_the_attributes_have_the_layout_of_the_runtime() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    theirs = runtime.cudaMemcpyAttributes()
    theirs.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    overlap = runtime.cudaMemcpyFlags.cudaMemcpyFlagPreferOverlapWithCompute
    theirs.flags = int(overlap)
    ours = module._Attributes(order=module._STREAM_ORDER, flags=module._PREFER_OVERLAP)
    size = ctypes.sizeof(ours)
    assert size == 24
    assert bytes(ours) == ctypes.string_at(theirs.getPtr(), size)
    same = runtime.cudaDeviceAttr.cudaDevAttrCanUseHostPointerForRegisteredMem
    assert int(same) == module._SAME_ADDRESSES
    assert int(runtime.cudaMemcpyKind.cudaMemcpyDefault) == module._DEFAULT_KIND


# The kernel


@pytest.mark.req("WRK-08")
@pytest.mark.parametrize("max_pieces", [1 << 15, 2])
@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8])
def test_the_kernel_copies_large_and_unaligned_pages(
    shift: int, max_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages above and below a piece, of which some are no multiple of a word."""
    monkeypatch.setattr(module, "MAX_PIECES", max_pieces)
    copier = Runtime(13_000).copier("kernel")
    source = np.random.default_rng(shift).integers(1, 256, 140_000, np.uint8)
    target = np.zeros(160_000, np.uint8)
    sizes = int64s(40_000, 16 << 10, (16 << 10) + 8, 24, 8) + shift
    sources = int64s(0, 40_016, 56_800, 80_000, 81_000) + shift
    targets = int64s(100_000, 60_000, 20_000, 8, 64) + shift
    expected = target.copy()
    for to, start, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        expected[to : to + size] = source[start : start + size]
    copier.copy(targets + target.ctypes.data, sources + source.ctypes.data, sizes)
    np.testing.assert_array_equal(target, expected)


def test_the_words_of_the_kernel_divide_all_addresses_and_sizes() -> None:
    assert common_word_bytes(int64s(16, 8), int64s(0), int64s(24)) == 8
    assert common_word_bytes(int64s(16, 8), int64s(4), int64s(24)) == 4
    assert common_word_bytes(int64s(16, 8), int64s(4), int64s(26)) == 2
    assert common_word_bytes(int64s(17), int64s(4), int64s(26)) == 1


def test_a_device_with_other_addresses_has_no_kernel() -> None:
    class Library:
        is_same = 0

        def cudaDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
            assert attribute == module._SAME_ADDRESSES
            value._obj.value = self.is_same
            return 0

    library = Library()
    with pytest.raises(RuntimeError, match="another address"):
        mapped_kernel(library, torch.device("cpu"), lambda: None)
    library.is_same = 1
    assert mapped_kernel(library, torch.device("cpu"), lambda: None).name == "a kernel per job"


# The choice


class Wrong:
    name = "one that copies too little"

    def submit(self, targets: Any, sources: Any, sizes: Any) -> None:
        for each in zip(targets.tolist(), sources.tolist(), (sizes - 1).tolist(), strict=True):
            ctypes.memmove(*each)


def scratch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(70_000, dtype=torch.uint8), torch.empty(70_000, dtype=torch.uint8)


@pytest.mark.parametrize("page_bytes", [4096, 5000, 100_000])
@pytest.mark.parametrize("kind", ["batch", "runs", "kernel"])
def test_a_measured_copy_is_verified(kind: Any, page_bytes: int) -> None:
    runtime = Runtime(13_000)
    assert copied_per_s(runtime.copier(kind), *scratch(), page_bytes) > 0
    wrong = CudaCopier(Wrong(), runtime.copier(kind)._on_stream, runtime.synchronize)
    with pytest.raises(RuntimeError, match="copies are wrong"):
        copied_per_s(wrong, *scratch(), page_bytes)


def rated(monkeypatch: pytest.MonkeyPatch, **rates: float) -> Any:
    """Makers of copiers with these rates; a rate of 0 means that the copier cannot be made."""
    runtime = Runtime(13_000)
    kinds: Any = {runtime.copier(kind).name: kind for kind in ("batch", "runs", "kernel")}

    def make(name: str) -> CudaCopier:
        if not rates[kinds[name]]:
            raise ImportError("its library is missing")
        return runtime.copier(kinds[name])

    monkeypatch.setattr(module, "copied_per_s", lambda copier, *_: rates[kinds[copier.name]])
    return {name: (lambda name=name: make(name)) for name in kinds}


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ({"batch": 30e9, "runs": 9e9, "kernel": 59e9}, "batches of copies"),
        ({"batch": 30e9, "runs": 9e9, "kernel": 61e9}, "a kernel per job"),
        ({"batch": 30e9, "runs": 31e9, "kernel": 0}, "one copy per run of blocks"),
        ({"batch": 0, "runs": 0, "kernel": 5e9}, "a kernel per job"),
    ],
)
def test_the_fastest_is_chosen_and_what_fails_is_named(
    rates: dict[str, float],
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The kernel takes multiprocessors, so it must be twice as fast."""
    caplog.set_level(logging.INFO)
    copiers = rated(monkeypatch, **rates)
    assert fastest(copiers, *scratch(), 4096, "to host").name == chosen
    *warnings, said = (record.getMessage() for record in caplog.records)
    assert said.startswith(f"copies to host, pages of 4096 bytes: {chosen} (")
    assert len(warnings) == list(rates.values()).count(0)
    assert all("is not used: its library is missing" in warning for warning in warnings)


def test_no_way_of_copying_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no way of copying blocks to device works"):
        fastest(rated(monkeypatch, batch=0, runs=0, kernel=0), *scratch(), 4096, "to device")


def test_the_measurement_has_a_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    copiers = rated(monkeypatch, batch=1e9, runs=9e9, kernel=99e9)
    monkeypatch.setattr(module, "MAX_MEASURE_S", -1)
    assert fastest(copiers, *scratch(), 4096, "to host").name == "batches of copies"
    assert "a kernel per job: not measured" in caplog.text
