"""What each policy makes of loads, prefixes and sessions."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from longshore.deploy.gateway.router.block_index import BlockIndex, GroupInfo
from longshore.deploy.gateway.router.engine_loads import TOKENS_PER_REQUEST
from longshore.deploy.gateway.router.policies import (
    MAX_EXCESS,
    MAX_PREFIX_BLOCKS,
    PREFIX_WEIGHT,
    Decision,
    LeastLoaded,
    PrefixAware,
    RoundRobin,
    RoutedPrompt,
    SessionAffinity,
    can_reuse,
    extra_keys_of,
)
from longshore.protocol.requests import MultimodalFeature, PoolingParams, RequestOptions
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.kv_cache.block_hash import BlockHasher, ExtraKeys

SIZE = 16
HASHER = BlockHasher(SIZE, b"seed")
ENGINES = range(4)

loads_of_engines = st.lists(st.floats(0, 100), min_size=4, max_size=4)


def hashes_of(tokens: Sequence[int], keys: ExtraKeys | None = None) -> list[bytes]:
    hashes: list[bytes] = []
    HASHER.extend(hashes, np.array(tokens, np.int32), keys)
    return hashes


def prefix_aware(num_cached: Sequence[int], tokens: Sequence[int], **keys: Any) -> PrefixAware:
    """Engines that have this many leading blocks of a prompt."""
    index = BlockIndex(len(num_cached), tokens_per_hash=SIZE, max_hashes=100_000)
    index.describe_group(0, GroupInfo(SIZE))
    for engine, count in enumerate(num_cached):
        index.is_known[engine] = True
        index.store(engine, hashes_of(tokens, **keys)[:count], 0, "GPU")
    return PrefixAware(index, HASHER)


@given(loads_of_engines, st.permutations(ENGINES))
def test_turns_and_loads(loads: list[float], turns: list[int]) -> None:
    prompt = RoutedPrompt([1, 2, 3])
    assert RoundRobin().choose(prompt, turns[:2], loads) == Decision(turns[0], "turn")
    decision = LeastLoaded().choose(prompt, turns[1:], loads)
    assert loads[decision.engine] == min(loads[engine] for engine in turns[1:])
    first = next(engine for engine in turns[1:] if loads[engine] == loads[decision.engine])
    assert decision.engine == first


@given(
    st.lists(st.integers(0, 50), min_size=4, max_size=4),
    loads_of_engines,
    st.sets(st.sampled_from(list(ENGINES)), min_size=1),
    st.integers(1, 60 * SIZE),
)
def test_prefix_aware_weighs_loads_against_prefixes(
    num_cached: list[int], loads: list[float], usable: set[int], num_tokens: int
) -> None:
    tokens = list(range(60 * SIZE))
    policy = prefix_aware(num_cached, tokens)
    decision = policy.choose(RoutedPrompt(tokens[:num_tokens]), list(usable), loads)
    limit = (num_tokens - 1) // SIZE
    cached = {engine: SIZE * min(num_cached[engine], limit) for engine in usable}
    costs = {e: loads[e] - PREFIX_WEIGHT * cached[e] / TOKENS_PER_REQUEST for e in usable}
    assert costs[decision.engine] == pytest.approx(min(costs.values()))
    assert decision.num_cached_tokens == cached[decision.engine]
    longest = max(cached.values())
    if longest == 0:
        assert decision.reason == "load"
    else:
        is_longest = decision.num_cached_tokens == longest
        assert decision.reason == ("prefix" if is_longest else "prefix_overloaded")
    first = decision.num_cached_tokens // SIZE
    assert list(decision.next_hashes) == hashes_of(tokens[: limit * SIZE])[first : first + 64]


def test_another_salt_item_or_image_has_no_prefix() -> None:
    tokens = list(range(100))
    image = MultimodalFeature("an image", 0, 20)
    for salt, items in ((None, ()), ("a", ()), (None, (image,)), ("a", (image,))):
        keys = extra_keys_of(RequestOptions(cache_salt=salt, multimodal=items))
        policy = prefix_aware([0, 6], tokens, keys=keys)
        for other in (None, ExtraKeys(cache_salt="a"), ExtraKeys(multimodal=[image])):
            expected = 96 if hashes_of(tokens, other) == hashes_of(tokens, keys) else 0
            decision = policy.choose(RoutedPrompt(tokens, other), [0, 1], [0, 0])
            assert decision.num_cached_tokens == expected
        assert policy.choose(RoutedPrompt(tokens, keys), [0, 1], [0, 0]).engine == 1


def test_a_request_that_computes_everything_goes_to_the_least_loaded_engine() -> None:
    tokens = list(range(100))
    prompt = RoutedPrompt(tokens, uses_prefix=False)
    assert prefix_aware([0, 6], tokens).choose(prompt, [0, 1], [0, 0]) == Decision(0, "load")


@pytest.mark.parametrize(
    ("sampling", "pooling", "expected"),
    [
        (SamplingParams(), None, True),
        (SamplingParams(prompt_logprobs=1), None, False),
        (SamplingParams(), PoolingParams("last"), True),
        (SamplingParams(), PoolingParams("mean"), False),
    ],
)
def test_requests_with_a_result_per_token_use_no_prefix(
    sampling: SamplingParams, pooling: PoolingParams | None, expected: bool
) -> None:
    assert can_reuse(sampling, RequestOptions(pooling=pooling)) is expected


def test_the_search_in_a_prompt_is_bounded() -> None:
    tokens = list(range((MAX_PREFIX_BLOCKS + 10) * SIZE))
    decision = prefix_aware([0, MAX_PREFIX_BLOCKS + 10], tokens).choose(
        RoutedPrompt(tokens), [0, 1], [0, 0]
    )
    assert decision == Decision(1, "prefix", MAX_PREFIX_BLOCKS * SIZE)


@pytest.mark.parametrize("tokens", [[], [1], list(range(SIZE))])
def test_a_prompt_without_a_full_block_before_its_last_token_has_no_prefix(
    tokens: list[int],
) -> None:
    decision = prefix_aware([0, 1], list(range(SIZE))).choose(RoutedPrompt(tokens), [0, 1], [0, 0])
    assert decision == Decision(0, "load")


def session(key: str | None, engines: Sequence[int], loads: Sequence[float]) -> Decision:
    return SessionAffinity().choose(RoutedPrompt([1], session_key=key), engines, loads)


@given(st.text(min_size=1), st.permutations(ENGINES))
def test_all_gateways_send_a_session_to_the_same_engine(key: str, turns: list[int]) -> None:
    assert session(key, turns, [0] * 4) == session(key, ENGINES, [3] * 4)
    assert session(key, turns, [0] * 4).reason == "session"


def test_sessions_are_spread_and_only_those_of_a_lost_engine_move() -> None:
    keys = [f"session {number}" for number in range(4000)]
    before = {key: session(key, ENGINES, [0] * 4).engine for key in keys}
    assert all(900 < count < 1100 for count in Counter(before.values()).values())
    after = {key: session(key, [0, 1, 3], [0] * 4).engine for key in keys}
    assert all(after[key] == before[key] for key in keys if before[key] != 2)
    moved = Counter(after[key] for key in keys if before[key] == 2)
    assert all(count > 250 for count in moved.values())


@given(st.text(min_size=1), loads_of_engines)
def test_a_session_leaves_an_engine_that_is_much_more_loaded(key: str, loads: list[float]) -> None:
    decision, own = session(key, ENGINES, loads), session(key, ENGINES, [0] * 4).engine
    maximum = MAX_EXCESS * sum(loads) / 4 + 1
    assert loads[decision.engine] <= maximum
    assert (decision.engine == own) == (loads[own] <= maximum)
    assert decision.reason == ("session" if decision.engine == own else "session_overloaded")


def test_requests_without_a_session_go_to_the_least_loaded_engine() -> None:
    assert session(None, [2, 3, 0, 1], [5, 4, 7, 4]) == Decision(3, "load")
