"""Settings of one worker: plain values, set by the process that starts it."""

from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from longshore.connectors.base import ECTransferConfig
from longshore.protocol.errors import ConfigError
from longshore.protocol.handshake import EngineIdentity
from longshore.protocol.kv_cache_spec import KVCacheDtype
from longshore.protocol.transport.channel import Endpoint

LoadFormat: TypeAlias = Literal["auto", "dummy"]
AttentionBackendName: TypeAlias = Literal["auto", "triton", "torch", "flashinfer"]


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank loads and how much memory it uses. Raises ConfigError naming the wrong setting.

    model:               folder with config.json and safetensors files, in Hugging Face format.
    device:              "cpu", "cuda" or "cuda:N".
    load_format:         "auto" reads the weights from the folder; "dummy" fills them at random.
    dtype:               dtype of the computation; "auto" is the checkpoint's own.
    kv_cache_dtype:      dtype of keys and values; "auto" is the model's.
    block_size:          tokens per KV block.
    num_blocks:          size of the KV cache, null block included; None derives it from memory.
    kv_cache_bytes:      size of the KV cache if num_blocks is None.
    kv_memory_fraction:  share of the memory left after loading the weights that the KV cache takes
                         if neither of the above is given.
    gpu_memory_utilization: if none of the above is given, share of a GPU's total memory that
                         weights, activations, graphs and KV cache take together; None is
                         `memory_budget.DEFAULT_GPU_MEMORY_UTILIZATION`. Not for a CPU.
    max_num_seqs:        number of rows.
    max_num_batched_tokens: maximum tokens per step.
    max_num_scheduled_tokens: maximum tokens that the scheduler plans per step; None is
                         max_num_batched_tokens.
    max_steps_in_flight: maximum number of unanswered plans; None is one per pipeline stage, and two
                         with a single stage.
    max_model_len:       maximum tokens per request; None is the model's own limit.
    eos_token_ids:       not sampled until a request has min_tokens.
    num_ranks_on_device: ranks that measure and share the same memory.
    cpu_kernels:         "auto" uses the compiled kernels if they were built; "torch" uses torch.
    attention_backend:   kernels of paged attention. "auto" uses the Triton kernels on a GPU, with
                         FlashInfer for prompts if it is installed and faster; on a CPU as
                         cpu_kernels says.
    poison_kv:           fill blocks with a pattern before use, and verify that full ones do not
                         change.
    enforce_eager:       run every step kernel by kernel, never as a graph.
    routed_experts_fd:   descriptor of the memory that it shares with the scheduler, for the experts
                         chosen for each token; None: they are not captured.
    threads:             threads of CPU kernels; None keeps torch's setting.
    show_progress:       progress bars while loading and capturing; None shows them on a terminal
                         only.
    """

    model: str
    device: str = "cpu"
    load_format: LoadFormat = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    kv_memory_fraction: float | None = None
    gpu_memory_utilization: float | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_num_scheduled_tokens: int | None = None
    max_steps_in_flight: int | None = None
    max_model_len: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    num_ranks_on_device: int = 1
    cpu_kernels: Literal["auto", "torch"] = "auto"
    attention_backend: AttentionBackendName = "auto"
    threads: int | None = None
    poison_kv: bool = False
    enforce_eager: bool = False
    routed_experts_fd: int | None = None
    show_progress: bool | None = None

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "num_blocks",
            "kv_cache_bytes",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_num_scheduled_tokens",
            "max_steps_in_flight",
            "max_model_len",
            "num_ranks_on_device",
            "threads",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1.")
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise ConfigError(
                f"num_blocks={self.num_blocks} and kv_cache_bytes={self.kv_cache_bytes} both set "
                "the size of the KV cache. Give one of them."
            )
        check_memory_shares(self.kv_memory_fraction, self.gpu_memory_utilization, self.device)


def check_memory_shares(
    kv_memory_fraction: float | None, gpu_memory_utilization: float | None, device: str
) -> None:
    """Raise ConfigError unless the settings that size the KV cache by a share of the memory are
    valid, and fit each other and the device; `auto` is unknown yet."""
    shares = {
        "kv_memory_fraction": kv_memory_fraction,
        "gpu_memory_utilization": gpu_memory_utilization,
    }
    for name, share in shares.items():
        if share is not None and not 0 < share <= 1:
            raise ConfigError(f"{name}={share} must be above 0 and at most 1.")
    if None not in shares.values():
        raise ConfigError(
            f"kv_memory_fraction={kv_memory_fraction} and gpu_memory_utilization="
            f"{gpu_memory_utilization} both set the size of the KV cache: the first is a share of "
            "the memory left after loading the weights, the second of all memory of the GPU. Give "
            "one of them."
        )
    if gpu_memory_utilization is not None and device == "cpu":
        raise ConfigError(
            f"gpu_memory_utilization={gpu_memory_utilization} needs a GPU, and the device is a "
            "CPU, whose memory other programs use, too. Use num_blocks, or kv_memory_fraction, "
            "the share of the memory left after loading that the KV cache takes."
        )


class RankLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the ranks of an engine share a model: rank = stage * tensor_parallel_size + shard.

    decode_context_parallel_size: neighbouring shards that split the tokens of their KV cache; a
                divisor of tensor_parallel_size.
    cp_kv_cache_interleave_size: consecutive tokens that one of these shards stores.
    rendezvous: path of a file that all ranks can write and that does not exist yet; None for one
                rank.
    timeout_s:  how long a rank waits for another rank during a step.
    Raises ConfigError naming the wrong setting.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    cp_kv_cache_interleave_size: int = 1
    rendezvous: str | None = None
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for name in (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "decode_context_parallel_size",
            "cp_kv_cache_interleave_size",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.tensor_parallel_size % self.decode_context_parallel_size:
            raise ConfigError(
                f"decode_context_parallel_size={self.decode_context_parallel_size} does not divide "
                f"tensor_parallel_size={self.tensor_parallel_size}; shards split tokens in groups "
                "of equal size. Use a divisor."
            )
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s={self.timeout_s} must be above 0.")
        if self.num_ranks > 1 and self.rendezvous is None:
            raise ConfigError(f"{self.num_ranks} ranks need a rendezvous file. Set rendezvous.")

    @property
    def num_ranks(self) -> int:
        """Worker processes of the engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def sampling_rank(self) -> int:
        """The first shard of the last stage."""
        return self.num_ranks - self.tensor_parallel_size


class WorkerProcessConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a worker process: `python -m longshore.worker` reads them as JSON.

    identity:    what this rank must agree on with its scheduler; sizes and dtypes come from it.
    endpoint:    address of the scheduler for this rank; the worker connects to it.
    ranks:       layout of the engine's ranks.
    num_replicas: engines of the same size on this host; they share its CPU and memory.
    max_num_scheduled_tokens, max_steps_in_flight: see WorkerConfig. The tokens in flight determine
                 how many blocks a request can hold.
    threads:     threads of CPU kernels; None divides the physical cores among the ranks of all
                 engines.
    load_format, attention_backend, poison_kv, enforce_eager, routed_experts_fd: see WorkerConfig.
    startup_timeout_s: how long this rank waits for the other ranks and for its scheduler during
                 startup, warm-up included.
    step_timeout_s: how long a step may take, plus as long again for every 1,024 tokens.
    kv_connector: name of a registered connector, or package.module:Class.
    kv_connector_config: JSON with options that the connector defines.
    ec_transfer: the encoder connector; None: there is none.
    engine_id:   identifies the engine.
    state_dir:   see WorkerConnectorConfig.
    shared_memory_fd: inherited descriptor of the memory that the connector's worker halves share.
    kv_memory_fd: inherited descriptor of memory for the KV cache, which outlives the process; None:
                 the cache is this process's own.
    is_standby:  it takes the place of this rank only when the supervisor says so.
    late_imports: modules that a standby imports in advance.
    lifeline_fd: inherited descriptor that ties the process to its supervisor.
    runtime_dir: directory to remove if the supervisor dies.
    """

    model: str
    identity: EngineIdentity
    endpoint: Endpoint
    rank: int = 0
    ranks: RankLayout = RankLayout()
    num_replicas: int = 1
    device: str = "cpu"
    load_format: LoadFormat = "auto"
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    kv_memory_fraction: float | None = None
    gpu_memory_utilization: float | None = None
    max_num_scheduled_tokens: int | None = None
    max_steps_in_flight: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    cpu_kernels: Literal["auto", "torch"] = "auto"
    attention_backend: AttentionBackendName = "auto"
    threads: int | None = None
    poison_kv: bool = False
    enforce_eager: bool = False
    routed_experts_fd: int | None = None
    startup_timeout_s: float = 600.0
    step_timeout_s: float = 60.0
    kv_connector: str | None = None
    kv_connector_config: str = "{}"
    ec_transfer: ECTransferConfig | None = None
    engine_id: str = "engine"
    state_dir: str | None = None
    shared_memory_fd: int | None = None
    kv_memory_fd: int | None = None
    is_standby: bool = False
    late_imports: tuple[str, ...] = ()
    lifeline_fd: int | None = None
    runtime_dir: str | None = None
    log_level: str = "info"
    show_progress: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks.num_ranks:
            raise ConfigError(f"rank={self.rank} is outside 0..{self.ranks.num_ranks - 1}.")
        if self.num_replicas < 1:
            raise ConfigError(f"num_replicas={self.num_replicas} must be at least 1.")

    @property
    def num_ranks_on_device(self) -> int:
        """All ranks of all engines share the CPU; on GPUs each rank has its own."""
        return self.ranks.num_ranks * self.num_replicas if self.device == "cpu" else 1

    @property
    def worker(self) -> WorkerConfig:
        """The same settings without those of the process."""
        identity = self.identity
        return msgspec.convert(
            {
                "model": self.model,
                "device": self.device,
                "load_format": self.load_format,
                "dtype": identity.dtype,
                "kv_cache_dtype": identity.kv_cache_dtype,
                "block_size": identity.block_size,
                "num_blocks": self.num_blocks,
                "kv_cache_bytes": self.kv_cache_bytes,
                "kv_memory_fraction": self.kv_memory_fraction,
                "gpu_memory_utilization": self.gpu_memory_utilization,
                "max_num_seqs": identity.max_num_seqs,
                "max_num_batched_tokens": identity.max_num_batched_tokens,
                "max_num_scheduled_tokens": self.max_num_scheduled_tokens,
                "max_steps_in_flight": self.max_steps_in_flight,
                "max_model_len": identity.max_model_len,
                "eos_token_ids": self.eos_token_ids,
                "num_ranks_on_device": self.num_ranks_on_device,
                "cpu_kernels": self.cpu_kernels,
                "attention_backend": self.attention_backend,
                "threads": self.threads,
                "poison_kv": self.poison_kv,
                "enforce_eager": self.enforce_eager,
                "routed_experts_fd": self.routed_experts_fd,
                "show_progress": self.show_progress,
            },
            WorkerConfig,
        )


def load_config(path: Path) -> WorkerProcessConfig:
    """Read a worker's configuration. Raises ConfigError if the file does not hold one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=WorkerProcessConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: {error}") from error
