"""Priorities of CUDA streams, without a device."""

from typing import Any

import pytest
import torch

from longshore.worker.queues.compute_queue import CudaComputeQueue
from longshore.worker.queues.transfer_queues import WorkerQueues


@pytest.mark.req("WRK-09")
def test_streams_of_transfers_have_a_lower_priority_than_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In CUDA, lower numbers are served first."""
    priorities: list[int] = []

    def stream(device: Any, priority: int = 0) -> None:
        priorities.append(priority)

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    device = torch.device("cuda")
    compute = CudaComputeQueue(device)
    queues = WorkerQueues(device, compute, lambda: None)
    queues.open("loads")
    queues.open("stores")
    queues.open("files", on_host=True)  # a thread, without a stream
    queues.close()
    compute.close()
    of_steps, *of_transfers = priorities
    assert len(of_transfers) == 2
    assert all(priority > of_steps for priority in of_transfers)
