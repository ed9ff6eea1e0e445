"""Settings of the scheduler, of its KV cache and of the scheduler process."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from longshore.connectors.base import ECTransferConfig
from longshore.protocol.commands import LogLevel, PauseMode
from longshore.protocol.errors import ConfigError
from longshore.protocol.events import KVEventsConfig
from longshore.protocol.handshake import EngineIdentity
from longshore.protocol.kv_cache_spec import KVCacheSpec, LongestRequest, StateSpec
from longshore.protocol.settings import Duration, Setting, Settings
from longshore.protocol.transport.channel import Endpoint
from longshore.scheduler.process.settings import InspectionSettings, StructuredOutputSettings

KVRole: TypeAlias = Literal["kv_both", "kv_producer", "kv_consumer"]
PreemptionMode: TypeAlias = Literal["recompute", "swap", "auto"]


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings(Settings):
    """What users can set of the scheduler."""

    max_num_seqs: Annotated[
        int, Meta(ge=1, le=1 << 16), Setting("Scheduling", "Maximum number of running requests.")
    ] = 256
    max_num_batched_tokens: Annotated[
        int,
        Meta(ge=1, le=1 << 24),
        Setting("Scheduling", "Maximum number of tokens that one step can compute.", is_count=True),
    ] = 2048
    max_num_scheduled_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 24)] | None,
        Setting(
            "Scheduling",
            "Maximum number of tokens scheduled per step. Default: max_num_batched_tokens.",
            is_count=True,
        ),
    ] = None
    max_pin_s: Annotated[
        float,
        Setting(
            "Scheduling",
            "With the policy continuum, longest time in seconds for which the KV of a job's turn "
            "is kept on the device for its next turn; 0 keeps none.",
        ),
    ] = 60.0
    enable_chunked_prefill: Annotated[
        bool,
        Setting("Scheduling", "Split prompts that exceed the remaining token budget of a step."),
    ] = True
    long_prefill_token_threshold: Annotated[
        int,
        Meta(ge=0),
        Setting("Scheduling", "Maximum number of tokens of one prompt per step; 0 means no limit."),
    ] = 0
    scheduler_reserve_full_isl: Annotated[
        bool,
        Setting(
            "Scheduling",
            "Admit a request only when there are free blocks for its whole prompt, not only for "
            "its first chunk.",
        ),
    ] = False
    preemption_mode: Annotated[
        PreemptionMode,
        Setting(
            "Scheduling",
            "What happens to the KV of a preempted request: recompute it, swap it out to host "
            "memory once preempt_threshold is exceeded, or what takes less time by measurement "
            "(auto). swap and auto need a connector that can do it, such as offloading.",
        ),
    ] = "recompute"
    kv_role: Annotated[
        KVRole,
        Setting(
            "KV beyond the device",
            "Whether the connector loads and stores (kv_both), only stores (kv_producer), or only "
            "loads (kv_consumer).",
        ),
    ] = "kv_both"
    load_failure_policy: Annotated[
        Literal["recompute", "fail"],
        Setting(
            "KV beyond the device",
            "What to do if the connector cannot load a request's KV: recompute it, or fail the "
            "request.",
        ),
    ] = "recompute"
    load_timeout_s: Annotated[
        Duration,
        Setting(
            "KV beyond the device",
            "Seconds that a request waits for an asynchronous load of the connector, at most.",
        ),
    ] = 60.0
    min_load_wait_s: Annotated[
        float,
        Setting(
            "KV beyond the device",
            "Seconds that a request waits for a lookup or a load of the connector in any case. It "
            "waits longer only as long as computing these tokens would take, at the measured "
            "rate; then it computes them. Has no effect with load_failure_policy fail, with which "
            "a request waits for load_timeout_s.",
        ),
    ] = 1.0
    max_loading_blocks: Annotated[
        Annotated[int, Meta(ge=1, le=2**31 - 1)] | None,
        Setting(
            "KV beyond the device",
            "Maximum number of blocks held by requests that wait for loads, or that have loaded "
            "and are not running yet. One load alone may exceed it, if the pool holds it. "
            "Default: half of all blocks.",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.max_pin_s < math.inf:
            raise ConfigError(f"max_pin_s={self.max_pin_s} must be a number of seconds, at least 0")
        if not 0 <= self.min_load_wait_s < math.inf:
            raise ConfigError(
                f"min_load_wait_s={self.min_load_wait_s} must be a number of seconds, at least 0"
            )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(SchedulerSettings):
    """How many requests run and what a step computes. Raises ConfigError with the bad setting.

    max_num_batched_tokens:  also the tokens that the workers' buffers hold in one step.
    policy:                  a built-in policy, the name of an entry point, or package.module:Class.
    max_loras:               adapters that may run at the same time.
    max_num_encoder_input_tokens: multimodal tokens encoded per step; 0 rejects multimodal requests.
                             With cross attention, at least the encoder tokens of one request.
    encoder_cache_size:      tokens of encoder output kept; None: as many as one step encodes. Not
                             used with cross attention.
    num_speculative_tokens:  maximum number of drafts per request and step.
    num_lookahead_tokens:    slots kept after a request's tokens for a drafter that writes KV.
    max_steps_in_flight:     plans that may be unanswered; 1 is synchronous scheduling.
    feed_back_tokens:        plans carry sampled ids to the first pipeline stage, which does not
                             sample; a request that expects a token is not in another step.
    """

    max_model_len: Annotated[int, Meta(ge=1)]
    policy: str = "fcfs"
    max_loras: Annotated[int, Meta(ge=0)] = 0
    max_num_encoder_input_tokens: Annotated[int, Meta(ge=0)] = 0
    encoder_cache_size: Annotated[int, Meta(ge=0)] | None = None
    num_speculative_tokens: Annotated[int, Meta(ge=0)] = 0
    num_lookahead_tokens: Annotated[int, Meta(ge=0)] = 0
    max_steps_in_flight: int = 2
    feed_back_tokens: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_num_scheduled_tokens is not None and not (
            1 <= self.max_num_scheduled_tokens <= self.max_num_batched_tokens
        ):
            raise ConfigError(
                f"max_num_scheduled_tokens={self.max_num_scheduled_tokens} must be between 1 and "
                f"max_num_batched_tokens={self.max_num_batched_tokens}, the size of the buffers"
            )
        if not self.enable_chunked_prefill and self.token_budget < self.max_model_len:
            raise ConfigError(
                f"without chunked prefill a prompt must fit into one step, but a step's budget is "
                f"{self.token_budget} tokens and max_model_len={self.max_model_len}. Raise "
                "max_num_batched_tokens or enable chunked prefill."
            )
        if not self.enable_chunked_prefill and self.long_prefill_token_threshold:
            raise ConfigError("long_prefill_token_threshold needs chunked prefill, which is off")
        if self.preemption_mode != "recompute" and self.kv_role != "kv_both":
            raise ConfigError(
                f"preemption_mode={self.preemption_mode!r} needs kv_role='kv_both': a swapped "
                f"request is stored and loaded, and kv_role is {self.kv_role!r}"
            )
        if not 1 <= self.max_steps_in_flight <= (64 if self.feed_back_tokens else 2):
            raise ConfigError(
                f"max_steps_in_flight={self.max_steps_in_flight} must be 1 (synchronous) or 2, or "
                "the number of pipeline stages (at most 64) with feed_back_tokens"
            )

    @property
    def token_budget(self) -> int:
        """Tokens that one step may compute."""
        return self.max_num_scheduled_tokens or self.max_num_batched_tokens

    @property
    def max_tokens_in_flight(self) -> int:
        """Slots after the settled tokens that all steps in flight may use for one request."""
        return self.max_steps_in_flight * self.token_budget + self.num_lookahead_tokens

    def longest_request(self, context_parallel_size: int) -> LongestRequest:
        """The longest request that may run, on a cache whose blocks this many ranks share."""
        return LongestRequest(
            self.max_model_len,
            self.max_tokens_in_flight,
            self.max_steps_in_flight,
            context_parallel_size,
        )

    @property
    def encoder_capacity(self) -> int:
        """Capacity of the encoder cache, in tokens."""
        if self.encoder_cache_size is None:
            return self.max_num_encoder_input_tokens
        return self.encoder_cache_size


@dataclass(frozen=True, kw_only=True)
class CacheSettings(Settings):
    """What users can set of the block pool."""

    num_blocks: Annotated[
        Annotated[int, Meta(ge=1, le=2**31 - 1)] | None,
        Setting(
            "KV cache",
            "Blocks in the KV cache, including the null block. Default: as many as fit in memory.",
        ),
    ] = None
    hash_block_size: Annotated[
        int | None,
        Setting(
            "KV cache",
            "Tokens per block hash in the prefix cache, a divisor of block_size. Default: "
            "block_size.",
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool, Setting("KV cache", "Share the KV blocks of equal prefixes.")
    ] = True
    watermark: Annotated[
        float,
        Setting(
            "Scheduling",
            "Fraction of the blocks that admissions leave free for running requests; 0 disables "
            "it.",
        ),
    ] = 0.01
    preempt_threshold: Annotated[
        float,
        Setting(
            "Scheduling",
            "Admissions stop when the fraction of blocks in use exceeds this; 1 disables it.",
        ),
    ] = 0.95
    admit_threshold: Annotated[
        float,
        Setting(
            "Scheduling", "Admissions resume when the fraction of blocks in use falls below this."
        ),
    ] = 0.80
    enable_kv_cache_events: Annotated[
        bool,
        Setting(
            "KV events",
            "Publish which KV blocks are stored and removed, for routers and other subscribers.",
        ),
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ConfigError(
                f"num_blocks={self.num_blocks} leaves no block but the null block; use 2 or more"
            )
        if not 0 <= self.watermark < 1:
            raise ConfigError(
                f"watermark={self.watermark} must be a share of the blocks, at least 0 and below 1"
            )
        if not 0 < self.admit_threshold <= self.preempt_threshold <= 1:
            raise ConfigError(
                f"admit_threshold={self.admit_threshold} and preempt_threshold="
                f"{self.preempt_threshold} must satisfy 0 < admit <= preempt <= 1"
            )


@dataclass(frozen=True, kw_only=True)
class CacheConfig(CacheSettings):
    """The block pool and its block hashes. Raises ConfigError with the bad setting.

    num_blocks:  None: what the workers report.
    hash_algorithm: of block hashes; sha256 resists forged collisions, xxh3-128 is faster.
    hash_block_size: divides every group's block size.
    enable_kv_cache_events: record events of which blocks are stored and removed. Something must
                 take them regularly.
    log_stats:   count the tokens looked up in the prefix cache, and hits.
    use_eagle:   recompute the last cached block, because a drafter needs its hidden states.
    decode_context_parallel_size, prefill_context_parallel_size: ranks that share the tokens of a
                 block, which holds `block_size` times this number of tokens.
    """

    block_size: int = 16
    hash_algorithm: Literal["sha256", "xxh3-128"] = "sha256"
    log_stats: bool = True
    use_eagle: bool = False
    decode_context_parallel_size: Annotated[int, Meta(ge=1)] = 1
    prefill_context_parallel_size: Annotated[int, Meta(ge=1)] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigError(
                f"block_size={self.block_size} is not a power of two, but positions are divided by "
                "it with shifts. Use 16 or 32."
            )
        hash_block_size = self.hash_block_size or self.block_size
        if hash_block_size < 1 or self.block_size % hash_block_size:
            raise ConfigError(
                f"hash_block_size={self.hash_block_size} does not divide block_size="
                f"{self.block_size}; a block must consist of whole hash blocks. Use a divisor."
            )

    @property
    def context_parallel_size(self) -> int:
        """Ranks that share the tokens of one block."""
        return self.decode_context_parallel_size * self.prefill_context_parallel_size

    @property
    def tokens_per_hash(self) -> int:
        """Tokens per block hash."""
        if self.hash_block_size is not None:
            return self.hash_block_size
        return self.block_size * self.context_parallel_size


def check_states(config: SchedulerConfig, specs: Iterable[KVCacheSpec]) -> None:
    """Raise ConfigError for settings that a model with states does not support. specs: of its
    layers or groups."""
    has_states = any(isinstance(spec, StateSpec) for spec in specs)
    if has_states and (config.num_speculative_tokens or config.num_lookahead_tokens):
        raise ConfigError(
            "this model keeps states and cannot run with num_speculative_tokens: a state cannot be "
            "rewound after a rejected draft"
        )


def check_preemption_mode(config: SchedulerConfig, cache: CacheConfig) -> None:
    """Raise ConfigError if the preemption mode has no effect with this cache."""
    if config.preemption_mode != "recompute" and cache.preempt_threshold == 1:
        raise ConfigError(
            f"preemption_mode={config.preemption_mode} begins when more than preempt_threshold of "
            "the blocks are held, and preempt_threshold=1 disables it. Set it below 1, for "
            "example to 0.95."
        )


@dataclass(frozen=True, kw_only=True)
class StructuredOutputConfig(StructuredOutputSettings):
    """Grammars, which a process of their own compiles.

    tokenizer_file:   tokenizer.json of the model.
    endpoint:         where the processes connect; the scheduler binds it, with the number of the
                      process appended.
    compile_timeout_s: limit for one grammar, from the moment that a thread begins with it.
    max_cached_grammars, max_cached_bytes: compiled grammars that are kept for further requests,
                      besides those that live requests have.
    """

    tokenizer_file: str
    endpoint: Endpoint
    compile_timeout_s: float = 10.0
    max_cached_grammars: int = 256
    max_cached_bytes: int = 256 << 20


class SchedulerProcessConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything `python -m longshore.scheduler CONFIG.json` needs.

    engine_id:   the engine's id; messages to clients have the epoch appended.
    epoch:       the incarnation of the workers, counted by the supervisor from 1.
    hash_seed:   hexadecimal; one per deployment, so that its engines agree on block hashes.
    workers:     one endpoint per rank; the scheduler binds them.
    sampling_rank: the rank that samples and sends outputs.
    rank_timeout_s: with several workers, a step that is unanswered for this long ends the engine,
                 because a worker hangs and the others may not notice.
    clients:     where gateways connect.
    kv_connector: name of a registered connector, or package.module:Class.
    kv_connector_config: JSON with options that the connector defines.
    ec_transfer: the encoder connector; None: there is none.
    kv_events:   publish the events of the cache; None: do not.
    structured_output: how to compile grammars; None: such requests are rejected.
    tokenizer_file: tokenizer.json of the model, which the policy `continuum` reads.
    routed_experts_fd: inherited descriptor of the memory into which rank 0 writes the experts of
                 tokens; None: outputs do not have them.
    outlives_workers: workers that have ended are started again, and the supervisor says so; the
                 scheduler waits for that and begins a new epoch. Otherwise it ends with them.
    adopts_kv:   the memory of the workers' KV outlives them.
    paused:      the pause that an operator has begun in a former process; None: no pause.
    is_drained:  an operator has drained the engine in a former process.
    is_asleep:   an operator has put the engine to sleep in a former process.
    trace_path:  file of the scheduler trace; None: none is written.
    trace_bytes: size at which the trace ends.
    record: files of the flight recorder, without their number; None: nothing is recorded.
    record_bytes: maximum size of these files, beside their newest snapshot.
    lifeline_fd: inherited socket to the supervisor; None when started by hand.
    """

    scheduler: SchedulerConfig
    cache: CacheConfig
    identity: EngineIdentity
    workers: tuple[Endpoint, ...]
    clients: Endpoint
    hash_seed: str
    vocab_size: int
    rank_timeout_s: float
    eos_token_ids: tuple[int, ...] = ()
    engine_id: str = "engine-0"
    epoch: int = 1
    sampling_rank: int = 0
    verify_plan: bool = InspectionSettings.verify_plan
    kv_connector: str | None = None
    kv_connector_config: str = "{}"
    ec_transfer: ECTransferConfig | None = None
    kv_events: KVEventsConfig | None = None
    structured_output: StructuredOutputConfig | None = None
    tokenizer_file: str | None = None
    routed_experts_fd: int | None = None
    outlives_workers: bool = False
    adopts_kv: bool = False
    paused: PauseMode | None = None
    is_drained: bool = False
    is_asleep: bool = False
    trace_path: str | None = None
    trace_bytes: int = InspectionSettings.sched_trace_mib << 20
    record: str | None = None
    record_bytes: int = InspectionSettings.record_mib << 20
    lifeline_fd: int | None = None
    runtime_dir: str | None = None
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        if self.cache.context_parallel_size != self.identity.decode_context_parallel_size:
            raise ConfigError(
                f"decode_context_parallel_size={self.cache.decode_context_parallel_size} and "
                f"prefill_context_parallel_size={self.cache.prefill_context_parallel_size} of the "
                "cache do not match the identity that workers are compared with, which has "
                f"decode_context_parallel_size={self.identity.decode_context_parallel_size}. Set "
                "both to the same value, and the prefill size to 1, which is all workers support."
            )
        if self.cache.enable_kv_cache_events != (self.kv_events is not None):
            raise ConfigError(
                f"enable_kv_cache_events={self.cache.enable_kv_cache_events} needs kv_events to be "
                "set if it is true, and None otherwise"
            )
        if not 0 <= self.sampling_rank < len(self.workers):
            raise ConfigError(
                f"sampling_rank={self.sampling_rank} must be one of the {len(self.workers)} workers"
            )
        try:
            bytes.fromhex(self.hash_seed)
        except ValueError:
            raise ConfigError("hash_seed is not hexadecimal; use 32 random bytes as hex") from None


class GrammarProcessConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the grammar process reads from its standard input.

    engine:      of its log records.
    lifeline_fd: inherited socket to the scheduler.
    page_fd:     inherited memory in which it notes what it works on.
    """

    structured_output: StructuredOutputConfig
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    engine: str
    lifeline_fd: int
    page_fd: int
    is_relayed: bool
    log_level: LogLevel
