"""Cost of a steady decode step in the scheduler, by number of running requests, compared with vLLM.

    python benchmarks/scheduler_step.py [--running 1 64 256 1024 4096] [--groups 1 2 4]
                                        [--kinds windows] [--json F]
    python benchmarks/scheduler_step.py --drafts 4 [--running 16 64 256 1024] [--json F]
    python benchmarks/scheduler_step.py --connector [--running 64 256 1024] [--json F]
    python benchmarks/scheduler_step.py --trace [--running 64 256 1024] [--json F]

Our step plans, encodes the plan, applies the output and encodes the message to the gateway. Their
step is only `schedule()` and `update_from_output()`. The two sides take turns (ours, theirs, ours,
theirs, ours), and each turn measures every number of groups. Our steps are shorter, so a turn of
ours has up to four times as many. `step_us_each` lists the medians of our turns. `cpu_share` is the
smallest share of the wall time in which a turn had a core; a turn with a low share is measured
again, up to four times in all.

Prompts have 512 to 543 tokens, so that in every step equally many requests cross a block boundary.
Prefix caching is on, with sha256. `async` keeps two plans unanswered, `sync` one. With several KV
cache groups, the first one has full attention. `--kinds` selects the others: `windows` are sliding
windows of 256 tokens; `states` is a state of 99 pages (with `--groups 1 2`); `mixed` are such a
window, a state, and chunks of 256 tokens (both without the peer, which has no states here).
`growth` is the median and the mean of a row, divided by those of the row with the fewest groups.

`--drafts K`: every row verifies K drafts in each step, of which 0 to K are right, the same on both
sides, with one plan unanswered. `plain` is our step without drafts, in turns with it, and
`to_plain` our step divided by it. A step gives each row K / 2 + 1 tokens.

`--connector` compares our step with the offloading connector to our step without one instead: two
schedulers with the same requests take turns, one step each. `idle`: all requests complete a block
in the same step, and only the steps count in which there is nothing to store. `storing`: in every
step, a sixteenth of the requests completes a block, which is stored; the workers report each store
in the next step. Medians; `ratio` divides them. `counted` is the share of the steps that count.

`--trace` compares our step with a scheduler trace, written to a file in the folder for temporary
files, to our step without one, in the same way. `bytes` is what the trace has per step.
"""

import argparse
import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import report
from peers import workload

from longshore.connectors.base import ConnectorConfig, SchedulerConnector, StepView
from longshore.connectors.offloading.connector import OffloadingConnector
from longshore.connectors.offloading.messages import Commands, Ended, Report
from longshore.protocol.handshake import ToClient, ToWorker
from longshore.protocol.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    SlidingWindowSpec,
    StateSpec,
)
from longshore.protocol.outputs import ModelRunnerOutput, TransferReport
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.requests import AddRequest
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.transport.codec import Encoder, Frame
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.inspect.trace import SchedulerTrace
from longshore.scheduler.process.trace_file import open_trace
from longshore.scheduler.scheduler import Scheduler

CLIENT = 0
MIN_CPU_SHARE = 0.97  # of the wall time; a turn with less is measured again
MAX_TRIES = 4
OUR_STEPS = 4  # maximum number of our steps per step of theirs
MIN_ROW_STEPS = 4000  # running requests x steps of a turn: turns of short steps have more steps

NUM_PAGES = 99  # of a state, as of Qwen3.5-9B in blocks of 16 tokens

