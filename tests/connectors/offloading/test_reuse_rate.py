"""The policy `reuse_rate`: what it learns, and what it evicts because of that."""

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.connectors.offloading.policies.policy import Protected
from longshore.connectors.offloading.policies.reuse_rate import (
    MAX_REMEMBERED,
    REMEMBERED_PER_BLOCK,
    ReuseRate,
)
from longshore.connectors.offloading.policies.reuse_statistics import (
    FIRST_USE,
    FIRST_USE_AT_END,
    MAX_USES,
    ReuseStatistics,
    non_decreasing,
)
from longshore.protocol.errors import ConfigError

NOTHING = Protected()


def prompt(name: int, length: int) -> list[bytes]:
    return [f"{name}/{position}".encode() for position in range(length)]


def use(policy: ReuseRate, keys: list[bytes]) -> int:
    """A request with these keys; the number of leading ones that are entries."""
    num_hits = next((i for i, key in enumerate(keys) if key not in policy), len(keys))
    policy.touch(keys, range(len(keys)))
    positions = [position for position, key in enumerate(keys) if key not in policy]
    new = [keys[position] for position in positions]
    num_evict = max(0, len(policy) + len(new) - policy.capacity)
    assert policy.admit(new, positions, num_evict, Protected(set(keys))) is not None
    policy.refresh(keys)
    return num_hits


def kept(policy: ReuseRate, keys: list[bytes]) -> int:
    return sum(key in policy for key in keys)


def test_prompts_used_once_do_not_displace_one_that_is_used_again_and_again() -> None:
    policy = ReuseRate(100)
    shared = prompt(0, 40)
    hits = []
    for turn in range(60):
        hits.append(use(policy, shared))
        for other in range(6):  # 240 blocks, so that LRU would never have the shared prompt
            use(policy, prompt(1000 * (turn + 1) + other, 40))
    assert hits[0] == 0
    assert min(hits[30:]) >= 39


def test_the_last_block_is_evicted_first_if_only_the_others_are_used_again() -> None:
    policy = ReuseRate(4000)
    ends = [f"end of {name}".encode() for name in range(1500)]
    for name, end in enumerate(ends):  # the second turn does not contain the first one's end
        use(policy, [*prompt(name, 20), end])
        use(policy, [*prompt(name, 30), b"second " + end])
    newest = range(1400, 1500)  # their blocks and ends fit
    num_ends = kept(policy, [ends[name] for name in newest])
    assert num_ends < 75  # LRU has all of them
    assert all(kept(policy, prompt(name, 30)) == 30 for name in newest)


def test_without_reuse_it_evicts_the_oldest_prompt_from_its_end() -> None:
    policy = ReuseRate(30)
    for name in range(3):
        use(policy, prompt(name, 10))
    assert (
        policy.evict(12, NOTHING)
        == [
            prompt(0, 10)[9],  # the end of a prompt has a class of its own, equal until it is known
            *prompt(0, 10)[8::-1],
            prompt(1, 10)[9],
            prompt(1, 10)[8],
        ]
    )


def test_blocks_that_cost_more_to_recompute_are_kept_longer() -> None:
    """A long prompt is older than several short ones, which a policy without costs keeps."""
    for cost_doubles_at, is_long_kept in ((None, False), (16, True)):
        policy = ReuseRate(1000, cost_doubles_at=cost_doubles_at)
        use(policy, prompt(0, 200))
        for name in range(1, 101):
            use(policy, prompt(name, 8))
        evicted = policy.evict(200, NOTHING) or []
        assert all(not key.startswith(b"0/") for key in evicted) == is_long_kept
    with pytest.raises(ConfigError, match="cost_doubles_at=0 must be more than 0"):
        ReuseRate(10, cost_doubles_at=0)


