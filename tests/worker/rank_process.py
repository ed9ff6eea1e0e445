"""A process that is one rank of one group after another: `python -m tests.worker.rank_process`.

Each line of its input is [RANK, LAYOUT.json, CASE]. CASE is a function of this file, whose result
is printed as a line.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from longshore.protocol.errors import EngineDead
from longshore.worker.config import RankLayout
from longshore.worker.ranks.parallel import Parallel
from longshore.worker.ranks.rendezvous import joined_ranks
from longshore.worker.ranks.stage_link import StageLink

CPU = torch.device("cpu")
NUM_STEPS = 50
PATIENCE_S = 0.5


def place(parallel: Parallel) -> list[int]:
    """The rank's place, and the results of exchanges in its stage."""
    mine = torch.tensor([parallel.rank, 1], dtype=torch.int32)
    gathered = parallel.all_gather(mine[:1]).tolist()
    told = parallel.broadcast(mine.clone()).tolist()
    return [parallel.stage, parallel.shard, *parallel.all_reduce(mine).tolist(), *gathered, *told]


def share(parallel: Parallel) -> list[list[int]]:
    """The results of exchanges within the context group."""
    size, rank = parallel.context_share.size, parallel.rank
    gathered = parallel.gather_context(torch.tensor([rank]))
    received = parallel.exchange_context(10 * rank + torch.arange(size).unsqueeze(1))
    return [gathered.flatten().tolist(), received.flatten().tolist()]


def link(parallel: Parallel) -> list[float]:
    """Steps of different sizes through all stages; the first is far ahead of the last."""
    stages = StageLink(parallel, hidden_size=3, dtype=torch.bfloat16, device=CPU)
    last = []
    for step in range(1, NUM_STEPS + 1):
        if parallel.is_first_stage:
            hidden = torch.full((step, 3), float(step), dtype=torch.bfloat16)
        else:
            hidden = stages.receive(step).add_(1)
        if parallel.is_last_stage:
            last.append(float(hidden.float().mean()))
        else:
            stages.send(hidden)
    stages.finish()
    return last


def lose(parallel: Parallel) -> str:
    """Rank 0 exits once all are connected; the others report how they notice."""
    parallel.meet(CPU)
    if parallel.rank == 0:
        print('"left"', flush=True)
        sys.exit()
    try:
        parallel.all_reduce(torch.zeros(4))
    except EngineDead as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was noticed"


def compile_slowly(parallel: Parallel) -> str:
    """Rank 0 is later than `PATIENCE_S` at the first exchange, and never takes part in the
    second."""
    started = time.monotonic()
    while parallel.rank == 0 and time.monotonic() - started < 3 * PATIENCE_S:
        torch.ones(64, 64).mm(torch.ones(64, 64))
    parallel.meet(CPU)
    parallel.set_timeout(PATIENCE_S)
    store = dist.distributed_c10d._get_default_store()
    if parallel.rank == 0:
        store.wait(["noticed"])  # a rank that has ended is reported as gone, not as late
        return "late"
    try:
        parallel.all_reduce(torch.zeros(4))
    except EngineDead as error:
        return str(error)
    finally:
        store.set("noticed", "")
    return "nothing was noticed"


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        rank, layout_file, case = json.loads(line)
        layout = msgspec.json.decode(Path(layout_file).read_bytes(), type=RankLayout)
        with joined_ranks(layout, rank, CPU) as parallel:
            result: Any = globals()[case](parallel)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
