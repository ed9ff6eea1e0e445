"""Cost of admitting a prompt that is fully cached, by part, compared with vLLM.

    python benchmarks/prefix_lookup.py [--tokens 512 4096 32768] [--groups 1 2 4]
                                       [--kinds windows] [--json F]

Parts: `hash` (create the request and hash its blocks), `lookup`, `allocate` (after the hit, with
one new block) and `free`. `chain` is the bare hash chain over the same bytes, a lower bound for
`hash`. The peer's `hash` is the same part, with its sha256 and its xxhash over pickled tuples; its
other parts are measured with sha256, on which they do not depend. Medians in µs. KV cache groups as
in `scheduler_step.py`; `growth` is for all four parts together and for each except `hash`, which
does not depend on the groups. The numbers of groups take turns, request by request.
"""

import gc
import hashlib
import json
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import report
import xxhash
from peers import workload
from scheduler_step import add_groups, growth, kv_cache_of

from longshore.protocol.arrays import Int32Array
from longshore.protocol.kv_cache_spec import LongestRequest
from longshore.protocol.requests import AddRequest
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.config import CacheConfig
from longshore.scheduler.kv_cache.block_hash import BlockHasher
from longshore.scheduler.kv_cache.habits import turn_kind
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.request import Request

Algorithm = Literal["sha256", "xxh3-128"]
BLOCK_SIZE = workload.BLOCK_SIZE
MAX_NUM_SEQS = 8
PARTS = ("hash", "lookup", "allocate", "free")
PEER_HASH = {"sha256": "hash_sha256_us", "xxh3-128": "hash_xxhash_us"}
PEER_PROGRAM = """
import json, pathlib, sys, tempfile
sys.path.insert(0, sys.argv[1])
import bench_vllm_core as bench
results = {}
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "config.json").write_text(json.dumps(bench.LLAMA_2L))
    for job in sys.argv[2:]:
        num_tokens, num_groups = map(int, job.split("x"))
        result = {}
        bench.part_b(folder, result, ntok=num_tokens, groups=num_groups)
        results[job] = result["b"]
print(json.dumps(results))
"""


def request_of(token_ids: Int32Array) -> Request:
    message = AddRequest("request", 0, token_ids, SamplingParams(max_tokens=None))
    return Request(
        message, client_index=0, now=0.0, max_model_len=len(token_ids) + 1, eos_token_ids=()
    )


