"""scripts/soak: what it finds, and a short run of it."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT, load_script

soak = load_script("soak")


def seen(resident_kb: list[int], descriptors: list[int]) -> dict[str, "soak.Process"]:
    return {"gateway": soak.Process(resident_kb, descriptors)}


@pytest.mark.parametrize(
    ("resident_kb", "descriptors", "free", "faults"),
    [
        ([50] * 20 + [100] * 80, [5, 9, 30, 30, 9], soak.ALL_FREE, []),
        ([100] * 40 + [101] * 60, [9], soak.ALL_FREE, []),
        ([100] * 80 + [103] * 20, [9], soak.ALL_FREE, ["gateway grew by 3.0 % after the warm-up"]),
        (
            [100] * 100,
            [9, 9, 9, 9, 10],
            soak.ALL_FREE,
            ["gateway has 10 descriptors, 9 after the warm-up"],
        ),
        ([100] * 100, [9], 1998, ["1998 KV blocks are free instead of 1999"]),
    ],
)
def test_growth_descriptors_and_blocks_are_found(
    resident_kb: list[int], descriptors: list[int], free: int, faults: list[str]
) -> None:
    found = soak.find_faults(seen(resident_kb, descriptors), free, max_growth_percent=2)
    assert found == faults


@pytest.mark.slow
def test_a_short_run_through_real_processes() -> None:
    flags = "--requests 1000 --demo-requests 100 --max-growth-percent 100"
    run = subprocess.run(
        [sys.executable, ROOT / "scripts" / "soak", *flags.split()],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "small: 1000 requests" in run.stdout
    assert "demo_model: 100 requests" in run.stdout
    for process in ("supervisor", "worker-0", "scheduler", "gateway"):
        assert run.stdout.count(f"\n{process} ") == 2
