"""Random runs, as many as it takes to see what a test is about."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

MOST_TIMES: Final = 4
"""Runs at most, in multiples of those that a test asks for."""


def run_until_seen(
    run: Callable[[int], Mapping[str, int]], seeds: range, least: Mapping[str, int]
) -> Counter[str]:
    """Run with all these seeds and, while something has been seen less often than `least` says,
    with those that would follow. Returns how often everything was seen. Raises AssertionError if a
    run fails, or if something remains rare.

    Which seeds show something rare changes with every rule of the scheduler. More runs keep the
    test from failing for that reason, and it still fails if the thing no longer happens.
    """
    seen: Counter[str] = Counter()
    end = seeds.start + MOST_TIMES * len(seeds) * seeds.step
    for seed in range(seeds.start, end, seeds.step):
        if seed >= seeds.stop and not _missing(seen, least):
            break
        try:
            seen.update(run(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    missing = _missing(seen, least)
    assert not missing, f"seen too rarely: {missing}"
    return seen


def _missing(seen: Mapping[str, int], least: Mapping[str, int]) -> dict[str, str]:
    return {
        what: f"{seen.get(what, 0)} of {number}"
        for what, number in least.items()
        if seen.get(what, 0) < number
    }
