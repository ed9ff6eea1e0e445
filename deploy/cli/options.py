"""The settings that a user gives on the command line or to `LLM`, before defaults are derived."""

import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

from cyclopts import Group, Parameter

from longshore.connectors.base import ECRole
from longshore.deploy.cli.counts import read_count
from longshore.deploy.cli.setting_checks import (
    MAX_TIMEOUT_S,
    check_at_least,
    check_context_parallel_size,
    check_device,
    check_duration,
    check_range,
)
from longshore.deploy.cli.vllm_settings import translate_settings
from longshore.deploy.gateway.api_keys import CacheSharing
from longshore.deploy.gateway.router.policies import POLICY_NAMES, PolicyName
from longshore.deploy.supervisor.log_lines import LogFormat
from longshore.protocol.commands import Role
from longshore.protocol.errors import ConfigError
from longshore.protocol.events import EventFormat, HashFormat
from longshore.protocol.kv_cache_spec import KVCacheDtype
from longshore.scheduler.config import KVRole, PreemptionMode, StructuredOutputBackend
from longshore.worker.config import AttentionBackendName, LoadFormat, check_memory_shares

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
VerifyKV: TypeAlias = Literal["always", "sampled", "never"]
MetricsNames: TypeAlias = Literal["longshore", "vllm"]
Launcher: TypeAlias = Literal["ray"]
SPLIT_ONLY: Final = ("disaggregation_min_tokens", "disaggregation_max_waiting")
"""Settings that need engines with the roles prefill and decode."""
Dtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]


# Sections of `--help`, in this order.
_MODEL: Final = Parameter(group=Group.create_ordered("Model"))
_SERVER: Final = Parameter(group=Group.create_ordered("Server"))
_CACHE: Final = Parameter(group=Group.create_ordered("KV cache"))
_SCHEDULING: Final = Parameter(group=Group.create_ordered("Scheduling"))
_RANKS: Final = Parameter(group=Group.create_ordered("Several workers"))
_HOSTS: Final = Parameter(group=Group.create_ordered("Several hosts"))
_CONNECTOR: Final = Parameter(group=Group.create_ordered("KV beyond the device"))
_EVENTS: Final = Parameter(group=Group.create_ordered("KV events"))
_OPERATION: Final = Parameter(group=Group.create_ordered("Operation"))
_TOKENS: Final = Parameter(converter=read_count)


def _demo_model(folder: Path) -> str:
    return "the bundled demo model"


SHOWN_AS_DEMO_MODEL: Final = Parameter(show_default=_demo_model)
"""Default of a model argument in `--help`: the bundled model's path depends on the machine."""

