"""The export of a scheduler trace to Parquet."""

import re
import sys
from pathlib import Path

import pytest
from pyarrow import parquet

from longshore.deploy.trace.reading import read_trace
from longshore.deploy.trace.tables import export_parquet
from longshore.protocol.errors import ConfigError
from longshore.protocol.install_command import install_command
from tests.deploy.trace.traces import driven, short_of_blocks


def test_there_is_a_row_per_step_request_and_lookup(tmp_path: Path) -> None:
    driver = short_of_blocks(tmp_path / "t")
    trace = read_trace(tmp_path / "t")
    counts = export_parquet(trace, tmp_path / "out")
    tables = {name: parquet.read_table(tmp_path / "out" / f"{name}.parquet") for name in counts}
    assert {name: table.num_rows for name, table in tables.items()} == counts
    steps, requests, lookups = (tables[name] for name in ("steps", "requests", "lookups"))
    tokens = [plan.num_scheduled_tokens for plan in driver.plans]
    assert steps["tokens"].to_pylist() == tokens
    assert steps["gpu_total"].to_pylist() == [13] * len(tokens)
    assert requests["request"].to_pylist() == ["r0", "r1", "r2", "r3"]
    assert requests["output_tokens"].to_pylist() == [20] * 4
    assert lookups["now_s"].to_pylist() == [lookup.now for lookup in trace.lookups]
    for table in tables.values():
        empty = {name for name in table.column_names if table[name].null_count == table.num_rows}
        assert empty <= {"connector"}


def test_a_trace_without_rows_has_the_same_columns(tmp_path: Path) -> None:
    driven(tmp_path / "t")
    assert set(export_parquet(read_trace(tmp_path / "t"), tmp_path / "out").values()) == {0}
    assert "gpu_free" in parquet.read_schema(tmp_path / "out" / "steps.parquet").names


def test_without_pyarrow_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    driven(tmp_path / "t")
    with pytest.raises(
        ConfigError, match="needs pyarrow; run " + re.escape(install_command("research"))
    ):
        export_parquet(read_trace(tmp_path / "t"), tmp_path / "out")
