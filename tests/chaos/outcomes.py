"""What faults did, and the report about it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """What one fault did.

    num_cut:    streams that were not complete, each of which may not be.
    recovery_s: the longest time in which a client got no token; None if the deployment ended.
    """

    kind: str
    what: str
    num_complete: int
    num_cut: int
    recovery_s: float | None


def report(outcomes: Sequence[Outcome]) -> str:
    """A table in Markdown, with a row per fault."""
    by_fault: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        by_fault.setdefault((outcome.kind, outcome.what), []).append(outcome)
    lines = [
        "| fault | | times | complete streams | cut streams | recovery p50 | p99 |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for (kind, what), same in by_fault.items():
        times_s = sorted(each.recovery_s for each in same if each.recovery_s is not None)
        quantiles = [_quantile(times_s, share) for share in (0.5, 0.99)]
        numbers = [len(same), sum(o.num_complete for o in same), sum(o.num_cut for o in same)]
        lines.append(f"| {kind} | {what} | {' | '.join(map(str, [*numbers, *quantiles]))} |")
    return "\n".join(lines)


def _quantile(ordered_s: Sequence[float], share: float) -> str:
    if not ordered_s:
        return ""
    return f"{ordered_s[math.ceil(share * len(ordered_s)) - 1]:.2f} s"
