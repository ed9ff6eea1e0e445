"""The scheduler as a prefix cache, for `hybrid_hits.py`.

A request is added, and its steps are planned and answered until it has ended, before the next one
arrives. Its time is that of its arrival. It comes with its answer, as one that goes on after a
restart; only the last two tokens are sampled. They tell a call of a tool from another answer, as in
templates that end calls with a token of their own.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from hybrid_caches import BLOCK, Cache, Node
from hybrid_workloads import Request

from longshore.protocol.arrays import Int32Array
from longshore.protocol.kv_cache_spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    StateSpec,
)
from longshore.protocol.outputs import ModelRunnerOutput
from longshore.protocol.requests import AddRequest, RequestOptions
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.features.kept_states import MAX_INSURANCE, MAX_KEPT
from longshore.scheduler.scheduler import Scheduler

VOCAB_SIZE: Final = 1 << 30
MOST_TOKENS: Final = 300_000_000
NUM_SAMPLED: Final = 2
NUM_TEXT_ENDS: Final = 20
"""Answers that are no calls end with one of so many tokens."""


class Scheduled(Cache):
    """capacity, state_tokens: as those of `Hybrid`. The pool also has the working state of a
    request."""

    def __init__(self, capacity: float, state_tokens: int, requests: Sequence[Request]) -> None:
        super().__init__(BLOCK)
        longest = max(request.num_tokens for request in requests) + NUM_SAMPLED
        num_pages = -(-state_tokens // BLOCK)
        attention = FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=64, dtype_bytes=2)
        state = StateSpec(
            block_size=BLOCK, shapes=((num_pages, 2),), dtype_bytes=(4,), num_pages=num_pages
        )
        num_blocks = 1 + num_pages + int(min(capacity, _most(requests, state_tokens)) // BLOCK)
        groups = tuple(
            KVCacheGroup((name,), spec) for name, spec in (("a", attention), ("s", state))
        )
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=longest,
                max_num_seqs=1,
                max_num_batched_tokens=longest,
                max_steps_in_flight=1,
            ),
            CacheConfig(block_size=BLOCK),
            kv_cache=KVCacheConfig(num_blocks, groups, "bfloat16"),
            hash_seed=b"benchmark",
            vocab_size=VOCAB_SIZE,
        )
        self._num_made = 0
        self._endings: dict[int, int] = {}  # by key of an answer

    def _serve(self, request: Request, nodes: Sequence[Node], seen: int) -> int:
        return self.serve_one(request)

    def serve_one(self, request: Request) -> int:
        """Serve a request; returns the number of its tokens that were found."""
        scheduler, now = self._scheduler, request.now
        before = scheduler.kv_cache.stats.num_hit_tokens
        self._num_made += 1
        last = request.num_prompt - 1
        ends = {min(each, last) for each in (request.turn_start, request.stable_end) if each}
        ending = 1 if request.has_call else 2 + self._num_made % NUM_TEXT_ENDS
        if request.answer_end is not None:
            self._endings[request.path[-1][0]] = ending
        prompt, answer = np.split(self._tokens(request), [request.num_prompt])
        answer = np.append(answer[:-NUM_SAMPLED], [ending] * NUM_SAMPLED).astype(np.int32)
        message = AddRequest(
            f"cmpl-{self._num_made:024x}",
            self._num_made,
            prompt,
            SamplingParams(max_tokens=len(answer), ignore_eos=True),
            options=RequestOptions(turn_ends=tuple(sorted(ends))),
            output_token_ids=answer[:-NUM_SAMPLED],
        )
        scheduler.add_request(message, client=0, now=now)
        while (plan := scheduler.schedule(now)) is not None:
            is_sampled = plan.num_scheduled_tokens > 0
            tokens = np.array([ending] if is_sampled else [], np.int32)
            output = ModelRunnerOutput(epoch=1, step=plan.step, sampled_tokens=tokens)
            scheduler.update_from_output(output, now)
        scheduler.take_outputs()
        return scheduler.kv_cache.stats.num_hit_tokens - before

    def _tokens(self, request: Request) -> Int32Array:
        """Equal segments have equal tokens. An answer that later prompts repeat ends as it was
        sampled."""
        parts = []
        for key, length in request.path:
            part = (np.arange(length, dtype=np.int64) * 31 + key * 1_000_003) % VOCAB_SIZE
            if (ending := self._endings.get(key)) is not None:
                part[-NUM_SAMPLED:] = ending
            parts.append(part)
        return np.concatenate(parts).astype(np.int32)


def _most(requests: Sequence[Request], state_tokens: int) -> int:
    """As many tokens as all requests fill, with all states, but at most MOST_TOKENS."""
    distinct = {segment for request in requests for segment in request.path}
    kept = MAX_KEPT + MAX_INSURANCE + 1
    tokens = sum(length for _, length in distinct) + len(requests) * kept * state_tokens
    return min(tokens, MOST_TOKENS)
