"""Settings of one worker: plain values, set by the process that starts it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from longshore.connectors.base import ECTransferConfig
from longshore.protocol.commands import LogLevel
from longshore.protocol.errors import ConfigError
from longshore.protocol.handshake import EngineIdentity, model_fingerprint
from longshore.protocol.kv_cache_spec import KVCacheDtype
from longshore.protocol.settings import Duration, Setting, Settings
from longshore.protocol.transport.channel import Endpoint
from longshore.worker.drafting.config import SpeculativeConfig, parse_speculative_config

Dtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
AttentionBackendName: TypeAlias = Literal["auto", "triton", "torch", "flashinfer"]
QuantisedProducts: TypeAlias = Literal["exact", "int8", "exact on a GPU", "fp8 on a GPU"]
"""How matrices are multiplied that are in the format of a quantised checkpoint. exact: as the
matrix in the input's dtype would be. int8: each 32 elements of an input are rounded to integers of
eight bits and a scale. fp8: inputs of matrices in FP8 are rounded to FP8, with as many scales as a
row of the matrix has."""

ON_GPU: Final = "exact on a GPU", "fp8 on a GPU"

_SIZES: Final = (
    "dtype",
    "kv_cache_dtype",
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
)
"""What the ranks and the scheduler must agree on."""


def exact_products(device: str, dtype: str) -> QuantisedProducts | None:
    """What the kernels of a device can multiply; None: no quantised matrix. device: its type."""
    if device == "cuda":
        return "exact on a GPU"
    return "exact" if device == "cpu" and dtype in ("float32", "bfloat16") else None


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(Settings):
    """What users can set of a worker: where and how it computes, and how much memory it uses."""

    device: Annotated[
        str,
        Setting(
            "Model",
            "Device that runs the model: cpu, cuda or cuda:N. auto selects a GPU if there is one. "
            "Several workers use GPUs 0, 1 and so on, or share the CPU.",
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"],
        Setting(
            "Model",
            "auto reads the weights from the model's folder; dummy fills them at random, to "
            "measure a model of which there is only a config.json.",
        ),
    ] = "auto"
    dtype: Annotated[
        Dtype,
        Setting(
            "Model",
            "Data type of weights and KV cache. auto uses that of the checkpoint (float16 becomes "
            "float32 on a CPU).",
        ),
    ] = "auto"
    quantised_weights: Annotated[
        Literal["auto", "int8", "fp8", "dequantised"],
        Setting(
            "Model",
            "How a quantised model is computed. auto multiplies by its weights as they are stored "
            "if there are kernels for their format, with the same results as if they had been "
            "dequantised to dtype, on a GPU but for the order of sums; int8 does the same with "
            "inputs that are rounded to eight bits, which is faster and less exact (CPU only); fp8 "
            "rounds those of weights in FP8 to FP8 (GPU only, from compute capability 8.9 on); "
            "dequantised does it once, when it loads.",
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        Setting(
            "KV cache",
            "Data type of keys and values in the cache. auto uses dtype. fp8_e4m3 needs one byte "
            "per element, so more tokens fit, and rounds to four significant bits.",
        ),
    ] = "auto"
    kv_memory_fraction: Annotated[
        float | None,
        Setting(
            "KV cache",
            "Fraction of the memory left after loading to use for the KV cache, if num_blocks is "
            "not set.",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        Setting(
            "KV cache",
            "Fraction of a GPU's whole memory that weights, activations, CUDA graphs and KV cache "
            "take together, if neither num_blocks nor kv_memory_fraction is set. Memory of other "
            "processes counts as taken. Default on a GPU: 0.9.",
        ),
    ] = None
    cpu_kernels: Annotated[
        Literal["auto", "torch"],
        Setting(
            "Model",
            "auto uses the kernels compiled at installation, if there are any; torch uses plain "
            "PyTorch, which is slower.",
        ),
    ] = "auto"
    attention_backend: Annotated[
        AttentionBackendName,
        Setting(
            "Model",
            "Kernels of attention. auto uses the Triton kernels on a GPU, with FlashInfer for "
            "prompts if it is installed, computes the same as torch and is faster; on a CPU, what "
            "cpu_kernels says. triton and flashinfer need a GPU; flashinfer falls back to triton, "
            "with a warning, where it cannot compute a layer. torch is slower.",
        ),
    ] = "auto"
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Setting(
            "Model",
            "CPU threads per worker. Default: the physical cores, or the cores of the CPU quota if "
            "these are fewer, divided among the workers.",
        ),
    ] = None
    enforce_eager: Annotated[
        bool,
        Setting(
            "Model",
            "Run every step kernel by kernel. By default decode steps run as graphs, which are "
            "captured at start-up: CUDA graphs on a GPU, and on a CPU where that is faster.",
        ),
    ] = False
    speculative_config: Annotated[
        str | None,
        Setting(
            "Speculative decoding",
            "How drafts are made that a step verifies, as a JSON object with vLLM's names: method "
            "(ngram, suffix, draft_model, mtp, eagle3 or an installed drafter), "
            "num_speculative_tokens, and what the method takes (docs/speculation.md). Tokens are "
            "those without drafts; steps are then planned one at a time. Default: no drafts.",
        ),
    ] = None
    poison_kv: Annotated[
        bool,
        Setting(
            "Operation",
            "Fill KV blocks with a pattern before their first token is written, and stop if a "
            "full block changes while a request holds it (slow; for debugging).",
        ),
    ] = False

    def quantised_products(self, device: str, dtype: str) -> QuantisedProducts | None:
        """How quantised matrices are multiplied if there are kernels for their format; None: as
        floats. device: its type; dtype: of the computation.

        Raises ConfigError if only int8 or fp8 will do, and cannot be had.
        """
        has_kernels = device != "cpu" or self.cpu_kernels == "auto"
        products = exact_products(device, dtype) if has_kernels else None
        match self.quantised_weights, products:
            case "dequantised", _:
                return None
            case "int8", "exact":
                return "int8"
            case "int8", _:
                raise ConfigError(
                    f"quantised_weights=int8 needs the CPU kernels, and dtype float32 or bfloat16; "
                    f"here are device={device}, dtype={dtype} and cpu_kernels={self.cpu_kernels}"
                )
            case "fp8", "exact on a GPU":
                return "fp8 on a GPU"
            case "fp8", _:
                raise ConfigError(f"quantised_weights=fp8 needs a GPU, but device is {device}")
        return products

    @property
    def drafts(self) -> SpeculativeConfig | None:
        """How drafts are made; None: there are none. Raises ConfigError."""
        text = self.speculative_config
        return None if text is None else parse_speculative_config(text)

    def fingerprint(self, model_dir: Path) -> str:
        """`model_fingerprint` of a model that is computed with these settings: rounded inputs give
        other keys and values, which no other engine may take for its own, and a drafter with
        weights has keys and values in the same blocks."""
        found, products = model_fingerprint(model_dir), self.quantised_weights
        if products in ("int8", "fp8"):
            found += f"-{products}"
        drafts = self.drafts
        if drafts is not None and drafts.keeps_kv:
            found += f"-{drafts.method}"
            if drafts.model is not None:
                found += f"-{model_fingerprint(Path(drafts.model))}"
        return found

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.drafts
        check_memory_shares(self.kv_memory_fraction, self.gpu_memory_utilization)


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(WorkerSettings):
    """What one rank loads and how much memory it uses. Raises ConfigError naming the wrong setting.

    model:               folder with config.json and safetensors files, in Hugging Face format.
    device:              "cpu", "cuda" or "cuda:N".
    block_size:          tokens per KV block.
    num_blocks:          size of the KV cache, null block included; None derives it from memory.
    kv_cache_bytes:      size of the KV cache if num_blocks is None. If neither is given, the
                         settings that are shares of the memory say it.
    max_num_seqs:        number of rows.
    max_num_batched_tokens: maximum tokens per step.
    max_num_scheduled_tokens: maximum tokens that the scheduler plans per step; None is
                         max_num_batched_tokens. They determine with max_steps_in_flight how many
                         blocks a request can hold.
    max_steps_in_flight: maximum number of unanswered plans; None is one per pipeline stage, and two
                         with a single stage.
    max_model_len:       maximum tokens per request; None is the model's own limit.
    eos_token_ids:       not sampled until a request has min_tokens.
    num_ranks_on_device: ranks that measure and share the same memory.
    routed_experts_fd:   descriptor of the memory that it shares with the scheduler, for the experts
                         chosen for each token; None: they are not captured.
    show_progress:       progress bars while loading and capturing; None shows them on a terminal
                         only.
    """

    model: str
    device: str = "cpu"
    block_size: Annotated[int, Meta(ge=1)] = 16
    num_blocks: Annotated[int, Meta(ge=1)] | None = None
    kv_cache_bytes: Annotated[int, Meta(ge=1)] | None = None
    max_num_seqs: Annotated[int, Meta(ge=1)] = 256
    max_num_batched_tokens: Annotated[int, Meta(ge=1)] = 2048
    max_num_scheduled_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_steps_in_flight: Annotated[int, Meta(ge=1)] | None = None
    max_model_len: Annotated[int, Meta(ge=1)] | None = None
    eos_token_ids: tuple[int, ...] = ()
    num_ranks_on_device: Annotated[int, Meta(ge=1)] = 1
    routed_experts_fd: int | None = None
    show_progress: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise ConfigError(
                f"num_blocks={self.num_blocks} and kv_cache_bytes={self.kv_cache_bytes} both set "
                "the size of the KV cache. Give one of them."
            )


def check_memory_shares(
    kv_memory_fraction: float | None, gpu_memory_utilization: float | None
) -> None:
    """Raise ConfigError unless the settings that size the KV cache by a share of the memory are
    valid, and fit each other."""
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


@dataclass(frozen=True, kw_only=True)
class RankSettings(Settings):
    """What users can set of the ranks of an engine: how they divide a model, and how long they
    wait."""

    tensor_parallel_size: Annotated[
        int,
        Meta(ge=1, le=64),
        Setting(
            "Several workers", "Number of workers that every layer is split across.", alias="-tp"
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Meta(ge=1, le=64),
        Setting(
            "Several workers",
            "Number of stages that the layers are divided into. Each stage has its own workers.",
            alias="-pp",
        ),
    ] = 1
    decode_context_parallel_size: Annotated[
        int,
        Meta(ge=1, le=64),
        Setting(
            "Several workers",
            "Number of workers with the same KV heads that split the tokens of the KV cache among "
            "them. Multiplies the tokens that fit and adds no workers. Must divide the number of "
            "copies of each KV head that tensor_parallel_size creates; for models with latents it "
            "must divide tensor_parallel_size.",
            alias="-dcp",
        ),
    ] = 1
    cp_kv_cache_interleave_size: Annotated[
        int,
        Meta(ge=1, le=1 << 20),
        Setting(
            "Several workers",
            "Number of consecutive tokens that one of these workers stores; a divisor of "
            "block_size.",
        ),
    ] = 1
    rank_timeout_s: Annotated[
        Duration,
        Setting(
            "Several workers",
            "Seconds that a worker waits for another worker within a step before it fails.",
        ),
    ] = 120.0
    startup_timeout_s: Annotated[
        Duration,
        Setting("Operation", "Seconds that startup may take, including loading the model."),
    ] = 600.0
    step_timeout_s: Annotated[
        Duration,
        Setting(
            "Operation",
            "Seconds that a step may take, and as many again for every 1,024 tokens that it "
            "computes; then the worker counts as hung.",
        ),
    ] = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_context_parallel_size(self.decode_context_parallel_size, self.tensor_parallel_size)
        if self.decode_context_parallel_size == 1 < self.cp_kv_cache_interleave_size:
            raise ConfigError(
                f"cp_kv_cache_interleave_size={self.cp_kv_cache_interleave_size} has no effect: "
                "decode_context_parallel_size is 1, so no workers share tokens. Raise "
                "decode_context_parallel_size or remove cp_kv_cache_interleave_size."
            )

    @property
    def num_ranks(self) -> int:
        """Number of worker processes of the engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, kw_only=True)
