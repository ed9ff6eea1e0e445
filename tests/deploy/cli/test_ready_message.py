"""The log lines with the URL and with the size of the KV cache."""

from typing import Final

import pytest

from longshore.deploy.cli.ready_message import (
    cache_sizes,
    model_line,
    ready_lines,
    ready_message,
)
from longshore.deploy.supervisor.replica import replicas
from longshore.protocol.transport.lifeline import Ready

ONE: Final = replicas(("unified",))
TWO: Final = replicas(("unified",) * 2)


def test_the_line_is_a_row_with_the_model_and_what_fits() -> None:
    ready = {
        "scheduler": Ready({"kv_cache_tokens": "31234"}),
        "gateway": Ready({"max_model_len": "4096"}),
    }
    line = ready_message("http://127.0.0.1:8000", {"tiny": ONE}, ready)
    assert line == (
        "ready at http://127.0.0.1:8000 (model tiny, a KV cache of 31,234 tokens, "
        "4,096 per request)"
    )


@pytest.mark.parametrize(
    ("block_bytes", "size"),
    [
        ([8192], "1,000 x 8,192 = 8,192,000 bytes"),
        ([4096, 4096], "1,000 x 4,096 = 4,096,000 bytes on each of 2 workers"),
        # Stages with two layers and with one.
        ([8192, 4096], "1,000 x (8,192 + 4,096) = 12,288,000 bytes, per worker"),
    ],
)
def test_the_size_of_the_cache_is_told_for_every_worker(block_bytes: list[int], size: str) -> None:
    ready = {
        f"worker {rank}": Ready({"block_bytes": str(count)})
        for rank, count in enumerate(block_bytes)
    }
    ready["scheduler"] = Ready({"num_blocks": "1000", "block_sizes": "16 or 64"})
    assert cache_sizes(ready, ONE) == f"1,000 blocks of 16 or 64 tokens, {size}"


@pytest.mark.parametrize(
    ("num_blocks", "room", "sizes"),
    [
        (
            (600, 600),
            "2 engines, each with a KV cache of 9,584 tokens",
            "2 engines, each with 600 blocks of 16 tokens, 600 x 64 = 38,400 bytes on each of 2 "
            "workers",
        ),
        (
            (600, 50),
            "2 engines: engine 0 has a KV cache of 9,584 tokens; "
            "engine 1 has a KV cache of 784 tokens",
            "2 engines: engine 0 has 600 blocks of 16 tokens, 600 x 64 = 38,400 bytes on each of 2 "
            "workers; engine 1 has 50 blocks of 16 tokens, 50 x 64 = 3,200 bytes on each of 2 "
            "workers",
        ),
    ],
)
def test_engines_of_one_size_are_told_once_and_others_each(
    num_blocks: tuple[int, int], room: str, sizes: str
) -> None:
    ready = {
        f"worker {engine}.{rank}": Ready({"block_bytes": "64"})
        for engine in range(2)
        for rank in range(2)
    }
    for engine, count in enumerate(num_blocks):
        tokens = str((count - 1) * 16)
        details = {"num_blocks": str(count), "block_sizes": "16", "kv_cache_tokens": tokens}
        ready[f"scheduler {engine}"] = Ready(details)
    for gateway in range(3):
        ready[f"gateway {gateway}"] = Ready({"max_model_len": "4096"})
    line = ready_message("http://x", {"tiny": TWO}, ready, num_gateways=3)
    assert line == f"ready at http://x (model tiny, 3 gateways, {room}, 4,096 per request)"
    assert cache_sizes(ready, TWO) == sizes


def test_the_ways_in_come_last() -> None:
    assert ready_lines("http://127.0.0.1:8000", "ready", can_chat=True, needs_key=False) == [
        "ready",
        "dashboard: http://127.0.0.1:8000/dashboard",
        "chat: longshore chat",
    ]
    lines = ready_lines("http://10.0.0.1:1", "ready", can_chat=True, needs_key=True)
    assert lines[-1] == "chat: longshore chat --url http://10.0.0.1:1 --api-key KEY"
    lines = ready_lines("http://10.0.0.1:1", "ready", can_chat=False, needs_key=False)
    assert lines[-1] == "dashboard: http://10.0.0.1:1/dashboard"


def test_the_model_is_told_with_what_computes_it() -> None:
    def worker(device: str, threads: str = "4") -> Ready:
        return Ready({"device": device, "dtype": "bfloat16", "threads": threads})

    assert model_line("tiny", {"worker 0": worker("cpu"), "scheduler": Ready()}, ONE) == (
        "model tiny: 1 worker on cpu with 4 threads, bfloat16"
    )
    assert model_line("tiny", {"worker 0": worker("cpu", "1"), "scheduler": Ready()}, ONE) == (
        "model tiny: 1 worker on cpu with 1 thread, bfloat16"
    )
    gpus = {f"worker {engine}.{rank}": worker(f"cuda:{rank}") for engine in "01" for rank in "01"}
    assert model_line("tiny", gpus, TWO) == (
        "model tiny: 2 engines, each with 2 workers on cuda:0, cuda:1, bfloat16"
    )
    apart = replicas(("prefill", "decode"))
    assert model_line("tiny", gpus, apart) == (
        "model tiny: 1 prefill and 1 decode engines, each with 2 workers on cuda:0, cuda:1, "
        "bfloat16"
    )
