"""Derives the configuration of an engine's processes from the user's settings."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from longshore.connectors.base import ECTransferConfig
from longshore.connectors.encoder_registry import check_encoder_connector
from longshore.connectors.registry import (
    check_connector,
    check_verify_kv,
    parse_options,
    uses_shared_memory,
)
from longshore.deploy.cli.options import EngineOptions
from longshore.deploy.machine.device import resolve_device
from longshore.deploy.model.folder import ModelFolder
from longshore.deploy.supervisor.connector_options import p2p_host, with_variables
from longshore.deploy.supervisor.interfaces import LOOPBACK, interface_of
from longshore.deploy.supervisor.kv_events import kv_events_config
from longshore.deploy.supervisor.process import ProcessSpec
from longshore.deploy.supervisor.replica import Replica
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.deploy.supervisor.state_dir import StateDir
from longshore.protocol.errors import ConfigError
from longshore.protocol.events import KVEventsConfig
from longshore.protocol.handshake import EngineIdentity, hash_seed_digest, model_fingerprint
from longshore.protocol.kv_cache_spec import (
    KVCacheGroup,
    KVCacheSpec,
    LongestRequest,
    check_holds_one_request,
    num_blocks_needed,
)
from longshore.protocol.model_files import exists
from longshore.protocol.transport.channel import Endpoint
from longshore.scheduler.config import (
    CacheConfig,
    SchedulerConfig,
    SchedulerProcessConfig,
    StructuredOutputBackend,
    StructuredOutputConfig,
    check_preemption_mode,
    check_states,
)
from longshore.scheduler.queue.outside_policies import load_policy
from longshore.scheduler.structured_output.schema_support import installed_backends
from longshore.worker.config import (
    RankLayout,
    WorkerConfig,
    WorkerProcessConfig,
    check_memory_shares,
)
from longshore.worker.kv_cache.context_share import check_context_parallel
from longshore.worker.kv_cache.plan import (
    DTYPE_BYTES,
    CacheSizes,
    check_cache_specs,
    element_bytes,
    plan_groups,
)
from longshore.worker.models.decoder_config import DecoderConfig
from longshore.worker.models.families import read_model_config

_ONLY: Final = Replica()
_DEFAULT_POLICY: Final = "fcfs"
# These processes only use numpy for bookkeeping: no thread pool, and no memory for its stacks.
NO_BLAS_THREADS: Final = {"OPENBLAS_NUM_THREADS": "1"}
NCCL_INTERFACE: Final = "NCCL_SOCKET_IFNAME"
# All ranks are on one host. Other hosts must not reach them, since gloo and NCCL do not
# authenticate. If a rank is lost, NCCL's watchdog would end the process; with 2 it only aborts the
# communicators, and the worker reports the loss with its reason.
OF_RANKS: Final = {
    "GLOO_SOCKET_IFNAME": LOOPBACK,
    NCCL_INTERFACE: LOOPBACK,
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
}

TORCH_CACHE: Final = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True)
class EngineSockets:
    """Where an engine listens for other nodes: for requests, KV events and replays of them."""

    clients: Endpoint
    events: Endpoint
    replays: Endpoint


@dataclass(frozen=True)
class EnginePlan:
    """One engine with its workers: all settings derived, nothing started.

    hash_seed: seed of block hashes; secret.
    state_dir:         the directory that outlives the deployment.
    connector_options: options of the connector, parsed; they can contain secrets.
    ec_transfer: the encoder connector, with its options, likewise; None: there is none.
    """

    options: EngineOptions
    model: ModelFolder
    device: str
    identity: EngineIdentity
    scheduler: SchedulerConfig
    cache: CacheConfig
    hash_seed: bytes = field(repr=False)
    state_dir: Path
    connector_options: dict[str, Any] = field(repr=False)
    ec_transfer: ECTransferConfig | None = field(repr=False)


def plan_engine(
    options: EngineOptions, model: ModelFolder, hash_seed: bytes | None = None
) -> EnginePlan:
    """Derive every component's settings. Raises ConfigError for settings that do not fit.

    hash_seed: of block hashes; None: that of the state directory.
    """
    _check_policy(options.scheduling_policy or _DEFAULT_POLICY)
    _check_trace_path(options.sched_trace_path)
    _check_backend(options.structured_output_backend)
    config = read_model_config(model.path)
    config.check_split(
        num_shards=options.tensor_parallel_size, num_stages=options.pipeline_parallel_size
    )
    num_sharing = options.decode_context_parallel_size
    connector_options = with_variables(parse_options(options.kv_connector_config))
    if options.kv_connector is not None:
        if config.is_bidirectional:
            raise ConfigError(
                f"kv_connector={options.kv_connector!r}: the tokens of this model attend to later "
                "ones, so its KV cannot be reused. Remove kv_connector"
            )
        if options.verify_kv is not None:
            check_verify_kv(options.kv_connector)
            connector_options["verify_kv"] = options.verify_kv
        check_connector(options.kv_connector, connector_options)
    ec_transfer = _ec_transfer(options, config)
    device = resolve_device(options.device)
    check_memory_shares(options.kv_memory_fraction, options.gpu_memory_utilization, device)
    cache = _cache_config(options, config)
    dtype = model.resolve_dtype(options.dtype, device)
    sizes = CacheSizes(
        block_size=cache.block_size,
        dtype_bytes=element_bytes(options.kv_cache_dtype, DTYPE_BYTES[dtype]),
        num_shards=options.tensor_parallel_size,
    )
    specs = config.cache_specs(sizes)
    check_cache_specs(specs, options.kv_cache_dtype)
    check_context_parallel(
        specs,
        size=num_sharing,
        interleave=options.cp_kv_cache_interleave_size,
        block_size=cache.block_size,
        num_shards=options.tensor_parallel_size,
        num_kv_heads=config.num_kv_heads,
    )
    scheduler = _scheduler_config(
        options, config, max_model_len=_max_model_len(options, model, config, specs)
    )
    check_states(scheduler, specs.values())
    check_preemption_mode(scheduler, cache)
    if options.num_blocks is not None:
        groups = _groups(options, specs, scheduler.max_model_len)
        longest = scheduler.longest_request(num_sharing)
        check_holds_one_request(groups, options.num_blocks, longest)
    state_dir = StateDir(options.state_dir)
    if hash_seed is None:
        hash_seed = state_dir.block_hash_seed()
    identity = EngineIdentity(
        model_fingerprint=model_fingerprint(model.path),
        dtype=dtype,
        block_size=cache.block_size,
        max_model_len=scheduler.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        kv_cache_dtype=options.kv_cache_dtype,
        decode_context_parallel_size=num_sharing,
        cp_kv_cache_interleave_size=options.cp_kv_cache_interleave_size,
        hash_seed_digest=hash_seed_digest(hash_seed),
    )
    return EnginePlan(
        options=options,
        model=model,
        device=device,
        identity=identity,
        scheduler=scheduler,
        cache=cache,
        hash_seed=hash_seed,
        state_dir=state_dir.path.absolute(),
        connector_options=connector_options,
        ec_transfer=ec_transfer,
    )


def _cache_config(options: EngineOptions, config: DecoderConfig) -> CacheConfig:
    return CacheConfig(
        block_size=options.block_size or config.default_block_size,
        num_blocks=options.num_blocks,
        enable_prefix_caching=options.enable_prefix_caching and not config.is_bidirectional,
        hash_block_size=options.hash_block_size,
        watermark=options.watermark,
        preempt_threshold=options.preempt_threshold,
        admit_threshold=options.admit_threshold,
        enable_kv_cache_events=options.enable_kv_cache_events,
        decode_context_parallel_size=options.decode_context_parallel_size,
    )


def _scheduler_config(
    options: EngineOptions, config: DecoderConfig, *, max_model_len: int
) -> SchedulerConfig:
    max_num_batched_tokens = options.max_num_batched_tokens
    if config.is_bidirectional:  # a step computes whole prompts
        max_num_batched_tokens = max(max_num_batched_tokens, max_model_len)
    return SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_scheduled_tokens=options.max_num_scheduled_tokens,
        max_num_encoder_input_tokens=_max_num_encoder_input_tokens(options, config),
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        enable_chunked_prefill=options.enable_chunked_prefill and not config.is_bidirectional,
        scheduler_reserve_full_isl=options.scheduler_reserve_full_isl,
        policy=options.scheduling_policy or _DEFAULT_POLICY,
        max_pin_s=options.max_pin_s,
        kv_role=options.kv_role,
        preemption_mode=options.preemption_mode,
        load_failure_policy=options.load_failure_policy,
        load_timeout_s=options.load_timeout_s,
        min_load_wait_s=options.min_load_wait_s,
        max_loading_blocks=options.max_loading_blocks,
        max_steps_in_flight=options.max_steps_in_flight,
        feed_back_tokens=options.pipeline_parallel_size > 1,
    )


def _check_policy(name: str) -> None:
    """Raise ConfigError for an unknown policy, before the model is loaded."""
    try:
        load_policy(name)
    except ConfigError as error:
        raise ConfigError(f"scheduling_policy={name!r}: {error}") from error


def _check_trace_path(name: Path | str | None) -> None:
    """Raise ConfigError if no file can be created there, before anything is started."""
    if name is None:
        return
    path = Path(name)
    if path.is_dir() or not path.name:
        raise ConfigError(f"sched_trace_path={path} is a folder; give it the name of a file")
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"sched_trace_path={path}: {path.absolute().parent} is not a folder that this user may "
            "write to"
        )


def trace_path(plan: EnginePlan, replica: Replica = _ONLY) -> Path | None:
    """The file of the engine's scheduler trace: with several engines, one each."""
    if plan.options.sched_trace_path is None:
        return None
    path = Path(plan.options.sched_trace_path).absolute()  # `LLM` may be given a string
    return path.with_name(replica.file_name(path.stem) + path.suffix)


