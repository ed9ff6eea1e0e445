"""Ranks as real processes: they find each other, exchange tensors, and notice lost ranks."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from longshore.protocol.errors import EngineDead
from longshore.worker.config import RankLayout
from longshore.worker.ranks.parallel import ALONE
from longshore.worker.ranks.rendezvous import joined_ranks
from tests.conftest import ROOT
from tests.worker.rank_process import NUM_STEPS, PATIENCE_S

TIMEOUT_S = 60


def run_ranks(
    case: str,
    num_shards: int,
    num_stages: int,
    directory: Path,
    timeout_s: float = 20,
    num_sharing: int = 1,
) -> list[Any]:
    """The result of each rank."""
    layout = RankLayout(
        tensor_parallel_size=num_shards,
        pipeline_parallel_size=num_stages,
        decode_context_parallel_size=num_sharing,
        rendezvous=str(directory / "rendezvous"),
        timeout_s=timeout_s,
    )
    layout_file = directory / "layout.json"
    layout_file.write_bytes(msgspec.json.encode(layout))
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.worker.rank_process", str(rank), str(layout_file), case],
            cwd=ROOT,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
        )
        for rank in range(layout.num_ranks)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * layout.num_ranks
    return [msgspec.json.decode(output) for output in outputs]


def test_shards_of_a_stage_exchange_among_themselves(tmp_path: Path) -> None:
    assert run_ranks("place", 2, 2, tmp_path) == [
        [0, 0, 1, 2, 0, 1, 0, 1],
        [0, 1, 1, 2, 0, 1, 0, 1],
        [1, 0, 5, 2, 2, 3, 2, 1],
        [1, 1, 5, 2, 2, 3, 2, 1],
    ]


@pytest.mark.req("FEA-06")
def test_neighbouring_shards_that_share_tokens_exchange_among_themselves(tmp_path: Path) -> None:
    assert run_ranks("share", 4, 1, tmp_path, num_sharing=2) == [
        [[0, 1], [0, 10]],
        [[0, 1], [1, 11]],
        [[2, 3], [20, 30]],
        [[2, 3], [21, 31]],
    ]


def test_hidden_states_reach_the_next_stage_in_order_though_the_first_runs_ahead(
    tmp_path: Path,
) -> None:
    first, second, last = run_ranks("link", 1, 3, tmp_path)
    assert (first, second) == ([], [])
    assert last == [step + 2 for step in range(1, NUM_STEPS + 1)]


def test_a_rank_that_exits_is_a_named_error_on_the_others(tmp_path: Path) -> None:
    left, noticed = run_ranks("lose", 2, 1, tmp_path)
    assert left == "left"
    assert noticed.startswith("RankLost: rank 1 has lost the other ranks of its engine (")


def test_a_rank_may_be_slow_during_startup_but_not_afterwards(tmp_path: Path) -> None:
    late, noticed = run_ranks("compile_slowly", 2, 1, tmp_path, timeout_s=PATIENCE_S)
    assert late == "late"
    assert "imed out" in noticed


def test_a_rank_whose_peers_do_not_start_reports_how_many_did(tmp_path: Path) -> None:
    layout = RankLayout(tensor_parallel_size=3, rendezvous=str(tmp_path / "rendezvous"))
    alone = joined_ranks(layout, 0, torch.device("cpu"), startup_timeout_s=0.1)
    with pytest.raises(EngineDead, match="only 1 of 3 ranks have started"), alone:
        pass


def test_every_exchange_of_a_single_rank_is_the_identity() -> None:
    with joined_ranks(RankLayout(), 0, torch.device("cpu"), startup_timeout_s=0) as parallel:
        assert parallel is ALONE
    tensor = torch.arange(4.0)
    for same in (parallel.all_reduce(tensor), parallel.all_gather(tensor)):
        assert same is tensor
    assert parallel.broadcast(tensor) is tensor
    assert parallel.samples
