"""The loads whose instructions `instructions.py` counts.

    python -m cProfile benchmarks/instruction_loads.py scheduler-step-64

No load opens a connection or starts a thread, and the garbage collector is off. With `--count`,
under callgrind, each load has a process of its own, and each call of `getsid` ends a part of its
profile; the second part counts.
"""

import argparse
import atexit
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final

import numpy as np
import report
from block_pool import Pool
from hybrid_scheduler import Scheduled
from hybrid_workloads import agents
from offload_ledger import Side
from peers import workload
from peers.ledger_workload import Tier
from prefix_lookup import Cache
from scheduler_step import Load

from longshore.protocol.handshake import FromWorker, ToWorker
from longshore.protocol.outputs import ModelRunnerOutput
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.transport.codec import Decoder, Encoder

sys.path.insert(0, str(report.ROOT))  # for helpers of the tests

NUM_PROCESSORS: Final = 2
NUM_ROWS: Final = 64
NUM_DRAFTS: Final = 4
PREFIX_TOKENS: Final = 4096
LEDGER_BLOCKS: Final = 16  # of a request
TURNS_CAPACITY: Final = 150_000  # tokens
TURNS_STATE_TOKENS: Final = 1_584  # of Qwen3.5-9B
MATRIX: Final = (256, 1024)
FORMATS: Final = ("Q4_1", "Q4_K", "Q8_0")
PRODUCTS: Final = {
    "packed-product-16": (16, False),
    "packed-product-1": (1, False),
    "packed-product-1-int8": (1, True),
}
"""Rows, and whether their values are rounded."""

Round = Callable[[], object]


@dataclass(frozen=True)
class CountedLoad:
    """begin:   prepares a number of rounds, and returns one of them.
    unit:    what the instructions are divided by; a round has `units` of it.
    rounds:  that are counted. warm_up: those before them.
    """

    begin: Callable[[int], Round]
    unit: str
    rounds: int
    units: int = 1
    warm_up: int = 32

    def run(self, begin_counting: Callable[[], None]) -> None:
        take_round = self.begin(self.warm_up + self.rounds)
        gc.collect()
        gc.disable()
        for _ in range(self.warm_up):
            take_round()
        begin_counting()
        os.getsid(0)
        for _ in range(self.rounds):
            take_round()
        os.getsid(0)


def instrument() -> None:
    """Callgrind instruments code from here on: what was before, such as imports, runs ten times as
    fast."""
    command = ["vgdb", f"--pid={os.getpid()}", "instrumentation", "on"]
    vgdb = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while vgdb.poll() is None:  # a process that runs needs no ptrace to take the command
        pass
    assert vgdb.returncode == 0


def scheduler(work: str, num_rows: int, num_rounds: int) -> Round:
    """A step as in `scheduler_step.py`, with two plans in flight."""
    return Load(workload.make(work, num_rows, num_rounds), mode="async").step


def drafts(num_rounds: int) -> Round:
    """A decode step of rows with drafts, of which some are right."""
    work = workload.make("steady", NUM_ROWS, num_rounds * (1 + NUM_DRAFTS))
    return Load(work, mode="sync", drafts=NUM_DRAFTS).step


def states(num_rounds: int) -> Round:
    """A decode step of rows with states."""
    work = workload.make("steady", NUM_ROWS, num_rounds)
    return Load(work, mode="async", groups=2, kinds="states").step


def turns(num_rounds: int) -> Round:
    """A turn of an agent's conversation with a hybrid model, where memory is short: states are
    found, kept and evicted."""
    made = islice(agents(num_rounds, 0.1, is_dropped=False), num_rounds)
    cache = Scheduled(TURNS_CAPACITY, TURNS_STATE_TOKENS, requests := list(made))
    waiting = iter(requests)
    return lambda: cache.serve_one(next(waiting))


def prefix_lookup(num_rounds: int) -> Round:
    token_ids = np.random.default_rng(1).integers(3, workload.VOCAB_SIZE, PREFIX_TOKENS + 1)
    return Cache(token_ids.astype(np.int32), "sha256", groups=1, kinds="windows").look_up


def block_pool(at_a_time: int, num_rounds: int) -> Round:
    return Pool(at_a_time, evicting=True).take_turn


def ledger_load(num_rounds: int) -> Round:
    return Tier(Side("lru"), LEDGER_BLOCKS, seed=0).load


def ledger_store(num_rounds: int) -> Round:
    return Tier(Side("lru"), LEDGER_BLOCKS, seed=0).store


