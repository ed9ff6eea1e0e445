"""Settings of one worker: plain values, decided by whoever starts it."""

from pathlib import Path
from typing import Literal

import msgspec

from longshore.protocol.errors import ConfigError
from longshore.protocol.handshake import EngineIdentity
from longshore.protocol.kv_cache_spec import KVCacheDtype
from longshore.protocol.transport.channel import Endpoint


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank loads and how much it may hold. Raises ConfigError naming the wrong setting.

    model:               folder with config.json and safetensors files, as Hugging Face writes it.
    device:              "cpu", "cuda" or "cuda:N".
    dtype:               that the model computes in; "auto" is the checkpoint's own.
    kv_cache_dtype:      of keys and values; "auto" is that of the model.
    block_size:          tokens per KV block.
    num_blocks:          size of the KV cache including the null block; None measures memory.
    kv_cache_bytes:      size of the KV cache when num_blocks is None.
    kv_memory_fraction:  share of the memory left after loading the weights that the KV cache takes
                         when neither of the above is given; None is the device's default
                         (`kv_cache.DEFAULT_MEMORY_FRACTION`).
    max_num_seqs:        rows.
    max_num_batched_tokens: tokens of one step at most.
    max_num_scheduled_tokens: tokens that the scheduler gives a step; None is as many as it can.
    max_steps_in_flight: plans that may be unanswered; None is one per pipeline stage, and two where
                         there is one stage.
    max_model_len:       tokens of one request at most; None is what the model was made for.
    eos_token_ids:       not sampled before a request has its min_tokens.
    num_ranks_on_device: ranks that measure and share the same memory.
    cpu_kernels:         "auto" is the compiled ones, if they were built; "torch" is plain torch.
    threads:             of CPU kernels; None leaves torch's setting.
    show_progress:       progress bar while loading; None shows it on a terminal.
    """

    model: str
    device: str = "cpu"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    kv_memory_fraction: float | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_num_scheduled_tokens: int | None = None
    max_steps_in_flight: int | None = None
    max_model_len: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    num_ranks_on_device: int = 1
    cpu_kernels: Literal["auto", "torch"] = "auto"
    threads: int | None = None
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
        fraction = self.kv_memory_fraction
        if fraction is not None and not 0 < fraction <= 1:
            raise ConfigError(f"kv_memory_fraction={fraction} must be above 0 and at most 1.")


class RankLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the ranks of an engine share a model: rank = stage * tensor_parallel_size + shard.

    decode_context_parallel_size: neighbouring shards that share the tokens of their KV cache; it
                divides tensor_parallel_size.
    cp_kv_cache_interleave_size: neighbouring tokens that one of them keeps.
    rendezvous: path of a file that all ranks can write and that does not exist before they meet;
                None for one rank.
    timeout_s:  how long a rank waits for another one in a step.
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
                f"tensor_parallel_size={self.tensor_parallel_size}: groups of shards share tokens."
            )
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s={self.timeout_s} must be above 0.")
        if self.num_ranks > 1 and self.rendezvous is None:
            raise ConfigError(f"{self.num_ranks} ranks need a rendezvous file to meet at.")

    @property
    def num_ranks(self) -> int:
        """Worker processes of the engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def sampling_rank(self) -> int:
        """The first shard of the last stage."""
        return self.num_ranks - self.tensor_parallel_size


class WorkerProcessConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker as a process of its own: `python -m longshore.worker` reads this as JSON.

    identity:    what this rank must agree on with its scheduler; sizes and dtypes come from it.
    endpoint:    the scheduler's, for this rank; the worker connects.
    ranks:       of the engine.
    num_replicas: engines of as many ranks on this host; they share its CPU and its memory.
    max_num_scheduled_tokens, max_steps_in_flight: see WorkerConfig; how much may be in flight says
                 how many blocks a request can hold.
    threads:     of CPU kernels; None shares the physical cores out among the ranks of all engines.
    startup_timeout_s: how long this rank waits for others, and for its scheduler, until all of them
                 are warm.
    lifeline_fd: inherited descriptor that ties the process to its supervisor.
    runtime_dir: removed when the supervisor is gone.
    """

    model: str
    identity: EngineIdentity
    endpoint: Endpoint
    rank: int = 0
    ranks: RankLayout = RankLayout()
    num_replicas: int = 1
    device: str = "cpu"
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    kv_memory_fraction: float | None = None
    max_num_scheduled_tokens: int | None = None
    max_steps_in_flight: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    cpu_kernels: Literal["auto", "torch"] = "auto"
    threads: int | None = None
    startup_timeout_s: float = 600.0
    lifeline_fd: int | None = None
    runtime_dir: str | None = None
    log_level: str = "info"
    show_progress: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks.num_ranks:
            raise ConfigError(f"rank={self.rank} is none of the {self.ranks.num_ranks} ranks.")
        if self.num_replicas < 1:
            raise ConfigError(f"num_replicas={self.num_replicas} must be at least 1.")

    @property
    def num_ranks_on_device(self) -> int:
        """All ranks of all engines share the CPU; each has a GPU of its own."""
        return self.ranks.num_ranks * self.num_replicas if self.device == "cpu" else 1

    @property
    def worker(self) -> WorkerConfig:
        """The same settings without the process around them."""
        identity = self.identity
        return msgspec.convert(
            {
                "model": self.model,
                "device": self.device,
                "dtype": identity.dtype,
                "kv_cache_dtype": identity.kv_cache_dtype,
                "block_size": identity.block_size,
                "num_blocks": self.num_blocks,
                "kv_cache_bytes": self.kv_cache_bytes,
                "kv_memory_fraction": self.kv_memory_fraction,
                "max_num_seqs": identity.max_num_seqs,
                "max_num_batched_tokens": identity.max_num_batched_tokens,
                "max_num_scheduled_tokens": self.max_num_scheduled_tokens,
                "max_steps_in_flight": self.max_steps_in_flight,
                "max_model_len": identity.max_model_len,
                "eos_token_ids": self.eos_token_ids,
                "num_ranks_on_device": self.num_ranks_on_device,
                "cpu_kernels": self.cpu_kernels,
                "threads": self.threads,
                "show_progress": self.show_progress,
            },
            WorkerConfig,
        )


def load_config(path: Path) -> WorkerProcessConfig:
    """Raises ConfigError for a file that is not a worker's configuration."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=WorkerProcessConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: {error}") from error
