"""`longshore trace`, and where --sched-trace is given."""

from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.cli.main import app
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.deploy.model.folder import read_model_folder
from longshore.deploy.settings.options import EngineOptions
from longshore.deploy.supervisor.engine_plan import plan_engine, trace_path
from longshore.deploy.supervisor.replica import Replica
from longshore.protocol.errors import ConfigError
from tests.deploy.trace.traces import short_of_blocks


def run(*tokens: object) -> None:
    app(list(map(str, tokens)), result_action="return_none")


def test_a_trace_is_summarized_exported_and_plotted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "t.jsonl"
    short_of_blocks(file)
    run("trace", "summary", file)
    assert "first token, ms" in capsys.readouterr().out
    out = tmp_path / "out"
    run("trace", "export", file, "--perfetto", tmp_path / "p.json", "--parquet", out)
    run("trace", "plot", file, "--out", out)
    shown = capsys.readouterr().out
    for path in [tmp_path / "p.json", *out.iterdir()]:
        assert str(path) in shown
        assert path.stat().st_size > 0
    assert len(list(out.iterdir())) == 7


def test_an_export_to_nothing_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to export"):
        run("trace", "export", tmp_path / "t.jsonl")


def test_what_cannot_be_written_or_plotted_is_rejected(tmp_path: Path) -> None:
    empty = tmp_path / "t.jsonl"
    empty.touch()
    with pytest.raises(ConfigError, match=r"perfetto=.* cannot be written: No such file"):
        run("trace", "export", empty, "--perfetto", tmp_path / "missing" / "x.json")
    with pytest.raises(ConfigError, match="nothing to plot"):
        run("trace", "plot", empty, "--out", tmp_path / "plots")
    assert not (tmp_path / "plots").exists()


def plan_of(path: Path, tmp_path: Path) -> Any:
    options = EngineOptions(device="cpu", sched_trace_path=path, state_dir=tmp_path / "state")
    return plan_engine(options, read_model_folder(DEMO_MODEL_DIR))


def test_with_several_engines_each_has_a_file(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "t.jsonl", tmp_path)
    assert trace_path(plan) == tmp_path / "t.jsonl"
    assert trace_path(plan, Replica(1, 2)) == tmp_path / "t-1.jsonl"


@pytest.mark.parametrize(
    ("name", "problem"), [(".", "is a folder"), ("missing/t.jsonl", "is not a folder")]
)
def test_a_place_where_no_file_can_be_created_is_rejected_before_the_start(
    name: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=problem):
        plan_of(tmp_path / name, tmp_path)