# All have the same bytes per block.
SIZES = {"num_kv_heads": 8, "head_size": 128, "dtype_bytes": 2}
FULL = FullAttentionSpec(workload.BLOCK_SIZE, **SIZES)
WINDOW = SlidingWindowSpec(workload.BLOCK_SIZE, **SIZES, sliding_window=workload.WINDOW)
CHUNKS = ChunkedLocalAttentionSpec(
    workload.BLOCK_SIZE, **SIZES, attention_chunk_size=workload.WINDOW
)
STATE = StateSpec(
    block_size=workload.BLOCK_SIZE,
    shapes=((NUM_PAGES * FULL.page_size_bytes // 4,),),
    dtype_bytes=(4,),
    num_pages=NUM_PAGES,
)
KINDS: dict[str, tuple[KVCacheSpec, ...]] = {
    "windows": (WINDOW,),
    "states": (STATE,),
    "mixed": (WINDOW, STATE, CHUNKS),
}


def num_sampled(plan: SchedulerOutput) -> int:
    """The number of tokens that a plan samples, if it completes the prompts of all its rows. A row
    that the plan does not list computes the one token that is expected of it, and every row that
    computes tokens samples one."""
    listed = plan.scheduled_tokens
    return plan.num_scheduled_tokens - int(listed.sum()) + int(np.count_nonzero(listed))


def kv_cache_of(
    num_groups: int, num_blocks: int, kinds: str = "windows", num_states: int = 0
) -> KVCacheConfig:
    """The first group has full attention, further ones are those of KINDS. num_states: if some have
    states, there are blocks for so many, in addition to `num_blocks`."""
    specs = list(islice(cycle(KINDS[kinds]), num_groups - 1))
    groups = [KVCacheGroup((f"layer.{index}",), spec) for index, spec in enumerate((FULL, *specs))]
    if STATE in specs:
        num_blocks += num_states * NUM_PAGES
    return KVCacheConfig(num_blocks, tuple(groups), "bfloat16")


class Load:
    """A scheduler with a workload, which replaces requests that end. It collects the time of each
    part of a step (`intake_us`, `plan_us`, `apply_us`) and the size of each plan."""

    def __init__(
        self,
        work: workload.Workload,
        *,
        mode: str,
        groups: int = 1,
        kinds: str = "windows",
        connector: SchedulerConnector | None = None,
        trace: SchedulerTrace | None = None,
        drafts: int = 0,
    ) -> None:
        self._num_drafts = drafts
        num_running = len(work.first)
        # Those of rows, and those that are kept.
        kv_cache = kv_cache_of(groups, groups * work.num_blocks, kinds, num_states=4 * num_running)
        num_prompt_tokens = sum(len(arrival.prompt) for arrival in work.first)
        arrivals = (*work.first, *work.later)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=max(len(one.prompt) + one.max_tokens for one in arrivals),
                max_num_seqs=num_running,
                max_num_batched_tokens=max(num_prompt_tokens, 8192),
                max_steps_in_flight=2 if mode == "async" else 1,
                num_speculative_tokens=drafts,
            ),
            CacheConfig(block_size=workload.BLOCK_SIZE),
            kv_cache=kv_cache,
            hash_seed=b"benchmark",
            vocab_size=workload.VOCAB_SIZE,
            connector=connector,
            trace=trace,
        )
        self._stores: list[bytes] = []  # metadata of plans, whose stores end before the next step
        self._plans: Encoder[ToWorker] = Encoder()
        self._messages: Encoder[ToClient] = Encoder()
        self._unanswered: deque[SchedulerOutput] = deque()
        self._num_samples: deque[int] = deque()  # of each unanswered plan
        self._tokens = np.random.default_rng(1).integers(
            3, workload.VOCAB_SIZE, 2 * num_running * (1 + drafts), np.int32
        )
        self._num_made = 0
        self._arriving = [self._message(arrival) for arrival in work.first]
        self._to_come = self._later([self._message(arrival) for arrival in work.later])
        self.intake_us: list[float] = []
        self.plan_us: list[float] = []
        self.apply_us: list[float] = []
        self.plan_bytes: list[int] = []
        self.num_finished = self.num_preempted = 0

    def _message(self, arrival: workload.Arrival) -> AddRequest:
        self._num_made += 1
        sampling = SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True)
        return AddRequest(f"cmpl-{self._num_made:024x}", self._num_made, arrival.prompt, sampling)

    def _later(self, messages: list[AddRequest]) -> Iterator[AddRequest]:
        return iter(messages)

    def _answer(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """The answer to the oldest plan. Call it once per plan."""
        if self._num_drafts:
            self._num_samples.popleft()
            return self._answer_with_drafts(plan)
        first = plan.step % (len(self._tokens) // 2)
        tokens = self._tokens[first : first + self._num_samples.popleft()]
        return ModelRunnerOutput(epoch=1, step=plan.step, sampled_tokens=tokens)

    def _answer_with_drafts(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """The right drafts of each row, a token, and drafts for the next step."""
        rows = np.arange(plan.num_rows)
        num_drafts = np.bincount(plan.draft_rows, minlength=len(rows))
        num_right = np.minimum(workload.num_right(rows, plan.step, self._num_drafts), num_drafts)
        places = np.arange(len(plan.draft_rows)) - (num_drafts.cumsum() - num_drafts).repeat(
            num_drafts
        )
        right = plan.draft_tokens[places < num_right.repeat(num_drafts)]
        tokens = np.insert(right, num_right.cumsum(), self._tokens[rows])
        count = len(rows) * self._num_drafts
        return ModelRunnerOutput(
            epoch=1,
            step=plan.step,
            sampled_tokens=tokens,
            num_sampled=(num_right + 1).astype(np.int32),
            draft_rows=rows.repeat(self._num_drafts).astype(np.int32),
            draft_tokens=self._tokens[:count],
        )

    def _end_stores(self) -> list[TransferReport]:
        """The workers' reports of the stores of earlier steps."""
        stores, self._stores = self._stores, []
        reports = []
        for metadata in stores:
            commands = msgspec.msgpack.decode(metadata, type=Commands)
            jobs = [Ended(job.job_id) for job in commands.stores]
            data = msgspec.msgpack.encode(Report(jobs))
            reports.append(TransferReport(epoch=1, rank=0, connector_metadata=data))
        return reports

    def forget_samples(self) -> None:
        """Discard the samples of the warm-up."""
        for samples in (self.intake_us, self.plan_us, self.apply_us, self.plan_bytes):
            samples.clear()
        self.num_finished = self.num_preempted = 0

    def step(self) -> None:
        """Add new requests, plan until enough plans are in flight, answer the oldest plan."""
        scheduler, unanswered = self.scheduler, self._unanswered
        started = time.perf_counter_ns()
        for request in self._arriving:
            scheduler.add_request(request, client=CLIENT, now=0.0)
        queued = time.perf_counter_ns()
        frames: list[Frame] = []
        num_known = len(unanswered)
        while (plan := scheduler.schedule(0.0)) is not None:
            frames = self._plans.encode(plan)
            unanswered.append(plan)
            if plan.connector_metadata:
                self._stores.append(plan.connector_metadata)
        planned = time.perf_counter_ns()
        self.plan_bytes.append(sum(map(len, frames)))
        self.num_preempted += len(unanswered[-1].preempted_rows) if frames else 0
        self._num_samples += map(num_sampled, islice(unanswered, num_known, None))
        output = self._answer(unanswered.popleft())
        reports = self._end_stores()
        answering = time.perf_counter_ns()
        for stored in reports:
            scheduler.update_from_transfers(stored, 0.0)
        scheduler.update_from_output(output, 0.0)
        outputs = scheduler.take_outputs()
        for _, message in outputs:
            self._messages.encode(message)
        ended = time.perf_counter_ns()
        self.intake_us.append((queued - started) / 1e3)
        self.plan_us.append((planned - queued) / 1e3)
        self.apply_us.append((ended - answering) / 1e3)
        num_ended = sum(len(message.finished) for _, message in outputs)
        self.num_finished += num_ended
        self._arriving = list(islice(self._to_come, num_ended))


def measure_ours(
    work: str,
    *,
    running: int,
    mode: str,
    steps: int,
    warm_up: int,
    groups: int = 1,
    kinds: str = "windows",
    drafts: int = 0,
) -> dict[str, Any]:
    """Samples in the format of `peers/vllm_steps.py`, and the mean size of a plan. A `cpu_share`
    well below 1 means that other processes used the machine, so the samples are unreliable."""
    requests = workload.make(work, running, (steps + warm_up) * (1 + drafts))
    load = Load(requests, mode=mode, groups=groups, kinds=kinds, drafts=drafts)
    for _ in range(warm_up):
        load.step()
    load.forget_samples()
    gc.collect()
    gc.freeze()
    started, started_cpu = time.perf_counter(), time.thread_time()
    for _ in range(steps):
        load.step()
    cpu_share = (time.thread_time() - started_cpu) / (time.perf_counter() - started)
    gc.unfreeze()
    return {
        "cpu_share": cpu_share,
        "intake_us": load.intake_us,
        "plan_us": load.plan_us,
        "apply_us": load.apply_us,
        "plan_bytes": float(np.mean(load.plan_bytes)),
        "num_finished": load.num_finished,
        "num_preempted": load.num_preempted,
    }


def steps_us(samples: dict[str, Any]) -> list[float]:
    """Microseconds of each step, without adding requests."""
    return [
        plan + apply for plan, apply in zip(samples["plan_us"], samples["apply_us"], strict=True)
    ]


def undisturbed(measure: Callable[..., dict[str, Any]], **job: Any) -> dict[str, Any]:
    """A turn of one side in which it had a core almost all the time, or else the best of a few."""
    turns: list[dict[str, Any]] = []
    while len(turns) < MAX_TRIES and (not turns or turns[-1]["cpu_share"] < MIN_CPU_SHARE):
        turns.append(measure(**job))
    return max(turns, key=lambda turn: float(turn["cpu_share"]))


def take_turns(
    peer: report.Peer | None,
    groups: Sequence[int],
    kinds: str,
    *,
    turns: int,
    steps: int,
    **job: Any,
) -> Iterator[tuple[int, list[dict[str, Any]], list[dict[str, Any]]]]:
    """For each number of groups, the samples of our `turns` turns and of their turns between them.
    With 64 running requests and more, our steps are much shorter, so a turn has more of them."""
    our_steps = steps * min(max(job["running"] // 64, 1), OUR_STEPS)
    ours: dict[int, list[dict[str, Any]]] = {count: [] for count in groups}
    theirs: dict[int, list[dict[str, Any]]] = {count: [] for count in groups}
    for turn in range(turns):
        for count in groups:
            settings = {**job, "steps": our_steps, "groups": count, "kinds": kinds}
            ours[count].append(undisturbed(measure_ours, **settings))
        if peer is not None and kinds == "windows" and turn < turns - 1:
            for count in groups:
                samples = undisturbed(peer.measure, **job, steps=steps, groups=count)
                theirs[count].append(samples)
    for count in groups:
        yield count, ours[count], theirs[count]


def compare(
    peer: report.Peer | None,
    running: int,
    mode: str,
    *,
    turns: int,
    steps: int,
    groups: list[int],
    kinds: str,
) -> list[dict[str, Any]]:
    """A row for each number of groups."""
    rows: list[dict[str, Any]] = []
    job = {
        "work": "steady",
        "running": running,
        "mode": mode,
        "steps": max(steps, MIN_ROW_STEPS // running),
        "warm_up": 64,
    }
    for count, ours, theirs in take_turns(peer, groups, kinds, turns=turns, **job):
        each = [steps_us(turn) for turn in ours]
        times = report.times([us for samples in each for us in samples])
        row = {
            "running": running,
            "mode": mode,
            "groups": count,
            "kinds": kinds,
            **times,
            "step_us_each": [float(np.median(samples)) for samples in each],
            "plan_us": float(np.median([us for turn in ours for us in turn["plan_us"]])),
            "apply_us": float(np.median([us for turn in ours for us in turn["apply_us"]])),
            "plan_bytes": ours[0]["plan_bytes"],
            "cpu_share": min(turn["cpu_share"] for turn in ours),
            "growth": growth(times, rows[0] if rows else times, "step_us", "mean_us"),
            "ratio": None,
            "peer": None,
        }
        if theirs:
            times_of_peer = report.times([us for turn in theirs for us in steps_us(turn)])
            row["peer"] = times_of_peer | {"cpu_share": min(turn["cpu_share"] for turn in theirs)}
            row["ratio"] = row["peer"]["step_us"] / row["step_us"]
        rows.append(row)
    return rows


class Offloading(OffloadingConnector):
    """num_asked: how often the connector was asked for its metadata."""

    num_asked = 0

    def build_connector_meta(self, step: StepView) -> bytes:
        self.num_asked += 1
        return super().build_connector_meta(step)


def offloading(num_blocks: int) -> Offloading:
    """The connector, with host memory for half as many blocks as the device has."""
    config = ConnectorConfig(
        {"cpu_bytes_to_use": num_blocks // 2},
        block_size=FULL.block_size,
        num_blocks=num_blocks,
        specs=(FULL,),
        hash_block_size=FULL.block_size,
        rank_block_bytes=(1,),
    )
    return Offloading(config)


def compare_connector(running: int, mode: str, *, steps: int) -> list[dict[str, Any]]:
    """A row for each workload, `idle` and `storing`."""
    rows = []
    steps, warm_up = max(steps, MIN_ROW_STEPS * 4 // running), 64
    for work in ("idle", "storing"):
        requests = workload.make("steady", running, steps + warm_up)
        if work == "idle":
            first = [workload.Arrival(one.prompt[:512], one.max_tokens) for one in requests.first]
            requests = workload.Workload(first, [], requests.num_blocks)
        connector = offloading(requests.num_blocks)
        sides = [Load(requests, mode=mode), Load(requests, mode=mode, connector=connector)]
        asked = []
        for number in range(warm_up + steps):
            if number == warm_up:
                gc.collect()
                gc.freeze()
            before = connector.num_asked
            for side in sides if number % 2 else reversed(sides):
                side.step()
            asked.append(connector.num_asked > before)
        gc.unfreeze()
        counts = np.array(asked[warm_up:]) == (work == "storing")
        without, with_one = (
            np.add(side.plan_us, side.apply_us)[warm_up:][counts] for side in sides
        )
        row = {
            "running": running,
            "mode": mode,
            "work": work,
            "without_us": float(np.median(without)),
            "with_us": float(np.median(with_one)),
            "ratio": float(np.median(with_one) / np.median(without)),
            "counted": float(counts.mean()),
        }
        rows.append(row)
    return rows


def compare_trace(running: int, mode: str, *, steps: int) -> dict[str, Any]:
    """Our step without a trace and with one, in turns, one step each."""
    steps, warm_up = max(steps, MIN_ROW_STEPS * 4 // running), 64
    requests = workload.make("steady", running, steps + warm_up)
    with TemporaryDirectory() as folder:
        opened = open_trace(Path(folder) / "trace.jsonl", "engine-0")
        assert opened is not None
        trace, file = opened
        sides = [Load(requests, mode=mode), Load(requests, mode=mode, trace=trace)]
        for number in range(warm_up + steps):
            if number == warm_up:
                gc.collect()
                gc.freeze()
            for side in sides if number % 2 else reversed(sides):
                side.step()
        gc.unfreeze()
        file.close()
        num_bytes = (Path(folder) / "trace.jsonl").stat().st_size
    without, with_one = (np.add(side.plan_us, side.apply_us)[warm_up:] for side in sides)
    return {
        "running": running,
        "mode": mode,
        "without_us": float(np.median(without)),
        "with_us": float(np.median(with_one)),
        "ratio": float(np.median(with_one) / np.median(without)),
        "bytes": num_bytes / (warm_up + steps),
    }


def compare_drafts(
    peer: report.Peer | None, running: int, drafts: int, *, turns: int, steps: int
) -> dict[str, Any]:
    """Our step with drafts, without them, and the peer's with them, in turns."""
    job: dict[str, Any] = {"work": "steady", "running": running, "mode": "sync", "warm_up": 64}
    ours, plain, theirs = [], [], []
    for turn in range(turns):
        ours += steps_us(undisturbed(measure_ours, **job, steps=steps, drafts=drafts))
        plain += steps_us(undisturbed(measure_ours, **job, steps=steps))
        if peer is not None and turn < turns - 1:
            samples = undisturbed(peer.measure, **job, steps=steps, groups=1, drafts=drafts)
            theirs += steps_us(samples)
    median, without = float(np.median(ours)), float(np.median(plain))
    of_peer = float(np.median(theirs)) if theirs else None
    return {
        "running": running,
        "drafts": drafts,
        "step_us": median,
        "plain_us": without,
        "to_plain": median / without,
        "peer_us": of_peer,
        "ratio": None if of_peer is None else of_peer / median,
    }


def growth(row: dict[str, Any], fewest: dict[str, Any], *names: str) -> dict[str, float]:
    """The figures of `row`, divided by those of the row with the fewest groups."""
    return {name.removesuffix("_us"): row[name] / fewest[name] for name in names}


def add_groups(arguments: argparse.ArgumentParser) -> None:
    """Add the options for the KV cache groups and for the number of turns."""
    arguments.add_argument("--turns", type=int, default=3, help="our turns; the peer has one less")
    arguments.add_argument("--groups", type=int, nargs="+", default=[1], help="numbers of groups")
    arguments.add_argument(
        "--kinds", choices=KINDS, default="windows", help="kinds of all groups but the first"
    )


def main() -> None:
    arguments = report.parser(__doc__, peer="core")
    arguments.add_argument("--running", type=int, nargs="+", default=[1, 64, 256, 1024, 4096])
    arguments.add_argument("--connector", action="store_true", help="compare with offloading")
    arguments.add_argument("--drafts", type=int, default=0, help="of each row in each step")
    arguments.add_argument("--trace", action="store_true", help="compare with a scheduler trace")
    arguments.add_argument("--steps", type=int, default=500, help="minimum per turn")
    add_groups(arguments)
    options = arguments.parse_args()
    if options.connector:
        rows = [
            row
            for running in options.running
            for mode in ("sync", "async")
            for row in compare_connector(running, mode, steps=options.steps)
        ]
        report.write(options.json, rows)
        return
    if options.trace:
        rows = [
            compare_trace(running, mode, steps=options.steps)
            for running in options.running
            for mode in ("sync", "async")
        ]
        report.write(options.json, rows)
        return
    if options.drafts:
        with report.peer(options.peer_python, "vllm_steps.py") as peer:
            rows = [
                compare_drafts(
                    peer, running, options.drafts, turns=options.turns, steps=options.steps
                )
                for running in options.running
            ]
        report.write(options.json, rows, peer=peer and peer.about)
        return
    groups = {
        "turns": options.turns,
        "groups": sorted(options.groups),
        "kinds": options.kinds,
    }
    with report.peer(options.peer_python, "vllm_steps.py") as peer:
        rows = [
            row
            for running in options.running
            for mode in ("sync", "async")
            for row in compare(peer, running, mode, steps=options.steps, **groups)
        ]
    report.write(options.json, rows, peer=peer and peer.about)


if __name__ == "__main__":
    main()
