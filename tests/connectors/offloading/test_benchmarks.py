"""The benchmarks of this package run at a tiny size and write what they promise. The values are not
asserted."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT


def run(tmp_path: Path, *command: str) -> tuple[list[dict[str, Any]], str]:
    """The rows that were written, and what was printed."""
    path = tmp_path / "result.json"
    ran = subprocess.run(
        [sys.executable, f"benchmarks/{command[0]}", *command[1:], "--json", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(path.read_text())["rows"], ran.stdout + ran.stderr


def test_the_eviction_benchmark_has_a_row_per_trace_and_capacity_and_a_drawing_per_trace(
    tmp_path: Path,
) -> None:
    for name, lengths in (("one", range(1, 9)), ("two", [3, 3, 5])):
        with gzip.open(tmp_path / f"{name}_trace.jsonl.gz", "wt") as trace:
            for length in lengths:
                trace.write(json.dumps({"hash_ids": list(range(length))}) + "\n")
    places = ("--traces", str(tmp_path), "--plot", str(tmp_path))
    sizes = ("--policies", "reuse_rate", "lru", "--capacities", "20", "8")
    rows, _ = run(tmp_path, "eviction.py", *places, *sizes)
    assert [(row["trace"], row["capacity"]) for row in rows] == [
        ("one", 8),
        ("one", 20),
        ("two", 8),
        ("two", 20),
    ]
    for row in rows:
        rate = (0 + 3 + 3) / 11 if row["trace"] == "two" else 28 / 36
        assert row["ledger"] == pytest.approx({"reuse_rate": rate, "lru": rate})
        assert row["one_by_one"] == pytest.approx({"lru": rate})
        assert row["minimum"] == pytest.approx(rate)
    for name in ("one", "two"):
        drawing = (tmp_path / f"eviction-{name}.svg").read_text(encoding="utf-8")
        assert drawing.startswith("<svg")
        assert all(word in drawing for word in ("MIN", "reuse_rate", "lru", f"{name} trace"))


def test_the_ledger_benchmark_has_a_row_per_policy_and_size(tmp_path: Path) -> None:
    sizes = ("--policies", "lru", "reuse_rate", "--at-a-time", "2048", "--rounds", "1")
    no_peer = ("--peer-python", "/nonexistent/python")
    rows, printed = run(tmp_path, "offload_ledger.py", *sizes, *no_peer)
    assert [(row["policy"], row["at_a_time"]) for row in rows] == [
        ("lru", 2048),
        ("reuse_rate", 2048),
    ]
    parts = ("lookup", "touch", "prepare_load", "complete_load", "prepare_store", "complete_store")
    for row in rows:
        assert row["cycle"] == pytest.approx(sum(row[part] for part in parts))
        assert "ratio" not in row
    assert "NO PEER: /nonexistent/python" in printed


@pytest.mark.slow
def test_the_preemption_benchmark_has_a_row_per_mode_and_equal_tokens(tmp_path: Path) -> None:
    """It asserts itself that no mode changes a token."""
    sizes = ("--requests", "4", "--prompt-len", "64", "--output-len", "48", "--turns", "1")
    rows, _ = run(tmp_path, "preemption.py", *sizes, "--host-bytes", "64MiB")
    assert [row["mode"] for row in rows] == ["no connector", "recompute", "swap", "auto"]
    by_mode = {row["mode"]: row for row in rows}
    assert by_mode["no connector"]["swapped"] == by_mode["recompute"]["swapped"] == 0
    assert by_mode["swap"]["swapped"] > 0
    for row in rows:
        assert row["tokens_per_s"] > 0
        assert 0 < row["tpot_p50_ms"] <= row["tpot_p99_ms"]


@pytest.mark.slow
def test_the_dma_benchmark_has_a_row_per_page_size_direction_and_way(tmp_path: Path) -> None:
    rows, _ = run(tmp_path, "dma.py", "--dry-run", "--mib", "2", "--repeats", "1")
    sizes = [16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20]
    assert [(row["page_bytes"], row["direction"]) for row in rows] == [
        (size, direction) for size in sizes for direction in ("to host", "to device", "both")
    ]
    for row in rows:
        assert row["way"] == "memory copies, threads: 1"
        assert row["is_chosen"]
        assert row["share"] == pytest.approx(row["gb_s"] / row["peak_gb_s"])
