"""`longshore simulate` and the files that it writes."""

import csv
import json
from pathlib import Path

import pytest

from longshore.deploy.cli.simulate import run
from longshore.deploy.simulator.options import SimulateOptions
from longshore.deploy.simulator.results import CSV_FIELDS
from longshore.protocol.errors import ConfigError
from tests.deploy.simulator.workload_files import agent_job, write_lines


def test_a_run_writes_a_summary_and_all_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [agent_job(n, n * 0.1, [(60, 5, 0.2), (20, 5, 0.0)]) for n in range(4)]
    options = SimulateOptions(
        trace=write_lines(tmp_path / "jobs.jsonl", jobs),
        engines=2,
        json=tmp_path / "out.json",
        csv=tmp_path / "out.csv",
        plot=tmp_path / "plots",
    )
    run(options)
    output = capsys.readouterr()
    assert "8 completed, 0 rejected" in output.out
    assert "4 completed, 0 failed" in output.out
    assert "times real time" in output.err
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["requests"] == {
        "completed": 8,
        "rejected": 0,
        "input_tokens": 4 * (60 + 60 + 5 + 20),
        "output_tokens": 40,
        "preemptions": 0,
    }
    assert "plot" not in content["settings"]
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == CSV_FIELDS
    assert [row["turn"] for row in rows] == ["0", "1"] * 4
    for name in ("latency.png", "load.png"):
        assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG")


def test_a_file_that_cannot_be_written_is_named_before_the_simulation(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"csv=.*missing"):
        run(SimulateOptions(csv=tmp_path / "missing" / "out.csv"))


def test_a_simulation_that_fails_leaves_no_files(tmp_path: Path) -> None:
    old = tmp_path / "old.csv"
    old.write_text("kept")
    with pytest.raises(ConfigError, match="num_blocks"):
        run(SimulateOptions(num_blocks=2, json=tmp_path / "out.json", csv=old))
    assert [path.name for path in tmp_path.iterdir()] == ["old.csv"]
    assert old.read_text() == "kept"


def test_settings_that_cannot_be_followed_are_rejected_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^speed=inf must be above 0 and finite"):
        SimulateOptions(speed=float("inf"))
    with pytest.raises(ConfigError, match=r"connector_config=.* needs a connector"):
        SimulateOptions(connector_config='{"cpu_bytes_to_use": 1}')
    with pytest.raises(ConfigError, match=r"^thin=3 changes a trace; set trace"):
        SimulateOptions(thin=3)
    with pytest.raises(ConfigError, match="json and csv are the same file"):
        SimulateOptions(json=Path("out"), csv=Path("out"))
