"""Selective writes: only blocks that requests have asked for often enough are stored."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.connectors.offloading.reuse_filter import (
    MAX_TRACKER_SIZE,
    ReuseFilter,
    make_reuse_filter,
)
from longshore.protocol.errors import ConfigError


@pytest.mark.req("REU-02")
def test_a_threshold_below_two_means_no_filter() -> None:
    assert make_reuse_filter() is None
    assert make_reuse_filter(1) is None
    made = make_reuse_filter(2)
    assert made is not None
    assert (made.store_threshold, made.max_tracker_size) == (2, MAX_TRACKER_SIZE)
    assert MAX_TRACKER_SIZE == 64_000
    with pytest.raises(ConfigError, match="store_threshold=-1 must not be negative"):
        make_reuse_filter(-1)
    with pytest.raises(ConfigError, match="max_tracker_size=0 must be at least 1"):
        ReuseFilter(2, 0)
    with pytest.raises(ConfigError, match="must be at least 2"):
        ReuseFilter(1)


@pytest.mark.req("REU-01")
@given(st.lists(st.lists(st.integers(0, 20), max_size=9), max_size=30))
def test_counts_are_those_of_a_plain_lru_counter(calls: list[list[int]]) -> None:
    reuse_filter = ReuseFilter(2, max_tracker_size=6)
    counts: OrderedDict[int, int] = OrderedDict()
    for numbers in calls:
        reuse_filter.count([bytes([number]) for number in numbers])
        once = list(dict.fromkeys(numbers))
        seen = {number: counts.get(number, 0) for number in once}
        for number in reversed(once):
            counts[number] = seen[number] + 1
            counts.move_to_end(number)
        while len(counts) > 6:
            counts.popitem(last=False)
        assert len(reuse_filter) == len(counts)
        expected = [number for number in range(21) if counts.get(number, 0) >= 2]
        every = [bytes([number]) for number in range(21)]
        assert reuse_filter.worth_storing(every) == [bytes([number]) for number in expected]
