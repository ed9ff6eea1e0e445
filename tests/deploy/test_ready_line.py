"""The line that says where to ask, and what fits."""

import pytest

from longshore.deploy.ready_line import ready_line
from longshore.protocol.lifeline import Ready


@pytest.mark.parametrize(
    ("block_bytes", "size"),
    [
        ([8192], "1,000 x 8,192 = 8,192,000 bytes"),
        ([4096, 4096], "1,000 x 4,096 = 4,096,000 bytes on each of 2 workers"),
        # Stages of two layers and of one.
        ([8192, 4096], "1,000 x (8,192 + 4,096) = 12,288,000 bytes, by worker"),
    ],
)
def test_the_size_of_the_cache_is_told_for_every_worker(block_bytes: list[int], size: str) -> None:
    ready = {
        f"worker {rank}": Ready({"block_bytes": str(count)})
        for rank, count in enumerate(block_bytes)
    }
    ready["scheduler"] = Ready(
        {"num_blocks": "1000", "block_sizes": "16 or 64", "kv_cache_tokens": "31234"}
    )
    ready["gateway"] = Ready({"num_blocks": "1000", "block_size": "16", "max_model_len": "4096"})
    assert ready_line("http://x", "tiny", ready) == (
        "ready at http://x (model tiny, 1,000 blocks of 16 or 64 tokens: 31,234 tokens fit, "
        f"4,096 per request; KV cache: {size})"
    )
