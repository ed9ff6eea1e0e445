"""Limits of the operating system, checked before the processes of a deployment start. They inherit
what is set here."""

import logging
import resource
import sys
from typing import Final

from longshore.protocol.errors import ConfigError
from longshore.worker.process.byte_size import byte_size

logger = logging.getLogger(__name__)

FILES_PER_DEPLOYMENT: Final = 64
FILES_PER_PROCESS: Final = 8
"""Descriptors that a process needs for itself and for its connections to the others, generously."""
MIN_ADDRESS_SPACE_BYTES: Final = 2 << 30
"""torch, its threads' stacks and a small model fit into 1.5 GiB."""


def raise_file_limit(num_processes: int, num_connections: int) -> None:
    """Raise the limit of open files to the hard limit. Raises ConfigError if that is too low to
    start; logs a warning if it is too low for `num_connections` clients of one gateway."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    needed = _files_needed(num_processes)
    if limit == resource.RLIM_INFINITY or limit >= needed + num_connections:
        return
    if limit <= needed:
        raise ConfigError(
            f"a process may open {limit} files (hard limit, ulimit -Hn), but {num_processes} "
            f"processes need {needed}, plus one per connection of a client. Raise the hard limit "
            "(LimitNOFILE= in systemd, --ulimit nofile= in docker)."
        )
    logger.warning(
        "a process may open %d files (hard limit, ulimit -Hn), so a gateway accepts about %d "
        "connections, fewer than --max-live-requests=%d. Raise the hard limit, or lower the "
        "setting, so that clients get status 429 instead of 503",
        limit,
        limit - needed,
        num_connections,
    )


def connections_left(num_processes: int) -> int:
    """How many connections of clients a gateway may have, so that descriptors are left for
    everything else."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(1, limit - _files_needed(num_processes))


def _files_needed(num_processes: int) -> int:
    return FILES_PER_DEPLOYMENT + FILES_PER_PROCESS * num_processes


def check_address_space(device: str) -> None:
    """Raise ConfigError if a worker cannot start within the limit of address space; torch would
    abort without a reason. Log a limit that is large enough."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return
    size = byte_size(limit)
    if limit < MIN_ADDRESS_SPACE_BYTES or device != "cpu":
        raise ConfigError(
            f"the address space of a process is limited to {size} (ulimit -v, RLIMIT_AS), but a "
            f"worker on {device} reserves more than it uses"
            f"{f', at least {byte_size(MIN_ADDRESS_SPACE_BYTES)}' if device == 'cpu' else ''}. Run "
            "ulimit -v unlimited, and limit memory with a control group."
        )
    logger.warning(
        "the address space of a process is limited to %s (ulimit -v, RLIMIT_AS), which includes "
        "memory that is reserved and not used. If a worker dies, run ulimit -v unlimited, and "
        "limit memory with a control group",
        size,
    )
