"""A simulation: jobs, a gateway and engines in virtual time, and a record of each request."""

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Final

from longshore.connectors.base import ConnectorConfig
from longshore.deploy.simulator.clock import Clock
from longshore.deploy.simulator.cost_model import CostModel, read_cost_model
from longshore.deploy.simulator.engine import SimulatedEngine, SimulationStalled
from longshore.deploy.simulator.gateway import SimulatedGateway
from longshore.deploy.simulator.options import SimulateOptions
from longshore.deploy.simulator.pulls import PullNetwork, SimulatedPulls
from longshore.deploy.simulator.records import (
    EngineRecord,
    JobRecord,
    RequestRecord,
    Sample,
    SimulationResult,
)
from longshore.deploy.simulator.rooflines import ROOFLINES
from longshore.deploy.simulator.split_gateway import SplitGateway
from longshore.deploy.simulator.transfers import SimulatedTransfers, read_connector_options
from longshore.deploy.simulator.worker import SimulatedWorker
from longshore.deploy.simulator.workloads import (
    VOCAB_SIZE,
    Job,
    random_jobs,
    read_jobs,
    turn_of_output,
)
from longshore.protocol.errors import ConfigError
from longshore.protocol.handshake import EngineIdentity, EngineReady, hash_seed_digest
from longshore.protocol.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from longshore.protocol.outputs import (
    FinishedRequest,
    FinishReason,
    RequestEvent,
    TransferReport,
)
from longshore.protocol.requests import AddRequest, RequestOptions
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.config import CacheConfig, SchedulerConfig, check_preemption_mode
from longshore.scheduler.queue.outside_policies import load_policy
from longshore.scheduler.queue.policies import SchedulingPolicy
from longshore.scheduler.scheduler import Scheduler

HASH_SEED: Final = bytes(32)
NUM_SAMPLES: Final = 200
"""Samples of the engines' states until the last job arrives. A run that goes on has up to twice as
many: then every second one is removed, and the interval doubles."""
MIN_SAMPLE_S: Final = 0.1

DEFAULT_NUM_REQUESTS: Final = 1000


def simulate(options: SimulateOptions) -> SimulationResult:
    """Raises ConfigError for settings or files that are not valid."""
    return Simulation(options, load_jobs(options), load_cost_model(options.cost_model)).run()


def load_jobs(options: SimulateOptions) -> list[Job]:
    """The workload. Raises ConfigError."""
    if options.trace is not None:
        jobs = read_jobs(
            options.trace,
            limit=options.num_requests,
            shrink=options.shrink,
            thin=options.thin,
            spread_s=options.spread_s,
        )
    else:
        jobs = random_jobs(
            options.num_requests or DEFAULT_NUM_REQUESTS,
            rate=options.request_rate,
            mean_input=options.input_len,
            mean_output=options.output_len,
            shared_prefix=options.shared_prefix,
            seed=options.seed,
        )
    for job in jobs:
        job.arrival_s /= options.speed
    return jobs


def load_cost_model(name: str) -> CostModel:
    """A built-in model, or that of a file. Raises ConfigError."""
    if name in ROOFLINES:
        return ROOFLINES[name]
    path = Path(name)
    if not path.exists():
        raise ConfigError(
            f"cost_model={name!r} is neither a file nor a built-in model; those are "
            f"{', '.join(ROOFLINES)}"
        )
    return read_cost_model(path)


