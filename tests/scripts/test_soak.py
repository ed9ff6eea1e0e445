"""scripts/soak: what it finds, and a short run of it."""

import subprocess
import sys
from typing import Any

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


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        ({"regex": "[a-d]{2,3}"}, "abc", "abcd"),
        ({"choice": ["12", "34"]}, "34", "1234"),
        ({"json": {"properties": {"a": {"enum": ["b"]}}}}, '{"a": "b"}', '{"a": "c"}'),
    ],
    ids=["regex", "choice", "json"],
)
def test_an_answer_that_does_not_conform_is_found_unless_it_was_cut_off(
    constraint: dict[str, Any], good: str, bad: str
) -> None:
    soak._check_choices([{"text": good, "finish_reason": "stop"}], constraint)
    soak._check_choices([{"text": bad, "finish_reason": "length"}], constraint)
    with pytest.raises(AssertionError, match="does not conform"):
        soak._check_choices([{"text": bad, "finish_reason": "stop"}], constraint)


def test_the_mix_names_kinds_with_weights() -> None:
    assert soak._weights(["plain=3", "abort=0.5"]) == {"plain": 3.0, "abort": 0.5}
    for text in ("fork=1", "plain", "plain=many"):
        with pytest.raises(ValueError, match=r"kind|convert"):
            soak._weights([text])


@pytest.mark.slow
def test_a_short_run_through_real_processes() -> None:
    # Its warm-up may end before the first constraint starts the process of structured output.
    flags = "--requests 400 --demo-requests 200 --max-growth-percent 100 --max-new-descriptors 20"
    run = subprocess.run(
        [sys.executable, ROOT / "scripts" / "soak", *flags.split()],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "small: 400 requests" in run.stdout
    assert "demo_model: 200 requests" in run.stdout
    for kind in soak.MIX:
        assert f"'{kind}': " in run.stdout
    assert run.stdout.count("'GPU_to_CPU': ") == run.stdout.count("'CPU_to_DISK': ") == 2
    for process in ("supervisor", "worker-0", "scheduler", "gateway"):
        assert run.stdout.count(f"\n{process} ") == 2