class AnsweredPlans(Load):
    """A load whose steps have been taken, with their plans and answers."""

    def __init__(self, work: workload.Workload, num_steps: int) -> None:
        self.plans: list[SchedulerOutput] = []
        self.answers: list[ModelRunnerOutput] = []
        super().__init__(work, mode="async")
        for _ in range(num_steps):
            self.step()

    def _answer(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        answer = super()._answer(plan)
        self.plans.append(plan)
        self.answers.append(answer)
        return answer


def messages() -> list[tuple[SchedulerOutput, ModelRunnerOutput]]:
    """The plan and the answer of a step in which nothing changes but tokens, and of one in which
    requests arrive and end."""
    num_steps = 32
    loads = [
        AnsweredPlans(workload.make(work, NUM_ROWS, num_steps), num_steps)
        for work in ("steady", "churn")
    ]
    return [(load.plans[-1], load.answers[-1]) for load in loads]


def encode_messages(num_rounds: int) -> Round:
    plans: Encoder[ToWorker] = Encoder()
    answers: Encoder[FromWorker] = Encoder()
    steps = messages()

    def encode() -> None:
        for plan, answer in steps:
            plans.encode(plan)
            answers.encode(answer)

    return encode


def decode_messages(num_rounds: int) -> Round:
    encoder: Encoder[Any] = Encoder()
    plans: Decoder[ToWorker] = Decoder(ToWorker)
    answers: Decoder[FromWorker] = Decoder(FromWorker)
    steps = [
        [[bytes(frame) for frame in encoder.encode(message)] for message in step]
        for step in messages()
    ]

    def decode() -> None:
        for plan, answer in steps:
            plans.decode(plan)
            answers.decode(answer)

    return decode


def gateway(num_rounds: int) -> Round:
    from gateway_streams import Streams

    streams = Streams(NUM_ROWS, num_rounds)
    atexit.register(streams.close)
    return streams.step


def worker(num_rounds: int) -> Round:
    from worker_host import HostSteps

    work = workload.make("steady", NUM_ROWS, num_rounds)
    plans = AnsweredPlans(work, num_rounds).plans
    return HostSteps(plans, NUM_ROWS, work.num_blocks).step


def products(num_rows: int, rounds_inputs: bool, num_rounds: int) -> Round:
    """Products of so many rows of float32 with matrices that stay in the formats of files.
    Valgrind knows no newer instructions than those of AVX2."""
    import torch

    from longshore.worker.kernels import packing
    from longshore.worker.kernels.linear import PackedMatrix
    from longshore.worker.kernels.packing import QuantisedRows

    matrices = []
    for name in FORMATS:
        kind = getattr(packing, name)
        matrix = PackedMatrix.quantised(kind, *MATRIX, torch.float32, rounds_inputs=rounds_inputs)
        matrix.fill(0, QuantisedRows.zeros(kind, *MATRIX))
        matrices.append(matrix)
    x = torch.ones(num_rows, MATRIX[1])
    return lambda: [matrix.product(x) for matrix in matrices]


# The longest first. Of steady steps, the rounds are a multiple of the block size.
LOADS: Final[Mapping[str, CountedLoad]] = {
    "worker-step": CountedLoad(worker, "step", 64),
    "gateway-token": CountedLoad(gateway, "token", 64, units=NUM_ROWS),
    "scheduler-step-1024": CountedLoad(partial(scheduler, "steady", 1024), "step", 64),
    "scheduler-churn": CountedLoad(partial(scheduler, "churn", NUM_ROWS), "step", 64),
    "scheduler-pressure": CountedLoad(
        partial(scheduler, "pressure", NUM_ROWS), "step", 128, warm_up=150
    ),
    "scheduler-step-64": CountedLoad(partial(scheduler, "steady", NUM_ROWS), "step", 128),
    "scheduler-step-1": CountedLoad(partial(scheduler, "steady", 1), "step", 128),
    "scheduler-step-states": CountedLoad(states, "step", 128),
    "scheduler-step-drafts": CountedLoad(drafts, "step", 128),
    "scheduler-turn-states": CountedLoad(turns, "turn", 32, warm_up=64),
    **{
        name: CountedLoad(partial(products, *of), "product", 16, units=len(FORMATS), warm_up=2)
        for name, of in PRODUCTS.items()
    },
    "offload-ledger-load": CountedLoad(ledger_load, "block", 256, units=LEDGER_BLOCKS),
    "offload-ledger-store": CountedLoad(ledger_store, "block", 256, units=LEDGER_BLOCKS),
    "prefix-lookup": CountedLoad(prefix_lookup, "request", 32),
    "block-pool-1024": CountedLoad(partial(block_pool, 1024), "block", 64, units=1024),
    "block-pool-16": CountedLoad(partial(block_pool, 16), "block", 512, units=16),
    "block-pool-1": CountedLoad(partial(block_pool, 1), "block", 1024),
    "encode-messages": CountedLoad(encode_messages, "pair of steps", 256),
    "decode-messages": CountedLoad(decode_messages, "pair of steps", 256),
}


def count(names: Sequence[str]) -> None:
    """Run each load in a fork of this process, which has imported already what most of them need;
    two run at a time. Print their names and the ids of their processes, without those that fail."""
    running: dict[int, str] = {}

    def wait() -> None:
        process_id, status = os.wait()
        name = running.pop(process_id)
        if status == 0:
            print(name, process_id, flush=True)

    for name in names:
        if len(running) == NUM_PROCESSORS:
            wait()
        process_id = os.fork()
        if process_id == 0:
            LOADS[name].run(instrument)
            sys.exit()
        running[process_id] = name
    while running:
        wait()


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("load", nargs="+", choices=LOADS)
    arguments.add_argument("--count", action="store_true", help="under callgrind")
    options = arguments.parse_args()
    if options.count:
        count(options.load)
        return
    for name in options.load:
        LOADS[name].run(lambda: None)


if __name__ == "__main__":
    main()
