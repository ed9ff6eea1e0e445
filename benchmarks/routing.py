"""Routing policies on request traces: hit rates, balance and waiting times, beside one pool.

    python benchmarks/routing.py [--traces DIR] [--engines 2 4 8] [--blocks 40000] [--requests N]
                                 [--policies prefix_aware ...] [--restart-every-s S] [--json F]

Everything but the workers is real: the router with its index, the KV events, and the KV cache of
each engine, with the trace's 512 tokens per block. `--blocks` is the number of blocks of all
engines together. Workers compute nothing. An engine computes one prompt at a time, 40,000 tokens
per second for all engines together; then it holds the request's blocks for 30 ms per output token.
Requests arrive as in the trace; sessions are not in it, so they are derived: a request continues
the session of the request with which it has the most blocks in common, beyond the first block.

`hit_rate`    of prompt tokens, as the engines find them.
`one_pool`    the same with one engine that has all blocks and all speed: no policy can have more
              memory for a prefix.
`expected`    tokens that the router expected to be found, over those that were.
`imbalance`   tokens that the busiest engine computed, over the mean of all.
`ttft_ms`     mean time to first token; `ttft_p99_ms`.
`unknown`     share of decisions while the router did not know what all engines have. With
              `--restart-every-s`, the router loses its knowledge that often, and gets snapshots
              `--snapshot-ms` later, as if it did not wait for them before it serves.
"""

import gzip
import heapq
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import report

from longshore.deploy.gateway.router.config import PrefixRoutingConfig, RoutingConfig, make_policy
from longshore.deploy.gateway.router.event_follower import EventFollower
from longshore.deploy.gateway.router.policies import POLICY_NAMES, PrefixAware, RoutedPrompt
from longshore.deploy.gateway.router.router import Router
from longshore.deploy.requests.live_requests import LiveRequest
from longshore.protocol.arrays import EMPTY_INT32, Int32Array
from longshore.protocol.events import AllBlocksCleared, KVEventsConfig, sequence_frame
from longshore.protocol.kv_cache_spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    LongestRequest,
)
from longshore.protocol.requests import AddRequest
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.transport.channel import Endpoint
from longshore.scheduler.config import CacheConfig
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.kv_events.stream import EventStream
from longshore.scheduler.request import Request

TRACES: Final = Path(__file__).resolve().parent / "traces"
SUFFIX: Final = "_trace.jsonl.gz"
BLOCK_SIZE: Final = 512
MAX_LEN: Final = 200_192
NUM_ROWS: Final = 1024
PROMPT_TOKENS_PER_S: Final = 40_000
TOKEN_S: Final = 0.03
SEED: Final = b"benchmark"
SPEC: Final = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype_bytes=2)
NOWHERE: Final = Endpoint("inproc://nowhere")
NO_MESSAGE: Final = AddRequest("", 0, EMPTY_INT32, SamplingParams())


@dataclass(frozen=True)
class Arrival:
    at_s: float
    token_ids: Int32Array
    num_output: int
    session: str


