"""Speed is guarded by counts of instructions: what `benchmarks/instructions.py` says of them, and
the counts of this tree."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import instruction_loads
import instructions
import pytest
from gateway_streams import Streams

from tests.conftest import ROOT

LOAD, OTHER = "scheduler-step-64", "block-pool-16"

Run = Callable[..., int]


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with 1,000,000 instructions of LOAD and 5,000 of OTHER, counted here."""
    path = tmp_path / "instructions.json"
    known = {LOAD: 1_000_000, OTHER: 5000}
    path.write_text(json.dumps({"versions": instructions.versions(), "instructions": known}))
    monkeypatch.setattr(instructions, "RECORD", path)
    return path


@pytest.fixture
def run(record: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the program when LOAD has this count, and returns its exit status."""

    def run(counted: int, *options: str) -> int:
        monkeypatch.setattr(instructions, "count", lambda names: dict.fromkeys(names, counted))
        monkeypatch.setattr(sys, "argv", ["instructions.py", "--load", LOAD, *options])
        try:
            instructions.main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return run


def other_versions(record: Path) -> None:
    known = json.loads(record.read_text())
    known["versions"]["numpy"] = "1.0"
    record.write_text(json.dumps(known))


def test_growth_by_more_than_three_percent_fails_and_says_what_to_do(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(1_031_000) == 1
    assert (
        f"{LOAD} executes 3.1% more instructions per step: 1,031,000, instead of 1,000,000. Make "
        f"it cheaper, or run `python benchmarks/instructions.py --write --load {LOAD}` and say in "
        "the commit what this buys."
    ) in capsys.readouterr().out


def test_a_gain_is_to_be_written_but_does_not_fail(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(960_000) == 0
    said = capsys.readouterr().out
    assert f"{LOAD} executes 4.0% fewer instructions per step" in said
    assert f"--write --load {LOAD}" in said


@pytest.mark.parametrize("counted", [971_000, 1_029_000])
def test_a_small_difference_is_not_worth_a_word(
    counted: int, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(counted) == 0
    assert "executes" not in capsys.readouterr().out


def test_counts_of_other_versions_are_compared_but_do_not_fail(
    run: Run, record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other_versions(record)
    assert run(2_000_000) == 0
    said = capsys.readouterr().out
    assert f"{LOAD} executes 100.0% more" in said
    assert "'numpy': '1.0'" in said


def test_a_load_that_is_not_recorded_fails(
    run: Run, record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = json.loads(record.read_text())
    del known["instructions"][LOAD]
    record.write_text(json.dumps(known))
    assert run(1_000_000) == 1
    assert f"{LOAD} is not in instructions.json" in capsys.readouterr().out


def test_counts_are_written_beside_those_of_other_loads(run: Run, record: Path) -> None:
    assert run(2_000_000, "--write") == 0
    written = json.loads(record.read_text())
    assert written["instructions"] == {LOAD: 2_000_000, OTHER: 5000}
    assert run(2_000_000) == 0


def test_counts_of_other_versions_are_not_kept(run: Run, record: Path) -> None:
    other_versions(record)
    assert run(2_000_000, "--write") == 0
    written = json.loads(record.read_text())
    assert written == {"versions": instructions.versions(), "instructions": {LOAD: 2_000_000}}


def test_only_the_rounds_after_the_first_ones_are_in_the_counted_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    def begin(num_rounds: int) -> Callable[[], None]:
        events.append(f"begin {num_rounds}")
        return lambda: events.append("round")

    monkeypatch.setattr(os, "getsid", lambda pid: events.append("part ends"))
    monkeypatch.setattr(gc, "disable", lambda: None)
    load = instruction_loads.CountedLoad(begin, "round", rounds=3, warm_up=2)
    load.run(lambda: events.append("instrumented"))
    counted = ["part ends", "round", "round", "round", "part ends"]
    assert events == ["begin 5", "round", "round", "instrumented", *counted]


def test_the_total_of_a_part_is_read() -> None:
    profile = "part: 2\nevents: Ir\nsummary: 9\n\nfn=(1) f\n16 4\ntotals: 1077587\n"
    assert instructions.instructions_of(profile) == 1_077_587
    with pytest.raises(ValueError, match="totals"):
        instructions.instructions_of("version: 1\n")


def test_without_valgrind_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="needs valgrind"):
        instructions.count([LOAD])


def test_a_load_runs_without_valgrind() -> None:
    program = [sys.executable, "benchmarks/instruction_loads.py", OTHER]
    subprocess.run(program, cwd=ROOT, check=True)


def test_each_step_of_the_gateway_reaches_every_client() -> None:
    streams = Streams(num_streams=3, num_steps=4)
    for _ in range(4):
        before = [client.num_bytes for client in streams.clients]
        streams.step()
        assert all(
            client.num_bytes > num_bytes
            for client, num_bytes in zip(streams.clients, before, strict=True)
        )
    streams.close()


@pytest.mark.services
def test_a_load_that_fails_is_named() -> None:
    with pytest.raises(SystemExit, match="the load no-load failed"):
        instructions.count(["no-load"])


def test_every_load_is_recorded() -> None:
    record = json.loads((ROOT / "benchmarks" / "instructions.json").read_text())
    assert record["instructions"].keys() == instruction_loads.LOADS.keys()


@pytest.mark.slow
@pytest.mark.services
@pytest.mark.timeout(1800)
def test_no_load_executes_more_instructions_than_recorded() -> None:
    ran = subprocess.run(
        [sys.executable, "benchmarks/instructions.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
