"""How much code one event runs: distinct files, functions and calls, compared with vLLM.

    python benchmarks/hops.py [--functions EVENT] [--json F]

`sys.setprofile` counts calls, only in the files of our packages (for the peer, of vLLM's). Before
Python 3.12, every comprehension counts as a function. `--functions EVENT` lists the functions that
one event calls, and how often.

All events have plain text requests, synchronous scheduling, one KV cache group and a prefix cache:

arrive       a request is added
admit        the step that admits and plans it, with nothing cached
prefix hit   the same for a request whose prompt is cached
steady       a decode step in which no block fills up
full         a decode step in which a block fills up and the next one is allocated
preemption   a decode step in which blocks are short and one of two requests is preempted
token        the output of a step with one token for each of two requests
last token   the output that ends one of them
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import report
from peers.hop_counter import calls_during, count, described

import longshore.connectors
import longshore.protocol
import longshore.scheduler
from longshore.protocol.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from longshore.protocol.outputs import ModelRunnerOutput
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.requests import AddRequest
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
SPEC = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype_bytes=2)
FOLDERS = tuple(
    f"{Path(folder).resolve()}/"
    for package in (longshore.protocol, longshore.scheduler, longshore.connectors)
    for folder in package.__path__
)

Run = Callable[[Callable[[], Any]], Any]


def is_ours(filename: str) -> bool:
    return str(Path(filename).resolve()).startswith(FOLDERS)


class Engine:
    """A scheduler and a worker that samples token 7 in every row."""

    def __init__(self, *, num_blocks: int = 1024) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(max_model_len=1024, max_num_seqs=8, max_steps_in_flight=1),
            CacheConfig(block_size=BLOCK_SIZE, watermark=0.0),
            kv_cache=KVCacheConfig(num_blocks, (KVCacheGroup(("layer.0",), SPEC),), "bfloat16"),
            hash_seed=b"hops",
            vocab_size=32_000,
            eos_token_ids=(2,),
        )
        self.num_requests = 0

    def request(self, num_tokens: int, *, max_tokens: int = 64) -> Callable[[], None]:
        """Adds a request. Its prompt is the first `num_tokens` tokens of one fixed sequence."""
        self.num_requests += 1
        prompt = np.arange(10, 10 + num_tokens, dtype=np.int32)
        sampling = SamplingParams(max_tokens=max_tokens)
        message = AddRequest(f"request-{self.num_requests}", self.num_requests, prompt, sampling)
        return lambda: self.scheduler.add_request(message, client=0, now=0.0)

    def plan(self) -> SchedulerOutput:
        plan = self.scheduler.schedule(0.0)
        assert plan is not None
        return plan

    def output(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        tokens = np.full(plan.num_rows, 7, np.int32)
        return ModelRunnerOutput(epoch=1, step=plan.step, sampled_tokens=tokens)

    def apply(self, plan: SchedulerOutput) -> Callable[[], None]:
        """Applies the output of the plan. This collects the outputs of the clients, which
        `take_outputs` returns later."""
        output = self.output(plan)
        return lambda: self.scheduler.update_from_output(output, 0.0)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.apply(self.plan())()


def measure() -> dict[str, Counter[CodeType]]:
    """Calls by event."""
    events: dict[str, Counter[CodeType]] = {}

    def note(name: str, event: Callable[[], Any]) -> Any:
        results: list[Any] = []
        events[name] = calls_during(lambda: results.append(event()), is_ours)
        return results[0]

    engine = Engine()
    note("arrive", engine.request(40))
    plan = note("admit", engine.plan)
    engine.apply(plan)()
    engine.request(40)()
    plan = note("prefix hit", engine.plan)
    note("token", engine.apply(plan))
    engine.steps(3)  # both rows have 44 tokens, so no block fills up soon
    plan = note("steady", engine.plan)
    engine.apply(plan)()

    engine = Engine()
    engine.request(30)()
    engine.request(30, max_tokens=4)()
    engine.steps(2)
    plan = note("full", engine.plan)  # token 32 fills the second block
    engine.apply(plan)()
    plan = engine.plan()
    note("last token", engine.apply(plan))

    engine = Engine(num_blocks=66)  # one request of the maximum length, and one block
    engine.request(32 * BLOCK_SIZE - 1)()
    engine.scheduler.add_request  # noqa: B018 - keeps the two requests on different prompts
    prompt = np.arange(5000, 5000 + 32 * BLOCK_SIZE + BLOCK_SIZE - 1, dtype=np.int32)
    other = AddRequest("other", 99, prompt, SamplingParams(max_tokens=64))
    engine.scheduler.add_request(other, client=0, now=0.0)
    num_preempted = 0
    while not num_preempted:
        plan = note("preemption", engine.plan)
        num_preempted = len(plan.preempted_rows)
        engine.apply(plan)()
    return events


def main() -> None:
    arguments = report.parser(__doc__, peer="core")
    arguments.add_argument(
        "--functions", metavar="EVENT", help="list the functions that one event calls"
    )
    options = arguments.parse_args()
    events = measure()
    if options.functions:
        print("\n".join(described(events[options.functions])))
        return
    theirs: dict[str, Any] = {}
    with report.peer(options.peer_python, "vllm_hops.py") as peer:
        if peer is not None:
            theirs = peer.measure()
    rows = [
        {"event": name, **count(calls), "vllm": theirs.get(name)} for name, calls in events.items()
    ]
    report.write(options.json, rows, peer=peer and peer.about)


if __name__ == "__main__":
    main()
