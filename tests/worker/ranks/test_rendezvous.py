"""Ranks as real processes: they find each other, exchange tensors, and notice lost ranks."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
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


class Ranks:
    """Processes that are ranks of one group after another, because starting them is expensive."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []

    def run(
        self,
        case: str,
        num_shards: int,
        num_stages: int,
        directory: Path,
        timeout_s: float = 20,
        num_sharing: int = 1,
    ) -> list[Any]:
        """The result of each rank. A rank that has ended is replaced for the next case."""
        layout = RankLayout(
            tensor_parallel_size=num_shards,
            pipeline_parallel_size=num_stages,
            decode_context_parallel_size=num_sharing,
            rendezvous=str(directory / "rendezvous"),
            rank_timeout_s=timeout_s,
        )
        layout_file = directory / "layout.json"
        layout_file.write_bytes(msgspec.json.encode(layout))
        for ended in [each for each in self._processes if each.poll() is not None]:
            self._processes.remove(ended)
            ended.communicate()  # closes its pipes
        while len(self._processes) < layout.num_ranks:
            self._processes.append(_start())
        ranks = self._processes[: layout.num_ranks]
        for rank, process in enumerate(ranks):
            assert process.stdin is not None
            process.stdin.write(json.dumps([rank, str(layout_file), case]) + "\n")
            process.stdin.flush()
        return [json.loads(process.stdout.readline()) for process in ranks]  # type: ignore[union-attr]

    def wait_for_end(self, rank: int) -> int:
        """The exit status of a rank that leaves."""
        return self._processes[rank].wait()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.worker.rank_process"],
        cwd=ROOT,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.close()


@pytest.mark.slow
def test_shards_of_a_stage_exchange_among_themselves(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run("place", 2, 2, tmp_path) == [
        [0, 0, 1, 2, 0, 1, 0, 1],
        [0, 1, 1, 2, 0, 1, 0, 1],
        [1, 0, 5, 2, 2, 3, 2, 1],
        [1, 1, 5, 2, 2, 3, 2, 1],
    ]


@pytest.mark.req("FEA-06")
def test_neighbouring_shards_that_share_tokens_exchange_among_themselves(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks.run("share", 4, 1, tmp_path, num_sharing=2) == [
        [[0, 1], [0, 10]],
        [[0, 1], [1, 11]],
        [[2, 3], [20, 30]],
        [[2, 3], [21, 31]],
    ]


def test_hidden_states_reach_the_next_stage_in_order_though_the_first_runs_ahead(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, second, last = ranks.run("link", 1, 3, tmp_path)
    assert (first, second) == ([], [])
    assert last == [step + 2 for step in range(1, NUM_STEPS + 1)]


def test_a_rank_that_leaves_is_an_error_with_a_name_for_the_other(
    ranks: Ranks, tmp_path: Path
) -> None:
    left, noticed = ranks.run("lose", 2, 1, tmp_path)
    assert left == "left"
    assert ranks.wait_for_end(0) == 0
    assert noticed.startswith("RankLost: rank 1 has lost the other ranks of its engine (")


def test_a_rank_may_be_slow_while_they_start_and_not_afterwards(
    ranks: Ranks, tmp_path: Path
) -> None:
    late, noticed = ranks.run("compile_slowly", 2, 1, tmp_path, timeout_s=PATIENCE_S)
    assert late == "late"
    assert "imed out" in noticed


def test_a_rank_whose_peers_do_not_come_says_how_many_did(tmp_path: Path) -> None:
    layout = RankLayout(
        tensor_parallel_size=3, startup_timeout_s=0.1, rendezvous=str(tmp_path / "rendezvous")
    )
    alone = joined_ranks(layout, 0, torch.device("cpu"))
    with pytest.raises(EngineDead, match="only 1 of 3 ranks have started"), alone:
        pass


def test_one_rank_exchanges_with_nobody() -> None:
    with joined_ranks(RankLayout(), 0, torch.device("cpu")) as parallel:
        assert parallel is ALONE
    tensor = torch.arange(4.0)
    for same in (parallel.all_reduce(tensor), parallel.all_gather(tensor)):
        assert same is tensor
    assert parallel.broadcast(tensor) is tensor
    assert parallel.samples