def _check_backend(name: StructuredOutputBackend) -> None:
    """Raise ConfigError for a backend that is not installed."""
    if name != "auto" and not installed_backends(name):
        package = "'longshore[xgrammar]'" if name == "xgrammar" else name
        raise ConfigError(
            f"structured_output_backend={name!r}: the package is not installed; run "
            f"pip install {package}"
        )


def _structured_output(
    plan: EnginePlan, runtime_dir: RuntimeDir, replica: Replica
) -> StructuredOutputConfig | None:
    """None if the model's tokens have no text that a grammar could describe."""
    tokenizer_file = plan.model.path / "tokenizer.json"
    if plan.model.audio is not None or not exists(tokenizer_file):
        return None
    return StructuredOutputConfig(
        backend=plan.options.structured_output_backend,
        tokenizer_file=str(tokenizer_file),
        endpoint=runtime_dir.endpoint(replica.file_name("grammars")),
    )


def worker_config(plan: EnginePlan) -> WorkerConfig:
    """Configuration of a worker in this process. Raises ConfigError for several workers."""
    if plan.options.num_ranks > 1:
        raise ConfigError(
            f"in_process with tensor_parallel_size={plan.options.tensor_parallel_size} and "
            f"pipeline_parallel_size={plan.options.pipeline_parallel_size} is not supported: each "
            "worker needs its own process. Remove in_process."
        )
    return _worker_process(plan, 0, Endpoint("inproc://unused"), RankLayout(), _ONLY).worker