MAX_AUDIO_S: Final = 24 * 3600
# Far above any useful value: a larger number is a typing error and would end in a traceback.
_MAXIMA: Final = {
    "num_blocks": 2**31 - 1,
    "max_model_len": 1 << 26,
    "max_num_seqs": 1 << 16,
    "max_num_batched_tokens": 1 << 24,
    "max_num_scheduled_tokens": 1 << 24,
    "max_num_encoder_input_tokens": 1 << 24,
    "max_loading_blocks": 2**31 - 1,
    "tensor_parallel_size": 64,
    "pipeline_parallel_size": 64,
    "decode_context_parallel_size": 64,
    "cp_kv_cache_interleave_size": 1 << 20,
    "threads": 1024,
    "kv_events_buffer": 1 << 20,
    "record_mib": 1 << 20,
    "sched_trace_mib": 1 << 20,
}
MAX_MODEL_NAMES: Final = 64
MAX_RESTARTS: Final = 1000
MAX_STANDBY_WORKERS: Final = 8
MIN_HANG_TIMEOUT_S: Final = 3.0
MAX_PROCESSES: Final = 64  # for replicas and for gateways, separately
MAX_INDEX_BLOCKS: Final = 100_000_000


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """One engine: a scheduler and its workers. Raises ConfigError naming an invalid setting.

    Attributes:
        device: Device that runs the model: cpu, cuda or cuda:N. auto selects a GPU if there is one.
            Several workers use GPUs 0, 1 and so on, or share the CPU.
        tensor_parallel_size: Number of workers that every layer is split across.
        pipeline_parallel_size: Number of stages that the layers are divided into. Each stage has
            its own workers.
        decode_context_parallel_size: Number of workers with the same KV heads that split the tokens
            of the KV cache among them. Multiplies the tokens that fit and adds no workers. Must
            divide the number of copies of each KV head that tensor_parallel_size creates; for
            models with latents it must divide tensor_parallel_size.
        cp_kv_cache_interleave_size: Number of consecutive tokens that one of these workers stores;
            a divisor of block_size.
        rank_timeout_s: Seconds that a worker waits for another worker within a step before it
            fails.
        load_format: auto reads the weights from the model's folder; dummy fills them at random, to
            measure a model of which there is only a config.json.
        dtype: Data type of weights and KV cache. auto uses that of the checkpoint (float16 becomes
            float32 on a CPU).
        kv_cache_dtype: Data type of keys and values in the cache. auto uses dtype. fp8_e4m3 needs
            one byte per element, so more tokens fit, and rounds to four significant bits.
        num_blocks: Blocks in the KV cache, including the null block. Default: as many as fit in
            memory.
        kv_memory_fraction: Fraction of the memory left after loading to use for the KV cache, if
            num_blocks is not set.
        gpu_memory_utilization: Fraction of a GPU's whole memory that weights, activations, CUDA
            graphs and KV cache take together, if neither num_blocks nor kv_memory_fraction is set.
            Memory of other processes counts as taken. Default on a GPU: 0.9.
        block_size: Tokens per block, a power of two. Default: 16; 256 for models that only have
            state layers.
        hash_block_size: Tokens per block hash in the prefix cache, a divisor of block_size.
            Default: block_size.
        max_num_seqs: Maximum number of running requests.
        max_num_batched_tokens: Maximum number of tokens that one step can compute.
        max_num_scheduled_tokens: Maximum number of tokens scheduled per step. Default:
            max_num_batched_tokens.
        max_num_encoder_input_tokens: Maximum number of tokens that the encoder of a speech model
            produces per step; limits how many requests can start in a step. Default: the tokens of
            one request.
        max_model_len: Maximum number of tokens of a request, prompt and output together. Default:
            the model's own limit, or what num_blocks can hold if that is less.
        scheduling_policy: Order in which requests are scheduled: fcfs by arrival, priority by the
            request's priority, continuum by the first arrival of the request's job, fair by the
            shares of API keys, or an installed policy given by name or as package.module:Class.
            Default: fair for a key file with several keys, else fcfs.
        max_pin_s: With the policy continuum, longest time in seconds for which the KV of a job's
            turn is kept on the device for its next turn; 0 keeps none.
        async_scheduling: Plan a step before the tokens of the previous step are known. Default: on,
            unless there are several pipeline stages, which overlap steps anyway.
        enable_prefix_caching: Share the KV blocks of equal prefixes.
        enable_chunked_prefill: Split prompts that exceed the remaining token budget of a step.
        long_prefill_token_threshold: Maximum number of tokens of one prompt per step; 0 means no
            limit.
        scheduler_reserve_full_isl: Admit a request only when there are free blocks for its whole
            prompt, not only for its first chunk.
        watermark: Fraction of the blocks that admissions leave free for running requests; 0
            disables it.
        preempt_threshold: Admissions stop when the fraction of blocks in use exceeds this; 1
            disables it.
        admit_threshold: Admissions resume when the fraction of blocks in use falls below this.
        preemption_mode: What happens to the KV of a preempted request: recompute it, swap it out to
            host memory once preempt_threshold is exceeded, or what takes less time by measurement
            (auto). swap and auto need a connector that can do it, such as offloading.
        kv_connector: Connector that stores KV outside the device, given by its installed name or as
            package.module:Class. Default: none.
        kv_connector_config: Settings of the connector, as a JSON object or the path of a .toml
            file.
        kv_role: Whether the connector loads and stores (kv_both), only stores (kv_producer), or
            only loads (kv_consumer).
        ec_connector: Encoder connector of a speech model, which hands encoder outputs to other
            engines: nixl, mooncake, or package.module:Class. Default: none.
        ec_connector_config: Settings of the encoder connector, as a JSON object or the path of a
            .toml file.
        ec_role: Whether the engine offers its encoder outputs to others (ec_producer), loads those
            of others before it encodes (ec_consumer), or both (ec_both).
        verify_kv: How often the checksum of a block that is loaded from host memory is verified:
            of every block, of one in 16, or never. Blocks from disk are always verified. Sets the
            option of the same name of a connector that has it. Default: the connector's.
        load_failure_policy: What to do if the connector cannot load a request's KV: recompute it,
            or fail the request.
        load_timeout_s: Seconds that a request waits for an asynchronous load of the connector, at
            most.
        min_load_wait_s: Seconds that a request waits for a lookup or a load of the connector in any
            case. It waits longer only as long as computing these tokens would take, at the measured
            rate; then it computes them. Has no effect with load_failure_policy fail, with which a
            request waits for load_timeout_s.
        max_loading_blocks: Maximum number of blocks held by requests that wait for loads, or that
            have loaded and are not running yet. One load alone may exceed it, if the pool holds it.
            Default: half of all blocks.
        enable_kv_cache_events: Publish which KV blocks are stored and removed, for routers and
            other subscribers.
        kv_events_endpoint: Address of the events, ipc://PATH or tcp://ADDRESS:PORT; further engines
            use the following ports, or PATH with their numbers. Default: a socket in the
            deployment's private directory, shown in the log.
        kv_events_replay_endpoint: Address for requests of missed events and of snapshots, in the
            same form.
        kv_events_topic: Topic of the messages.
        kv_events_buffer: Number of past batches of events that can be replayed.
        kv_events_format: Whether each event is an array or a map. vLLM sent arrays before version
            0.24, and sends maps since.
        kv_events_hashes: Whether block hashes are whole (bytes), or integers of their last 8 bytes,
            which some subscribers need.
        cpu_kernels: auto uses the kernels compiled at installation, if there are any; torch uses
            plain PyTorch, which is slower.
        attention_backend: Kernels of attention. auto uses the Triton kernels on a GPU, with
            FlashInfer for prompts if it is installed, computes the same as torch and is faster; on
            a CPU, what cpu_kernels says. triton and flashinfer need a GPU; flashinfer falls back to
            triton, with a warning, where it cannot compute a layer. torch is slower.
        threads: CPU threads per worker. Default: the physical cores, divided among the workers.
        enforce_eager: Run every step kernel by kernel. By default decode steps run as graphs, which
            are captured at start-up: CUDA graphs on a GPU, and on a CPU where that is faster.
        enable_return_routed_experts: Answers of a mixture of experts have the experts that were
            chosen for each token. Needs host memory for the experts of all tokens in the KV cache,
            and excludes pipeline_parallel_size, decode_context_parallel_size and kv_connector.
        seed: Derive the seeds of requests without a seed from this one, so that they are
            reproducible. Default: random seeds.
        state_dir: Directory of what must survive a restart: the seed of block hashes. It is created
            with mode 0700 if it is missing. Deployments that share stored KV need the same one.
            Default: longshore in XDG_STATE_HOME, or in ~/.local/state.
        structured_output_backend: Library that compiles the grammars of structured output. auto
            uses llguidance for what it supports, and xgrammar for the rest, if they are installed.
        sched_trace_path: File in which the scheduler records what it sees and decides in each step
            (docs/trace.md). With several engines, the number of each is added to its name. An
            existing file is not overwritten; the next free name is used. Default: no trace.
        sched_trace_mib: Size of the trace of an engine at which it ends, with a warning.
        verify_plan: Send the full state with every plan and compare it (slow; for debugging).
        record: Record what the scheduler gets and plans in FILE.000000 and following files, for
            longshore replay. They contain prompts and outputs. Further engines add their names.
            Default: nothing is recorded.
        record_mib: Maximum size of the recorded files of an engine, beside one snapshot; the oldest
            ones are removed.
        poison_kv: Fill KV blocks with a pattern before their first token is written, and stop if a
            full block changes while a request holds it (slow; for debugging).
        kv_adoption: After the death of a worker, keep the KV that it had computed: the KV cache is
            memory that outlives the process. CPU workers only; others compute it again.
        startup_timeout_s: Seconds that startup may take, including loading the model.
        step_timeout_s: Seconds that a step may take, and as many again for every 1,024 tokens that
            it computes; then the worker counts as hung.
        log_level: Lowest level of log lines to show.
    """

    device: Annotated[str, _MODEL] = "auto"
    tensor_parallel_size: Annotated[int, _RANKS, Parameter(alias="-tp")] = 1
    pipeline_parallel_size: Annotated[int, _RANKS, Parameter(alias="-pp")] = 1
    decode_context_parallel_size: Annotated[int, _RANKS, Parameter(alias="-dcp")] = 1
    cp_kv_cache_interleave_size: Annotated[int, _RANKS] = 1
    rank_timeout_s: Annotated[float, _RANKS] = 120.0
    load_format: Annotated[LoadFormat, _MODEL] = "auto"
    dtype: Annotated[Dtype, _MODEL] = "auto"
    kv_cache_dtype: Annotated[KVCacheDtype, _CACHE] = "auto"
    num_blocks: Annotated[int | None, _CACHE] = None
    kv_memory_fraction: Annotated[float | None, _CACHE] = None
    gpu_memory_utilization: Annotated[float | None, _CACHE] = None
    block_size: Annotated[int | None, _CACHE] = None
    hash_block_size: Annotated[int | None, _CACHE] = None
    max_num_seqs: Annotated[int, _SCHEDULING] = 256
    max_num_batched_tokens: Annotated[int, _SCHEDULING, _TOKENS] = 2048
    max_num_scheduled_tokens: Annotated[int | None, _SCHEDULING, _TOKENS] = None
    max_num_encoder_input_tokens: Annotated[int | None, _MODEL] = None
    max_model_len: Annotated[int | None, _MODEL, _TOKENS] = None
    scheduling_policy: Annotated[str | None, _SCHEDULING] = None
    max_pin_s: Annotated[float, _SCHEDULING] = 60.0
    async_scheduling: Annotated[bool | None, _SCHEDULING] = None
    enable_prefix_caching: Annotated[bool, _CACHE] = True
    enable_chunked_prefill: Annotated[bool, _SCHEDULING] = True
    long_prefill_token_threshold: Annotated[int, _SCHEDULING] = 0
    scheduler_reserve_full_isl: Annotated[bool, _SCHEDULING] = False
    watermark: Annotated[float, _SCHEDULING] = 0.01
    preempt_threshold: Annotated[float, _SCHEDULING] = 0.95
    admit_threshold: Annotated[float, _SCHEDULING] = 0.80
    preemption_mode: Annotated[PreemptionMode, _SCHEDULING] = "recompute"
    kv_connector: Annotated[str | None, _CONNECTOR] = None
    kv_connector_config: Annotated[str, _CONNECTOR] = field(default="{}", repr=False)
    kv_role: Annotated[KVRole, _CONNECTOR] = "kv_both"
    ec_connector: Annotated[str | None, _CONNECTOR] = None
    ec_connector_config: Annotated[str, _CONNECTOR] = field(default="{}", repr=False)
    ec_role: Annotated[ECRole, _CONNECTOR] = "ec_both"
    verify_kv: Annotated[VerifyKV | None, _CONNECTOR] = None
    load_failure_policy: Annotated[Literal["recompute", "fail"], _CONNECTOR] = "recompute"
    load_timeout_s: Annotated[float, _CONNECTOR] = 60.0
    min_load_wait_s: Annotated[float, _CONNECTOR] = 1.0
    max_loading_blocks: Annotated[int | None, _CONNECTOR] = None
    enable_kv_cache_events: Annotated[bool, _EVENTS] = False
    kv_events_endpoint: Annotated[str | None, _EVENTS] = None
    kv_events_replay_endpoint: Annotated[str | None, _EVENTS] = None
    kv_events_topic: Annotated[str, _EVENTS] = "kv-events"
    kv_events_buffer: Annotated[int, _EVENTS] = 10_000
    kv_events_format: Annotated[EventFormat, _EVENTS] = "arrays"
    kv_events_hashes: Annotated[HashFormat, _EVENTS] = "bytes"
    cpu_kernels: Annotated[Literal["auto", "torch"], _MODEL] = "auto"
    attention_backend: Annotated[AttentionBackendName, _MODEL] = "auto"
    threads: Annotated[int | None, _MODEL] = None
    enforce_eager: Annotated[bool, _MODEL] = False
    enable_return_routed_experts: Annotated[bool, _MODEL] = False
    seed: Annotated[int | None, _MODEL] = None
    state_dir: Annotated[Path | None, _OPERATION] = None
    structured_output_backend: Annotated[StructuredOutputBackend, _MODEL] = "auto"
    sched_trace_path: Annotated[Path | None, _OPERATION, Parameter(alias="--sched-trace")] = None
    sched_trace_mib: Annotated[int, _OPERATION] = 4096
    verify_plan: Annotated[bool, _OPERATION] = False
    record: Annotated[Path | None, _OPERATION] = None
    record_mib: Annotated[int, _OPERATION] = 256
    poison_kv: Annotated[bool, _OPERATION] = False
    kv_adoption: Annotated[bool, _OPERATION] = True
    startup_timeout_s: Annotated[float, _OPERATION] = 600.0
    step_timeout_s: Annotated[float, _OPERATION] = 60.0
    log_level: Annotated[LogLevel, _OPERATION] = "info"

    def __post_init__(self) -> None:
        check_device(self.device)
        for name, allowed in (
            ("load_format", get_args(LoadFormat)),
            ("attention_backend", get_args(AttentionBackendName)),
            ("dtype", get_args(Dtype)),
            ("kv_cache_dtype", get_args(KVCacheDtype)),
            ("kv_role", get_args(KVRole)),
            ("ec_role", get_args(ECRole)),
            ("preemption_mode", get_args(PreemptionMode)),
            ("load_failure_policy", ("recompute", "fail")),
            ("kv_events_format", get_args(EventFormat)),
            ("kv_events_hashes", get_args(HashFormat)),
            ("log_level", get_args(LogLevel)),
            ("verify_kv", (None, *get_args(VerifyKV))),
        ):
            if getattr(self, name) not in allowed:
                known = ", ".join(filter(None, allowed))
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown; use one of {known}")
        for name, maximum in _MAXIMA.items():
            check_range(name, getattr(self, name), 1, maximum)
        check_memory_shares(self.kv_memory_fraction, self.gpu_memory_utilization, self.device)
        for name in ("startup_timeout_s", "load_timeout_s", "rank_timeout_s", "step_timeout_s"):
            check_duration(name, getattr(self, name))
        if not 0 <= self.min_load_wait_s < math.inf:
            raise ConfigError(
                f"min_load_wait_s={self.min_load_wait_s} must be a number of seconds, at least 0"
            )
        if self.num_ranks > 1 and ":" in self.device:
            raise ConfigError(
                f"device={self.device!r} selects one GPU, but tensor_parallel_size="
                f"{self.tensor_parallel_size} and pipeline_parallel_size="
                f"{self.pipeline_parallel_size} need {self.num_ranks}. Use device='cuda', and "
                "select GPUs with CUDA_VISIBLE_DEVICES."
            )
        check_context_parallel_size(self.decode_context_parallel_size, self.tensor_parallel_size)
        if self.decode_context_parallel_size == 1 < self.cp_kv_cache_interleave_size:
            raise ConfigError(
                f"cp_kv_cache_interleave_size={self.cp_kv_cache_interleave_size} has no effect: "
                "decode_context_parallel_size is 1, so no workers share tokens. Raise "
                "decode_context_parallel_size or remove cp_kv_cache_interleave_size."
            )
        if self.async_scheduling and self.pipeline_parallel_size > 1:
            raise ConfigError(
                "async_scheduling is not supported with pipeline_parallel_size="
                f"{self.pipeline_parallel_size}, because the first stage gets the tokens of a step "
                "with the next plan. Remove async_scheduling; one step per stage runs at a time "
                "anyway."
            )
        if self.kv_connector is None and self.kv_connector_config != "{}":
            raise ConfigError(
                "kv_connector_config is set, but kv_connector is not, so it has no effect. Set "
                "kv_connector, for example to offloading, or remove kv_connector_config."
            )
        if self.kv_connector is None and self.kv_role != "kv_both":
            raise ConfigError(
                f"kv_role={self.kv_role!r} is set, but kv_connector is not, so it has no effect. "
                "Set kv_connector, or remove kv_role."
            )
        if self.ec_connector is None and (self.ec_connector_config, self.ec_role) != (
            "{}",
            "ec_both",
        ):
            raise ConfigError(
                "ec_connector_config or ec_role is set, but ec_connector is not, so it has no "
                "effect. Set ec_connector, for example to nixl, or remove it."
            )
        if self.preemption_mode != "recompute" and self.kv_connector is None:
            raise ConfigError(
                f"preemption_mode={self.preemption_mode} needs a connector that keeps KV in host "
                "memory, and kv_connector is not set. Use kv_connector=offloading, or "
                "preemption_mode=recompute."
            )
        if self.kv_connector is None and self.verify_kv is not None:
            raise ConfigError(
                "verify_kv is set, but kv_connector is not, so there is nothing to verify. Set "
                "kv_connector, or remove verify_kv."
            )
        if self.enable_return_routed_experts:
            self._check_routed_experts()
        self._check_kv_events()

    def _check_routed_experts(self) -> None:
        for name, neutral, why in (
            ("pipeline_parallel_size", 1, "no stage knows the experts of all layers"),
            ("decode_context_parallel_size", 1, "no worker has the slots of all tokens"),
            ("kv_connector", None, "blocks that are loaded do not have their tokens' experts"),
        ):
            if (value := getattr(self, name)) != neutral:
                raise ConfigError(
                    f"enable_return_routed_experts is not supported with {name}={value}: {why}. "
                    "Remove one of them."
                )

    def _check_kv_events(self) -> None:
        if self.enable_kv_cache_events:
            if not self.enable_prefix_caching:
                raise ConfigError(
                    "enable_kv_cache_events needs enable_prefix_caching: the events are about "
                    "cached blocks"
                )
            return
        for name in ("endpoint", "replay_endpoint"):
            if getattr(self, f"kv_events_{name}") is not None:
                raise ConfigError(f"kv_events_{name} is set, but enable_kv_cache_events is not")

    @property
    def num_ranks(self) -> int:
        """Worker processes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def max_steps_in_flight(self) -> int:
        """Limit of unanswered plans: one per pipeline stage; else 2, or 1 if not asynchronous."""
        if self.pipeline_parallel_size > 1:
            return self.pipeline_parallel_size
        return 1 if self.async_scheduling is False else 2


@dataclass(frozen=True, kw_only=True)
class ServeOptions(EngineOptions):
    """A deployment: engines with an OpenAI-compatible API.

    Attributes:
        prefill: Number of engines that compute prompts and first tokens only, for the decode
            engines. They take GPUs before these, or share the CPU. Default: all engines compute
            whole requests.
        decode: Number of engines that compute all other tokens; they copy the KV of the prompts
            from the prefill engines through kv_connector, which is nixl by default.
        disaggregation_min_tokens: Prompts of which a decode engine has fewer tokens than this to
            compute are not sent to a prefill engine.
        disaggregation_max_waiting: Maximum number of requests that wait at each gateway for memory
            of a decode engine; further ones get a 429.
        topology: TOML file that describes engines and gateways on one or several nodes
            (docs/topology.md). All other settings are in the file then.
        launcher: What starts the nodes of a topology: ray, on the hosts of its cluster. Default:
            nothing; a topology of one node is started here.
        replicas: Number of engines with the same model and settings, each with its own scheduler
            and workers. Replicas use consecutive GPUs, or share the CPU and its memory.
        routing_policy: Which engine gets a prompt, with several replicas: the least loaded one
            (least_loaded), the next in turn (round_robin), the one that has its prefix in the
            KV cache, unless that is too loaded (prefix_aware), or the same one for all requests
            of a session (session_affinity).
        routing_session_header: Header of requests that names their session, for session_affinity.
            Without it, prompt_cache_key and user are used.
        routing_index_blocks: Maximum number of KV blocks that each gateway knows of, for
            prefix_aware; each takes about 170 bytes.
        gateways: Number of processes that serve the port. Raise it if one gateway uses a whole
            core.
        host: Address to listen on; 0.0.0.0 is every interface.
        port: Port to listen on; 0 selects a free one.
        served_model_name: Model names in the API. Responses have the first one, requests may use
            any. Default: the name of the model's folder, or its id on the hub.
        chat_template: File with a Jinja chat template that replaces the model's own.
        tool_call_parser: Format in which the model writes tool calls: deepseek, harmony, hermes,
            llama, mistral, none, the name of an installed parser, or package.module:Class. auto
            chooses it by the chat template.
        reasoning_parser: Format in which the model writes its reasoning: harmony, think, none, or
            as for tool_call_parser.
        max_body_mib: Maximum size of a request body without audio.
        max_audio_mib: Maximum size of an audio file.
        max_audio_s: Maximum duration of an audio file.
        max_live_requests: Maximum number of requests running or waiting in all engines; further
            requests get a 429 with Retry-After. A gateway learns the other gateways' share from the
            engines once a second.
        api_key: API keys that clients may use; without any, no key is required. Set it in
            LONGSHORE_API_KEY or in a file, because other users can see command lines.
        admin_key_file: File with the key of the paths under /admin, readable by its owner only.
            Without it, these paths do not exist.
        router_key_file: File with the key of routers that may send kv_transfer_params, readable by
            its owner only (docs/disaggregation.md). Without it, no request may.
        api_key_file: TOML file with named API keys, their shares and limits (docs/security.md).
            Only you may be able to read it. It replaces api_key, and is read when the server
            starts.
        share_prefix_cache: Which requests share cached prefixes: those of the same API key, or all.
            A request finds out from its cached_tokens and its speed which prefixes are cached.
            Without API keys, all requests share.
        allowed_hosts: Names of this server that requests without API keys may have in their Host
            header, beside localhost, IP addresses, host and the machine's own name; * allows all.
            Others get a 403: a page of another site could send them (docs/security.md).
        cors_allow_origins: Origins (https://app.example.org) whose pages may use the API from a
            browser; * allows all. Default: none.
        stored_responses_mib: Maximum size of all stored responses of /v1/responses, in the
            temporary directory; 0: none are stored. Beyond it, the oldest response of the API key
            that has most is deleted.
        stored_response_ttl_s: Seconds after which a stored response is deleted.
        strict_requests: Reject requests with unknown fields. Otherwise these fields are ignored,
            and the response names them in the header x-longshore-ignored-fields.
        log_format: Format of the lines on standard error: text, or one JSON object per line.
        access_log: Log a line for every HTTP request: method, path, status, durations, numbers of
            tokens, name of the API key. Prompts and answers are never logged.
        metrics_names: Names of the metrics: longshore, or vllm for these and, with the label
            model_name, those that dashboards made for vLLM use (docs/metrics.md).
        unread_timeout_s: Seconds after which a client that reads none of the response data waiting
            for it is disconnected.
        drain_timeout_s: Seconds that running requests have to finish after SIGTERM.
        max_restarts: How often an engine or gateway that dies again and again is restarted, until
            the server stops; a minute without a death ends the row. 0: the first death stops it.
        standby_workers: Sets of workers per engine that have loaded the model and wait, so that an
            engine goes on within about a second after the death of a worker. Each needs the memory
            of the weights once more, on the same device.
        hang_timeout_s: Seconds without a sign of life after which a scheduler, worker or gateway
            counts as hung, is killed and restarted; while it starts, seconds for which it is
            stopped (SIGSTOP). 0: never.
    """

    prefill: Annotated[int, _RANKS] = 0
    decode: Annotated[int, _RANKS] = 0
    disaggregation_min_tokens: Annotated[int, _RANKS] = 64
    disaggregation_max_waiting: Annotated[int, _RANKS] = 1024
    topology: Annotated[Path | None, _HOSTS] = None
    launcher: Annotated[Launcher | None, _HOSTS] = None
    replicas: Annotated[int, _RANKS] = 1
    routing_policy: Annotated[PolicyName, _RANKS] = "least_loaded"
    routing_session_header: Annotated[str, _RANKS] = "x-session-id"
    routing_index_blocks: Annotated[int, _RANKS] = 1_000_000
    gateways: Annotated[int, _SERVER] = 1
    host: Annotated[str, _SERVER] = "127.0.0.1"
    port: Annotated[int, _SERVER] = 8000
    served_model_name: Annotated[tuple[str, ...] | None, _SERVER] = None
    chat_template: Annotated[Path | None, _SERVER] = None
    tool_call_parser: Annotated[str, _SERVER] = "auto"
    reasoning_parser: Annotated[str, _SERVER] = "auto"
    max_body_mib: Annotated[int, _SERVER] = 16
    max_audio_mib: Annotated[int, _SERVER] = 25
    max_audio_s: Annotated[float, _SERVER] = 3600.0
    max_live_requests: Annotated[int, _SERVER] = 16_384
    api_key: Annotated[tuple[str, ...] | None, _SERVER] = field(default=None, repr=False)
    admin_key_file: Annotated[Path | None, _SERVER] = None
    router_key_file: Annotated[Path | None, _SERVER] = None
    api_key_file: Annotated[Path | None, _SERVER] = None
    share_prefix_cache: Annotated[CacheSharing, _SERVER] = "key"
    allowed_hosts: Annotated[tuple[str, ...] | None, _SERVER] = None
    cors_allow_origins: Annotated[tuple[str, ...] | None, _SERVER] = None
    stored_responses_mib: Annotated[int, _SERVER] = 256
    stored_response_ttl_s: Annotated[float, _SERVER] = 86_400.0
    strict_requests: Annotated[bool, _SERVER] = False
    log_format: Annotated[LogFormat, _OPERATION] = "text"
    access_log: Annotated[bool, _OPERATION] = False
    metrics_names: Annotated[MetricsNames, _OPERATION] = "longshore"
    unread_timeout_s: Annotated[float, _OPERATION] = 60.0
    drain_timeout_s: Annotated[float, _OPERATION] = 30.0
    max_restarts: Annotated[int, _OPERATION] = 5
    standby_workers: Annotated[int, _OPERATION] = 0
    hang_timeout_s: Annotated[float, _OPERATION] = 8.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.launcher is not None and self.topology is None:
            raise ConfigError(
                f"launcher={self.launcher} starts the nodes of a topology, and topology is not "
                "set. Set it, or remove launcher."
            )
        check_range("replicas", self.replicas, 1, MAX_PROCESSES)
        self._check_roles()
        check_range("gateways", self.gateways, 1, MAX_PROCESSES)
        self._check_routing()
        num_engines = len(self.roles)
        if num_engines > 1 and ":" in self.device:
            settings = f"prefill={self.prefill} and decode={self.decode}"
            raise ConfigError(
                f"device={self.device!r} selects one GPU, but "
                f"{settings if self.prefill else f'replicas={self.replicas}'} need "
                f"{self.num_ranks * num_engines}. Use device='cuda', and select GPUs with "
                "CUDA_VISIBLE_DEVICES."
            )
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port={self.port} must be between 0 and 65535")
        check_at_least("max_body_mib", self.max_body_mib, 1)
        check_at_least("max_audio_mib", self.max_audio_mib, 1)
        if not 0 < self.max_audio_s <= MAX_AUDIO_S:
            raise ConfigError(
                f"max_audio_s={self.max_audio_s} must be above 0 and at most {MAX_AUDIO_S}, "
                "because an audio file is held in memory as a whole"
            )
        names = self.served_model_name
        if names is not None and not (0 < len(names) <= MAX_MODEL_NAMES and all(names)):
            raise ConfigError(
                f"served_model_name must be 1 to {MAX_MODEL_NAMES} names, none of them empty. "
                "Remove it to use the name of the model's folder."
            )
        check_at_least("max_live_requests", self.max_live_requests, 1)
        keys = self.api_key
        if keys is not None and not (keys and all(re.fullmatch(r"[!-~]+", key) for key in keys)):
            raise ConfigError(
                "api_key must be one or more keys of visible ASCII characters without spaces. "
                "Remove it to serve without keys."
            )
        if keys is not None and self.api_key_file is not None:
            raise ConfigError(
                "api_key and api_key_file are both set; move the keys into the file, and unset "
                "api_key (LONGSHORE_API_KEY)"
            )
        for name in self.allowed_hosts or ():
            if name != "*" and not re.fullmatch(r"[\w.-]+", name, re.ASCII):
                raise ConfigError(
                    f"allowed_hosts={name!r} is not the name of a host; use a name such as "
                    "llm.example.org without scheme, port and path, or * for all"
                )
        for origin in self.cors_allow_origins or ():
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#]+", origin):
                raise ConfigError(
                    f"cors_allow_origins={origin!r} is not an origin; use SCHEME://HOST[:PORT] "
                    "without a path, as browsers send it, or * for all"
                )
        check_at_least("stored_responses_mib", self.stored_responses_mib, 0)
        check_duration("stored_response_ttl_s", self.stored_response_ttl_s)
        check_range("max_restarts", self.max_restarts, 0, MAX_RESTARTS)
        check_range("standby_workers", self.standby_workers, 0, MAX_STANDBY_WORKERS)
        if self.standby_workers and not self.max_restarts:
            raise ConfigError(
                f"standby_workers={self.standby_workers} has no use with max_restarts=0: the first "
                "death of a worker stops the server. Set max_restarts to 1 or more."
            )
        if self.hang_timeout_s and not MIN_HANG_TIMEOUT_S <= self.hang_timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"hang_timeout_s={self.hang_timeout_s} must be between {MIN_HANG_TIMEOUT_S:g} and "
                f"{MAX_TIMEOUT_S:g}, or 0: processes report once a second that they are alive"
            )
        if not 0 <= self.drain_timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"drain_timeout_s={self.drain_timeout_s} must be between 0 and {MAX_TIMEOUT_S}"
            )
        if not 0 < self.unread_timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"unread_timeout_s={self.unread_timeout_s} must be above 0 and at most "
                f"{MAX_TIMEOUT_S}"
            )

    @property
    def roles(self) -> tuple[Role, ...]:
        """Of each engine."""
        numbers: dict[Role, int] = {"unified": self.replicas}
        if self.prefill:
            numbers = {"prefill": self.prefill, "decode": self.decode}
        return tuple(role for role, number in numbers.items() for _ in range(number))

    def _check_roles(self) -> None:
        check_range("prefill", self.prefill, 0, MAX_PROCESSES)
        check_range("decode", self.decode, 0, MAX_PROCESSES)
        check_at_least("disaggregation_min_tokens", self.disaggregation_min_tokens, 1)
        check_at_least("disaggregation_max_waiting", self.disaggregation_max_waiting, 0)
        if bool(self.prefill) != bool(self.decode):
            missing = "decode" if self.prefill else "prefill"
            raise ConfigError(
                f"prefill={self.prefill} and decode={self.decode}: both kinds of engines are "
                f"needed. Set {missing} to 1 or more, or remove both."
            )
        if self.prefill and self.replicas > 1:
            raise ConfigError(
                f"replicas={self.replicas} are engines for whole requests, and prefill="
                f"{self.prefill} and decode={self.decode} are not. Remove replicas."
            )
        if self.prefill and self.kv_role != "kv_both":
            raise ConfigError(
                f"kv_role={self.kv_role!r} is not supported with prefill={self.prefill} and "
                f"decode={self.decode}: the role of an engine says whether it sends or receives "
                "KV. Remove kv_role."
            )
        for name in () if self.prefill or self.topology is not None else SPLIT_ONLY:
            if getattr(self, name) != getattr(ServeOptions, name):
                raise ConfigError(
                    f"{name}={getattr(self, name)} is set, but prefill is not, so it has no "
                    f"effect. Set prefill and decode, or remove {name}."
                )

    def _check_routing(self) -> None:
        if self.routing_policy not in POLICY_NAMES:
            raise ConfigError(
                f"routing_policy={self.routing_policy!r} is unknown; use one of "
                f"{', '.join(POLICY_NAMES)}"
            )
        if not re.fullmatch(r"[a-z0-9-]{1,64}", self.routing_session_header):
            raise ConfigError(
                f"routing_session_header={self.routing_session_header!r} must be 1 to 64 "
                "lower-case letters, digits and dashes: names of headers are compared in lower case"
            )
        check_range("routing_index_blocks", self.routing_index_blocks, 1, MAX_INDEX_BLOCKS)
        if self.routing_policy != "prefix_aware":
            return
        if not self.enable_prefix_caching:
            raise ConfigError("routing_policy=prefix_aware needs enable_prefix_caching")
        if (self.kv_events_format, self.kv_events_hashes) != ("arrays", "bytes"):
            raise ConfigError(
                f"routing_policy=prefix_aware reads KV events as arrays with whole hashes, but "
                f"kv_events_format={self.kv_events_format} and kv_events_hashes="
                f"{self.kv_events_hashes}. Remove these settings, or use another policy."
            )


@dataclass(frozen=True, kw_only=True)
class CachePlanOptions:
    """A plan of a model's KV cache: what will fit.

    Attributes:
        plan: Plan the KV cache of this model (a folder or an id on a model hub) instead of
            examining an engine: its groups, their memory, and how many tokens fit.
        block_size: Tokens per block, a power of two. Default: the same as for serving.
        max_model_len: Tokens of the longest request. Default: the model's own limit.
        max_num_batched_tokens: Maximum number of tokens per step.
        max_steps_in_flight: Maximum number of unanswered plans.
        kv_cache_bytes: Size of the cache of one rank.
        tensor_parallel_size: Number of ranks that every layer is split across.
        decode_context_parallel_size: Number of ranks that split the tokens of the cache among them.
            Also prints how many more tokens fit because of it.
        dtype: Data type of weights and KV cache.
        kv_cache_dtype: Data type of keys and values in the cache. With fp8_e4m3, also prints how
            many more tokens fit than in dtype.
        device: Device to plan for. On a CPU, dtype auto is float32 for a float16 checkpoint.
    """

    plan: str | None = None
    block_size: int | None = None
    max_model_len: Annotated[int | None, _TOKENS] = None
    max_num_batched_tokens: Annotated[int, _TOKENS] = 2048
    max_steps_in_flight: int = 2
    kv_cache_bytes: int = 4 << 30
    tensor_parallel_size: Annotated[int, Parameter(alias="-tp")] = 1
    decode_context_parallel_size: Annotated[int, Parameter(alias="-dcp")] = 1
    dtype: Dtype = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.plan is None:
            return  # the other settings may be meant for another command
        check_device(self.device)
        for name in (
            "block_size",
            "max_model_len",
            "max_num_batched_tokens",
            "max_steps_in_flight",
            "kv_cache_bytes",
            "tensor_parallel_size",
            "decode_context_parallel_size",
        ):
            check_at_least(name, getattr(self, name), 1)
        check_context_parallel_size(self.decode_context_parallel_size, self.tensor_parallel_size)


def engine_options(settings: dict[str, Any]) -> EngineOptions:
    """EngineOptions from keyword arguments, also with vLLM's names. Raises ConfigError, with the
    known names, for an unknown one."""
    known = [setting.name for setting in fields(EngineOptions)]
    of_server = {each.name: each.default for each in fields(ServeOptions) if each.name not in known}
    given = {}
    for name, value in translate_settings(settings).items():
        if name in known:
            given[name] = value
        elif name not in of_server:
            raise ConfigError(f"{name} is not an engine setting; known are {', '.join(known)}")
        elif value != of_server[name]:
            raise ConfigError(
                f"{name} is a setting of `longshore serve`, not of an engine; remove it"
            )
    return EngineOptions(**given)
