"""The ledger and its policies on the recorded requests of benchmarks/traces."""

import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from types import ModuleType

import pytest

from longshore.connectors.offloading.ledger import OffloadLedger
from longshore.connectors.offloading.policies.registry import POLICIES, load_eviction_policy
from tests.conftest import ROOT

TRACES = ROOT / "benchmarks" / "traces"
TRACE_OF_COLUMN = {"conv": "conversation", "syn": "synthetic"}
CAPACITIES = (1_000, 3_000, 10_000, 30_000, 50_000, 100_000)
EVERY_CELL = list(product(TRACE_OF_COLUMN.values(), CAPACITIES))
QUICK_CELL = ("synthetic", 10_000)
SLOW_CELLS = (("conversation", 1_000),)

RateOf = Callable[[str, str, int], float]
"""The hit rate of the ledger, by trace, policy and capacity."""


def cells() -> list[object]:
    """All but one take too long for every run of the tests."""

    def marks(cell: tuple[str, int]) -> tuple[pytest.MarkDecorator, ...]:
        if cell == QUICK_CELL:
            return ()
        return (pytest.mark.slow if cell in SLOW_CELLS else pytest.mark.long,)

    return [pytest.param(*cell, marks=marks(cell)) for cell in EVERY_CELL]


@pytest.fixture(scope="module")
def eviction() -> Iterator[ModuleType]:
    """The benchmark, which has the replays."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import eviction

    yield eviction
    sys.path.remove(str(ROOT / "benchmarks"))
    for name in ("eviction", "report"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def traces(eviction: ModuleType) -> dict[str, list[list[bytes]]]:
    return {
        name: eviction.read_trace(TRACES / f"{name}{eviction.SUFFIX}")
        for name in TRACE_OF_COLUMN.values()
    }


def reference_rates() -> dict[tuple[str, str, int], float]:
    """The table of the traces' README, by trace, policy and capacity."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (TRACES / "README.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| Capacity") or re.match(r"\| [\d,]+ \|", line)
    ]
    columns = [column.split() for column in rows[0][1:]]
    return {
        (
            TRACE_OF_COLUMN[trace],
            policy.lower().replace("-", ""),
            int(row[0].replace(",", "")),
        ): float(rate)
        for row in rows[1:]
        for (trace, policy), rate in zip(columns, row[1:], strict=True)
    }


@pytest.fixture(scope="module")
def rate_of(eviction: ModuleType, traces: dict[str, list[list[bytes]]]) -> RateOf:
    @cache  # two tests need it
    def rate(trace: str, policy: str, capacity: int) -> float:
        ledger = OffloadLedger(capacity, load_eviction_policy(policy, capacity))
        return float(eviction.replay(traces[trace], ledger)) / sum(map(len, traces[trace]))

    return rate


@pytest.mark.parametrize(("trace", "capacity"), cells())
def test_hit_rates_are_those_of_the_reference(
    eviction: ModuleType,
    traces: dict[str, list[list[bytes]]],
    rate_of: RateOf,
    trace: str,
    capacity: int,
) -> None:
    requests = traces[trace]
    num_blocks = sum(map(len, requests))
    for policy in ("lru", "arc", "s3fifo"):
        expected = pytest.approx(reference_rates()[trace, policy, capacity], abs=0.002)
        num_hits = eviction.replay_one_by_one(requests, policy, capacity)
        assert num_hits / num_blocks == expected
        assert rate_of(trace, policy, capacity) == expected


@pytest.mark.parametrize(("trace", "capacity"), cells())
def test_reuse_rate_is_at_or_above_the_best_of_the_others_and_below_the_optimum(
    eviction: ModuleType,
    traces: dict[str, list[list[bytes]]],
    rate_of: RateOf,
    trace: str,
    capacity: int,
) -> None:
    requests = traces[trace]
    reached = rate_of(trace, "reuse_rate", capacity)
    for policy in ("lru", "arc", "s3fifo"):
        assert reached >= reference_rates()[trace, policy, capacity] - 0.00005  # as rounded there
        assert reached >= rate_of(trace, policy, capacity)
    assert reached <= eviction.most_hits(requests, capacity) / sum(map(len, requests))


