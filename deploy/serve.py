"""`longshore serve`: one engine behind a gateway, until it is told to stop or something dies."""

import logging
import socket
import sys
from collections.abc import Callable, Mapping, Sequence

from longshore.deploy.audio import require_extra
from longshore.deploy.engine import (
    NO_BLAS_THREADS,
    EnginePlan,
    check_workers,
    engine_processes,
    plan_engine,
)
from longshore.deploy.gateway.config import GatewayConfig
from longshore.deploy.log_lines import LINE_FORMATS
from longshore.deploy.model_folder import ModelFolder
from longshore.deploy.options import ServeOptions
from longshore.deploy.process import ProcessSpec
from longshore.deploy.runtime_dir import RuntimeDir
from longshore.deploy.stop_signals import StopSignals
from longshore.deploy.supervisor import STOP_TIMEOUT_S, StopRequested, Supervisor
from longshore.protocol.channel import Endpoint
from longshore.protocol.errors import ConfigError, EngineDead
from longshore.protocol.lifeline import Ready

logger = logging.getLogger(__name__)


def serve(
    model: ModelFolder, options: ServeOptions, announce: Callable[[str], None] = print
) -> None:
    """Serve until SIGTERM or SIGINT, drain, and return.

    Raises ConfigError or StartFailed if the deployment cannot start, EngineDead if a process dies.
    Nothing is left behind either way.
    """
    if model.audio is not None:
        require_extra("soundfile", "soxr", "python_multipart")
    plan = plan_engine(options, model)
    check_workers(plan)
    with (
        StopSignals() as stop_signal,
        _bind(options.host, options.port) as listener,
        Supervisor(RuntimeDir(), sys.stderr, LINE_FORMATS[options.log_format]) as supervisor,
    ):
        url = _url(listener)
        logger.info("starting at %s; its /ready tells how far that is", url)
        specs, clients = engine_processes(plan, supervisor.runtime_dir)
        specs.append(_gateway(plan, options, clients, listener))
        try:
            ready = supervisor.start(
                specs, timeout_s=options.startup_timeout_s, stop_signal=stop_signal
            )
        except StopRequested:
            logger.info("stopped before it was ready")
            return
        listener.close()  # the gateway alone holds the port now, and gives it up when it drains
        announce(ready_line(url, options.served_model_name or model.name, ready))
        death = supervisor.wait_for_death(stop_signal=stop_signal)
        if death is not None:
            supervisor.stop_now(death)
            raise EngineDead(f"{death} Everything has been stopped; start it again to go on.")
        stop_signal.clear()  # a second one cuts the draining short
        logger.info("stopping: live answers have %.0f s to finish", options.drain_timeout_s)
        all_well = supervisor.stop(options.drain_timeout_s + STOP_TIMEOUT_S, stop_signal)
        if not all_well and not stop_signal.is_set():
            raise EngineDead("not every process came to an orderly end; the lines above say which.")


def _gateway(
    plan: EnginePlan, options: ServeOptions, clients: Endpoint, listener: socket.socket
) -> ProcessSpec:
    model = plan.model
    config = GatewayConfig(
        model=str(model.path),
        served_model_name=options.served_model_name or model.name,
        model_fingerprint=plan.identity.model_fingerprint,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_model_len=plan.identity.max_model_len,
        sampling_defaults=model.sampling_defaults,
        engine=clients,
        listen_fd=listener.fileno(),
        chat_template=None if options.chat_template is None else str(options.chat_template),
        max_body_bytes=options.max_body_mib << 20,
        audio=model.audio,
        max_audio_bytes=options.max_audio_mib << 20,
        max_audio_s=options.max_audio_s,
        max_live_requests=options.max_live_requests,
        api_keys=options.api_key or (),
        drain_timeout_s=options.drain_timeout_s,
        seed=options.seed,
        log_level=options.log_level,
    )
    return ProcessSpec(
        "gateway",
        "longshore.deploy.gateway",
        config,
        environment=NO_BLAS_THREADS,
        pass_fds=(listener.fileno(),),
    )


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket, before anything is loaded. Raises ConfigError if it cannot be had."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}. Choose another --port (0 takes a "
            "free one) or --host, or stop what uses it."
        ) from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def ready_line(url: str, model_name: str, ready: Mapping[str, Ready]) -> str:
    """Where to ask, and what fits. ready: the processes' reports, by name."""
    cache, max_model_len = ready["scheduler"].details, ready["gateway"].details["max_model_len"]
    num_blocks, num_tokens = int(cache["num_blocks"]), int(cache["kv_cache_tokens"])
    block_bytes = [
        int(report.details["block_bytes"])
        for name, report in ready.items()
        if name.startswith("worker ")
    ]
    return (
        f"ready at {url} (model {model_name}, "
        f"{num_blocks:,} blocks of {cache['block_sizes']} tokens: {num_tokens:,} tokens fit, "
        f"{int(max_model_len):,} per request; "
        f"KV cache: {_kv_cache_size(num_blocks, block_bytes)})"
    )


def _kv_cache_size(num_blocks: int, block_bytes: Sequence[int]) -> str:
    """block_bytes: of each worker. They differ between stages with unlike numbers of layers."""
    if len(set(block_bytes)) > 1:
        each = " + ".join(f"{size:,}" for size in block_bytes)
        return f"{num_blocks:,} x ({each}) = {num_blocks * sum(block_bytes):,} bytes, by worker"
    size = block_bytes[0]
    where = f" on each of {len(block_bytes)} workers" if len(block_bytes) > 1 else ""
    return f"{num_blocks:,} x {size:,} = {num_blocks * size:,} bytes{where}"
