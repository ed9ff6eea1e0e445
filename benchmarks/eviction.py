"""Hit rates of eviction policies on request traces, by capacity, beside the best possible ones.

    python benchmarks/eviction.py [--traces DIR] [--policies lru arc] [--capacities 1000 10000]
                                  [--json F] [--plot DIR]

A row has the block hit rate of each policy: the leading run of each request's blocks that are
resident, over all of its blocks; then all of them are made resident (the rules are in
`benchmarks/traces/README.md`). `ledger` is the offload ledger with the calls that a connector
makes: lookup, touch, load, store. `one_by_one` gives the policy one block at a time, from the last
block of a request to the first, as the papers and the README's table do. `reuse_rate` looks at
whole prefixes, and is not measured so.

`minimum` is Belady's MIN: after each request, only the blocks with the nearest next uses stay, also
those of the request itself. No policy can have more hits per block with this capacity, and since a
block is never used without those before it, no next use is later than that of the block after it:
with ties broken towards the beginning of the prompt, all hits of MIN are in leading runs. So it is
the highest hit rate by these rules, and can be reached by one that knows the future.

`--plot` writes a drawing per trace, `eviction-NAME.svg`.
"""

import gzip
import json
import math
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import product, takewhile
from pathlib import Path
from typing import Any, Final

import report

from longshore.connectors.offloading.ledger import OffloadLedger
from longshore.connectors.offloading.policies.policy import Protected
from longshore.connectors.offloading.policies.registry import POLICIES, load_eviction_policy

TRACES: Final = Path(__file__).resolve().parent / "traces"
SUFFIX: Final = "_trace.jsonl.gz"
CAPACITIES: Final = (1_000, 3_000, 10_000, 30_000, 50_000, 100_000)
ONE_BY_ONE: Final = ("lru", "arc", "s3fifo")
NOTHING: Final = Protected()
COLORS: Final = ("#c33", "#36c", "#292", "#a60", "#838", "#088")

Requests = Sequence[Sequence[bytes]]


def read_trace(path: Path) -> list[list[bytes]]:
    """The keys of each request, in file order."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [
            [number.to_bytes(8, "big") for number in json.loads(line)["hash_ids"]] for line in lines
        ]


def replay(requests: Requests, ledger: OffloadLedger) -> int:
    """Number of hits, with the calls of a connector."""
    num_hits = 0
    for keys in requests:
        run = ledger.lookup(keys) or 0
        num_hits += run
        ledger.touch(keys)
        hits = keys[:run]
        ledger.prepare_load(hits)
        prepared = ledger.prepare_store(keys)
        assert prepared is not None
        ledger.complete_load(hits)
        ledger.complete_store(prepared.keys)
        ledger.take_events()
    ledger.check()
    return num_hits


def replay_one_by_one(requests: Requests, policy: str, capacity: int) -> int:
    """Number of hits, with one key per call."""
    chosen = load_eviction_policy(policy, capacity)
    num_hits = 0
    for keys in requests:
        num_hits += sum(1 for _ in takewhile(chosen.__contains__, keys))
        for position in range(len(keys) - 1, -1, -1):
            key, positions = keys[position : position + 1], range(position, position + 1)
            if key[0] in chosen:
                chosen.touch(key, positions)
            else:
                chosen.admit(key, positions, int(len(chosen) >= capacity), NOTHING)
    chosen.check()
    return num_hits


def most_hits(requests: Requests, capacity: int) -> int:
    """Number of hits of Belady's MIN. All of them are in leading runs."""
    never = len(requests)
    next_use: dict[bytes, int] = {}
    next_uses: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        keys = requests[number]
        next_uses.append([next_use.get(key, never) for key in keys])
        next_use.update(dict.fromkeys(keys, number))
    resident: dict[bytes, int] = {}  # with the next use
    latest: list[tuple[int, int, bytes]] = []  # heap: the latest next use, then the deepest block
    num_hits = 0
    for keys in requests:
        run = sum(1 for _ in takewhile(resident.__contains__, keys))
        assert run == sum(map(resident.__contains__, keys))
        num_hits += run
        for position, (key, use) in enumerate(zip(keys, next_uses.pop(), strict=True)):
            resident[key] = use
            heappush(latest, (-use, -position, key))
        while len(resident) > capacity or (latest and latest[0][0] == -never):
            use, _, key = heappop(latest)
            if resident.get(key) == -use:
                del resident[key]
    return num_hits


