"""`longshore serve`: runs engines and gateways, restarts those that die, until a stop signal."""

import logging
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from longshore.deploy.admin.server import AdminServer
from longshore.deploy.cli.deployment import Deployment, prepare
from longshore.deploy.cli.ready_message import (
    cache_sizes,
    model_line,
    node_ready_message,
    ready_lines,
    ready_message,
)
from longshore.deploy.model.folder import ModelFolder
from longshore.deploy.supervisor.fork_server import take_first
from longshore.deploy.supervisor.listeners import bind, url_of
from longshore.deploy.supervisor.log_lines import LINE_FORMATS
from longshore.deploy.supervisor.process import KILL_TIMEOUT_S, STOP_TIMEOUT_S
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.deploy.supervisor.service_manager import notify_ready, notify_stopping
from longshore.deploy.supervisor.stop_signals import StopSignals
from longshore.deploy.supervisor.supervisor import StopRequested, Supervisor
from longshore.deploy.topology.node_plan import NodePlan
from longshore.protocol.errors import EngineDead

logger = logging.getLogger(__name__)


def serve(
    models: Sequence[ModelFolder],
    node: NodePlan,
    announce: Callable[[str], None] = print,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, then drain and return.

    on_ready: called with the URL once requests are served.

    Raises ConfigError or StartFailed if the deployment cannot start, EngineDead if a process dies
    more often than it may be restarted.
    In every case all processes have ended and the runtime directory is removed on return.
    """
    deployment = prepare(models, node)
    with ExitStack() as port:
        listeners = bind(node.options.host, node.options.port, node.num_gateways)
        for listener in listeners:
            port.enter_context(listener)
        _serve(deployment, models, listeners, port, announce, on_ready)


def _serve(
    deployment: Deployment,
    models: Sequence[ModelFolder],
    listeners: Sequence[socket.socket],
    port: ExitStack,
    announce: Callable[[str], None],
    on_ready: Callable[[str], None],
) -> None:
    """port: closes the listeners."""
    node = deployment.node
    options = node.options
    fork_server = take_first()
    if fork_server is not None and not node.engines:
        fork_server.kill()
        fork_server = None
    with (
        StopSignals() as stop_signal,
        Supervisor(
            RuntimeDir(), sys.stderr, LINE_FORMATS[options.log_format], fork_server
        ) as supervisor,
        AdminServer(
            supervisor.runtime_dir, deployment.operations(supervisor, stop_signal)
        ) as admin,
    ):
        url = url_of(listeners[0]) if listeners else None
        if url is None:
            logger.info("starting the engines of node %s", node.name)
        else:
            supervisor.runtime_dir.note_url(url)
            logger.info("starting at %s (/ready shows the progress)", url)
        logger.debug("`longshore admin` uses the socket %s", admin.path)
        specs = deployment.processes(supervisor.runtime_dir, listeners)
        try:
            ready = supervisor.start(
                specs,
                timeout_s=options.startup_timeout_s,
                stop_signal=stop_signal,
                hang_timeout_s=options.hang_timeout_s,
            )
        except StopRequested:
            logger.info("stopped by %s before startup was complete", stop_signal.cause)
            return
        engines = {
            name: node.replicas_of(place) for place, (name, *_) in enumerate(deployment.names)
        }
        for name, replicas in engines.items():
            if replicas:
                logger.info("%s", model_line(name, ready, replicas))
                logger.info("KV cache: %s", cache_sizes(ready, replicas))
        if url is None:
            message = node_ready_message(str(node.name), name, ready, node.replicas)
            announce(message)
        else:
            message = ready_message(url, engines, ready, num_gateways=node.num_gateways)
            can_chat = any(model.can_chat for model in models)
            needs_key = bool(deployment.api_keys)
            for line in ready_lines(url, message, can_chat=can_chat, needs_key=needs_key):
                announce(line)
            on_ready(url)
        notify_ready(message)
        death = supervisor.keep_running(
            max_restarts=options.max_restarts,
            start_timeout_s=options.startup_timeout_s,
            stop_signal=stop_signal,
            hang_timeout_s=options.hang_timeout_s,
        )
        port.close()  # held for a restarted gateway; now the gateways close it when they drain
        if death is not None:
            supervisor.stop_now(death)
            raise EngineDead(f"{death} All other processes have been stopped; restart the server.")
        _drain(supervisor, stop_signal, options.drain_timeout_s)
    logger.info("stopped")


def _drain(supervisor: Supervisor, stop_signal: StopSignals, timeout_s: float) -> None:
    """Finish running requests, then stop all processes. Raises EngineDead if some were killed."""
    stop_signal.clear()  # a second signal aborts the draining
    logger.info(
        "stopping (%s): running requests have %.0f s to finish; press Ctrl-C again to abort them",
        stop_signal.cause,
        timeout_s,
    )
    # Gateways, schedulers and workers end one after the other; killed ones release their device.
    notify_stopping(timeout_s + 3 * STOP_TIMEOUT_S + KILL_TIMEOUT_S)
    is_clean = supervisor.stop(timeout_s + STOP_TIMEOUT_S, stop_signal)
    if not is_clean and not stop_signal.is_set():
        raise EngineDead("some processes did not stop cleanly; see the log lines above.")
