"""An invalid setting is rejected with its name and the allowed values."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from longshore.protocol.errors import ConfigError
from longshore.protocol.handshake import EngineIdentity
from longshore.protocol.settings import read_config
from longshore.protocol.transport.channel import Endpoint
from longshore.scheduler.config import CacheConfig, SchedulerConfig, SchedulerProcessConfig
from longshore.scheduler.kv_cache.block_hash import BlockHasher
from longshore.scheduler.queue.outside_policies import load_policy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 0}, r"max_model_len=0 must be at least 1"),
        ({"max_num_seqs": 0}, r"max_num_seqs=0 must be between 1 and 65536"),
        ({"max_num_batched_tokens": 0}, r"max_num_batched_tokens=0 must be between 1 and 16777216"),
        (
            {"max_num_scheduled_tokens": 0},
            r"max_num_scheduled_tokens=0 must be between 1 and 16777216",
        ),
        (
            {"max_num_scheduled_tokens": 2049},
            r"max_num_scheduled_tokens=2049 must be between 1 and max_num_batched_tokens=2048",
        ),
        (
            {"long_prefill_token_threshold": -1},
            r"long_prefill_token_threshold=-1 must be at least 0",
        ),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 63},
            r"budget is 63 tokens and max_model_len=64. Raise max_num_batched_tokens or enable",
        ),
        (
            {"enable_chunked_prefill": False, "long_prefill_token_threshold": 8},
            r"long_prefill_token_threshold needs chunked prefill, which is off",
        ),
        ({"max_loras": -1}, r"max_loras=-1 must be at least 0"),
        ({"max_num_encoder_input_tokens": -1}, r"max_num_encoder_input_tokens=-1 must be at"),
        ({"encoder_cache_size": -1}, r"encoder_cache_size=-1 must be at least 0"),
        ({"num_speculative_tokens": -1}, r"num_speculative_tokens=-1 must be at least 0"),
        ({"num_lookahead_tokens": -1}, r"num_lookahead_tokens=-1 must be at least 0"),
        ({"kv_role": "x"}, "kv_role='x' is unknown; use one of kv_both, kv_producer, kv_consumer"),
        (
            {"load_failure_policy": "x"},
            r"load_failure_policy='x' is unknown; use one of recompute, fail",
        ),
        ({"load_timeout_s": 0.0}, r"load_timeout_s=0.0 must be above 0"),
        ({"load_timeout_s": float("nan")}, r"load_timeout_s=nan must be above 0"),
        ({"max_loading_blocks": 0}, r"max_loading_blocks=0 must be between 1 and"),
        ({"max_steps_in_flight": 0}, r"max_steps_in_flight=0 must be 1 \(synchronous\) or 2"),
        ({"max_steps_in_flight": 3}, r"max_steps_in_flight=3 must be 1 \(synchronous\) or 2"),
        ({"max_steps_in_flight": 65, "feed_back_tokens": True}, r"=65 must be .*at most 64"),
    ],
)
def test_scheduler_setting_out_of_range_is_named_with_what_is_allowed(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**({"max_model_len": 64} | settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, r"block_size=0 is not a power of two.*Use 16 or 32"),
        ({"block_size": 12}, r"block_size=12 is not a power of two.*Use 16 or 32"),
        ({"num_blocks": 1}, r"num_blocks=1 leaves no block but the null block; use 2 or more"),
        ({"hash_block_size": 3}, r"hash_block_size=3 does not divide block_size=16"),
        ({"hash_block_size": 32}, r"hash_block_size=32 does not divide block_size=16"),
        ({"watermark": -0.1}, r"watermark=-0.1 must be a share of the blocks"),
        ({"watermark": 1.0}, r"watermark=1.0 must be a share of the blocks"),
        ({"admit_threshold": 0.9, "preempt_threshold": 0.8}, r"must satisfy 0 < admit <= preempt"),
        ({"preempt_threshold": 1.1}, r"must satisfy 0 < admit <= preempt <= 1"),
        (
            {"hash_algorithm": "md5"},
            r"hash_algorithm='md5' is unknown; use one of sha256, xxh3-128",
        ),
    ],
)
def test_cache_setting_out_of_range_is_named_with_what_is_allowed(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**settings)


@pytest.mark.req("SCH-02", "SCH-08")
def test_budget_and_width_have_their_defaults() -> None:
    config = SchedulerConfig(max_model_len=64)
    assert config.token_budget == config.max_num_batched_tokens
    assert config.max_num_seqs == 256
    limited = SchedulerConfig(max_model_len=64, max_num_scheduled_tokens=100)
    assert limited.token_budget == 100


def test_settings_at_their_limits_are_accepted() -> None:
    SchedulerConfig(max_model_len=1, max_num_seqs=1, max_num_batched_tokens=1)
    SchedulerConfig(max_model_len=64, max_num_batched_tokens=64, enable_chunked_prefill=False)
    for num_stages in (1, 2, 64):
        SchedulerConfig(max_model_len=64, feed_back_tokens=True, max_steps_in_flight=num_stages)
    CacheConfig(block_size=1, num_blocks=2)


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        ({"max_model_len": 64, "max_seqs": 4}, r"scheduler\.max_seqs is not a setting"),
        ({"max_num_seqs": 4}, "missing required field `max_model_len`"),
    ],
)
def test_a_misspelt_or_missing_setting_in_a_file_is_rejected(
    tmp_path: Path, scheduler: dict[str, int], message: str
) -> None:
    path = tmp_path / "scheduler.json"
    document = msgspec.to_builtins(process_config()) | {"scheduler": scheduler}
    path.write_bytes(msgspec.json.encode(document))
    with pytest.raises(ConfigError, match=message):
        read_config(path, SchedulerProcessConfig)


def test_a_wrong_setting_in_a_file_is_the_same_named_error() -> None:
    with pytest.raises(ConfigError, match="max_steps_in_flight=9"):
        msgspec.json.decode(
            b'{"max_model_len": 64, "max_steps_in_flight": 9}', type=SchedulerConfig
        )


@pytest.mark.req("CFG-01")
def test_scheduler_settings_have_the_defaults_of_the_field() -> None:
    config = SchedulerConfig(max_model_len=64)
    assert config.max_num_scheduled_tokens is None
    assert config.token_budget == config.max_num_batched_tokens
    assert (config.max_num_seqs, config.long_prefill_token_threshold) == (256, 0)
    assert (config.enable_chunked_prefill, config.scheduler_reserve_full_isl) == (True, False)
    assert (config.policy, config.max_steps_in_flight) == ("fcfs", 2)  # asynchronous
    assert (config.max_loras, config.max_num_encoder_input_tokens) == (0, 0)
    for policy in ("fcfs", "priority", "continuum"):
        load_policy(SchedulerConfig(max_model_len=64, policy=policy).policy)
    cut = SchedulerConfig(max_model_len=64, max_num_batched_tokens=64, max_num_scheduled_tokens=9)
    assert cut.token_budget == 9


@pytest.mark.req("CFG-02")
def test_cache_settings_have_the_defaults_of_the_field() -> None:
    config = CacheConfig()
    assert (config.block_size, config.hash_block_size, config.tokens_per_hash) == (16, None, 16)
    assert config.enable_prefix_caching
    assert (config.watermark, config.preempt_threshold, config.admit_threshold) == (0.01, 0.95, 0.8)
    assert not config.enable_kv_cache_events
    assert CacheConfig(hash_block_size=4).tokens_per_hash == 4
    assert "hash_seed" in SchedulerProcessConfig.__struct_fields__
    roots = {BlockHasher(16, seed).none_hash for seed in (b"one", b"other")}
    assert len(roots) == 2


@pytest.mark.req("FEA-06")
@pytest.mark.parametrize(
    "sizes", [{"decode_context_parallel_size": 2}, {"prefill_context_parallel_size": 2}]
)
def test_ranks_that_no_worker_is_compared_with_are_rejected_with_the_setting(
    sizes: dict[str, int],
) -> None:
    with pytest.raises(ConfigError, match=next(iter(sizes))):
        process_config(CacheConfig(**sizes))


def process_config(cache: CacheConfig = CacheConfig()) -> SchedulerProcessConfig:  # noqa: B008  # frozen
    identity = EngineIdentity(
        model_fingerprint="m",
        dtype="float32",
        block_size=16,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        hash_seed_digest="",
    )
    return SchedulerProcessConfig(
        scheduler=SchedulerConfig(max_model_len=64),
        cache=cache,
        identity=identity,
        workers=(Endpoint("ipc://w"),),
        clients=Endpoint("ipc://c"),
        hash_seed="00",
        vocab_size=8,
        rank_timeout_s=60.0,
    )