def engine_processes(
    plan: EnginePlan,
    runtime_dir: RuntimeDir,
    replica: Replica = _ONLY,
    *,
    sockets: EngineSockets | None = None,
    is_restarted: bool = False,
    num_standbys: int = 0,
) -> tuple[list[ProcessSpec], Endpoint]:
    """The processes to start, workers first and the scheduler last, and the endpoint of its
    clients.
    sockets: for other nodes; None: all sockets are in the runtime directory.
    is_restarted: processes that die are started again.
    num_standbys: processes that are kept ready to take the place of each worker."""
    clients = sockets.clients if sockets else runtime_dir.endpoint(replica.file_name("clients"))
    ranks = range(plan.options.num_ranks)
    endpoints = [runtime_dir.endpoint(replica.worker(rank).replace(" ", "-")) for rank in ranks]
    layout = _rank_layout(plan.options, runtime_dir, replica)
    events = kv_events_config(plan.options, runtime_dir, replica)
    if events is not None and sockets is not None:
        events = msgspec.structs.replace(
            events, endpoint=sockets.events, replay_endpoint=sockets.replays
        )
    scheduler = _scheduler_process(
        plan,
        endpoints,
        clients,
        layout,
        runtime_dir,
        replica,
        events,
        # Other nodes know the engine from before a restart of its node.
        epoch=1 if sockets is None else int(time.time()),
        is_restarted=is_restarted,
    )
    experts_fds: tuple[int, ...] = ()
    if plan.options.enable_return_routed_experts:
        experts_fds = (runtime_dir.shared_memory(f"longshore-experts-{replica.engine_id}"),)
        scheduler = msgspec.structs.replace(scheduler, routed_experts_fd=experts_fds[0])
    memory_fd = None
    if plan.options.kv_connector is not None and uses_shared_memory(plan.options.kv_connector):
        memory_fd = runtime_dir.shared_memory(f"longshore-{replica.engine_id}")
    workers = []
    for rank, endpoint in enumerate(endpoints):
        kv_memory_fd = None
        if scheduler.adopts_kv:
            kv_memory_fd = runtime_dir.shared_memory(f"longshore-kv-{replica.engine_id}-{rank}")
        config = msgspec.structs.replace(
            _worker_process(plan, rank, endpoint, layout, replica),
            shared_memory_fd=memory_fd,
            kv_memory_fd=kv_memory_fd,
            routed_experts_fd=experts_fds[0] if experts_fds and rank == 0 else None,
        )
        workers.append(
            ProcessSpec(
                replica.worker(rank),
                "longshore.worker",
                config,
                pass_fds=(
                    *(fd for fd in (memory_fd, kv_memory_fd) if fd is not None),
                    *(experts_fds if rank == 0 else ()),
                ),
                environment=_worker_environment(plan.options, runtime_dir),
                stop_group="workers",
                stopped_by=replica.scheduler,
                restart_group=replica.engine_id,
                survives=(replica.scheduler,),
                config_after=_next_worker,
                num_standbys=num_standbys,
                config_of_standby=_standby,
            )
        )
    spec = ProcessSpec(
        replica.scheduler,
        "longshore.scheduler",
        scheduler,
        pass_fds=experts_fds,
        environment=NO_BLAS_THREADS,
        stop_group="schedulers",
        restart_group=replica.engine_id,
        survives=tuple(map(replica.worker, ranks)),
        is_told=True,
        config_after=_next_scheduler,
    )
    return [*workers, spec], clients


