"""The attention of `attention.py` in two checkouts, in turns: before and after a change of the
kernel or of the layout of the cache.

    python benchmarks/attention_pairs.py BEFORE [AFTER] [--pairs N] [--caches N] [--threads N]
                                         [--side kernel|torch] [--only KIND] [--json F]

BEFORE and AFTER are checkouts, each with its compiled kernels; AFTER is this one by default. Each
tree has a process, which makes the cases of its own `attention.py`. For every case each process
makes a cache `--caches` times, because the place of a cache in memory changes its times, and then
they take turns `--pairs` times. A sample is the minimum of the calls in some milliseconds. Start it
with `taskset -c N`: the cores of a shared machine may differ in speed by half.

`before_us` and `after_us` are the lowest samples, per layer, because other programs can only slow a
call down; `best_ratio` divides them. `ratio` is the median of the pairs' own ratios. Above 1, AFTER
is slower.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import report

MEASURE: Final = "--measure"  # of the child process
SAMPLE_S: Final = 0.012


class Tree:
    """The process that measures one checkout: a request per line in, a result per line out."""

    def __init__(self, tree: Path, threads: int, side: str) -> None:
        folders = os.pathsep.join(str(tree.resolve() / name) for name in ("src", "benchmarks"))
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, MEASURE, str(threads), side],
            env={**os.environ, "PYTHONPATH": folders},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(threads: int, side: str) -> None:
    """The child's loop. A list is a case to make, null asks for a sample of it."""
    import attention  # of the tree that is measured
    import torch

    torch.set_num_threads(threads)
    case = backend = None
    with torch.inference_mode():
        for line in sys.stdin:
            request = json.loads(line)
            answer: Any = None
            if request is None:
                answer = sample_us(case, backend)
            elif request == "cases":
                cases = [("decode", n, size - 1, 1, {}) for n, size in attention.DECODES]
                cases += [("prefill", *prefill, {}) for prefill in attention.PREFILLS]
                cases += [("limited", *limited) for limited in attention.LIMITED]
                answer = [(shape, *one) for shape in attention.SHAPES for one in cases]
            else:
                case = backend = None  # frees the memory of the last one first
                torch.manual_seed(0)
                shape, _, batch, earlier, new, more = request
                case = attention.Case(shape, batch, earlier, new, **more)
                if side == "torch":
                    backend = attention.TorchAttention(case.cache, case.kind)
                else:
                    kernels = attention.native()
                    backend = attention.NativeAttention(kernels, case.cache, case.kind)
                case.attend(backend)
            print(json.dumps(answer), flush=True)


def sample_us(case: Any, backend: Any) -> float:
    """Microseconds per layer of the fastest call."""
    begin, best = time.perf_counter(), float("inf")
    while True:
        before = time.perf_counter()
        case.attend(backend)
        after = time.perf_counter()
        best = min(best, after - before)
        if after - begin > SAMPLE_S:
            return best * 1e6 / case.num_layers


def compare(sides: tuple[Tree, Tree], case: Any, caches: int, pairs: int) -> dict[str, Any]:
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(caches):
        for tree in sides:
            tree.ask(case)
        for pair in range(pairs):
            for side in (0, 1) if pair % 2 == 0 else (1, 0):
                samples[side].append(sides[side].ask(None))
    before, after = samples
    return {
        "before_us": min(before),
        "after_us": min(after),
        "best_ratio": min(after) / min(before),
        "ratio": float(np.median(np.divide(after, before))),
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("before", type=Path, metavar="BEFORE")
    parser.add_argument("after", type=Path, metavar="AFTER", nargs="?", default=report.ROOT)
    parser.add_argument("--pairs", type=int, default=7, help="%(default)s")
    parser.add_argument("--caches", type=int, default=3, help="%(default)s")
    parser.add_argument("--threads", type=int, default=1, help="%(default)s")
    parser.add_argument("--side", choices=["kernel", "torch"], default="kernel")
    parser.add_argument("--only", choices=["decode", "prefill", "limited"])
    options = parser.parse_args()
    sides = (
        Tree(options.before, options.threads, options.side),
        Tree(options.after, options.threads, options.side),
    )
    rows = []
    for case in sides[1].ask("cases"):
        shape, kind, batch, earlier, new, more = case
        if options.only not in (None, kind):
            continue
        row = {"shape": shape, "kind": kind, "batch": batch, "earlier": earlier, "new": new}
        named = ", ".join(f"{name} {value}" for name, value in more.items())
        row |= {"layer": named or "plain"}
        rows.append(row | compare(sides, case, options.caches, options.pairs))
        print(rows[-1], file=sys.stderr, flush=True)
    for tree in sides:
        tree.close()
    report.write(options.json, rows, threads=options.threads, side=options.side)


if __name__ == "__main__":
    if sys.argv[1:2] == [MEASURE]:
        measure(int(sys.argv[2]), sys.argv[3])
    else:
        main()
