"""The settings a user gives, on the command line or to `LLM`, before anything is derived."""

import importlib.metadata
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

from cyclopts import Group, Parameter

from longshore.deploy.supervisor.log_lines import LogFormat
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import KVCacheDtype

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


# Headings of `--help`, in this order.
_MODEL: Final = Parameter(group=Group.create_ordered("Model"))
_SERVER: Final = Parameter(group=Group.create_ordered("Server"))
_CACHE: Final = Parameter(group=Group.create_ordered("KV cache"))
_SCHEDULING: Final = Parameter(group=Group.create_ordered("Scheduling"))
_RANKS: Final = Parameter(group=Group.create_ordered("Several workers"))
_CONNECTOR: Final = Parameter(group=Group.create_ordered("KV beyond the device"))
_OPERATION: Final = Parameter(group=Group.create_ordered("Operation"))


def _demo_model(folder: Path) -> str:
    return "the bundled demo model"


SHOWN_AS_DEMO_MODEL: Final = Parameter(show_default=_demo_model)
"""Of a model that is the bundled one by default: its folder differs from machine to machine."""

MAX_TIMEOUT_S: Final = 7 * 24 * 3600
MAX_AUDIO_S: Final = 24 * 3600
# Far beyond what makes sense; larger numbers are typing errors that would end in a traceback.
_MOST: Final = {
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
}
MAX_PROCESSES: Final = 64  # replicas, and gateways


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """One engine: a scheduler and its workers. Raises ConfigError naming a wrong setting.

    Attributes:
        device: Where the model runs: cpu, cuda or cuda:N. auto takes a GPU if there is one. Several
            workers take the GPUs 0, 1 and so on, or share the CPU.
        tensor_parallel_size: Workers that share every layer of the model.
        pipeline_parallel_size: Stages that the layers are cut into, each with workers of its own.
        decode_context_parallel_size: Workers of a layer with the same KV heads that share the
            tokens of the KV cache out, so that so many times the tokens fit. Adds no workers: a
            divisor of the copies of a KV head that tensor_parallel_size makes; of it itself for
            models with latents.
        cp_kv_cache_interleave_size: Neighbouring tokens that one of these workers keeps; a divisor
            of block_size.
        rank_timeout_s: How long a worker waits for another one in a step before it gives up.
        dtype: Of weights and KV cache. auto is what the checkpoint is stored in (float16 becomes
            float32 on a CPU).
        kv_cache_dtype: Of keys and values in the cache. auto is dtype; fp8_e4m3 takes a byte per
            number, so that more tokens fit, and rounds them to four significant bits.
        num_blocks: Blocks in the KV cache, the null block included. Default: what memory holds.
        kv_memory_fraction: Share of the memory left after loading that the KV cache takes, when
            the number of blocks is not given.
        block_size: Tokens per block, a power of two. Default: 16; 256 for models that keep states
            alone.
        hash_block_size: Tokens per name in the prefix cache, a divisor of block_size. Default:
            block_size.
        max_num_seqs: Requests that run at the same time.
        max_num_batched_tokens: Tokens that one step computes at most.
        max_num_scheduled_tokens: Tokens that one step is given to compute. Default: as many as it
            can, max_num_batched_tokens.
        max_num_encoder_input_tokens: Tokens that the encoder of a speech model makes in one step at
            most, which limits how many requests begin in it. Default: those of one request.
        max_model_len: Tokens of one request, prompt and answer. Default: what the model was made
            for, and not more than num_blocks hold.
        scheduling_policy: Who runs first: fcfs by arrival, priority by the request's priority,
            continuum by the first arrival of the request's job; or the name of an installed
            policy, or package.module:Class.
        async_scheduling: Plan a step before the tokens of the one before are known. Default: yes,
            except with several pipeline stages, which have other steps to run meanwhile.
        enable_prefix_caching: Share the KV blocks of equal prefixes.
        enable_chunked_prefill: Slice prompts that exceed what is left of a step.
        long_prefill_token_threshold: Tokens of one prompt per step at most; 0 sets no limit.
        scheduler_reserve_full_isl: Admit a request only when blocks for its whole prompt are free,
            not just for its first slice.
        watermark: Share of the blocks that admissions leave free for requests that run already; 0
            leaves none.
        preempt_threshold: Nothing more is admitted once the share of blocks in use is above this;
            1 never holds anything up.
        admit_threshold: Admissions go on once the share of blocks in use is below this.
        kv_connector: What keeps KV beyond the device (refused until workers have their half of
            the contract): the name of an installed connector, or package.module:Class. Default:
            nothing does.
        kv_connector_config: Settings of the connector, a JSON object.
        load_failure_policy: A request whose KV the connector could not load computes it, or fails.
        load_timeout_s: How long a request waits for an asynchronous load of the connector.
        max_loading_blocks: Blocks held at most by requests that wait for loads, or that have loaded
            and do not run yet. Default: half of them.
        cpu_kernels: auto computes with the kernels that were compiled at installation, if there are
            any; torch with plain torch, which is slower.
        threads: CPU threads of each worker. Default: the physical cores, shared out among them.
        seed: Makes the seeds repeatable that are given to requests without one.
        verify_plan: Send the full state beside every plan and compare (slow; finds faults).
        startup_timeout_s: How long loading may take.
        log_level: Least level of the log lines shown.
    """

    device: Annotated[str, _MODEL] = "auto"
    tensor_parallel_size: Annotated[int, _RANKS] = 1
    pipeline_parallel_size: Annotated[int, _RANKS] = 1
    decode_context_parallel_size: Annotated[int, _RANKS, Parameter(alias="-dcp")] = 1
    cp_kv_cache_interleave_size: Annotated[int, _RANKS] = 1
    rank_timeout_s: Annotated[float, _RANKS] = 120.0
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], _MODEL] = "auto"
    kv_cache_dtype: Annotated[KVCacheDtype, _CACHE] = "auto"
    num_blocks: Annotated[int | None, _CACHE] = None
    kv_memory_fraction: Annotated[float | None, _CACHE] = None
    block_size: Annotated[int | None, _CACHE] = None
    hash_block_size: Annotated[int | None, _CACHE] = None
    max_num_seqs: Annotated[int, _SCHEDULING] = 256
    max_num_batched_tokens: Annotated[int, _SCHEDULING] = 2048
    max_num_scheduled_tokens: Annotated[int | None, _SCHEDULING] = None
    max_num_encoder_input_tokens: Annotated[int | None, _MODEL] = None
    max_model_len: Annotated[int | None, _MODEL] = None
    scheduling_policy: Annotated[str, _SCHEDULING] = "fcfs"
    async_scheduling: Annotated[bool | None, _SCHEDULING] = None
    enable_prefix_caching: Annotated[bool, _CACHE] = True
    enable_chunked_prefill: Annotated[bool, _SCHEDULING] = True
    long_prefill_token_threshold: Annotated[int, _SCHEDULING] = 0
    scheduler_reserve_full_isl: Annotated[bool, _SCHEDULING] = False
    watermark: Annotated[float, _SCHEDULING] = 0.01
    preempt_threshold: Annotated[float, _SCHEDULING] = 0.95
    admit_threshold: Annotated[float, _SCHEDULING] = 0.80
    kv_connector: Annotated[str | None, _CONNECTOR] = None
    kv_connector_config: Annotated[str, _CONNECTOR] = field(default="{}", repr=False)
    load_failure_policy: Annotated[Literal["recompute", "fail"], _CONNECTOR] = "recompute"
    load_timeout_s: Annotated[float, _CONNECTOR] = 60.0
    max_loading_blocks: Annotated[int | None, _CONNECTOR] = None
    cpu_kernels: Annotated[Literal["auto", "torch"], _MODEL] = "auto"
    threads: Annotated[int | None, _MODEL] = None
    seed: Annotated[int | None, _MODEL] = None
    verify_plan: Annotated[bool, _OPERATION] = False
    startup_timeout_s: Annotated[float, _OPERATION] = 600.0
    log_level: Annotated[LogLevel, _OPERATION] = "info"

    def __post_init__(self) -> None:
        check_device(self.device)
        for name, allowed in (
            ("dtype", ("auto", "float32", "bfloat16", "float16")),
            ("kv_cache_dtype", get_args(KVCacheDtype)),
            ("load_failure_policy", ("recompute", "fail")),
            ("log_level", get_args(LogLevel)),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is unknown; use one of {', '.join(allowed)}"
                )
        for name, most in _MOST.items():
            check_range(name, getattr(self, name), 1, most)
        fraction = self.kv_memory_fraction
        if fraction is not None and not 0 < fraction <= 1:
            raise ConfigError(f"kv_memory_fraction={fraction} must be above 0 and at most 1")
        for name in ("startup_timeout_s", "load_timeout_s", "rank_timeout_s"):
            check_duration(name, getattr(self, name))
        if self.num_ranks > 1 and ":" in self.device:
            raise ConfigError(
                f"device={self.device!r} names one GPU, but tensor_parallel_size="
                f"{self.tensor_parallel_size} and pipeline_parallel_size="
                f"{self.pipeline_parallel_size} take {self.num_ranks}. Use device='cuda'; "
                "CUDA_VISIBLE_DEVICES chooses which."
            )
        check_context_parallel_size(self.decode_context_parallel_size, self.tensor_parallel_size)
        if self.decode_context_parallel_size == 1 < self.cp_kv_cache_interleave_size:
            raise ConfigError(
                f"cp_kv_cache_interleave_size={self.cp_kv_cache_interleave_size}, but no workers "
                "that share tokens: decode_context_parallel_size is 1. Raise that or leave "
                "cp_kv_cache_interleave_size out."
            )
        if self.async_scheduling and self.pipeline_parallel_size > 1:
            raise ConfigError(
                f"async_scheduling with pipeline_parallel_size={self.pipeline_parallel_size}: the "
                "first stage learns the tokens of a step from the next plan. Leave "
                "async_scheduling out; as many steps as there are stages run at a time anyway."
            )
        if self.kv_connector is None and self.kv_connector_config != "{}":
            raise ConfigError(
                "kv_connector_config is given, but no kv_connector that it could be for"
            )

    @property
    def num_ranks(self) -> int:
        """Worker processes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def max_steps_in_flight(self) -> int:
        """Unanswered plans: one per pipeline stage, or one ahead of the tokens."""
        if self.pipeline_parallel_size > 1:
            return self.pipeline_parallel_size
        return 1 if self.async_scheduling is False else 2


@dataclass(frozen=True, kw_only=True)
class ServeOptions(EngineOptions):
    """A deployment: engines behind the OpenAI-compatible API.

    Attributes:
        replicas: Engines with the same model and settings, each with a scheduler and workers of its
            own; a prompt goes to the one with the least to do. Several take the GPUs in their
            order, or share the CPU and its memory.
        gateways: Processes that serve the port, for when one alone is busy all the time.
        host: Address to listen on; 0.0.0.0 is every interface.
        port: Port to listen on; 0 takes a free one.
        served_model_name: What requests call the model. Default: the name of its folder, or its id
            on the hub.
        chat_template: File with a Jinja chat template, instead of the model's own.
        max_body_mib: Size of a request body at most, without audio.
        max_audio_mib: Size of an audio file at most.
        max_audio_s: Length of its sound at most.
        max_live_requests: Answers under way at most in all engines, running or waiting; further
            requests get a 429 with Retry-After. A gateway knows of the others' what the engines say
            once a second.
        api_key: Clients must present one of these keys; without any, everybody is served. Better
            given as LONGSHORE_API_KEY or in a file: other users see command lines.
        cors_allow_origins: Pages of these origins (https://app.example.org) may use the API from a
            browser; * stands for all. Default: none.
        log_format: Of the lines on standard error: for people, or a JSON object each.
        unread_timeout_s: A client that has read nothing of a waiting answer for so long is dropped.
        drain_timeout_s: How long running answers may take to finish after SIGTERM.
    """

    replicas: Annotated[int, _RANKS] = 1
    gateways: Annotated[int, _SERVER] = 1
    host: Annotated[str, _SERVER] = "127.0.0.1"
    port: Annotated[int, _SERVER] = 8000
    served_model_name: Annotated[str | None, _SERVER] = None
    chat_template: Annotated[Path | None, _SERVER] = None
    max_body_mib: Annotated[int, _SERVER] = 16
    max_audio_mib: Annotated[int, _SERVER] = 25
    max_audio_s: Annotated[float, _SERVER] = 3600.0
    max_live_requests: Annotated[int, _SERVER] = 16_384
    api_key: Annotated[tuple[str, ...] | None, _SERVER] = field(default=None, repr=False)
    cors_allow_origins: Annotated[tuple[str, ...] | None, _SERVER] = None
    log_format: Annotated[LogFormat, _OPERATION] = "text"
    unread_timeout_s: Annotated[float, _OPERATION] = 60.0
    drain_timeout_s: Annotated[float, _OPERATION] = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("replicas", self.replicas, 1, MAX_PROCESSES)
        check_range("gateways", self.gateways, 1, MAX_PROCESSES)
        if self.replicas > 1 and ":" in self.device:
            raise ConfigError(
                f"device={self.device!r} names one GPU, but replicas={self.replicas} take "
                f"{self.num_ranks * self.replicas}. Use device='cuda'; CUDA_VISIBLE_DEVICES "
                "chooses which."
            )
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port={self.port} must lie between 0 and 65535")
        check_at_least("max_body_mib", self.max_body_mib, 1)
        check_at_least("max_audio_mib", self.max_audio_mib, 1)
        if not 0 < self.max_audio_s <= MAX_AUDIO_S:
            raise ConfigError(
                f"max_audio_s={self.max_audio_s} must be above 0 and at most {MAX_AUDIO_S}: an "
                "audio is held in memory as a whole"
            )
        check_at_least("max_live_requests", self.max_live_requests, 1)
        keys = self.api_key
        if keys is not None and not (keys and all(re.fullmatch(r"[!-~]+", key) for key in keys)):
            raise ConfigError(
                "api_key: give one or several keys, each of visible ASCII characters without "
                "spaces, or leave it out to serve everybody"
            )
        for origin in self.cors_allow_origins or ():
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#]+", origin):
                raise ConfigError(
                    f"cors_allow_origins={origin!r} is no origin; give SCHEME://HOST[:PORT] "
                    "without a path, as the browser sends it, or * for all"
                )
        if not 0 <= self.drain_timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"drain_timeout_s={self.drain_timeout_s} must lie between 0 and {MAX_TIMEOUT_S}"
            )
        if not 0 < self.unread_timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"unread_timeout_s={self.unread_timeout_s} must be above 0 and at most "
                f"{MAX_TIMEOUT_S}"
            )


@dataclass(frozen=True, kw_only=True)
class CachePlanOptions:
    """What the KV cache of a model will hold.

    Attributes:
        plan: Plan the KV cache of this model (a folder or an id on a model hub) instead of asking
            an engine: its groups, what they cost, and how many tokens fit.
        block_size: Tokens per block, a power of two. Default: the same as when serving.
        max_model_len: Tokens of the longest request. Default: what the model was made for.
        max_num_batched_tokens: Tokens of one step at most.
        max_steps_in_flight: Plans that may be unanswered.
        kv_cache_bytes: Size of the cache of one rank.
        tensor_parallel_size: Ranks among which every layer is cut.
        decode_context_parallel_size: Ranks that share the tokens of the cache out. The tokens that
            fit are compared with those that fit without.
        dtype: Of weights and KV.
        kv_cache_dtype: Of keys and values. With fp8_e4m3 the tokens that fit are compared with
            those that fit in dtype.
        device: "auto" dtype is float32 on a CPU for a checkpoint in float16.
    """

    plan: str | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    max_steps_in_flight: int = 2
    kv_cache_bytes: int = 4 << 30
    tensor_parallel_size: int = 1
    decode_context_parallel_size: Annotated[int, Parameter(alias="-dcp")] = 1
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.plan is None:
            return  # the rest may be meant for another command
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


def check_device(device: str) -> None:
    """Raise ConfigError for what names no device."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ConfigError(f"device={device!r} is unknown; use auto, cpu, cuda or cuda:N")


def resolve_device(device: str) -> str:
    """`auto` is `cuda` where the driver is loaded and the installed torch is not a CPU build.

    Found without importing torch, which only the worker does.
    """
    if device != "auto":
        return device
    has_driver = Path("/dev/nvidiactl").exists()
    return "cuda" if has_driver and not _torch_version().endswith("+cpu") else "cpu"


def check_context_parallel_size(size: int, tensor_parallel_size: int) -> None:
    """Raise ConfigError unless groups of `size` shards can be made."""
    if tensor_parallel_size % size:
        raise ConfigError(
            f"decode_context_parallel_size={size} does not divide tensor_parallel_size="
            f"{tensor_parallel_size}: groups of its workers share tokens. Raise "
            "tensor_parallel_size or use a divisor of it."
        )


def check_range(name: str, value: int | None, least: int, most: int) -> None:
    """Raise ConfigError naming the setting if it is given and outside least..most."""
    if value is not None and not least <= value <= most:
        raise ConfigError(f"{name}={value} must lie between {least} and {most}")


def check_duration(name: str, seconds: float) -> None:
    """Raise ConfigError naming the setting unless it is positive, and not absurd."""
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise ConfigError(f"{name}={seconds} must be above 0 and at most {MAX_TIMEOUT_S}")


def check_at_least(name: str, value: int | None, minimum: int) -> None:
    """Raise ConfigError naming the setting if it is given and too small."""
    if value is not None and value < minimum:
        raise ConfigError(f"{name}={value} must be at least {minimum}")


def engine_options(settings: dict[str, Any]) -> EngineOptions:
    """EngineOptions from keyword arguments; raises ConfigError listing the names if one is none."""
    known = [setting.name for setting in fields(EngineOptions)]
    for name in settings:
        if name not in known:
            raise ConfigError(f"{name} is no setting of an engine; known are {', '.join(known)}")
    return EngineOptions(**settings)


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
