"""What gateways read about restarts."""

import shutil
from pathlib import Path

from longshore.deploy.supervisor.restart_history import (
    RestartHistory,
    RestartRecord,
    read_restarts,
)


def test_counts_begin_at_zero_and_a_death_is_shown_until_its_group_is_ready(tmp_path: Path) -> None:
    history = RestartHistory(tmp_path)
    assert read_restarts(tmp_path) == RestartRecord()
    history.begin(["worker 0", "gateway"])
    zeros = {"death": 0, "hang": 0, "operator": 0}
    assert read_restarts(tmp_path) == RestartRecord({"worker 0": zeros, "gateway": zeros})
    history.died("engine-0", "worker 0 hangs.")
    history.started("worker 0", "hang")
    counts = {"worker 0": {**zeros, "hang": 1}, "gateway": zeros}
    assert read_restarts(tmp_path) == RestartRecord(counts, {"engine-0": "worker 0 hangs."})
    history.became_ready("engine-0")
    assert read_restarts(tmp_path) == RestartRecord(counts)
    assert len(list(tmp_path.iterdir())) == 1


def test_without_its_directory_nothing_is_known(tmp_path: Path) -> None:
    history = RestartHistory(tmp_path)
    shutil.rmtree(tmp_path)
    history.begin(["gateway"])
    assert read_restarts(tmp_path) == read_restarts(None) == RestartRecord()
