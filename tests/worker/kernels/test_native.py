"""Loading and selecting the compiled kernels."""

import logging
import subprocess
from pathlib import Path

import pytest
import torch

from longshore.worker.config import WorkerConfig
from longshore.worker.kernels import native as native_module
from longshore.worker.kernels.gate import SILU
from longshore.worker.kernels.native import (
    INSTRUCTION_SETS,
    Native,
    kernels_for,
    library_path,
    load,
    native,
    num_threads,
    select,
)
from longshore.worker.worker import Worker
from tests.conftest import ROOT
from tests.models import make_tiny_llama
from tests.worker.kernels.variants import NATIVE, native_only, using


@native_only
def test_the_kernels_run_on_torchs_threads_and_start_none(kernels: Native) -> None:
    x = torch.randn(64, 8192)

    def threads() -> set[str]:
        return {task.name for task in Path("/proc/self/task").iterdir()}

    with using(kernels.instruction_set, num_threads=3):
        torch.sigmoid(x)
        before = threads()
        SILU(x)
        assert threads() == before


@native_only
def test_the_best_instruction_set_is_used_and_plain_torch_on_request(
    kernels: Native, caplog: pytest.LogCaptureFixture
) -> None:
    best = [name for name in INSTRUCTION_SETS if name in NATIVE][-1]
    x = torch.zeros(1)
    try:
        with caplog.at_level(logging.DEBUG):
            chosen = select(use_native=True)
        assert chosen is not None
        assert chosen.instruction_set == best
        assert f"CPU kernels: {best}" in caplog.text
        assert kernels_for(x) is chosen
        assert kernels_for(x.half()) is None
        assert kernels_for(x.to("meta")) is None
        assert select(use_native=False) is None
        assert native() is None
        assert kernels_for(x) is None
    finally:
        select(use_native=True)


@native_only
def test_a_worker_computes_with_what_its_settings_say(kernels: Native, tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    try:
        with Worker(WorkerConfig(model=str(tmp_path), num_blocks=100, cpu_kernels="torch")):
            assert native() is None
        with Worker(WorkerConfig(model=str(tmp_path), num_blocks=100)):
            assert native() is not None
    finally:
        select(use_native=True)


def test_a_file_that_is_no_library_cannot_be_loaded(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    with pytest.raises(OSError, match=r"broken.so"):
        load(broken)


@native_only
def test_a_library_of_another_version_is_not_used(
    kernels: Native, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_module, "INTERFACE", -1)
    try:
        assert select(use_native=True) is None
    finally:
        monkeypatch.undo()
        select(use_native=True)
    assert "was built from other sources" in caplog.text


@native_only
def test_an_unknown_instruction_set_is_rejected(kernels: Native) -> None:
    path = library_path()
    assert path is not None
    with pytest.raises(ValueError, match="instruction set 'sse9' is unknown"):
        load(path, "sse9")


def test_small_work_stays_on_one_thread() -> None:
    with using("torch", num_threads=3):
        assert num_threads(0) == 1
        assert num_threads(1 << 16) == 2
        assert num_threads(1 << 30) == 3


@pytest.mark.long
@pytest.mark.services
def test_the_library_compiles_for_arm64(tmp_path: Path) -> None:
    """Without the x86 variants: only the generic one, with the vectors of that processor."""
    source = ROOT / "worker" / "kernels" / "native" / "library.cpp"
    flags = ["-std=gnu++17", "-O3", "-fopenmp", "-fno-exceptions", "-Wno-psabi", "-fPIC", "-shared"]
    library = tmp_path / "native.so"
    command = ["aarch64-linux-gnu-g++", "-Wall", "-Werror", *flags, source, "-o", library]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int.from_bytes(library.read_bytes()[18:20], "little") == 183  # EM_AARCH64