def test_the_optimum_is_that_of_all_possible_choices(eviction: ModuleType) -> None:
    """Against a search over every choice, for short traces of prompts that share prefixes."""
    prompts = [[b"a", b"b", b"c"], [b"a", b"b", b"d"], [b"x", b"y"], [b"z"], [b"x", b"w"]]
    for numbers in product(range(len(prompts)), repeat=4):
        requests = [prompts[number] for number in (*numbers, *numbers[:2])]
        for capacity in (1, 2, 3, 4):
            states: dict[frozenset[bytes], int] = {frozenset(): 0}
            for keys in requests:
                following: dict[frozenset[bytes], int] = {}
                for resident, num_hits in states.items():
                    run = next((i for i, k in enumerate(keys) if k not in resident), len(keys))
                    for kept in subsets(sorted(resident | set(keys)), capacity):
                        best = following.get(kept, -1)
                        following[kept] = max(best, num_hits + run)
                states = following
            assert eviction.most_hits(requests, capacity) == max(states.values())


def subsets(keys: list[bytes], size: int) -> Iterator[frozenset[bytes]]:
    """All subsets with `size` keys, or with all of them if they are fewer; keeping more is never
    worse."""
    if len(keys) <= size:
        yield frozenset(keys)
        return
    for chosen in product([False, True], repeat=len(keys)):
        if sum(chosen) == size:
            yield frozenset(key for key, is_kept in zip(keys, chosen, strict=True) if is_kept)


@pytest.mark.parametrize("policy", POLICIES)
def test_passes_of_a_trace_with_shifted_ids_leave_the_ledger_consistent(
    traces: dict[str, list[list[bytes]]], policy: str
) -> None:
    repeat_shifted(traces["conversation"][:400], policy, capacity=3_000, num_passes=6)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", POLICIES)
def test_6_passes_of_the_conversation_trace_leave_the_ledger_consistent(
    traces: dict[str, list[list[bytes]]], policy: str
) -> None:
    repeat_shifted(traces["conversation"], policy, capacity=30_000, num_passes=6)


def repeat_shifted(
    requests: list[list[bytes]], policy: str, *, capacity: int, num_passes: int
) -> None:
    """Replay with other keys in each pass, and with transfers that end some requests later and that
    sometimes fail."""
    ledger = OffloadLedger(capacity, load_eviction_policy(policy, capacity))
    num_hits = []
    for number in range(num_passes):
        shift = bytes([number])
        hits = 0
        in_flight: list[tuple[list[bytes], list[bytes]]] = []
        for step, keys in enumerate(requests):
            keys = [shift + key for key in keys]
            run = ledger.lookup(keys) or 0
            hits += run
            ledger.touch(keys)
            ledger.prepare_load(keys[:run])
            prepared = ledger.prepare_store(keys)
            in_flight.append((keys[:run], prepared.keys if prepared else []))
            if len(in_flight) > 4:
                loaded, stored = in_flight.pop(step % 3)
                ledger.complete_load(loaded)
                ledger.complete_store(stored, success=step % 11 != 0)
                if step % 17 == 0:
                    ledger.remove(loaded[2:])  # checksum mismatch
        for loaded, stored in in_flight:
            ledger.complete_load(loaded)
            ledger.complete_store(stored)
        ledger.check()
        ledger.take_events()
        assert (ledger.num_storing, ledger.num_loading) == (0, 0)
        num_hits.append(hits)
    assert ledger.num_ready + ledger.num_free == capacity
    # Old contents do not get in the way, except with S3-FIFO, whose main queue keeps them: a pass
    # has about as many hits as the first one.
    assert num_hits[-1] > (0.4 if policy == "s3fifo" else 0.75) * num_hits[0]