def engine_files(replica: Replica) -> tuple[str, ...]:
    """Patterns of the files of an engine in the runtime directory."""
    sockets = ("clients", "grammars", "events", "replay")
    meeting = replica.file_name("rendezvous")
    worker = replica.worker(0).removesuffix("0").replace(" ", "-")
    return (
        *(f"{replica.file_name(each)}.sock" for each in sockets),
        *(f"{worker}{rank}.sock" for rank in ("[0-9]", "[0-9][0-9]", "[0-9][0-9][0-9]")),
        *(f"{meeting}{suffix}" for suffix in ("", "+*", "-standby-*")),
    )


def _rank_layout(options: EngineOptions, runtime_dir: RuntimeDir, replica: Replica) -> RankLayout:
    return RankLayout(
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        decode_context_parallel_size=options.decode_context_parallel_size,
        cp_kv_cache_interleave_size=options.cp_kv_cache_interleave_size,
        rendezvous=str(runtime_dir.path / replica.file_name("rendezvous")),
        timeout_s=options.rank_timeout_s,
    )


def _scheduler_process(
    plan: EnginePlan,
    workers: Sequence[Endpoint],
    clients: Endpoint,
    layout: RankLayout,
    runtime_dir: RuntimeDir,
    replica: Replica,
    events: KVEventsConfig | None,
    *,
    epoch: int,
    is_restarted: bool,
) -> SchedulerProcessConfig:
    return SchedulerProcessConfig(
        scheduler=plan.scheduler,
        cache=plan.cache,
        identity=plan.identity,
        workers=tuple(workers),
        sampling_rank=layout.sampling_rank,
        rank_timeout_s=plan.options.rank_timeout_s,
        clients=clients,
        hash_seed=plan.hash_seed.hex(),
        vocab_size=plan.model.vocab_size,
        eos_token_ids=plan.model.eos_token_ids,
        verify_plan=plan.options.verify_plan,
        kv_connector=plan.options.kv_connector,
        kv_connector_config=msgspec.json.encode(plan.connector_options).decode(),
        ec_transfer=plan.ec_transfer,
        kv_events=events,
        structured_output=_structured_output(plan, runtime_dir, replica),
        tokenizer_file=str(plan.model.path / "tokenizer.json"),
        engine_id=replica.engine_id,
        epoch=epoch,
        outlives_workers=is_restarted,
        adopts_kv=is_restarted and plan.options.kv_adoption and plan.device == "cpu",
        trace_path=None if (path := trace_path(plan, replica)) is None else str(path),
        record=_record_path(plan.options, replica),
        trace_bytes=plan.options.sched_trace_mib << 20,
        record_bytes=plan.options.record_mib << 20,
        log_level=plan.options.log_level,
    )


