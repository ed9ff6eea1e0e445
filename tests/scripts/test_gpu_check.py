"""scripts/gpu_check: what it records, and its checks run on the CPU."""

import importlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.gpu import attention_checks, memory_checks, parts, results
from benchmarks.gpu.exactness import assert_near, poisoned_memory, worst_error
from benchmarks.gpu.parts import PARTS, Part, run_part
from benchmarks.gpu.results import Run, at_least, at_most, summary
from longshore.worker.attention.kind import PagedAttentionKind
from longshore.worker.attention.triton_backend import TritonAttention
from tests.conftest import ROOT
from tests.worker.kernels.variants import in_triton
from tests.worker.models.cases import CASES

SCRIPT = "scripts/gpu_check"


def script(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "results.json"
    results.write(found, results.new_document("cpu", is_dry=False))
    return found


@pytest.fixture
def run(path: Path, tmp_path: Path) -> Run:
    """Part 3, on a device."""
    return Run(path, 3, device="cpu", is_dry=False, folder=tmp_path, limit_s=60)


@pytest.fixture
def gpu_check() -> ModuleType:
    loader = SourceFileLoader("gpu_check", str(ROOT / SCRIPT))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    before = sys.path.copy()
    loader.exec_module(module)
    sys.path[:] = before
    return module


def raises(error: Exception) -> Callable[..., Any]:
    def function(*_: object) -> None:
        raise error

    return function


def test_parts_take_less_than_eight_minutes_and_25_together() -> None:
    assert max(part.minutes for part in PARTS) < 8
    assert sum(part.minutes for part in PARTS) <= 25


def test_the_functions_of_all_parts_exist() -> None:
    for part in PARTS:
        for function in part.functions:
            module_name, _, name = function.partition(":")
            module = importlib.import_module(f"benchmarks.gpu.{module_name}")
            assert callable(getattr(module, name))


def test_the_list_has_every_part_with_its_number() -> None:
    lines = script("--list").stdout.splitlines()
    assert [re.split(r"\s{2,}| \(", line.strip())[:2] for line in lines] == [
        [str(number), part.title] for number, part in enumerate(PARTS, start=1)
    ]


@pytest.mark.parametrize("part", ["0", "2-99", "5-4", "two"])
def test_a_part_that_does_not_exist_is_rejected(part: str) -> None:
    done = script("--part", part)
    assert done.returncode == 2
    assert "--part" in done.stderr


def test_a_wrong_result_is_recorded_and_does_not_end_the_part(run: Run, path: Path) -> None:
    assert run.check("right", lambda: 5) == 5
    assert run.check("wrong", raises(AssertionError("token 3"))) is None
    assert run.check("right again", lambda: 6) == 6
    checks = results.read(path)["checks"]
    assert [(check["part"], check["name"], check["ok"]) for check in checks] == [
        (3, "right", True),
        (3, "wrong", False),
        (3, "right again", True),
    ]
    assert checks[1]["error"] == "AssertionError: token 3"
    assert "FAIL wrong: AssertionError: token 3\n2 checks passed, 1 failed" in summary(
        results.read(path)
    )


def test_an_absent_package_is_not_verified(run: Run, path: Path) -> None:
    run.check("with it", raises(ModuleNotFoundError("No module", name="cupy")))
    document = results.read(path)
    assert document["checks"] == []
    assert document["not_verified"] == [
        {"part": 3, "name": "with it", "reason": "cupy is not installed"}
    ]
    assert "not verified on device: with it: cupy is not installed" in summary(document)


def test_the_absence_of_our_own_module_is_a_failure(run: Run, path: Path) -> None:
    run.check("with it", raises(ModuleNotFoundError("No module", name="longshore.worker.gone")))
    (check,) = results.read(path)["checks"]
    assert check["ok"] is False


def test_a_part_that_cannot_be_imported_is_not_verified(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = next(n for n, part in enumerate(PARTS, start=1) if part.title == "memory")
    monkeypatch.delitem(sys.modules, "benchmarks.gpu.memory_checks", raising=False)
    monkeypatch.setitem(sys.modules, "numpy", None)
    run_part(number, run)
    (entry,) = results.read(path)["not_verified"]
    assert entry["name"] == "memory: memory_checks.check"
    assert entry["reason"] == "numpy is not installed"


def test_a_function_that_raises_between_checks_does_not_end_the_part(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_checks, "check", raises(RuntimeError("no checkpoint")))
    monkeypatch.setattr(parts, "PARTS", (Part("two", 1, ("memory_checks:check",) * 2),))
    run_part(1, run)
    assert [check["error"] for check in results.read(path)["checks"]] == 2 * [
        "RuntimeError: no checkpoint"
    ]


def test_after_its_time_a_part_begins_no_check(path: Path, tmp_path: Path) -> None:
    run = Run(path, 3, device="cpu", is_dry=False, folder=tmp_path, limit_s=0)
    assert run.check("late", lambda: 5) is None
    (entry,) = results.read(path)["not_verified"]
    assert entry["reason"] == "the time of this part is over"


def test_a_share_is_compared_with_its_target(run: Run, path: Path) -> None:
    run.figure("rate", 8.0, "GB/s", ceiling=10.0, target=at_least(0.9))
    run.figure("time", 5.0, "ms", floor=4.0, target=at_least(0.75), rows=7)
    run.figure("gap", 120.0, "µs", target=at_most(100))
    run.figure("plain", 1.0, "s")
    figures = results.read(path)["figures"]
    assert [figure.get("share") for figure in figures] == [0.8, 0.8, None, None]
    assert [figure.get("met") for figure in figures] == [False, True, False, None]
    assert [figure.get("target") for figure in figures] == ["≥ 0.9", "≥ 0.75", "≤ 100", None]
    assert figures[1]["rows"] == 7
    lines = summary(results.read(path)).splitlines()
    assert lines[2] == "| rate | 8 GB/s | 10 | 0.80 | ≥ 0.9 | missed |"
    assert lines[5] == "| plain | 1 s |  |  |  |  |"
    assert "0 checks passed, 0 failed; 1 targets met, 2 missed" in lines[-1]


def test_in_a_dry_run_no_target_is_met_or_missed(path: Path, tmp_path: Path) -> None:
    run = Run(path, 1, device="cpu", is_dry=True, folder=tmp_path, limit_s=60)
    run.figure("rate", 8.0, "GB/s", ceiling=10.0, target=at_least(0.5))
    assert results.read(path)["figures"][0]["met"] is None


def test_a_ceiling_is_measured_once(run: Run, path: Path, tmp_path: Path) -> None:
    assert run.once("rate", lambda: 5.0) == 5.0
    later = Run(path, 4, device="cpu", is_dry=False, folder=tmp_path, limit_s=60)
    assert later.once("rate", raises(AssertionError())) == 5.0


def test_a_part_that_does_not_end_is_killed_and_fails(
    gpu_check: ModuleType, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "KILLED_AFTER_S", 0.2)
    gpu_check.run_part(1, path, is_dry=False, minutes=None)
    document = results.read(path)
    (check,) = document["checks"]
    assert check["ok"] is False
    assert check["error"] == "it was killed after 0.2 s"
    assert document["parts"][0]["part"] == 1


def test_one_wrong_vector_among_many_is_found() -> None:
    exact = torch.randn(1000, 3, 16, dtype=torch.float64)
    got = exact.float()
    assert worst_error(got, exact) < 1e-6
    got[517, 1, 3] += 0.5
    with pytest.raises(AssertionError, match="the worst error"):
        assert_near(got, exact)
    got[517, 1, 3] = math.nan
    assert worst_error(got, exact) == math.inf


def test_memory_that_nothing_writes_is_nan() -> None:
    with poisoned_memory():
        x = torch.empty(3, 4)
        assert x.isnan().all()
        assert x.new_empty(2).isnan().all()
        assert torch.empty_like(x).isnan().all()
        assert (torch.empty(2, dtype=torch.int32) > 1 << 30).all()
    assert not torch.are_deterministic_algorithms_enabled()


WINDOW = {"window": 9}


@pytest.mark.parametrize("wrong", [None, {"window": 8}, {"window": 10}, {"softcap": 4.0}], ids=str)
def test_a_key_too_many_or_too_few_is_found(
    wrong: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = PagedAttentionKind(num_heads=2, **(WINDOW if wrong is None else WINDOW | wrong))
    monkeypatch.setattr(
        attention_checks, "make_attention", lambda cache, _: TritonAttention(cache, kind)
    )

    def check() -> None:
        with in_triton():
            attention_checks._check_step(
                (2, 1, 16, 1),
                [20, 7],
                [1, 5],
                dtype=torch.float32,
                device=torch.device("cpu"),
                **WINDOW,
            )

    if wrong is None:
        check()
    else:
        with pytest.raises(AssertionError, match="the worst error"):
            check()


def test_a_dry_run_of_one_part_writes_its_figures(path: Path) -> None:
    done = script("--dry-run", "--part", "1", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    document = results.read(path)
    assert [part["part"] for part in document["parts"]] == [1]
    assert document["ceilings"]["copy_bytes_per_s"] > 0
    assert document["dry_run"] is True
    names = {figure["name"] for figure in document["figures"]}
    assert {"one pinned copy, both", "a kernel within a graph"} <= names
    assert "| a kernel within a graph | " in done.stdout


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_dry_run_takes_every_part_and_writes_its_results(path: Path) -> None:
    done = script("--dry-run", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    assert [part["part"] for part in document["parts"]] == list(range(1, len(PARTS) + 1))
    assert all(check["ok"] for check in document["checks"])
    names = [check["name"] for check in document["checks"]]
    assert {f"{case.name}, float32" for case in CASES[1:]} <= set(names)
    assert len([name for name in names if name.startswith("Llama, ")]) >= 5
    assert "no step waits for the device" in names
    assert "tokens are equal after a restore from disk" in names
    assert {"RMS norm, float32", "gates, bfloat16", "experts, edges, float16"} <= set(names)
    assert not [e for e in document["not_verified"] if e["name"].startswith("operator ")]
    targets = {figure["target"] for figure in document["figures"] if "target" in figure}
    assert targets >= {"≥ 0.9", "≥ 0.75", "≥ 0.5", "≥ 0.55", "≤ 1.05", "≥ 0.995", "≤ 100", "≥ 5"}
    assert all(figure["value"] >= 0 for figure in document["figures"])


def test_without_a_device_the_exit_status_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device here")
    path = tmp_path / "results.json"
    done = script("--json", str(path))
    assert done.returncode == 2
    assert "--dry-run" in done.stderr
    assert not path.exists()
