"""Microseconds per routing decision, by engines, size of the index, prefix and running requests.

    python benchmarks/routing_cost.py [--repeats 200] [--json F]

`decide_us`  median of `Router.choose` and `note_sent` for `prefix_aware`, with 16 tokens per block.
`hash_us`    of that, hashing the prompt's blocks, measured alone.
`least_us`   the same with `least_loaded`.
`p99_us`     99th percentile of `decide_us`.

All engines have the prompt's first `found` blocks; the prompt has 64 more. `blocks` is the size of
the index, `running` the number of unanswered requests of the gateway.

The second table is about events: `store_us` per block that an engine stores (decoding and index),
`snapshot_ms` for a snapshot of all blocks of one engine, and `longest_ms`, the longest call between
two of which the event loop serves requests. `bytes_per_block` is the memory of the index.
"""

import argparse
import gc
import random
import time
import tracemalloc
from typing import Any, Final

import numpy as np
import report

from longshore.deploy.gateway.router.block_index import BlockIndex, GroupInfo, PromptHashes
from longshore.deploy.gateway.router.event_follower import EventFollower
from longshore.deploy.gateway.router.policies import (
    LeastLoaded,
    PrefixAware,
    RoutedPrompt,
    RoutingPolicy,
)
from longshore.deploy.gateway.router.router import Router
from longshore.deploy.requests.live_requests import LiveRequest
from longshore.protocol.arrays import EMPTY_INT32
from longshore.protocol.events import (
    AllBlocksCleared,
    BlockStored,
    KVEventsConfig,
    sequence_frame,
)
from longshore.protocol.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from longshore.protocol.requests import AddRequest
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.transport.channel import Endpoint
from longshore.scheduler.kv_cache.block_hash import BlockHasher
from longshore.scheduler.kv_events.stream import EventStream

SIZE: Final = 16
HASHER: Final = BlockHasher(SIZE, b"benchmark")
CASES: Final = (
    # engines, blocks in the index, blocks found, running requests
    (2, 10_000, 0, 0),
    (2, 10_000, 64, 0),
    (2, 1_000_000, 0, 0),
    (2, 1_000_000, 64, 0),
    (2, 1_000_000, 512, 0),
    (2, 1_000_000, 2048, 0),
    (16, 1_000_000, 64, 0),
    (64, 1_000_000, 64, 0),
    (2, 1_000_000, 64, 16_000),
)
NO_MESSAGE: Final = AddRequest("", 0, EMPTY_INT32, SamplingParams())
NOWHERE: Final = Endpoint("inproc://nowhere")
SPEC: Final = FullAttentionSpec(SIZE, num_kv_heads=1, head_size=8, dtype_bytes=2)
KV_CACHE: Final = KVCacheConfig(10, (KVCacheGroup(("layer",), SPEC),), "bfloat16")
RUN: Final = 64


def hashes_of(tokens: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    HASHER.extend(hashes, np.array(tokens, np.int32))
    return hashes


def full_index(num_engines: int, num_blocks: int) -> BlockIndex:
    """Each block is at one engine."""
    draws = random.Random(0)
    index = BlockIndex(num_engines, tokens_per_hash=SIZE, max_hashes=2 * num_blocks)
    index.describe_group(0, GroupInfo(SIZE))
    index.is_known.update(dict.fromkeys(range(num_engines), True))
    for first in range(0, num_blocks, RUN):
        hashes = [draws.randbytes(32) for _ in range(RUN)]
        index.store(first // RUN % num_engines, hashes, 0, "GPU")
    return index


def request(num_tokens: int) -> LiveRequest:
    return LiveRequest("", 0, range(num_tokens), NO_MESSAGE, lambda: None)


def decide(
    policy: RoutingPolicy, tokens: list[int], num_engines: int, num_running: int, repeats: int
) -> list[float]:
    router = Router(num_engines, policy)
    usable, num_own = [True] * num_engines, [num_running // num_engines] * num_engines
    for number in range(num_running):
        live = request(100)
        fresh = RoutedPrompt([number % 50_000] * 100)
        decision = router.choose(fresh, num_own, usable, 0.0)
        assert decision is not None
        router.note_sent(decision, live)
    prompt, samples = RoutedPrompt(tokens), []
    for number in range(repeats):
        live = request(len(tokens))
        started = time.perf_counter_ns()
        decision = router.choose(prompt, num_own, usable, 2.0 * number)
        assert decision is not None
        router.note_sent(decision, live)
        samples.append((time.perf_counter_ns() - started) / 1e3)
        router.note_answer(live, 2.0 * number)
    return samples


def measure(case: tuple[int, int, int, int], options: argparse.Namespace) -> dict[str, Any]:
    num_engines, num_blocks, num_found, num_running = case
    index = full_index(num_engines, num_blocks)
    draws = random.Random(1)
    tokens = [draws.randrange(100_000) for _ in range((num_found + PromptHashes.PART) * SIZE + 1)]
    hashes = hashes_of(tokens)
    for engine in range(num_engines):
        index.store(engine, hashes[:num_found], 0, "GPU")
    gc.collect()
    gc.freeze()
    samples = decide(PrefixAware(index, HASHER), tokens, num_engines, num_running, options.repeats)
    least = decide(LeastLoaded(), tokens, num_engines, num_running, options.repeats)
    array, hashing = np.array(tokens, np.int32), []
    for _ in range(options.repeats):
        started = time.perf_counter_ns()
        HASHER.extend([], array)
        hashing.append((time.perf_counter_ns() - started) / 1e3)
    gc.unfreeze()
    return {
        "engines": num_engines,
        "blocks": num_blocks,
        "found": num_found,
        "running": num_running,
        "decide_us": float(np.median(samples)),
        "p99_us": float(np.percentile(samples, 99)),
        "hash_us": float(np.median(hashing)),
        "least_us": float(np.median(least)),
    }


def measure_events(num_blocks: int) -> dict[str, Any]:
    config = KVEventsConfig(endpoint=NOWHERE, replay_endpoint=NOWHERE)
    stream = EventStream(config, KV_CACHE, publisher_id=bytes(16))
    stream.append([AllBlocksCleared()], 0.0)
    draws = random.Random(2)
    payloads = []
    for first in range(0, num_blocks, RUN):
        hashes = [draws.randbytes(32) for _ in range(RUN)]
        tokens = np.array([draws.randrange(100_000) for _ in range(SIZE)], np.int32)
        events = [
            BlockStored(each, parent, tokens, 0)
            for each, parent in zip(hashes, [None, *hashes], strict=False)
        ]
        payloads += stream.append(events, float(first))

    def follower() -> EventFollower:
        index = BlockIndex(2, tokens_per_hash=SIZE, max_hashes=2 * num_blocks)
        made = EventFollower(index, 0, lambda request: None)
        made.begin(0.0)
        return made

    live = follower()
    live.receive_answer((b"", sequence_frame(0), bytes(16)), 0.0)
    started = time.perf_counter()
    for number, payload in payloads:
        live.receive((b"", sequence_frame(number), payload), 0.0)
        live.work(0.0)
    store_us = (time.perf_counter() - started) * 1e6 / num_blocks

    number, parts = stream.snapshot(0.0)
    answer = (b"", sequence_frame(number), bytes(16), *parts)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    late = follower()
    late.receive_answer(answer, 0.0)
    while late.has_work:
        late.work(0.0)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    timed, calls = follower(), []
    started = time.perf_counter()
    timed.receive_answer(answer, 0.0)
    while timed.has_work:
        begun = time.perf_counter()
        timed.work(0.0)
        calls.append(time.perf_counter() - begun)
    return {
        "blocks": num_blocks,
        "store_us": store_us,
        "snapshot_ms": (time.perf_counter() - started) * 1e3,
        "longest_ms": max(calls) * 1e3,
        "bytes_per_block": (after - before) / num_blocks,
    }


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=200)
    arguments.add_argument("--max-blocks", type=int, default=1_000_000)
    options = arguments.parse_args()
    cases = [case for case in CASES if case[1] <= options.max_blocks]
    rows = [measure(case, options) for case in cases]
    events = [measure_events(count) for count in (10_000, 100_000) if count <= options.max_blocks]
    report.write(options.json, rows, events=events)
    report.write(None, events)


if __name__ == "__main__":
    main()