def _record_path(options: EngineOptions, replica: Replica) -> str | None:
    """Each engine has files of its own."""
    if options.record is None:
        return None
    path = options.record.absolute()
    if not path.parent.is_dir():
        raise ConfigError(f"record={options.record}: there is no folder {path.parent}")
    return str(path) if replica.count == 1 else f"{path}.{replica.engine_id}"


def _worker_environment(options: EngineOptions, runtime_dir: RuntimeDir) -> dict[str, str]:
    # torch creates its cache folder in TMPDIR and never removes it, unless this names another one.
    cache = os.environ.get(TORCH_CACHE, str(runtime_dir.path / "torch"))
    environment = {TORCH_CACHE: cache, **(OF_RANKS if options.num_ranks > 1 else {})}
    if (host := p2p_host(options)) is not None and (name := interface_of(host)) is not None:
        # NCCL takes one interface for all its connections in a process.
        environment[NCCL_INTERFACE] = os.environ.get(NCCL_INTERFACE, f"={name}")
    return environment


def _next_scheduler(config: SchedulerProcessConfig) -> SchedulerProcessConfig:
    """For new workers, or after a restart: plans and events of the former epoch are void."""
    return msgspec.structs.replace(config, epoch=config.epoch + 1)


def _next_worker(config: WorkerProcessConfig) -> WorkerProcessConfig:
    """For a restart: the ranks meet at a new file."""
    ranks = msgspec.structs.replace(config.ranks, rendezvous=f"{config.ranks.rendezvous}+")
    return msgspec.structs.replace(config, ranks=ranks)


def _standby(config: WorkerProcessConfig, number: int) -> WorkerProcessConfig:
    """The standbys of the ranks meet at a file of their own."""
    rendezvous = f"{config.ranks.rendezvous}-standby-{number}"
    ranks = msgspec.structs.replace(config.ranks, rendezvous=rendezvous)
    return msgspec.structs.replace(config, ranks=ranks, is_standby=True)


