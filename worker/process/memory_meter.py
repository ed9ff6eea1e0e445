"""Measures what the steps of a rank need of a GPU's memory, before the KV cache gets the rest."""

from collections.abc import Callable
from typing import Protocol

import torch


class MemoryMeter(Protocol):
    """The memory of one device. Tests have one for CPUs."""

    def total_bytes(self) -> int:
        """All memory of the device."""

    def used_bytes(self) -> int:
        """What is in use now, by all processes. What this process only keeps for reuse is returned
        to the device first."""

    def peak_bytes(self, action: Callable[[], object]) -> int:
        """Run `action`. Returns how many bytes it had in use at most, beside those that were in use
        before."""

    def limit(self, num_bytes: int | None) -> None:
        """From now on, this process takes at most `num_bytes` more than it uses now: before it
        would take more, what it keeps for reuse is returned. None ends the limit."""


class CudaMeter:
    """A GPU, as the driver and torch's allocator see it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def used_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return total_bytes - free_bytes

    def peak_bytes(self, action: Callable[[], object]) -> int:
        """What torch has reserved, not what tensors occupy: the device must provide it."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        action()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - before

    def limit(self, num_bytes: int | None) -> None:
        share = 1.0
        if num_bytes is not None:
            torch.cuda.empty_cache()
            most = torch.cuda.memory_reserved(self._device) + num_bytes
            share = min(1.0, most / self.total_bytes())
        torch.cuda.set_per_process_memory_fraction(share, self._device)


def memory_meter(device: torch.device) -> MemoryMeter | None:
    """Make a meter, or None for a CPU: its activations are small beside the memory of a host."""
    return CudaMeter(device) if device.type == "cuda" else None
