"""Swap preemption with real workers: a device so small that requests are swapped again and again
gives the tokens of one that is large enough."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from longshore.deploy.llm.in_process_engine import InProcessEngine
from longshore.protocol.statistics import SchedulerStats
from tests.connectors.engine import Engine, prompts_of

OPTIONS: Final = {"cpu_bytes_to_use": "64MiB", "verify_kv": "always"}
SETTINGS: Final[dict[str, Any]] = {
    "max_model_len": 160,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 64,
    "preempt_threshold": 0.5,
    "admit_threshold": 0.5,
}
NUM_BLOCKS: Final = {"full": 41, "windows": 91, "chunks": 61, "latents": 41, "states": 41}
"""By kind of model; a request of 150 tokens has 10 blocks per group."""


def tokens_of(model: Path, *connector: Any, **settings: Any) -> tuple[list[list[int]], Any]:
    prompts = prompts_of(60, 45, 70, 52, 33, 66)
    with Engine(model, *connector, **(SETTINGS | settings)) as engine:
        tokens = engine.run(*prompts, is_together=True, max_tokens=80)
        if not isinstance(engine.engine, InProcessEngine):
            return tokens, engine
        engine.until(lambda: not engine.engine.scheduler.has_pending_work())
        engine.engine.scheduler.check()
        assert not engine.engine.connector_halves[0]._swaps if connector else True
        return tokens, engine.stats


def swapped(stats: SchedulerStats) -> bool:
    assert stats.num_swapped_in > 0, stats
    return stats.num_swapped_out >= stats.num_swapped_in


@pytest.mark.req("TIE-04", "TIE-06", "TIE-07")
@pytest.mark.parametrize("kind", NUM_BLOCKS)
def test_swapped_requests_keep_their_tokens(
    kind: str, model_of: Callable[[str], tuple[Path, Any]]
) -> None:
    model, _ = model_of(kind)
    expected, _ = tokens_of(model, num_blocks=400)
    for settings in ({}, {"enable_prefix_caching": False}, {"preemption_mode": "auto"}):
        tokens, stats = tokens_of(
            model,
            "offloading",
            OPTIONS,
            num_blocks=NUM_BLOCKS[kind],
            **({"preemption_mode": "swap"} | settings),
        )
        assert tokens == expected, settings
        assert settings.get("preemption_mode") == "auto" or swapped(stats)


@pytest.mark.req("TIE-04")
def test_fp8_blocks_are_swapped_with_their_scales(
    model_of: Callable[[str], tuple[Path, Any]],
) -> None:
    model, _ = model_of("full")
    expected, _ = tokens_of(model, num_blocks=400, kv_cache_dtype="fp8_e4m3")
    tokens, stats = tokens_of(
        model,
        "offloading",
        OPTIONS | {"block_size": 32},
        num_blocks=41,
        kv_cache_dtype="fp8_e4m3",
        preemption_mode="swap",
    )
    assert swapped(stats)
    assert tokens == expected


@pytest.mark.req("TIE-04")
def test_a_small_host_tier_falls_back_to_recomputing(
    model_of: Callable[[str], tuple[Path, Any]],
) -> None:
    model, _ = model_of("full")
    expected, _ = tokens_of(model, num_blocks=400)
    tokens, stats = tokens_of(
        model,
        "offloading",
        {"cpu_bytes_to_use": 6 * 16384},
        num_blocks=31,
        preemption_mode="swap",
        preempt_threshold=0.8,
    )
    assert tokens == expected
    assert stats.num_swaps_refused > 0
    assert stats.num_preemptions > stats.num_swapped_out
