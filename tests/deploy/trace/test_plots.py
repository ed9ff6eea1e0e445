"""The plots of a scheduler trace."""

import re
import sys
from pathlib import Path

import pytest
from matplotlib import image

from longshore.deploy.trace.plots import plot_trace
from longshore.deploy.trace.reading import read_trace
from longshore.protocol.errors import ConfigError
from longshore.protocol.install_command import install_command
from tests.deploy.trace.traces import driven, short_of_blocks


def test_there_are_four_plots_with_something_in_them(tmp_path: Path) -> None:
    short_of_blocks(tmp_path / "t")
    files = plot_trace(read_trace(tmp_path / "t"), tmp_path / "out")
    assert [path.name for path in files] == [
        "occupancy.png",
        "tokens.png",
        "hits.png",
        "queue_time.png",
    ]
    for path in files:
        assert image.imread(path).std() > 0.02, "it is almost of one colour"


def test_a_trace_without_data_has_no_plots(tmp_path: Path) -> None:
    driven(tmp_path / "t")
    assert plot_trace(read_trace(tmp_path / "t"), tmp_path / "out") == []


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    driven(tmp_path / "t")
    with pytest.raises(
        ConfigError, match="need matplotlib; run " + re.escape(install_command("research"))
    ):
        plot_trace(read_trace(tmp_path / "t"), tmp_path / "out")
