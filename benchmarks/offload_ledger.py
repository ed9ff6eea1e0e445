"""Cost per block of the offload ledger's calls, compared with vLLM's CPUOffloadingManager.

    python benchmarks/offload_ledger.py [--policies lru arc] [--at-a-time 16 2048] [--json F]

A full tier of 65,536 blocks is asked for stored keys (`lookup`, `touch`, `prepare_load`,
`complete_load`), and then stores new ones, each of which evicts another (`prepare_store`,
`complete_store`). `cycle` is the sum of these six. vLLM's call at the end of a request, `finish`,
is shown but not counted; ours has none. Medians in µs per block. Both sides run the same program
(`peers/ledger_workload.py`) and take turns.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import report
from peers import ledger_workload

from longshore.connectors.offloading.ledger import OffloadLedger
from longshore.connectors.offloading.policies.registry import POLICIES, load_eviction_policy

PEER_POLICIES = ("lru", "arc")
CYCLE = ledger_workload.PARTS[:-1]


class Side:
    """Our side of the workload. Keys of one request at a time."""

    def __init__(self, policy: str) -> None:
        capacity = ledger_workload.CAPACITY
        self._ledger = OffloadLedger(capacity, load_eviction_policy(policy, capacity))
        self._keys: list[bytes] = []

    def begin(self, keys: list[bytes]) -> None:
        self._keys = keys
        self._ledger.take_events()

    def lookup(self) -> int | None:
        return self._ledger.lookup(self._keys)

    def touch(self) -> None:
        self._ledger.touch(self._keys)

    def prepare_load(self) -> None:
        self._ledger.prepare_load(self._keys)

    def complete_load(self) -> None:
        self._ledger.complete_load(self._keys)

    def prepare_store(self) -> int:
        prepared = self._ledger.prepare_store(self._keys)
        assert prepared is not None
        return len(prepared.evicted_keys)

    def complete_store(self) -> None:
        self._ledger.complete_store(self._keys)

    def finish(self) -> None:
        """Nothing to do: a request that ends changes nothing here."""

    def check(self) -> None:
        """Raise LongshoreError unless the ledger is consistent."""
        self._ledger.check()


def measure_us(policy: str, **job: int) -> dict[str, Any]:
    """Our samples, in the format of the peer's answers."""
    side = Side(policy)
    answer: dict[str, Any] = ledger_workload.measure(side, **job)
    side.check()
    return answer


def medians(answers: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians over all rounds, µs per block."""
    row = {
        part: float(np.median(np.concatenate([each["samples"][part] for each in answers])))
        for part in ledger_workload.PARTS
    }
    row["cycle"] = sum(row[part] for part in CYCLE)
    row["cpu_share"] = min(each["cpu_share"] for each in answers)
    return row


def main() -> None:
    arguments = report.parser(__doc__, peer="core")
    arguments.add_argument("--policies", nargs="+", default=list(POLICIES))
    arguments.add_argument("--at-a-time", type=int, nargs="+", default=[16, 2048])
    arguments.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args()
    rows = []
    with report.peer(options.peer_python, "vllm_ledger.py") as peer:
        for policy, at_a_time in product(options.policies, options.at_a_time):
            calls = min(1500, 100_000 // at_a_time)
            job = {"at_a_time": at_a_time, "hits": calls, "stores": calls}
            ours, theirs = [], []
            for seed in range(options.rounds):
                ours.append(measure_us(policy, **job, seed=seed))
                if peer is not None and policy in PEER_POLICIES:
                    theirs.append(peer.measure(policy=policy, **job, seed=seed))
            row: dict[str, Any] = {"policy": policy, "at_a_time": at_a_time, **medians(ours)}
            if theirs:
                row["peer"] = medians(theirs)
                row["ratio"] = row["peer"]["cycle"] / row["cycle"]
                row["least_ratio"] = min(row["peer"][part] / row[part] for part in CYCLE)
            rows.append(row)
        report.write(options.json, rows, peer=peer.about if peer else None)


if __name__ == "__main__":
    main()