def test_remembered_keys_are_bounded() -> None:
    policy = ReuseRate(10)
    for name in range(200):
        use(policy, prompt(name, 7))
        policy.touch(prompt(10_000 + name, 5), range(5))  # looked up, never stored
        policy.check()
        assert policy.num_remembered() <= 10 * REMEMBERED_PER_BLOCK
    assert policy.num_remembered() == 10 * REMEMBERED_PER_BLOCK
    large = ReuseRate(MAX_REMEMBERED + 5)
    assert large._max_remembered == large.capacity


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning() -> None:
    policy = ReuseRate(10)
    keys = prompt(0, 6)
    use(policy, keys[:3])
    use(policy, keys)  # the first blocks are in other classes than the rest
    policy.evict(6, NOTHING)
    policy.touch(keys, range(6))
    assert list(policy._remembered) == keys[::-1]


def test_a_remembered_block_returns_with_the_uses_that_it_had() -> None:
    policy = ReuseRate(20)
    keys = prompt(0, 10)
    for _ in range(3):
        use(policy, keys)
    policy.evict(10, NOTHING)
    assert kept(policy, keys) == 0
    use(policy, keys)
    assert {policy._index[key].cls - FIRST_USE for key in keys[:-1]} == {3}
    assert policy._index[keys[-1]].cls - FIRST_USE_AT_END == 3


def test_what_is_learned_is_the_share_of_blocks_used_again_and_their_median_age() -> None:
    statistics = ReuseStatistics(1_000_000)
    statistics.update(0)
    # Without data, Laplace's rule, and the capacity.
    assert statistics.probabilities[FIRST_USE] == pytest.approx(1 / 2)
    assert statistics.probabilities[FIRST_USE + 2] == pytest.approx(3 / 4)
    assert statistics.scale == 1_000_000
    for number in range(2_000):
        statistics.use(FIRST_USE, 100)
        statistics.use(FIRST_USE_AT_END, 1)
        if number % 4 == 0:
            statistics.reuse(FIRST_USE, 100, age=5_000)
        elif number % 100 == 1:
            statistics.reuse(FIRST_USE, 100, age=80_000)
    statistics.update(500_000)
    assert statistics.probabilities[FIRST_USE] == pytest.approx(0.26, abs=0.01)
    # 2,000 ends and none of them used again, against the prior's 1,000 blocks
    assert statistics.probabilities[FIRST_USE_AT_END] == pytest.approx(0.26 / 3, abs=0.01)
    assert 4_000 < statistics.scale < 6_000
    for now in range(1, 400):  # all of it is long ago
        statistics.update(now * 8_000_000)
    assert statistics.probabilities[FIRST_USE] == pytest.approx(1 / 2, abs=0.01)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.data())
def test_non_decreasing_is_the_closest_such_sequence(
    heights: list[int], data: st.DataObject
) -> None:
    """Against all sequences whose steps are means of neighbours, one of which is the closest."""
    weights = data.draw(st.lists(st.integers(1, 3), min_size=len(heights), max_size=len(heights)))
    found = non_decreasing([float(x) for x in heights], [float(w) for w in weights])

    def distance(values: list[float]) -> float:
        pairs = zip(values, heights, weights, strict=True)
        return sum(weight * (value - height) ** 2 for value, height, weight in pairs)

    best = None
    for cuts in product([False, True], repeat=len(heights) - 1):
        blocks, start = [], 0
        for end in [*(i + 1 for i, cut in enumerate(cuts) if cut), len(heights)]:
            total = sum(weights[start:end])
            mean = sum(h * w for h, w in zip(heights[start:end], weights[start:end], strict=True))
            blocks += [mean / total] * (end - start)
            start = end
        if blocks == sorted(blocks):
            best = min(best, distance(blocks)) if best is not None else distance(blocks)
    assert found == sorted(found)
    assert best is not None
    assert distance(found) == pytest.approx(best)


def test_random_use_keeps_its_queues_consistent() -> None:
    chance = random.Random(3)
    policy = ReuseRate(60, cost_doubles_at=8)
    for _ in range(800):
        name = int(12 * chance.random() ** 2)
        use(policy, prompt(name, chance.randrange(1, 40)))
        if chance.random() < 0.1:
            policy.remove([key for key in policy if chance.random() < 0.2])
        policy.check()
    assert {run.cls % MAX_USES for queue in policy._queues for run in queue.runs} > {0, 7}