def policy_maker(name: str) -> Callable[[], SchedulingPolicy]:
    """Makes a policy for one engine. name: as for `serve`, or path/to/file.py:Class. Raises
    ConfigError."""
    path, _, class_name = name.rpartition(":")
    if not path.endswith(".py"):
        load_policy(name)
        return lambda: load_policy(name)
    spec = spec_from_file_location(f"longshore_policy_of_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)  # dataclasses look it up there
    try:
        spec.loader.exec_module(module)
        made = getattr(module, class_name)()
    except Exception as error:  # the file is the user's
        raise ConfigError(f"policy={name!r} cannot be loaded: {error!r}") from error
    if not isinstance(made, SchedulingPolicy):
        raise ConfigError(f"policy={name!r} is no SchedulingPolicy (docs/scheduling_policies.md)")
    return getattr(module, class_name)


class Simulation:
    """One run of a workload; `run` is called once."""

    def __init__(self, options: SimulateOptions, jobs: Sequence[Job], cost: CostModel) -> None:
        self._options, self._jobs, self._cost = options, jobs, cost
        self._clock = Clock()
        self._requests: list[RequestRecord | None] = [None] * sum(len(job.turns) for job in jobs)
        self._turns: dict[int, tuple[Job, int]] = {}  # live, by number
        self._tokens: dict[str, int] = {}  # output tokens of live requests, by id
        self._ended_jobs: list[JobRecord] = []
        self._num_left = len(jobs)
        self._samples: list[Sample] = []
        self._kv_cache = self._make_kv_cache()
        self._scheduler_config = self._make_scheduler_config()
        self._identity = EngineIdentity(
            "simulated",
            self._kv_cache.dtype,
            options.block_size,
            self._scheduler_config.max_model_len,
            options.max_num_seqs,
            options.max_num_batched_tokens,
            hash_seed_digest(HASH_SEED),
        )
        self._cache_config = CacheConfig(
            block_size=options.block_size,
            enable_prefix_caching=options.enable_prefix_caching,
            watermark=options.watermark,
            preempt_threshold=options.preempt_threshold,
            admit_threshold=options.admit_threshold,
            enable_kv_cache_events=options.router == "prefix_aware",
        )
        check_preemption_mode(self._scheduler_config, self._cache_config)
        is_split = "prefill" in options.roles
        self._network = PullNetwork(cost.transfers, self._clock) if is_split else None
        self._gateway = (SplitGateway if is_split else SimulatedGateway)(
            options.router,
            options.roles,
            self._cache_config,
            HASH_SEED,
            self._clock,
            num_requests=len(self._requests),
            send_to=self._send_to,
            on_first_token=self._got_token,
            on_end=self._end,
        )
        make_policy = policy_maker(options.policy)
        self._engines = [
            self._make_engine(number, make_policy()) for number in range(len(options.roles))
        ]

    def run(self) -> SimulationResult:
        """Until all jobs have ended. Raises LongshoreError, for example of the policy."""
        clock = self._clock
        if isinstance(self._gateway, SplitGateway):
            self._gateway.begin([self._describe(engine) for engine in self._engines])
        for job in self._jobs:
            clock.at(job.arrival_s, self._send, job, 0)
        self._sample_every_s = max(MIN_SAMPLE_S, self._jobs[-1].arrival_s / NUM_SAMPLES)
        clock.at(0.0, self._sample)
        with _fewer_collections():
            clock.run(lambda: not self._num_left)
        assert not self._num_left, "jobs have been lost"
        assert not self._turns, "requests have been lost"
        return SimulationResult(
            options=self._options,
            cost=self._cost,
            num_blocks=self._kv_cache.num_blocks,
            requests=[each for each in self._requests if each is not None],
            jobs=self._ended_jobs,
            samples=self._samples,
            engines=[
                EngineRecord(each.busy_s, each.num_steps, each.scheduler.make_stats())
                for each in self._engines
            ],
            route_counts=self._count_routes(),
            split=self._gateway.record if isinstance(self._gateway, SplitGateway) else None,
        )

    def check(self) -> None:
        """Raise LongshoreError if a scheduler has lost a block. For tests, after `run`."""
        for engine in self._engines:
            engine.scheduler.check()

    # Building the engines

    def _make_kv_cache(self) -> KVCacheConfig:
        size, token_bytes = self._options.block_size, self._cost.kv_bytes_per_token
        num_blocks = self._options.num_blocks
        if num_blocks is None:
            if self._cost.kv_cache_bytes is None:
                raise ConfigError(
                    f"the cost model {self._cost.name} does not say how much memory there is for "
                    "KV (kv_cache_bytes). Set num_blocks."
                )
            num_blocks = self._cost.kv_cache_bytes // (size * token_bytes)
        spec = FullAttentionSpec(size, num_kv_heads=1, head_size=token_bytes // 2, dtype_bytes=1)
        return KVCacheConfig(num_blocks, (KVCacheGroup(("all layers",), spec),), "uint8")

    def _make_scheduler_config(self) -> SchedulerConfig:
        options = self._options
        longest = options.max_model_len or max(
            job.num_prompt_tokens(len(job.turns) - 1) + job.turns[-1].num_output_tokens
            for job in self._jobs
        )
        return SchedulerConfig(
            max_model_len=longest,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            enable_chunked_prefill=options.enable_chunked_prefill,
            long_prefill_token_threshold=options.long_prefill_token_threshold,
            preemption_mode=options.preemption_mode,
            min_load_wait_s=options.min_load_wait_s,
            max_steps_in_flight=2 if options.async_scheduling else 1,
        )

    def _make_engine(self, number: int, policy: SchedulingPolicy) -> SimulatedEngine:
        transfers = self._make_transfers(number)
        scheduler = Scheduler(
            self._scheduler_config,
            self._cache_config,
            kv_cache=self._kv_cache,
            hash_seed=HASH_SEED,
            vocab_size=VOCAB_SIZE,
            policy=policy,
            connector=None if transfers is None else transfers.connector,
            decode=self._tool_call_of,
        )
        return SimulatedEngine(
            number,
            scheduler,
            SimulatedWorker(self._options.max_num_seqs, self._tokens.__getitem__),
            self._cost,
            self._clock,
            transfers=transfers,
            deliver=self._gateway.deliver,
            publish=self._gateway.publish if self._gateway.needs_events else None,
        )

    def _make_transfers(self, number: int) -> SimulatedTransfers | SimulatedPulls | None:
        options, kv_cache, network = self._options, self._kv_cache, self._network
        own: Mapping[str, Any] = {}
        if options.connector is not None:
            own = read_connector_options(options.connector, options.connector_config)
        elif network is None:
            return None
        config = ConnectorConfig(
            options=own,
            block_size=options.block_size,
            num_blocks=kv_cache.num_blocks,
            num_groups=1,
            specs=(kv_cache.groups[0].spec,),
            hash_block_size=self._cache_config.tokens_per_hash,
            rank_block_bytes=(kv_cache.largest_block_bytes,),
            engine_id=f"engine-{number}",
            identity=self._identity,
            kv_dtype=kv_cache.dtype,
            kv_layout=kv_cache.layout,
            publishes_events=self._gateway.needs_events,
        )

        def report(of_worker: TransferReport) -> None:
            self._engines[number].receive_report(of_worker)

        if network is not None:
            return SimulatedPulls(config, kv_cache, network, self._clock, report)
        return SimulatedTransfers(config, self._cost.transfers, self._clock, report)

    def _describe(self, engine: SimulatedEngine) -> EngineReady:
        """What an engine says of itself to a gateway."""
        return EngineReady(
            f"engine-{engine.number}",
            self._identity,
            self._kv_cache.num_blocks,
            engine.scheduler.capacity,
        )

    def _tool_call_of(self, token_ids: list[int]) -> str:
        """The text of a turn's output, as far as the policy `continuum` reads it."""
        job, turn = self._turns[turn_of_output(token_ids[-1])]
        tool = job.turns[turn].tool
        return "" if tool is None else f"<function={tool}>"

    # Events

    def _send(self, job: Job, turn: int) -> None:
        """A client sends a request."""
        now_s, number = self._clock.now_s, job.number + turn
        request_id = f"request-{number}"
        message = AddRequest(
            request_id,
            number,
            job.prompt(turn),
            SamplingParams(max_tokens=job.turns[turn].num_output_tokens, ignore_eos=True),
            RequestOptions(job_id=job.job_id, is_last_step=turn == len(job.turns) - 1),
        )
        self._turns[number] = job, turn
        self._tokens[request_id] = job.output_token(turn)
        self._requests[number] = RequestRecord(
            request_id, job.job_id, turn, None, now_s, len(message.prompt_token_ids)
        )
        self._gateway.send(message, job.session_key)

    def _send_to(self, number: int, engine: int, message: AddRequest) -> None:
        """The gateway sends a request, or a part of one, to an engine."""
        record = self._record(number)
        record.prefill_engine, record.engine = record.engine, engine
        arrival_s = self._clock.now_s + self._cost.host.arrival_s
        self._clock.at(arrival_s, self._engines[engine].receive, message)

    def _got_token(self, number: int) -> None:
        self._record(number).first_token_s = self._clock.now_s

    def _record(self, number: int) -> RequestRecord:
        record = self._requests[number]
        assert record is not None
        return record

    def _end(self, number: int, finished: FinishedRequest) -> None:
        """A request has ended: its job continues, or has ended as well."""
        now_s = self._clock.now_s
        record = self._record(number)
        is_complete = finished.reason is FinishReason.LENGTH_CAPPED
        record.end_s = now_s
        record.num_output_tokens = finished.num_output_tokens
        record.num_cached_tokens = finished.num_cached_tokens
        record.num_preemptions = finished.num_preemptions
        record.finish_reason = finished.reason.api_name if is_complete else "rejected"
        scheduled = (at_s for event, at_s in finished.events if event is RequestEvent.SCHEDULED)
        record.queue_s = next(scheduled, None)
        job, turn = self._turns.pop(number)
        del self._tokens[record.request_id]
        if is_complete and turn + 1 < len(job.turns):
            self._clock.at(now_s + job.turns[turn].gap_s, self._send, job, turn + 1)
            return
        self._num_left -= 1
        if job.job_id is not None:
            num_turns = turn + 1
            self._ended_jobs.append(
                JobRecord(job.job_id, job.arrival_s, now_s, num_turns, is_complete)
            )

    def _sample(self) -> None:
        if self._clock.is_empty:  # this was the last event
            raise SimulationStalled(
                f"{len(self._turns)} requests have not ended, and nothing will happen any more"
            )
        counts = [engine.scheduler.get_request_counts() for engine in self._engines]
        running, waiting = ([*each] for each in zip(*counts, strict=True))
        usage = [engine.scheduler.kv_cache.usage for engine in self._engines]
        self._samples.append(Sample(self._clock.now_s, running, waiting, usage))
        if len(self._samples) > 2 * NUM_SAMPLES:  # an odd number: the first and the last one stay
            del self._samples[1::2]
            self._sample_every_s *= 2
        self._clock.at(self._clock.now_s + self._sample_every_s, self._sample)

    def _count_routes(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for decision, count in self._gateway.router.counts.items():
            counts[decision.reason] += count
        return dict(sorted(counts.items()))


@contextmanager
def _fewer_collections() -> Iterator[None]:
    """The garbage collector skips what has been built so far, and runs seldom: a simulation makes
    few cycles."""
    thresholds: Any = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
