"""The configurations of the processes that a planned engine has."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from longshore.connectors.registry import (
    uses_shared_memory,
)
from longshore.deploy.settings.options import EngineOptions
from longshore.deploy.supervisor.connector_options import (
    p2p_host,
)
from longshore.deploy.supervisor.engine_plan import ONLY, EnginePlan, record_path, trace_path
from longshore.deploy.supervisor.fork_server import NO_BLAS_THREADS
from longshore.deploy.supervisor.interfaces import LOOPBACK, interface_of
from longshore.deploy.supervisor.kv_events import kv_events_config
from longshore.deploy.supervisor.process import ProcessSpec
from longshore.deploy.supervisor.replica import Replica
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.protocol.errors import ConfigError
from longshore.protocol.events import KVEventsConfig
from longshore.protocol.settings import part_of
from longshore.protocol.transport.channel import Endpoint
from longshore.scheduler.config import (
    SchedulerProcessConfig,
    StructuredOutputConfig,
)
from longshore.worker.config import (
    RankLayout,
    WorkerConfig,
    WorkerProcessConfig,
)

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


def _structured_output(
    plan: EnginePlan, runtime_dir: RuntimeDir, replica: Replica
) -> StructuredOutputConfig | None:
    """None if the model's tokens have no text that a grammar could describe."""
    tokenizer_file = plan.model.tokenizer_file
    if plan.model.audio is not None or tokenizer_file is None:
        return None
    return part_of(
        StructuredOutputConfig,
        plan.options,
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
    return _worker_config(plan, 0, ONLY)


def engine_processes(
    plan: EnginePlan,
    runtime_dir: RuntimeDir,
    replica: Replica = ONLY,
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
    rendezvous = str(runtime_dir.path / replica.file_name("rendezvous"))
    layout = part_of(RankLayout, plan.options, rendezvous=rendezvous)
    events = kv_events_config(plan.options, runtime_dir, replica)
    if events is not None and sockets is not None:
        events = replace(events, endpoint=sockets.events, replay_endpoint=sockets.replays)
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
        worker = _worker_config(plan, rank, replica)
        if experts_fds and rank == 0:
            worker = replace(worker, routed_experts_fd=experts_fds[0])
        config = part_of(
            WorkerProcessConfig,
            plan.options,
            identity=plan.identity,
            endpoint=endpoint,
            worker=worker,
            rank=rank,
            ranks=layout,
            kv_connector_config=msgspec.json.encode(plan.connector_options).decode(),
            ec_transfer=plan.ec_transfer,
            state_dir=str(plan.state_dir),
            engine_id=replica.engine_id,
            shared_memory_fd=memory_fd,
            kv_memory_fd=kv_memory_fd,
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
                environment=NO_BLAS_THREADS,
                late_environment=_worker_environment(plan.options, runtime_dir),
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
    return part_of(
        SchedulerProcessConfig,
        plan.options,
        scheduler=plan.scheduler,
        cache=plan.cache,
        identity=plan.identity,
        workers=tuple(workers),
        sampling_rank=layout.sampling_rank,
        clients=clients,
        hash_seed=plan.hash_seed.hex(),
        vocab_size=plan.model.vocab_size,
        eos_token_ids=plan.model.eos_token_ids,
        kv_connector_config=msgspec.json.encode(plan.connector_options).decode(),
        ec_transfer=plan.ec_transfer,
        kv_events=events,
        structured_output=_structured_output(plan, runtime_dir, replica),
        tokenizer_file=None if (file := plan.model.tokenizer_file) is None else str(file),
        engine_id=replica.engine_id,
        epoch=epoch,
        outlives_workers=is_restarted,
        adopts_kv=is_restarted and plan.options.kv_adoption and plan.device == "cpu",
        trace_path=None if (path := trace_path(plan, replica)) is None else str(path),
        record=record_path(plan.options, replica),
        trace_bytes=plan.options.sched_trace_mib << 20,
        record_bytes=plan.options.record_mib << 20,
    )


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
    ranks = replace(config.ranks, rendezvous=f"{config.ranks.rendezvous}+")
    return msgspec.structs.replace(config, ranks=ranks)


def _standby(config: WorkerProcessConfig, number: int) -> WorkerProcessConfig:
    """The standbys of the ranks meet at a file of their own."""
    ranks = replace(config.ranks, rendezvous=f"{config.ranks.rendezvous}-standby-{number}")
    return msgspec.structs.replace(config, ranks=ranks, is_standby=True)


def _worker_config(plan: EnginePlan, rank: int, replica: Replica) -> WorkerConfig:
    options, identity = plan.options, plan.identity
    num_ranks, device = options.num_ranks, plan.device
    if device == "cuda" and (num_ranks * replica.count > 1 or replica.devices):
        device = replica.gpu(rank, num_ranks)
    # All ranks of all engines share the CPU; on GPUs each rank has its own.
    num_sharing = num_ranks * (replica.num_on_host or replica.count) if device == "cpu" else 1
    return part_of(
        WorkerConfig,
        options,
        model=str(plan.model.path),
        device=device,
        dtype=identity.dtype,
        block_size=identity.block_size,
        max_model_len=identity.max_model_len,
        max_num_batched_tokens=identity.max_num_batched_tokens,
        max_steps_in_flight=options.max_steps_in_flight,
        eos_token_ids=plan.model.eos_token_ids,
        num_ranks_on_device=num_sharing,
        show_progress=False,
    )