def read_trace(path: Path, limit: int | None) -> Iterator[Arrival]:
    """Prompts whose blocks are equal where the trace's are."""
    session_of: dict[int, str] = {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if number == limit:
                return
            entry = json.loads(line)
            ids = entry["hash_ids"]
            known = next((each for each in reversed(ids[1:]) if each in session_of), None)
            session = str(number) if known is None else session_of[known]
            session_of |= dict.fromkeys(ids[1:], session)
            tokens = np.repeat(np.array(ids, np.int32), BLOCK_SIZE)[: entry["input_length"]]
            yield Arrival(entry["timestamp"] / 1e3, tokens, entry["output_length"], session)


class Engine:
    """One engine: a KV cache, its events, and a queue of prompts."""

    def __init__(self, num_blocks: int, prompt_tokens_per_s: float) -> None:
        kv_cache = KVCacheConfig(num_blocks, (KVCacheGroup(("layer",), SPEC),), "bfloat16")
        self._cache = KVCacheManager(
            CacheConfig(block_size=BLOCK_SIZE, enable_kv_cache_events=True),
            kv_cache,
            LongestRequest(MAX_LEN),
            max_num_seqs=NUM_ROWS,
            hash_seed=SEED,
        )
        config = KVEventsConfig(endpoint=NOWHERE, replay_endpoint=NOWHERE)
        self.stream = EventStream(config, kv_cache, publisher_id=bytes(16))
        self.stream.append([AllBlocksCleared()], 0.0)
        self._rate = prompt_tokens_per_s
        self._rows = list(range(NUM_ROWS))
        self.waiting: deque[tuple[Request, Callable[[float], None]]] = deque()
        self.is_busy = False
        self.num_live = self.num_computed = self.num_found = 0

    def begin(self) -> tuple[float, Callable[[], list[bytes]], int, Callable[[float], None]] | None:
        """Begin to compute the next prompt: seconds that it takes, what to call then, its row, and
        what the caller gave with it. None if there is none, or if it does not fit."""
        if self.is_busy or not self.waiting or not self._rows:
            return None
        request, given = self.waiting[0]
        found = self._cache.get_computed_blocks(request)
        row, num_tokens = self._rows[-1], len(request.token_ids)
        if self._cache.start(row, self._cache.demand(found, num_tokens)) is None:
            return None
        self.waiting.popleft()
        self._rows.pop()
        self.is_busy = True
        self.num_found += found.num_tokens
        self.num_computed += num_tokens - found.num_tokens

        def end() -> list[bytes]:
            self.is_busy = False
            self._cache.full_blocks.cache_row(row, request, request.token_ids, num_tokens)
            return self.publish()

        return (num_tokens - found.num_tokens) / self._rate, end, row, given

    def free(self, row: int) -> list[bytes]:
        self._cache.free(row)
        self._rows.append(row)
        return self.publish()

    def publish(self) -> list[bytes]:
        """The numbers and payloads of new events."""
        return [
            frame
            for number, payload in self.stream.append(self._cache.take_events(0), 0.0)
            for frame in (sequence_frame(number), payload)
        ]


class Simulation:
    """One policy, one number of engines."""

    def __init__(self, policy: str, num_engines: int, options: Any) -> None:
        self._policy, self._options = policy, options
        num_blocks = options.blocks // num_engines
        rate = PROMPT_TOKENS_PER_S / num_engines
        self._engines = [Engine(num_blocks, rate) for _ in range(num_engines)]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_events = 0
        self._num_decisions = self._num_unknown = 0
        self._num_expected = 0
        self.ttft_s: list[float] = []
        self._start_router()
        self._load_snapshots(0.0)

    def _start_router(self) -> None:
        num_engines = len(self._engines)
        prefix = PrefixRoutingConfig(SEED.hex(), "sha256", BLOCK_SIZE)
        policy = make_policy(
            RoutingConfig(
                routing_policy=self._policy,  # type: ignore[arg-type]
                routing_index_blocks=10_000_000,
                prefix=prefix,
            )
        )
        self._router = Router(num_engines, policy)
        self._index = policy.index if isinstance(policy, PrefixAware) else None
        self._followers: list[EventFollower] = []
        if self._index is not None:
            for engine in range(num_engines):
                self._index.add_engine(engine)
            self._followers = [
                EventFollower(self._index, engine, lambda request: None)
                for engine in range(num_engines)
            ]
            for follower in self._followers:
                follower.begin(0.0)

    def _load_snapshots(self, now: float) -> None:
        for engine, follower in zip(self._engines, self._followers, strict=False):
            number, parts = engine.stream.snapshot(0.0)
            follower.receive_answer((b"", sequence_frame(number), bytes(16), *parts), now)
            self._work(follower)

    def _restart_router(self, now: float) -> None:
        self._start_router()
        self._at(now + self._options.snapshot_ms / 1e3, self._load_snapshots)
        self._at(now + self._options.restart_every_s, self._restart_router)

    @staticmethod
    def _work(follower: EventFollower) -> None:
        while follower.has_work:
            follower.work(0.0)

    def run(self, arrivals: Sequence[Arrival]) -> dict[str, float]:
        for arrival in arrivals:
            self._at(arrival.at_s, lambda now, arrival=arrival: self._arrive(arrival, now))
        if self._options.restart_every_s and self._index is not None:
            self._at(self._options.restart_every_s, self._restart_router)
        while len(self.ttft_s) < len(arrivals):
            now, _, event = heapq.heappop(self._events)
            event(now)
        num_found = sum(engine.num_found for engine in self._engines)
        computed = [engine.num_computed for engine in self._engines]
        row = {
            "hit_rate": num_found / (num_found + sum(computed)),
            "imbalance": max(computed) * len(computed) / sum(computed),
            "ttft_ms": float(np.mean(self.ttft_s)) * 1e3,
            "ttft_p99_ms": float(np.percentile(self.ttft_s, 99)) * 1e3,
        }
        if self._index is not None:
            row["expected"] = self._num_expected / max(1, num_found)
            row["unknown"] = self._num_unknown / self._num_decisions
        return row

    def _at(self, time_s: float, event: Callable[[float], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, event))

    def _arrive(self, arrival: Arrival, now: float) -> None:
        prompt = RoutedPrompt(arrival.token_ids, session_key=arrival.session)  # type: ignore[arg-type]
        num_own = [engine.num_live for engine in self._engines]
        decision = self._router.choose(prompt, num_own, [True] * len(num_own), now)
        assert decision is not None
        self._num_decisions += 1
        self._num_unknown += decision.reason == "unknown"
        self._num_expected += decision.num_cached_tokens
        live = LiveRequest("", 0, range(len(arrival.token_ids)), NO_MESSAGE, lambda: None)
        router = self._router
        router.note_sent(decision, live)
        engine = self._engines[decision.engine]
        engine.num_live += 1
        message = AddRequest("", 0, arrival.token_ids, SamplingParams())
        request = Request(message, client_index=0, now=now, max_model_len=MAX_LEN, eos_token_ids=())

        def answer(then: float) -> None:
            self.ttft_s.append(then - now)
            router.note_answer(live, then)

        engine.waiting.append((request, answer))
        request.num_output = arrival.num_output  # type: ignore[attr-defined]
        self._begin(decision.engine, now)

    def _begin(self, number: int, now: float) -> None:
        engine = self._engines[number]
        request = engine.waiting[0][0] if engine.waiting else None
        begun = engine.begin()
        self._publish(number, engine.publish())
        if begun is None or request is None:
            return
        took_s, end, row, answer = begun
        decode_s = TOKEN_S * request.num_output  # type: ignore[attr-defined]

        def first_token(then: float) -> None:
            answer(then)
            self._publish(number, end())
            self._at(then + decode_s, finish)
            self._begin(number, then)

        def finish(then: float) -> None:
            engine.num_live -= 1
            self._publish(number, engine.free(row))
            self._begin(number, then)

        self._at(now + took_s, first_token)

    def _publish(self, number: int, frames: Sequence[bytes]) -> None:
        if not self._followers:
            return
        follower = self._followers[number]
        for first in range(0, len(frames), 2):
            follower.receive((b"", *frames[first : first + 2]), 0.0)
        self._work(follower)


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--traces", type=Path, default=TRACES)
    arguments.add_argument("--engines", type=int, nargs="+", default=[2, 4, 8])
    arguments.add_argument("--blocks", type=int, default=40_000, help="of all engines together")
    arguments.add_argument("--policies", nargs="+", default=list(POLICY_NAMES))
    arguments.add_argument("--requests", type=int, help="the first of each trace only")
    arguments.add_argument("--restart-every-s", type=float, default=0.0)
    arguments.add_argument("--snapshot-ms", type=float, default=100.0)
    options = arguments.parse_args()
    rows = []
    for path in sorted(options.traces.glob(f"*{SUFFIX}")):
        arrivals = list(read_trace(path, options.requests))
        one_pool = Simulation("round_robin", 1, options).run(arrivals)
        for num_engines in options.engines:
            for policy in options.policies:
                result = Simulation(policy, num_engines, options).run(arrivals)
                rows.append(
                    {
                        "trace": path.name.removesuffix(SUFFIX),
                        "engines": num_engines,
                        "policy": policy,
                        "one_pool": one_pool["hit_rate"],
                        **result,
                    }
                )
    report.write(options.json, rows, blocks=options.blocks, prompt_tokens_per_s=PROMPT_TOKENS_PER_S)


if __name__ == "__main__":
    main()
