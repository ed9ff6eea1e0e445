"""How a GPU's memory is divided, and what is said when it is too little."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from longshore.protocol.errors import KVCacheTooSmall
from longshore.protocol.kv_cache_spec import FullAttentionSpec, KVCacheGroup, LongestRequest
from longshore.worker.config import WorkerConfig
from longshore.worker.errors import OutOfMemory
from longshore.worker.kv_cache.memory_budget import (
    MemoryBudget,
    StepMemory,
    no_memory_for_warm_up,
)

GIB = 1 << 30
GROUP = KVCacheGroup(
    tuple(f"layer {index}" for index in range(32)),
    FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype_bytes=2),
)
BLOCK_BYTES = 2 << 20
LONGEST = LongestRequest(131_072, num_in_flight=4096, num_steps=2)
MEASURED = StepMemory(total=80 * GIB, used=17 * GIB, activations=3 * GIB, graphs=GIB)


def budget(
    measured: StepMemory = MEASURED, utilization: float = 0.9, ranks: int = 1
) -> MemoryBudget:
    return MemoryBudget(measured, utilization, weights=15 * GIB, num_ranks=ranks)


def num_blocks(of: MemoryBudget, longest: LongestRequest = LONGEST) -> int:
    return of.num_blocks([GROUP], longest, max_num_batched_tokens=8192)


def test_the_cache_gets_what_is_left_of_the_share_of_all_memory() -> None:
    assert num_blocks(budget()) == (72 - 17 - 3 - 1) * GIB // BLOCK_BYTES


def test_memory_of_other_processes_counts_as_used() -> None:
    beside_others = replace(MEASURED, used=MEASURED.used + 10 * GIB)
    assert num_blocks(budget(beside_others)) == num_blocks(budget()) - 10 * GIB // BLOCK_BYTES


def test_ranks_that_share_a_device_share_what_is_left_and_each_needs_activations() -> None:
    both, short = replace(MEASURED, used=32 * GIB), LONGEST._replace(num_tokens=1000)
    assert num_blocks(budget(both, ranks=2), short) == (20 - 3 - 1) * GIB // BLOCK_BYTES


def test_steps_may_take_what_is_left_but_always_what_the_largest_needs() -> None:
    assert budget().step_bytes(used=60 * GIB) == 12 * GIB
    assert budget(ranks=2).step_bytes(used=60 * GIB) == 6 * GIB
    assert budget().step_bytes(used=71 * GIB) == budget().step_bytes(used=80 * GIB) == 3 * GIB


def test_the_log_says_what_takes_how_much() -> None:
    assert str(budget()) == (
        "gpu_memory_utilization=0.9 of 80.00 GiB: weights 15.00 GiB, other memory in use 2.00 GiB, "
        "activations 3.00 GiB, graphs 1.00 GiB, KV cache 51.00 GiB"
    )


def test_each_remedy_for_too_little_memory_is_enough() -> None:
    small = replace(MEASURED, total=43 * GIB, activations=14 * GIB)
    tight = budget(small, utilization=1.0)
    with pytest.raises(KVCacheTooSmall) as raised:
        num_blocks(tight)
    text = str(raised.value)
    assert text.startswith("gpu_memory_utilization=1 of 43.00 GiB: weights 15.00 GiB")
    found = re.search(
        r"needs a cache of ([\d.]+) GiB\. Lower max_num_batched_tokens to about (\d+), or lower "
        r"max_model_len to (\d+); a lower max_num_seqs helps, too\.$",
        text,
    )
    assert found is not None, text
    tokens, length = int(found[2]), int(found[3])
    fewer = replace(small, activations=int(small.activations * tokens / 8192))
    num_blocks(budget(fewer, utilization=1.0))
    num_blocks(tight, LONGEST._replace(num_tokens=length))
    with pytest.raises(KVCacheTooSmall):
        num_blocks(tight, LONGEST._replace(num_tokens=length + 100))


def test_a_higher_share_is_named_where_it_is_enough() -> None:
    tight = budget(replace(MEASURED, total=40 * GIB))
    with pytest.raises(KVCacheTooSmall, match=r"Raise gpu_memory_utilization to 0\.93, or lower"):
        num_blocks(tight)
    num_blocks(replace(tight, utilization=0.93))


def test_without_any_remedy_it_says_how_much_is_missing() -> None:
    with pytest.raises(KVCacheTooSmall, match=r"GiB are missing\. Lower max_num_seqs and"):
        num_blocks(budget(replace(MEASURED, total=16 * GIB)))


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({}, "gpu_memory_utilization=0.9, for example to 0.855"),
        ({"gpu_memory_utilization": 0.8}, "gpu_memory_utilization=0.8, for example to 0.76"),
        ({"kv_memory_fraction": 0.5}, "kv_memory_fraction=0.5, for example to 0.45"),
        ({"kv_cache_bytes": 1000}, "kv_cache_bytes=1000, for example to 900"),
        ({"device": "cpu"}, "the size of the cache (num_blocks)"),
    ],
)
def test_a_cache_that_leaves_too_little_is_lowered_by_its_own_setting(
    settings: dict[str, Any], remedy: str
) -> None:
    config = WorkerConfig(**{"model": "model", "device": "cuda", **settings})
    error = no_memory_for_warm_up(config, torch.device("cuda", 0), OutOfMemory("no memory: x"))
    assert f"beside the KV cache: no memory: x. Lower {remedy}, max_num_batched" in str(error)