def bare_chain(token_ids: Int32Array, algorithm: Algorithm) -> None:
    """The bare hash chain: each block's hash of the previous hash and the block's bytes."""
    packed, width = token_ids.tobytes(), 4 * BLOCK_SIZE
    starts = range(0, len(packed) // width * width, width)
    if algorithm == "sha256":
        block_hash = bytes(32)
        for start in starts:
            block_hash = hashlib.sha256(block_hash + packed[start : start + width]).digest()
    else:
        block_hash = bytes(16)
        for start in starts:
            block_hash = xxhash.xxh3_128_digest(block_hash + packed[start : start + width])


class Cache:
    """A KV cache with a number of groups and one cached prompt; `samples_us` has times by part."""

    def __init__(
        self, token_ids: Int32Array, algorithm: Algorithm, groups: int, kinds: str
    ) -> None:
        self.num_tokens = len(token_ids)
        self._prompt = token_ids
        self._manager = KVCacheManager(
            CacheConfig(block_size=BLOCK_SIZE, hash_algorithm=algorithm),
            kv_cache_of(groups, groups * 3 * self.num_tokens // BLOCK_SIZE, kinds, num_states=3),
            LongestRequest(self.num_tokens + BLOCK_SIZE),
            max_num_seqs=MAX_NUM_SEQS,
            hash_seed=b"benchmark",
        )
        self._hasher = BlockHasher(BLOCK_SIZE, b"benchmark", algorithm)
        self._step = 1
        self.samples_us: dict[str, list[float]] = {part: [] for part in PARTS}
        request, num_cached = request_of(token_ids), self.num_tokens - 1
        computed = self._manager.get_computed_blocks(request)
        assert self._manager.start(0, self._manager.demand(computed, num_cached))
        self._manager.full_blocks.cache_row(0, request, token_ids, num_cached)
        if self._manager.kept_states is not None:
            pages = self._manager.keep_state(
                request, num_cached, turn_kind(0), generation=1, step=1
            )
            assert pages is not None
            self._manager.pool.free_blocks(pages)
        assert self._manager.grow_row(0, self.num_tokens) is not None
        self._manager.free(0)

    def look_up(self) -> None:
        """Admit and free one request with this prompt."""
        manager = self._manager
        nothing_new = np.zeros(MAX_NUM_SEQS, np.int64)
        manager.free_skipped(*3 * [nothing_new], step=self._step, answered_step=self._step - 1)
        request = self._timed("hash", self._hashed_request)
        computed = self._timed("lookup", lambda: manager.get_computed_blocks(request))
        assert computed.num_tokens == self.num_tokens - 1
        assert self._timed(
            "allocate", lambda: manager.start(0, manager.demand(computed, self.num_tokens))
        )
        self._timed("free", lambda: manager.free(0, self._step))
        self._step += 1

    def check(self) -> None:
        """Raise LongshoreError unless all blocks are accounted for."""
        self._manager.check()

    def _hashed_request(self) -> Request:
        request = request_of(self._prompt)
        self._hasher.extend(request.block_hashes, request.token_ids)
        return request

    def _timed(self, part: str, call: Callable[[], Any]) -> Any:
        result, us = timed(call)
        self.samples_us[part].append(us)
        return result


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the time in microseconds."""
    started = time.perf_counter_ns()
    result = call()
    return result, (time.perf_counter_ns() - started) / 1e3


def measure(
    num_tokens: int, algorithm: Algorithm, repeats: int, groups: Sequence[int], kinds: str
) -> list[dict[str, Any]]:
    """Our medians for a prompt of `num_tokens` cached tokens and one more, by number of groups."""
    rng = np.random.default_rng(1)
    token_ids = rng.integers(3, 32_000, num_tokens + 1).astype(np.int32)
    caches = [Cache(token_ids, algorithm, count, kinds) for count in groups]
    chain_us: list[float] = []
    gc.collect()
    gc.freeze()
    for _ in range(repeats):
        chain_us.append(timed(lambda: bare_chain(token_ids, algorithm))[1])
        for cache in caches:
            cache.look_up()
    gc.unfreeze()
    rows: list[dict[str, Any]] = []
    for count, cache in zip(groups, caches, strict=True):
        cache.check()
        row: dict[str, Any] = {
            f"{part}_us": float(np.median(us)) for part, us in cache.samples_us.items()
        }
        row |= {"all_us": sum(row.values()), "chain_us": float(np.median(chain_us))}
        fewest = rows[0] if rows else row
        row["hash_over_chain"] = row["hash_us"] / row["chain_us"]
        row["growth"] = growth(row, fewest, "all_us", "lookup_us", "allocate_us", "free_us")
        rows.append({"groups": count, **row})
    return rows


def measure_peer(
    python: Path, sizes: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], dict[str, float]] | None:
    """vLLM's medians by number of tokens and groups; None, with a warning, if not installed."""
    if not python.exists():
        print(f"*** NO PEER: {python} does not exist; install it with benchmarks/peers/setup.sh")
        return None
    jobs = {f"{num_tokens}x{groups}": (num_tokens, groups) for num_tokens, groups in sizes}
    command = [str(python), "-c", PEER_PROGRAM, str(report.PEERS), *jobs]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {jobs[job]: row for job, row in json.loads(printed.splitlines()[-1]).items()}


def compare(ours: dict[str, Any], peer: dict[str, float], algorithm: Algorithm) -> dict[str, Any]:
    """The peer's figures, and their ratios to ours."""
    theirs = {
        "hash_us": peer[PEER_HASH[algorithm]],
        "lookup_us": peer["get_computed_blocks_hit_us"],
        "allocate_us": peer["allocate_slots_after_hit_us"],
        "free_us": peer["free_us"],
    }
    blocks = ("lookup_us", "allocate_us", "free_us")
    return {
        "peer": theirs,
        "ratio_all": sum(theirs.values()) / ours["all_us"],
        "ratio_blocks": sum(theirs[name] for name in blocks) / sum(ours[name] for name in blocks),
    }


def main() -> None:
    arguments = report.parser(__doc__, peer="core")
    arguments.add_argument("--tokens", type=int, nargs="+", default=[512, 4096, 32_768])
    arguments.add_argument("--repeats", type=int, default=100)
    add_groups(arguments)
    options = arguments.parse_args()
    groups, kinds = sorted(options.groups), options.kinds
    peers = None
    if kinds == "windows":
        peers = measure_peer(options.peer_python, product(options.tokens, groups))
    rows = []
    algorithms: tuple[Algorithm, ...] = ("sha256", "xxh3-128")
    for num_tokens, algorithm in product(options.tokens, algorithms):
        for ours in measure(num_tokens, algorithm, options.repeats, groups, kinds):
            compared = {"peer": None}
            if peers is not None:
                compared = compare(ours, peers[num_tokens, ours["groups"]], algorithm)
            about = {"tokens": num_tokens, "algorithm": algorithm, "kinds": kinds}
            rows.append({**about, **ours, **compared})
    report.write(options.json, rows)


if __name__ == "__main__":
    main()