class RankLayout(RankSettings):
    """How the ranks of an engine share a model: rank = stage * tensor_parallel_size + shard.

    rendezvous: path of a file that all ranks can write and that does not exist yet; None for one
                rank.
    Raises ConfigError naming the wrong setting.
    """

    rendezvous: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_ranks > 1 and self.rendezvous is None:
            raise ConfigError(f"{self.num_ranks} ranks need a rendezvous file. Set rendezvous.")

    @property
    def sampling_rank(self) -> int:
        """The first shard of the last stage."""
        return self.num_ranks - self.tensor_parallel_size


def check_context_parallel_size(size: int, tensor_parallel_size: int) -> None:
    """Raise ConfigError unless the shards can be divided into groups of `size`."""
    if tensor_parallel_size % size:
        raise ConfigError(
            f"decode_context_parallel_size={size} does not divide tensor_parallel_size="
            f"{tensor_parallel_size}, whose workers form the groups that share tokens. Use a "
            "divisor of tensor_parallel_size."
        )


class WorkerProcessConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a worker process: `python -m longshore.worker` reads them as JSON.

    identity:    what this rank must agree on with its scheduler.
    endpoint:    address of the scheduler for this rank; the worker connects to it.
    worker:      the rank itself. Without its threads, `default_threads` divides the cores among the
                 ranks on the device.
    ranks:       layout of the engine's ranks.
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

    identity: EngineIdentity
    endpoint: Endpoint
    worker: WorkerConfig
    rank: int = 0
    ranks: RankLayout = RankLayout()
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
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks.num_ranks:
            raise ConfigError(f"rank={self.rank} is outside 0..{self.ranks.num_ranks - 1}.")
        for name in _SIZES:
            own, agreed = getattr(self.worker, name), getattr(self.identity, name)
            if own != agreed:
                raise ConfigError(f"{name}={own} of the worker is {agreed} in the identity")