def _worker_process(
    plan: EnginePlan, rank: int, endpoint: Endpoint, layout: RankLayout, replica: Replica
) -> WorkerProcessConfig:
    is_one_of_gpus = plan.device == "cuda" and (
        layout.num_ranks * replica.count > 1 or bool(replica.devices)
    )
    return WorkerProcessConfig(
        model=str(plan.model.path),
        identity=plan.identity,
        endpoint=endpoint,
        rank=rank,
        ranks=layout,
        num_replicas=replica.num_on_host or replica.count,
        device=replica.gpu(rank, layout.num_ranks) if is_one_of_gpus else plan.device,
        load_format=plan.options.load_format,
        num_blocks=plan.options.num_blocks,
        kv_memory_fraction=plan.options.kv_memory_fraction,
        gpu_memory_utilization=plan.options.gpu_memory_utilization,
        max_num_scheduled_tokens=plan.options.max_num_scheduled_tokens,
        max_steps_in_flight=plan.options.max_steps_in_flight,
        eos_token_ids=plan.model.eos_token_ids,
        threads=plan.options.threads,
        poison_kv=plan.options.poison_kv,
        enforce_eager=plan.options.enforce_eager,
        startup_timeout_s=plan.options.startup_timeout_s,
        step_timeout_s=plan.options.step_timeout_s,
        kv_connector=plan.options.kv_connector,
        kv_connector_config=msgspec.json.encode(plan.connector_options).decode(),
        ec_transfer=plan.ec_transfer,
        state_dir=str(plan.state_dir),
        engine_id=replica.engine_id,
        cpu_kernels=plan.options.cpu_kernels,
        attention_backend=plan.options.attention_backend,
        log_level=plan.options.log_level,
    )


def _ec_transfer(options: EngineOptions, config: DecoderConfig) -> ECTransferConfig | None:
    """Raises ConfigError."""
    name, role = options.ec_connector, options.ec_role
    if name is None:
        return None
    if not config.max_encoder_tokens:
        raise ConfigError(
            f"ec_connector={name!r}: this model has no encoder, so there are no encoder outputs to "
            "hand over. Remove ec_connector"
        )
    given = parse_options(options.ec_connector_config, "--ec-connector-config")
    values = with_variables(given)
    check_encoder_connector(name, values, role)
    return ECTransferConfig(name, role, msgspec.json.encode(values).decode())


def _max_num_encoder_input_tokens(options: EngineOptions, config: DecoderConfig) -> int:
    """The given value, else what one request needs; 0 for a model without an encoder."""
    given, needed = options.max_num_encoder_input_tokens, config.max_encoder_tokens
    if given is None:
        return needed
    if not needed:
        raise ConfigError(
            f"max_num_encoder_input_tokens={given}, but this model has no encoder. Remove it."
        )
    if given < needed:
        raise ConfigError(
            f"max_num_encoder_input_tokens={given} is too small: this model's encoder produces "
            f"{needed} tokens per request, in one step. Use at least {needed}."
        )
    return given


def _max_model_len(
    options: EngineOptions,
    model: ModelFolder,
    config: DecoderConfig,
    specs: Mapping[str, KVCacheSpec],
) -> int:
    """The given value, else the model's own limit, reduced to what `num_blocks` can hold."""
    if options.max_model_len is None:
        if options.num_blocks is None:
            return config.default_max_len
        num_steps = options.max_steps_in_flight
        step_tokens = options.max_num_scheduled_tokens or options.max_num_batched_tokens
        longest, too_long = 1, config.default_max_len + 1
        while too_long - longest > 1:
            length = (longest + too_long) // 2
            groups = _groups(options, specs, length)
            request = LongestRequest(
                length,
                num_steps * step_tokens,
                num_steps,
                options.decode_context_parallel_size,
            )
            if num_blocks_needed(groups, request) <= options.num_blocks:
                longest = length
            else:
                too_long = length
        return longest
    if options.max_model_len > model.max_model_len:
        raise ConfigError(
            f"max_model_len={options.max_model_len} is more than the {model.max_model_len} tokens "
            f"that {model.name} supports (max_position_embeddings in its config.json)"
        )
    return options.max_model_len


def _groups(
    options: EngineOptions, specs: Mapping[str, KVCacheSpec], max_model_len: int
) -> tuple[KVCacheGroup, ...]:
    return plan_groups(
        specs,
        max_model_len=max_model_len,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )
