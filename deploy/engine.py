"""From a user's settings to the configuration of an engine's processes."""

import secrets
from dataclasses import dataclass
from typing import Final

from longshore.connectors.registry import parse_options
from longshore.deploy.model_folder import ModelFolder
from longshore.deploy.options import EngineOptions
from longshore.deploy.process import ProcessSpec
from longshore.deploy.runtime_dir import RuntimeDir
from longshore.protocol.channel import Endpoint
from longshore.protocol.errors import ConfigError
from longshore.protocol.handshake import EngineIdentity, hash_seed_digest, model_fingerprint
from longshore.scheduler.config import CacheConfig, SchedulerConfig, SchedulerProcessConfig
from longshore.scheduler.policy import load_policy
from longshore.worker.config import WorkerConfig, WorkerProcessConfig

HASH_SEED_BYTES: Final = 32
# Processes that use numpy for counting need no pool of threads, nor the memory of their stacks.
NO_BLAS_THREADS: Final = {"OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class EnginePlan:
    """One engine with one worker: everything decided, nothing started.

    hash_seed: of this deployment's block names; it never leaves its processes.
    """

    options: EngineOptions
    model: ModelFolder
    device: str
    identity: EngineIdentity
    scheduler: SchedulerConfig
    cache: CacheConfig
    hash_seed: bytes


def plan_engine(options: EngineOptions, model: ModelFolder) -> EnginePlan:
    """Derive every component's settings. Raises ConfigError for settings that contradict."""
    _check_policy(options.scheduling_policy)
    parse_options(options.kv_connector_config)
    device = options.resolve_device()
    hash_seed = secrets.token_bytes(HASH_SEED_BYTES)
    cache = CacheConfig(
        block_size=options.block_size,
        num_blocks=options.num_blocks,
        enable_prefix_caching=options.enable_prefix_caching,
        hash_block_size=options.hash_block_size,
        watermark=options.watermark,
        preempt_threshold=options.preempt_threshold,
        admit_threshold=options.admit_threshold,
    )
    scheduler = SchedulerConfig(
        max_model_len=_max_model_len(options, model),
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_scheduled_tokens=options.max_num_scheduled_tokens,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        enable_chunked_prefill=options.enable_chunked_prefill,
        scheduler_reserve_full_isl=options.scheduler_reserve_full_isl,
        policy=options.scheduling_policy,
        load_failure_policy=options.load_failure_policy,
        load_timeout_s=options.load_timeout_s,
        max_loading_blocks=options.max_loading_blocks,
        max_steps_in_flight=2 if options.async_scheduling else 1,
    )
    identity = EngineIdentity(
        model_fingerprint=model_fingerprint(model.path),
        dtype=model.resolve_dtype(options.dtype, device),
        block_size=cache.block_size,
        max_model_len=scheduler.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        hash_seed_digest=hash_seed_digest(hash_seed),
    )
    return EnginePlan(options, model, device, identity, scheduler, cache, hash_seed)


def _check_policy(name: str) -> None:
    """Better said here than by a process that has waited for a model to load."""
    try:
        load_policy(name)
    except ConfigError as error:
        raise ConfigError(f"scheduling_policy={name!r}: {error}") from error


def worker_config(plan: EnginePlan) -> WorkerConfig:
    """The worker inside the caller's own process."""
    return _worker_process(plan, Endpoint("inproc://unused")).worker


def engine_processes(
    plan: EnginePlan, runtime_dir: RuntimeDir
) -> tuple[list[ProcessSpec], Endpoint]:
    """What to start, workers first, and where clients connect."""
    clients = runtime_dir.endpoint("clients")
    rank = runtime_dir.endpoint("worker-0")
    scheduler = SchedulerProcessConfig(
        scheduler=plan.scheduler,
        cache=plan.cache,
        identity=plan.identity,
        workers=(rank,),
        clients=clients,
        hash_seed=plan.hash_seed.hex(),
        vocab_size=plan.model.vocab_size,
        eos_token_ids=plan.model.eos_token_ids,
        verify_plan=plan.options.verify_plan,
        kv_connector=plan.options.kv_connector,
        kv_connector_config=plan.options.kv_connector_config,
        log_level=plan.options.log_level,
    )
    return [
        ProcessSpec("worker 0", "longshore.worker", _worker_process(plan, rank)),
        ProcessSpec("scheduler", "longshore.scheduler", scheduler, environment=NO_BLAS_THREADS),
    ], clients


def _worker_process(plan: EnginePlan, endpoint: Endpoint) -> WorkerProcessConfig:
    return WorkerProcessConfig(
        model=str(plan.model.path),
        identity=plan.identity,
        endpoint=endpoint,
        device=plan.device,
        num_blocks=plan.options.num_blocks,
        kv_memory_fraction=plan.options.kv_memory_fraction,
        threads=plan.options.threads,
        log_level=plan.options.log_level,
    )


def _max_model_len(options: EngineOptions, model: ModelFolder) -> int:
    """As asked for; else what the model was made for, cut to what the blocks asked for hold."""
    if options.max_model_len is None:
        if options.num_blocks is None:
            return model.max_model_len
        usable_tokens = (options.num_blocks - 1) * options.block_size  # without the null block
        return max(min(model.max_model_len, usable_tokens), 1)
    if options.max_model_len > model.max_model_len:
        raise ConfigError(
            f"max_model_len={options.max_model_len}, but {model.path.name} was made for "
            f"{model.max_model_len} tokens (max_position_embeddings in its config.json)"
        )
    return options.max_model_len
