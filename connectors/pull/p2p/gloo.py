"""Links between CPUs: a process group of torch.distributed with gloo, over TCP.

Gloo cannot end a wait from another thread. A wait that is late closes the connection, and that of
an ended link lasts until then; it holds nothing but staging memory.
"""

import time
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from longshore.connectors.offloading.copies import Copier, HostCopier
from longshore.connectors.pull.p2p.communicator import CommunicatorError, Side, WaitUntil
from longshore.connectors.pull.p2p.messages import LibraryName
from longshore.connectors.pull.p2p.rendezvous import Rendezvous
from longshore.protocol.errors import ConfigError, shortened

MIN_WAIT_S: Final = 0.001
"""Gloo takes a wait of 0 for one without end."""

_NUM_TAGS: Final = 1 << 16


class GlooLibrary:
    name: LibraryName = "gloo"

    def __init__(self, host: str) -> None:
        """host: the address of this machine that gloo uses, and on which it listens. Raises
        ConfigError."""
        if not dist.is_gloo_available():
            raise ConfigError("--kv-connector p2p_nccl needs a torch with gloo on CPUs")
        self._host = host
        self.copier: Copier = HostCopier()

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def connect(self, side: Side, rendezvous: Rendezvous, timeout_s: float) -> "GlooCommunicator":
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # of torch
        options._threads = 1
        options._timeout = timedelta(seconds=timeout_s)
        try:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
            group = dist.ProcessGroupGloo(rendezvous, side, len(Side), options)
        except RuntimeError as error:
            raise CommunicatorError(f"gloo cannot connect: {shortened(str(error))}") from error
        return GlooCommunicator(group, side)


class GlooCommunicator:
    def __init__(self, group: Any, side: Side) -> None:
        self._group, self._peer = group, int(side.other)

    def send(self, data: Tensor, number: int) -> WaitUntil:
        return self._begin(self._group.send, data, number)

    def receive(self, data: Tensor, number: int) -> WaitUntil:
        return self._begin(self._group.recv, data, number)

    def _begin(self, call: Any, data: Tensor, number: int) -> WaitUntil:
        try:
            work = call([data], self._peer, number % _NUM_TAGS)
        except RuntimeError as error:
            raise CommunicatorError(f"gloo has failed: {shortened(str(error))}") from error

        def wait_until(deadline_s: float) -> None:
            left_s = max(deadline_s - time.monotonic(), MIN_WAIT_S)
            try:
                work.wait(timedelta(seconds=left_s))
            except RuntimeError as error:
                raise CommunicatorError(f"gloo has failed: {shortened(str(error))}") from error

        return wait_until

    def abort(self) -> None:
        pass

    def close(self) -> bool:
        self._group = None  # closes its connections
        return True
