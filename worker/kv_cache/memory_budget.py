"""Divides a GPU's memory: weights, activations and graphs get what they need, and the KV cache gets
the rest of `gpu_memory_utilization`. Says what to lower if the memory is not enough. Nothing is
measured here; `worker/step/memory_profile.py` does."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from longshore.protocol.errors import ConfigError, KVCacheTooSmall
from longshore.protocol.kv_cache_spec import KVCacheGroup, LongestRequest, num_blocks_needed
from longshore.worker.config import WorkerConfig
from longshore.worker.errors import OutOfMemory
from longshore.worker.kv_cache.plan import block_bytes
from longshore.worker.process.byte_size import byte_size

DEFAULT_GPU_MEMORY_UTILIZATION: Final = 0.9


@dataclass(frozen=True)
class StepMemory:
    """What a profile has measured, in bytes.

    total:       all memory of the device.
    used:        in use between two steps, by all processes: weights, buffers of this rank, the CUDA
                 context with its loaded kernels, and what other processes use.
    activations: what the largest step needs in addition.
    graphs:      what the graphs of decode steps will need; an estimate.
    """

    total: int
    used: int
    activations: int
    graphs: int


@dataclass(frozen=True)
class MemoryBudget:
    """The memory of a device of which this rank is one of `num_ranks` users.

    utilization: share of the total that all ranks, and other processes, use at most.
    weights:     bytes of this rank's weights, which `measured.used` contains; for messages.
    """

    measured: StepMemory
    utilization: float
    weights: int
    num_ranks: int = 1

    @property
    def cache_bytes(self) -> int:
        """What is left for this rank's KV cache; negative if the rest needs too much."""
        measured = self.measured
        left = int(measured.total * self.utilization) - measured.used
        return left // self.num_ranks - measured.activations - measured.graphs

    def step_bytes(self, used: int) -> int:
        """What the steps of this rank may take, beside the `used` bytes that all ranks and other
        processes use between steps: what is left of the share, but what the largest step needs in
        any case."""
        left = int(self.measured.total * self.utilization) - used
        return max(left // self.num_ranks, self.measured.activations)

    def num_blocks(
        self,
        groups: Sequence[KVCacheGroup],
        longest: LongestRequest,
        *,
        max_num_batched_tokens: int,
    ) -> int:
        """How many blocks fit. Raises KVCacheTooSmall, saying what to lower and by how much, unless
        the longest request fits."""
        size_bytes, needed = block_bytes(groups), num_blocks_needed(groups, longest)
        num_blocks = max(0, self.cache_bytes) // size_bytes
        if num_blocks < needed:
            needed_bytes = needed * size_bytes
            remedies = self._remedies(groups, longest, needed_bytes, max_num_batched_tokens)
            raise KVCacheTooSmall(
                f"{self}; but a request of max_model_len={longest.num_tokens} tokens needs a cache "
                f"of {byte_size(needed_bytes)}. {remedies}"
            )
        return num_blocks

    def __str__(self) -> str:
        measured = self.measured
        others = f", {self.num_ranks} ranks share it" if self.num_ranks > 1 else ""
        return (
            f"gpu_memory_utilization={self.utilization:g} of {byte_size(measured.total)}{others}: "
            f"weights {byte_size(self.weights)}, other memory in use "
            f"{byte_size(max(0, measured.used - self.weights))}, activations "
            f"{byte_size(measured.activations)}, graphs {byte_size(measured.graphs)}, KV cache "
            f"{byte_size(max(0, self.cache_bytes))}"
        )

    def _remedies(
        self,
        groups: Sequence[KVCacheGroup],
        longest: LongestRequest,
        needed_bytes: int,
        max_num_batched_tokens: int,
    ) -> str:
        """Each of them is enough by itself, as far as it can be computed."""
        measured, missing = self.measured, needed_bytes - self.cache_bytes
        remedies = []
        utilization = self.utilization + missing * self.num_ranks / measured.total
        if (shown := math.ceil(utilization * 100) / 100) <= 1:
            remedies.append(f"raise gpu_memory_utilization to {shown:g}")
        if measured.activations > missing:
            # Activations grow with the tokens of a step.
            share = 1 - missing / measured.activations
            num_tokens = int(max_num_batched_tokens * share)
            remedies.append(f"lower max_num_batched_tokens to about {max(1, num_tokens)}")
        length = _longest_that_fits(groups, longest, max(0, self.cache_bytes))
        if length:
            remedies.append(f"lower max_model_len to {length}")
        if not remedies:
            return (
                f"{byte_size(missing)} are missing. Lower max_num_seqs and max_num_batched_tokens, "
                "end other processes on the GPU, or divide the model among more GPUs "
                "(tensor_parallel_size)."
            )
        first, *rest = remedies
        text = ", or ".join([first[0].upper() + first[1:], *rest])
        return f"{text}; a lower max_num_seqs helps, too."


def _longest_that_fits(
    groups: Sequence[KVCacheGroup], longest: LongestRequest, cache_bytes: int
) -> int:
    """The longest request, in tokens, that a cache of this size holds; 0: none."""
    num_blocks, fits, too_long = cache_bytes // block_bytes(groups), 0, longest.num_tokens
    while too_long - fits > 1:
        length = (fits + too_long) // 2
        if num_blocks_needed(groups, longest._replace(num_tokens=length)) <= num_blocks:
            fits = length
        else:
            too_long = length
    return fits


def no_memory_for_steps(
    config: WorkerConfig,
    device: torch.device,
    weight_bytes: int,
    max_model_len: int,
    error: OutOfMemory,
) -> ConfigError:
    """What to lower if the largest step does not fit, even with the smallest cache."""
    num_tokens, num_rows = config.max_num_batched_tokens, config.max_num_seqs
    return ConfigError(
        f"the largest step does not fit into the memory of {device} beside the weights "
        f"({byte_size(weight_bytes)}): {error}. Lower max_num_batched_tokens={num_tokens}, for "
        f"example to {max(1, num_tokens // 2)}, max_num_seqs={num_rows}, for example to "
        f"{max(1, num_rows // 2)}, or max_model_len={max_model_len}."
    )


def no_memory_for_warm_up(
    config: WorkerConfig, device: torch.device, error: OutOfMemory
) -> ConfigError:
    """What to lower if the warm-up does not fit beside the KV cache."""
    return ConfigError(
        f"the warm-up does not fit into the memory of {device} beside the KV cache: {error}. Lower "
        f"{_lower_cache(config)}, max_num_batched_tokens={config.max_num_batched_tokens} or "
        f"max_num_seqs={config.max_num_seqs}, or end other processes on the device."
    )


def _lower_cache(config: WorkerConfig) -> str:
    """The setting that decides how large the cache is, and a lower value."""
    for name in ("num_blocks", "kv_cache_bytes"):
        if (count := getattr(config, name)) is not None:
            return f"{name}={count}, for example to {count * 9 // 10}"
    if (fraction := config.kv_memory_fraction) is not None:
        return f"kv_memory_fraction={fraction:g}, for example to {fraction * 0.9:.3g}"
    if config.device == "cpu":
        return "the size of the cache (num_blocks)"
    share = config.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION
    return f"gpu_memory_utilization={share:g}, for example to {share * 0.95:.3g}"
