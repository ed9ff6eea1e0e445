"""What a prompt that is cached whole costs before anything runs, and what it costs in vLLM.

    python benchmarks/prefix_lookup.py [--tokens 512 4096 32768] [--groups 1] [--json F]

Apart: `hash` (the request is made and its blocks are named), `lookup`, `allocate` (after the hit,
with one new block) and `free`. `chain` is the bare hash chain over the same bytes, the least that
`hash` can be. The peer's `hash` is the same thing, with its sha256 and its xxhash over pickled
tuples; its other figures are measured with sha256, which they do not depend on. Medians in µs. Of
several KV cache groups the first has full attention, the others sliding windows of 256 tokens; the
peer always has one group.
"""

import gc
import hashlib
import json
import subprocess
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import report
import xxhash
from peers import workload
from scheduler_step import kv_cache_of

from longshore.protocol.arrays import Int32Array
from longshore.protocol.client import AddRequest
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.block_hash import BlockHasher
from longshore.scheduler.config import CacheConfig
from longshore.scheduler.kv_cache_manager import ComputedBlocks, KVCacheManager
from longshore.scheduler.request import Request

Algorithm = Literal["sha256", "xxh3-128"]
BLOCK_SIZE = workload.BLOCK_SIZE
PARTS = ("hash", "lookup", "allocate", "free")
PEER_HASH = {"sha256": "hash_sha256_us", "xxh3-128": "hash_xxhash_us"}
PEER_PROGRAM = """
import json, pathlib, sys, tempfile
sys.path.insert(0, sys.argv[1])
import bench_vllm_core as bench
results = {}
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "config.json").write_text(json.dumps(bench.LLAMA_2L))
    for num_tokens in map(int, sys.argv[2:]):
        result = {}
        bench.part_b(folder, result, ntok=num_tokens)
        results[num_tokens] = result["b"]
print(json.dumps(results))
"""


def request_of(token_ids: Int32Array) -> Request:
    message = AddRequest("request", 0, token_ids, SamplingParams(max_tokens=None))
    return Request(
        message, client_index=0, now=0.0, max_model_len=len(token_ids) + 1, eos_token_ids=()
    )


def bare_chain(token_ids: Int32Array, algorithm: Algorithm) -> None:
    """A hash per block of the one before it and of the block's bytes, and nothing else."""
    packed, width = token_ids.tobytes(), 4 * BLOCK_SIZE
    starts = range(0, len(packed) // width * width, width)
    if algorithm == "sha256":
        name = bytes(32)
        for start in starts:
            name = hashlib.sha256(name + packed[start : start + width]).digest()
    else:
        name = bytes(16)
        for start in starts:
            name = xxhash.xxh3_128_digest(name + packed[start : start + width])


def measure(num_tokens: int, algorithm: Algorithm, repeats: int, groups: int = 1) -> dict[str, Any]:
    """Our medians for a prompt of `num_tokens` cached tokens and one more."""
    rng = np.random.default_rng(1)
    token_ids = rng.integers(3, 32_000, num_tokens + 1).astype(np.int32)
    manager = KVCacheManager(
        CacheConfig(block_size=BLOCK_SIZE, hash_algorithm=algorithm),
        kv_cache_of(groups, groups * 3 * num_tokens // BLOCK_SIZE),
        max_num_seqs=8,
        max_model_len=num_tokens + BLOCK_SIZE,
        hash_seed=b"benchmark",
    )
    first = request_of(token_ids)
    assert manager.start(0, manager.demand(manager.get_computed_blocks(first), num_tokens + 1))
    manager.name_blocks(0, first, token_ids, num_tokens + 1)
    manager.free(0)
    samples: dict[str, list[float]] = {part: [] for part in (*PARTS, "chain")}
    gc.collect()
    gc.freeze()

    def timed(part: str, call: Callable[[], Any]) -> Any:
        started = time.perf_counter_ns()
        result = call()
        samples[part].append((time.perf_counter_ns() - started) / 1e3)
        return result

    hasher = BlockHasher(BLOCK_SIZE, b"benchmark", algorithm)

    def named_request() -> Request:
        request = request_of(token_ids)
        hasher.extend(request.block_names, request.token_ids)
        return request

    def allocate(computed: ComputedBlocks) -> None:
        assert manager.start(0, manager.demand(computed, num_tokens + 1))

    for step in range(1, repeats + 1):
        timed("chain", lambda: bare_chain(token_ids, algorithm))
        request = timed("hash", named_request)
        computed = timed("lookup", lambda request=request: manager.get_computed_blocks(request))
        assert computed.num_tokens == num_tokens
        timed("allocate", lambda hits=computed: allocate(hits))
        timed("free", lambda step=step: manager.free(0, step))
    gc.unfreeze()
    manager.check()
    return {f"{part}_us": float(np.median(values)) for part, values in samples.items()}


def measure_peer(python: Path, sizes: list[int]) -> dict[int, dict[str, float]] | None:
    """vLLM's medians by number of tokens; None, said loudly, where it is not installed."""
    if not python.exists():
        print(f"*** NO PEER: {python} does not exist; install it with benchmarks/peers/setup.sh")
        return None
    command = [str(python), "-c", PEER_PROGRAM, str(report.PEERS), *map(str, sizes)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {int(size): row for size, row in json.loads(printed.splitlines()[-1]).items()}


def beside(ours: dict[str, Any], peer: dict[str, float], algorithm: Algorithm) -> dict[str, Any]:
    """The peer's figures and how many times ours they are."""
    theirs = {
        "hash_us": peer[PEER_HASH[algorithm]],
        "lookup_us": peer["get_computed_blocks_hit_us"],
        "allocate_us": peer["allocate_slots_after_hit_us"],
        "free_us": peer["free_us"],
    }
    blocks = ("lookup_us", "allocate_us", "free_us")
    return {
        "peer": theirs,
        "ratio_all": sum(theirs.values()) / sum(ours[name] for name in theirs),
        "ratio_blocks": sum(theirs[name] for name in blocks) / sum(ours[name] for name in blocks),
    }


def main() -> None:
    arguments = report.parser(__doc__, peer="core")
    arguments.add_argument("--tokens", type=int, nargs="+", default=[512, 4096, 32_768])
    arguments.add_argument("--repeats", type=int, default=100)
    arguments.add_argument("--groups", type=int, nargs="+", default=[1], help="KV cache groups")
    options = arguments.parse_args()
    peers = measure_peer(options.peer_python, options.tokens)
    rows = []
    algorithms: tuple[Algorithm, ...] = ("sha256", "xxh3-128")
    for num_tokens in options.tokens:
        for algorithm, groups in product(algorithms, options.groups):
            ours = measure(num_tokens, algorithm, options.repeats, groups)
            compared = {"peer": None}
            if peers is not None:
                compared = beside(ours, peers[num_tokens], algorithm)
            rows.append(
                {
                    "tokens": num_tokens,
                    "algorithm": algorithm,
                    "groups": groups,
                    **ours,
                    "hash_over_chain": ours["hash_us"] / ours["chain_us"],
                    **compared,
                }
            )
    report.write(options.json, rows)


if __name__ == "__main__":
    main()
