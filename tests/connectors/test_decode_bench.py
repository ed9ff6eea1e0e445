"""decode_bench: decoding without prefill, on dummy KV."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longshore.connectors.base import ConnectorConfig
from longshore.connectors.registry import load_scheduler_connector
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import CrossAttentionSpec, CustomSpec
from tests.connectors.conftest import KINDS
from tests.connectors.engine import Engine, prompts_of

PROMPTS = prompts_of(100, 37, 1, 150, 33)
ModelOf = Callable[[str], tuple[Path, Any]]


def bench(model: Path, options: dict[str, Any] | None = None, **settings: Any) -> Engine:
    return Engine(model, "decode_bench", options or {"fill_std": 1.0}, **settings)


@pytest.mark.req("CRG-10")
@pytest.mark.parametrize("kind", KINDS)
def test_no_token_of_a_prompt_but_the_last_is_computed(kind: str, model_of: ModelOf) -> None:
    with bench(model_of(kind)[0], async_scheduling=False) as engine:
        answers = [engine.add(prompt, max_tokens=5) for prompt in PROMPTS]
        engine.wait(*answers)
        assert engine.num_computed == 5 * len(PROMPTS)
        stats = engine.stats
    num_loaded = sum(len(prompt) - 1 for prompt in PROMPTS)
    assert (stats.num_external_hit_tokens, stats.num_prefix_hit_tokens) == (num_loaded, 0)
    ends = [answer.end for answer in answers]
    assert [end.num_cached_tokens for end in ends if end] == [len(p) - 1 for p in PROMPTS]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_depend_only_on_the_request_and_the_options(kind: str, model_of: ModelOf) -> None:
    model, _ = model_of(kind)
    with bench(model) as engine:
        first = engine.run(*PROMPTS)
        again = engine.run(*reversed(PROMPTS), is_together=True)
        # Its prompt contains tokens that the engine has computed and cached.
        longer = engine.run(PROMPTS[0] + first[0])
    assert again == first[::-1]
    with bench(model) as engine:
        assert engine.run(PROMPTS[0] + first[0]) == longer
    num_blocks = 22 if kind == "states" else 34
    with bench(model, num_blocks=num_blocks, max_num_batched_tokens=32, max_num_seqs=8) as engine:
        preempted = engine.run(*PROMPTS, max_tokens=60, is_together=True)
        assert engine.stats.num_preemptions > 0
    with bench(model) as engine:
        assert engine.run(*PROMPTS, max_tokens=60) == preempted


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_rank_fills_its_share(model_of: ModelOf) -> None:
    ranks = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "in_process": False}
    model, _ = model_of("full")
    with bench(model, {"fill_mean": 0.5}) as engine:  # the same on all ranks
        wanted = engine.run(*PROMPTS)
    with bench(model, {"fill_mean": 0.5}, **ranks) as engine:
        answers = [engine.add(prompt) for prompt in PROMPTS]
        engine.wait(*answers)
    assert [answer.token_ids for answer in answers] == wanted
    ends = [answer.end for answer in answers]
    assert [end.num_cached_tokens for end in ends if end] == [len(p) - 1 for p in PROMPTS]


def test_options_change_the_values(model_of: ModelOf) -> None:
    model, _ = model_of("full")
    options: list[dict[str, Any]] = [
        {},
        {"fill_mean": 3},
        {"fill_std": 1.0},
        {"fill_std": 1.0, "seed": 1},
    ]
    tokens = []
    for chosen in options:
        with bench(model, chosen or {"fill_mean": 0.015}) as engine:
            tokens.append(tuple(map(tuple, engine.run(*PROMPTS, max_tokens=20))))
    with Engine(model) as engine:
        tokens.append(tuple(map(tuple, engine.run(*PROMPTS, max_tokens=20))))
    assert len(set(tokens)) == 5


def test_fp8_blocks_are_filled(model_of: ModelOf) -> None:
    model, _ = model_of("full")
    with bench(model, kv_cache_dtype="fp8_e4m3") as engine:
        first = engine.run(*PROMPTS)
        assert engine.run(*PROMPTS) == first


@pytest.mark.req("CFG-05")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": 1}, "has no option 'mean'; its options are fill_mean, fill_std, seed"),
        ({"fill_mean": "1"}, "needs 'fill_mean' to be a finite number; it is '1'"),
        ({"fill_mean": float("nan")}, "'fill_mean' to be a finite number; it is nan"),
        ({"fill_std": -1}, "'fill_std' to be a finite number of at least 0; it is -1"),
        ({"seed": 1.5}, "'seed' to be a whole number of at least 0; it is 1.5"),
        ({"seed": True}, "'seed' to be a whole number"),
    ],
)
def test_a_wrong_option_is_rejected_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_scheduler_connector("decode_bench", ConnectorConfig(options))


def test_kinds_of_attention_whose_blocks_cannot_be_filled_are_rejected() -> None:
    cross = CrossAttentionSpec(16, 2, 16, 4, max_encoder_tokens=32)
    custom = CustomSpec(16, page_size_bytes=64, manager="theirs:Manager")
    for spec in (cross, custom):
        with pytest.raises(ConfigError, match=f"cannot fill blocks of a {type(spec).__name__}"):
            load_scheduler_connector("decode_bench", ConnectorConfig(specs=(spec,)))


def test_it_cannot_be_combined_with_other_connectors() -> None:
    children = [{"connector": "decode_bench"}, {"connector": "decode_bench"}]
    with pytest.raises(ConfigError, match="multi cannot contain decode_bench"):
        load_scheduler_connector("multi", ConnectorConfig({"connectors": children}))
