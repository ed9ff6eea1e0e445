"""The settings of `longshore simulate`. Those that `longshore serve` has as well mean the same."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Group, Parameter

from longshore.deploy.gateway.router.policies import POLICY_NAMES, PolicyName
from longshore.deploy.settings.checks import check_at_least, check_range
from longshore.deploy.settings.counts import read_count
from longshore.protocol.commands import Role
from longshore.protocol.errors import ConfigError
from longshore.scheduler.config import PreemptionMode

_WORKLOAD: Final = Parameter(group=Group.create_ordered("Workload"))
_ENGINES: Final = Parameter(group=Group.create_ordered("Engines"))
_SCHEDULING: Final = Parameter(group=Group.create_ordered("Scheduling"))
_CACHE: Final = Parameter(group=Group.create_ordered("KV cache"))
_RESULTS: Final = Parameter(group=Group.create_ordered("Results"))
_TOKENS: Final = Parameter(converter=read_count)

MAX_ENGINES: Final = 1024


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """One simulation. Raises ConfigError naming an invalid setting.

    Attributes:
        trace: File of requests or of agent jobs, one JSON object per line, perhaps with gzip
            (docs/simulator.md). Default: random requests.
        num_requests: Number of random requests, or maximum number of lines of the trace. Default:
            1,000, or all lines.
        request_rate: Random requests per second.
        input_len: Mean number of tokens per random prompt, including the shared prefix.
        output_len: Mean number of tokens per random output.
        shared_prefix: Tokens that all random prompts begin with.
        speed: Divides the arrival times of the workload; 2 means twice the load.
        shrink: Divides all lengths of a trace of requests, also the 512 tokens per block id.
        thin: Simulates one of this many sessions of a trace (docs/simulator.md), which divides its
            load.
        spread_s: Seconds over which the requests of a trace that arrive at the same time are
            spread.
        seed: Seed of random requests.
        engines: Number of engines for whole requests.
        prefill_engines: Number of engines that compute prompts only, instead of engines for whole
            requests.
        decode_engines: Number of engines that compute all tokens after the first one.
        router: Policy by which the gateway chooses the engine of a request.
        cost_model: JSON file with the costs of an engine (longshore bench fit-cost makes one), or
            the name of a built-in one: h100-llama-8b, h200-llama-8b, h100x2-qwen-32b,
            h200-qwen-32b.
        policy: Scheduling policy: a built-in or installed one, package.module:Class, or
            path/to/file.py:Class.
        async_scheduling: Plan a step before the tokens of the previous step are known.
        max_num_seqs: Maximum number of running requests per engine.
        max_num_batched_tokens: Maximum number of tokens that one step can compute.
        max_model_len: Maximum number of tokens of a request. Default: those of the longest request
            of the workload.
        enable_chunked_prefill: Split prompts that exceed the remaining token budget of a step.
        long_prefill_token_threshold: Maximum number of tokens of one prompt per step; 0 means no
            limit.
        preemption_mode: What happens to the KV of a preempted request: recompute it, swap it out to
            host memory once preempt_threshold is exceeded, or what takes less time (auto).
        num_blocks: Blocks in the KV cache of each engine. Default: as many as the memory of the
            cost model holds.
        block_size: Tokens per block, a power of two.
        enable_prefix_caching: Share the KV blocks of equal prefixes.
        watermark: Fraction of the blocks that admissions leave free for running requests.
        preempt_threshold: Admissions stop when the fraction of blocks in use exceeds this.
        admit_threshold: Admissions resume when the fraction of blocks in use falls below this.
        min_load_wait_s: Seconds that a request waits for the connector in any case; longer only as
            long as computing the tokens takes.
        connector: Connector that stores KV outside the device: offloading. Default: none.
        connector_config: Settings of the connector, as a JSON object or the path of a .toml file.
        json: File for the result. Default: a summary on standard output.
        csv: File for a line per request.
        plot: Folder for pictures of the result.
    """

    trace: Annotated[Path | None, _WORKLOAD] = None
    num_requests: Annotated[int | None, _WORKLOAD] = None
    request_rate: Annotated[float, _WORKLOAD] = 1.0
    input_len: Annotated[int, _WORKLOAD, _TOKENS] = 1024
    output_len: Annotated[int, _WORKLOAD, _TOKENS] = 128
    shared_prefix: Annotated[int, _WORKLOAD, _TOKENS] = 0
    speed: Annotated[float, _WORKLOAD] = 1.0
    shrink: Annotated[int, _WORKLOAD] = 1
    thin: Annotated[int, _WORKLOAD] = 1
    spread_s: Annotated[float, _WORKLOAD] = 0.0
    seed: Annotated[int, _WORKLOAD] = 0
    engines: Annotated[int, _ENGINES] = 1
    prefill_engines: Annotated[int, _ENGINES] = 0
    decode_engines: Annotated[int, _ENGINES] = 0
    router: Annotated[PolicyName, _ENGINES] = "least_loaded"
    cost_model: Annotated[str, _ENGINES] = "h100-llama-8b"
    policy: Annotated[str, _SCHEDULING] = "fcfs"
    async_scheduling: Annotated[bool, _SCHEDULING] = True
    max_num_seqs: Annotated[int, _SCHEDULING] = 256
    max_num_batched_tokens: Annotated[int, _SCHEDULING, _TOKENS] = 2048
    max_model_len: Annotated[int | None, _SCHEDULING, _TOKENS] = None
    enable_chunked_prefill: Annotated[bool, _SCHEDULING] = True
    long_prefill_token_threshold: Annotated[int, _SCHEDULING] = 0
    preemption_mode: Annotated[PreemptionMode, _SCHEDULING] = "recompute"
    num_blocks: Annotated[int | None, _CACHE] = None
    block_size: Annotated[int, _CACHE] = 16
    enable_prefix_caching: Annotated[bool, _CACHE] = True
    watermark: Annotated[float, _CACHE] = 0.01
    preempt_threshold: Annotated[float, _CACHE] = 0.95
    admit_threshold: Annotated[float, _CACHE] = 0.80
    connector: Annotated[str | None, _CACHE] = None
    connector_config: Annotated[str, _CACHE] = "{}"
    min_load_wait_s: Annotated[float, _CACHE] = 1.0
    json: Annotated[Path | None, _RESULTS] = None
    csv: Annotated[Path | None, _RESULTS] = None
    plot: Annotated[Path | None, _RESULTS] = None

    def __post_init__(self) -> None:
        self._check_engines()
        for name in ("num_requests", "input_len", "output_len", "shrink", "thin"):
            check_at_least(name, getattr(self, name), 1)
        if not 0 <= self.spread_s < math.inf:
            raise ConfigError(f"spread_s={self.spread_s} must be at least 0 and finite")
        if self.trace is None:
            for name, nothing in (("thin", 1), ("shrink", 1), ("spread_s", 0)):
                if getattr(self, name) != nothing:
                    raise ConfigError(f"{name}={getattr(self, name)} changes a trace; set trace")
        for name in ("shared_prefix", "seed"):
            check_at_least(name, getattr(self, name), 0)
        if not self.request_rate > 0:
            raise ConfigError(f"request_rate={self.request_rate} must be above 0")
        if not 0 < self.speed < math.inf:
            raise ConfigError(f"speed={self.speed} must be above 0 and finite")
        if self.json is not None and self.json == self.csv:
            raise ConfigError(f"json and csv are the same file, {self.json}; write two files")
        if self.router not in POLICY_NAMES:
            raise ConfigError(
                f"router={self.router!r} is unknown; use one of {', '.join(POLICY_NAMES)}"
            )
        if self.router == "prefix_aware" and not self.enable_prefix_caching:
            raise ConfigError("router=prefix_aware needs enable_prefix_caching")
        if self.connector_config != "{}" and self.connector is None:
            raise ConfigError(
                f"connector_config={self.connector_config!r} needs a connector; set "
                "connector=offloading"
            )
        if self.preemption_mode != "recompute" and self.connector is None:
            raise ConfigError(
                f"preemption_mode={self.preemption_mode!r} needs connector=offloading, which swaps "
                "requests out"
            )
        if self.shared_prefix >= self.input_len:
            raise ConfigError(
                f"shared_prefix={self.shared_prefix} must be less than input_len={self.input_len}, "
                "which includes it"
            )

    @property
    def roles(self) -> tuple[Role, ...]:
        """The role of each engine."""
        numbers: dict[Role, int] = {"unified": self.engines}
        if self.prefill_engines:
            numbers = {"prefill": self.prefill_engines, "decode": self.decode_engines}
        return tuple(role for role, number in numbers.items() for _ in range(number))

    def _check_engines(self) -> None:
        check_range("engines", self.engines, 1, MAX_ENGINES)
        check_range("prefill_engines", self.prefill_engines, 0, MAX_ENGINES)
        check_range("decode_engines", self.decode_engines, 0, MAX_ENGINES)
        split = f"prefill_engines={self.prefill_engines} and decode_engines={self.decode_engines}"
        if bool(self.prefill_engines) != bool(self.decode_engines):
            raise ConfigError(
                f"{split}: both kinds of engines are needed. Set both to 1 or more, or neither."
            )
        if self.prefill_engines and self.engines > 1:
            raise ConfigError(
                f"engines={self.engines} are engines for whole requests, and {split} are not. "
                "Remove engines."
            )
        if self.prefill_engines and self.connector is not None:
            raise ConfigError(
                f"connector={self.connector!r} cannot be simulated with {split}, because their "
                "connector is one that pulls KV. Remove connector."
            )
