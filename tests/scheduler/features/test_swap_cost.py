"""What a swap costs, and what recomputing costs."""

import pytest

from longshore.connectors.base import SwapSize
from longshore.scheduler.features.swap_cost import SET_UP_S, PrefillRate, SwapCost

BLOCK_BYTES = 5_242_880
"""Of a block of 16 tokens of a 70B model (NUM-16)."""


def cost(
    *, store: float = 28e9, load: float | None = None, rate: float = 4000.0, set_up_s: float = 0.0
) -> SwapCost:
    return SwapCost(
        store_bandwidth=store, load_bandwidth=load or store, prefill_rate=rate, set_up_s=set_up_s
    )


def one_way(num_tokens: int) -> SwapSize:
    return SwapSize(num_tokens // 16 * BLOCK_BYTES, 0)


def both_ways(num_tokens: int) -> SwapSize:
    return SwapSize(num_tokens // 16 * BLOCK_BYTES, num_tokens // 16 * BLOCK_BYTES)


@pytest.mark.req("NUM-21", "ERR-02")
@pytest.mark.parametrize(
    ("bandwidth", "milliseconds"), [(28e9, 0.1872), (7e9, 0.7490), (450e9, 0.01165)]
)
def test_the_time_of_one_block(bandwidth: float, milliseconds: float) -> None:
    """Bytes are divided by bytes, not decimal megabytes by binary gigabytes."""
    seconds = cost(store=bandwidth).swap_s(SwapSize(BLOCK_BYTES, 0))
    assert seconds * 1e3 == pytest.approx(milliseconds, rel=1e-3)


@pytest.mark.req("NUM-22", "NUM-23", "ERR-02")
@pytest.mark.parametrize(
    ("num_tokens", "swap_ms", "recompute_ms"),
    [(64, 0.749, 16), (256, 3.0, 64), (1024, 11.98, 256), (4096, 47.9, 1024), (16384, 191.7, 4096)],
)
def test_the_table_of_swaps_and_recomputations(
    num_tokens: int, swap_ms: float, recompute_ms: float
) -> None:
    """The published table has 0.7, 2.9, 11.7, 46.8 and 187 ms; see ERR-02."""
    model = cost()
    assert model.swap_s(one_way(num_tokens)) * 1e3 == pytest.approx(swap_ms, rel=2e-3)
    assert model.recompute_s(SwapSize(0, 0), num_tokens) * 1e3 == pytest.approx(recompute_ms)


@pytest.mark.req("NUM-23", "ERR-09")
def test_a_swap_counts_both_directions() -> None:
    model = cost()
    recompute_s = model.recompute_s(SwapSize(0, 0), 4096)
    assert recompute_s / model.swap_s(one_way(4096)) == pytest.approx(21.4, abs=0.05)
    assert recompute_s / model.swap_s(both_ways(4096)) == pytest.approx(10.7, abs=0.05)
    slow_return = cost(store=28e9, load=7e9)
    assert slow_return.swap_s(both_ways(4096)) == pytest.approx(0.0479 + 0.1917, rel=1e-3)


@pytest.mark.req("TIE-05", "ERR-01", "ERR-09")
def test_the_decision_follows_what_was_measured_not_a_number_of_tokens() -> None:
    """At 4,000 tokens per second a swap always wins; a present GPU prefills faster, and then the
    link decides, for short requests and for long ones."""
    assert cost().prefers_swap(both_ways(64), 64)
    fast = 20_000.0
    for num_tokens in (256, 16_384):
        assert cost(store=28e9, rate=fast).prefers_swap(both_ways(num_tokens), num_tokens)
        assert not cost(store=7e9, rate=fast).prefers_swap(both_ways(num_tokens), num_tokens)


@pytest.mark.req("TIE-05")
def test_set_up_decides_for_short_requests() -> None:
    model = cost(store=50e9, rate=20_000.0, set_up_s=SET_UP_S)
    size = SwapSize(BLOCK_BYTES, BLOCK_BYTES)
    assert model.swap_s(size) == pytest.approx(2 * SET_UP_S + 2 * BLOCK_BYTES / 50e9)
    assert not model.prefers_swap(size, 16)
    assert model.prefers_swap(both_ways(1024), 1024)


@pytest.mark.req("TIE-05")
def test_transfers_that_come_first_count() -> None:
    model = cost(store=28e9, rate=20_000.0)
    size = both_ways(1024)
    assert model.prefers_swap(size, 1024)
    loaded = SwapSize(size.store_bytes, size.load_bytes, queued_store_bytes=10 * size.store_bytes)
    assert not model.prefers_swap(loaded, 1024)
    returning = SwapSize(size.store_bytes, size.load_bytes, queued_load_bytes=10 * size.load_bytes)
    assert not model.prefers_swap(returning, 1024)


def test_what_is_stored_anyway_is_not_recomputed() -> None:
    """Everything but the last 16 tokens is in the tier: both ways load it."""
    model = cost(store=28e9, rate=4000.0)
    stored = 255 * BLOCK_BYTES
    size = SwapSize(BLOCK_BYTES, 256 * BLOCK_BYTES, num_found_tokens=4080, found_bytes=stored)
    assert model.recompute_s(size, 4096) == pytest.approx(stored / 28e9 + 16 / 4000)
    assert model.prefers_swap(size, 4096)
    assert not cost(store=1e9, rate=4000.0).prefers_swap(size, 4096)


def test_nothing_to_copy_out_costs_nothing() -> None:
    assert cost(set_up_s=1.0).swap_s(SwapSize(0, 0)) == 0.0


# The prefill rate


@pytest.mark.req("TIE-05")
def test_the_prefill_rate_is_that_of_steps_with_many_tokens_per_row() -> None:
    rate = PrefillRate()
    assert rate.tokens_per_s is None
    rate.planned(1, 3, 3, 0.0)  # a decode
    rate.answered(1, 1.0)
    assert rate.tokens_per_s is None
    rate.planned(2, 1000, 2, 1.0)
    rate.answered(2, 1.5)
    assert rate.tokens_per_s == pytest.approx(2000)


def test_a_step_in_flight_begins_with_the_answer_of_the_one_before() -> None:
    rate = PrefillRate()
    rate.planned(1, 1000, 1, 0.0)
    rate.planned(2, 1000, 1, 0.1)
    rate.answered(1, 1.0)
    rate.answered(2, 2.0)
    assert rate.tokens_per_s == pytest.approx(1000)


def test_the_rate_follows_recent_steps() -> None:
    rate, now = PrefillRate(), 0.0
    for step in range(1, 101):
        rate.planned(step, 1000, 1, now)
        now += 1.0 if step <= 50 else 0.1
        rate.answered(step, now)
    assert rate.tokens_per_s == pytest.approx(10_000, rel=0.1)


def test_small_steps_do_not_hide_how_fast_large_ones_are() -> None:
    """Where prompts are loaded, what is left to compute is small, and a step has a fixed cost."""
    rate, now = PrefillRate(), 0.0
    for step in range(1, 201):
        num_tokens = 1000 if step == 1 else 10
        rate.planned(step, num_tokens, 1, now)
        now += 0.1
        rate.answered(step, now)
    assert rate.tokens_per_s == pytest.approx(10_000, rel=0.15)


def test_an_estimate_is_what_is_assumed_until_large_steps_were_measured() -> None:
    rate = PrefillRate()
    assert rate.estimate(0.001) == 1000
    rate.planned(1, 6, 1, 0.0)
    rate.answered(1, 0.06)
    assert rate.estimate(0.001) == pytest.approx(1000, rel=0.01)
    rate.planned(2, 4096, 1, 1.0)
    rate.answered(2, 2.0)
    assert rate.estimate(0.001) == pytest.approx(4096, rel=0.02)


def test_a_new_epoch_forgets_unanswered_steps() -> None:
    rate = PrefillRate()
    rate.planned(7, 1000, 1, 0.0)
    rate.begin_epoch()
    rate.planned(1, 1000, 1, 10.0)
    rate.answered(1, 11.0)
    assert rate.tokens_per_s == pytest.approx(1000)
