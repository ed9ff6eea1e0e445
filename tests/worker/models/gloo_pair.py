"""Two processes that run models over gloo, reused by many tests because starting them is slow."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.conftest import ROOT
from tests.worker.models.conftest import NUM_TOKENS, Checkpoint

LIMIT_S = 100.0
"""For one model, and the start of the processes before the first; less than a test may take."""


class GlooPair:
    """The processes of gloo_rank.py, which start at the first request. Their errors go to
    stderr."""

    def __init__(self, make_folder: Callable[[], Path]) -> None:
        """make_folder: makes a folder for the rendezvous of a pair."""
        self._make_folder = make_folder
        self._ranks: list[subprocess.Popen[str]] = []

    def answers(self, checkpoint: Checkpoint) -> list[list[list[int]]]:
        """By rank, the NUM_TOKENS greedy tokens after each prompt. After an error (a rank has
        ended, or is late), the next request starts a new pair."""
        job = {
            "path": str(checkpoint.path),
            "max_model_len": checkpoint.case.max_model_len,
            "prompts": checkpoint.prompts,
            "num_tokens": NUM_TOKENS,
        }
        if not self._ranks:
            self._start()
        try:
            for rank in self._ranks:
                assert rank.stdin is not None
                rank.stdin.write(json.dumps(job) + "\n")
                rank.stdin.flush()
            deadline = time.monotonic() + LIMIT_S
            return [json.loads(self._line(shard, deadline)) for shard in range(len(self._ranks))]
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        program, store = Path(__file__).with_name("gloo_rank.py"), self._make_folder() / "store"
        for shard in range(2):
            self._ranks.append(
                subprocess.Popen(
                    [sys.executable, "-P", str(program), str(store), str(shard)],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def _line(self, shard: int, deadline: float) -> str:
        output = self._ranks[shard].stdout
        assert output is not None
        is_readable, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
        assert is_readable, f"rank {shard} has not answered within {LIMIT_S:.0f} s"
        line = output.readline()
        assert line, f"rank {shard} has ended without an answer; see stderr"
        return line

    def close(self) -> None:
        """Kill the processes."""
        for rank in self._ranks:
            rank.kill()
            rank.communicate()
        self._ranks.clear()