def measure(trace: Path, policies: Sequence[str], capacity: int) -> dict[str, Any]:
    requests = read_trace(trace)
    num_blocks = sum(map(len, requests))
    row: dict[str, Any] = {"trace": trace.name.removesuffix(SUFFIX), "capacity": capacity}
    row["ledger"] = {
        policy: replay(requests, OffloadLedger(capacity, load_eviction_policy(policy, capacity)))
        / num_blocks
        for policy in policies
    }
    row["one_by_one"] = {
        policy: replay_one_by_one(requests, policy, capacity) / num_blocks
        for policy in policies
        if policy in ONE_BY_ONE
    }
    row["minimum"] = most_hits(requests, capacity) / num_blocks
    return row


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """Hit rates of the ledger over capacity (logarithmic), as SVG."""
    width, height, left, top = 560, 300, 60, 40
    highest = math.ceil(10 * max(row["minimum"] for row in rows)) / 10
    first, last = (math.log(rows[end]["capacity"]) for end in (0, -1))

    def x(capacity: int) -> float:
        return left + width * (math.log(capacity) - first) / ((last - first) or 1)

    def y(rate: float) -> float:
        return top + height * (1 - rate / highest)

    parts = [f'<text x="{left}" y="22">block hit rate, {rows[0]["trace"]} trace</text>']
    for row in rows:
        at, label = x(row["capacity"]), f"{row['capacity']:,}"
        parts.append(f'<path d="M{at:.1f} {top}V{top + height}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{at:.1f}" y="{top + height + 20}" text-anchor="middle">{label}</text>'
        )
    for step in range(round(highest * 10) + 1):
        at = y(step / 10)
        parts.append(f'<path d="M{left} {at:.1f}h{width}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">0.{step}</text>')
    parts.append(
        f'<text x="{left + width}" y="{top + height + 40}" text-anchor="end">blocks</text>'
    )
    lines = [("MIN", "#888", [row["minimum"] for row in rows])]
    for policy, color in zip(rows[0]["ledger"], COLORS * len(rows[0]["ledger"]), strict=False):
        lines.append((policy, color, [row["ledger"][policy] for row in rows]))
    for number, (name, color, rates) in enumerate(lines):
        points = " ".join(
            f"{x(row['capacity']):.1f},{y(rate):.1f}" for row, rate in zip(rows, rates, strict=True)
        )
        dashes = ' stroke-dasharray="5 4"' if name == "MIN" else ""
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>'
        )
        at = top + 18 + 18 * number
        parts.append(f'<text x="{left + width + 12}" y="{at}" fill="{color}">{name}</text>')
    size = f'width="{left + width + 110}" height="{top + height + 55}"'
    style = 'font-family="sans-serif" font-size="13" style="background:#fff"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{body}\n</svg>\n'


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--traces", type=Path, metavar="DIR", default=TRACES)
    arguments.add_argument("--policies", nargs="+", default=list(POLICIES))
    arguments.add_argument("--capacities", type=int, nargs="+", default=list(CAPACITIES))
    arguments.add_argument("--plot", type=Path, metavar="DIR", help="write the drawings here")
    options = arguments.parse_args()
    traces = sorted(options.traces.glob(f"*{SUFFIX}"))
    if not traces:
        arguments.error(f"{options.traces} has no *{SUFFIX}")
    capacities = sorted(options.capacities)
    rows = [
        measure(trace, options.policies, capacity)
        for trace, capacity in product(traces, capacities)
    ]
    report.write(options.json, rows)
    if options.plot is not None:
        for trace in traces:
            name = trace.name.removesuffix(SUFFIX)
            mine = [row for row in rows if row["trace"] == name]
            (options.plot / f"eviction-{name}.svg").write_text(draw(mine), encoding="utf-8")


if __name__ == "__main__":
    main()
