"""Draws requests that have something to do with each other, and what happens to them."""

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
from msgspec.structs import replace

from longshore.protocol.arrays import EMPTY_INT32, int32_array
from longshore.protocol.kv_cache_spec import CrossAttentionSpec
from longshore.protocol.requests import (
    NO_TENANT,
    AddRequest,
    CacheHint,
    CachePrefix,
    ContinueSession,
    LoRARequest,
    MultimodalFeature,
    PoolingParams,
    RequestOptions,
    Tenant,
)
from longshore.protocol.sampling import RepetitionDetection, SamplingParams
from longshore.scheduler.config import SchedulerConfig
from longshore.scheduler.step.planner import PauseState
from tests.harness.grammar import grammar_for
from tests.harness.tokens import sample_token
from tests.oracle.workloads import (
    Abort,
    BeginEpoch,
    Continue,
    FindStop,
    Operation,
    Pause,
    Resubmit,
    Submit,
)


class RequestMaker:
    """Draws requests, and what happens to them, for one workload."""

    def __init__(
        self,
        rng: Random,
        config: SchedulerConfig,
        vocab_size: int,
        features: frozenset[str],
        cross: CrossAttentionSpec | None = None,
    ) -> None:
        self._rng = rng
        self._config = config
        self._max_model_len = config.max_model_len
        self._vocab_size = vocab_size
        self._features = features
        self._cross = cross
        self._bases = [self._tokens(self._max_model_len) for _ in range(rng.randrange(1, 4))]
        self._num_handles = 0
        self._earlier: list[AddRequest] = []
        self._follow_up_share = rng.choice((0.0, 0.3, 0.8))
        self._longest_prompt = 1 + int(rng.choice((0.3, 0.6, 1.0)) * (self._max_model_len - 2))
        self._tail_share = rng.random()
        self._abort_share = rng.choice((0.0, 0.2, 0.6))
        self._gaps = rng.choice(((0,), (0, 1), (0, 0, 2, 8), (0, 0, 1, 30)))

    def _tokens(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(num_tokens)]

    def make_operations(self, num_requests: int) -> tuple[Operation, ...]:
        """Requests in bursts and pauses, with aborts, stops and resubmits some turns later."""
        rng = self._rng
        operations: list[Operation] = []
        turn = 0
        for number in range(num_requests):
            turn += rng.choice(self._gaps)
            client = rng.randrange(2)
            request = self._make_request(f"request-{number}", self._new_handle(), turn)
            self._earlier.append(request)
            operations.append(Submit(turn, client, request))
            operations += self._make_sequels(turn, client, request)
            if request.options.resumable:
                operations += self._make_chunks(turn, client, request)
        operations += self._make_interruptions(turn)
        operations.sort(key=lambda operation: operation.turn)
        return tuple(operations)

    def _make_sequels(self, turn: int, client: int, request: AddRequest) -> Iterator[Operation]:
        rng = self._rng
        handle = request.handle
        later = turn + rng.randrange(60)
        if rng.random() < self._abort_share:
            yield Abort(later, client, (handle, rng.randrange(1 + 2 * handle)))
        if rng.random() < 0.1:
            yield FindStop(turn + rng.randrange(60), client, handle, rng.random())
        if rng.random() < 0.15:
            new_handle = self._new_handle()
            yield Resubmit(later, client, handle, new_handle)
            yield Abort(later + rng.randrange(200), client, (new_handle,))
        if rng.random() < 0.05:
            again = replace(request, request_id=f"{request.request_id} again")
            if (
                request.options.structured_output is not None
            ):  # a grammar knows its request's tokens
                spec = grammar_for(again.request_id, later)
                options = replace(again.options, structured_output=spec)
                again = replace(again, options=options, output_token_ids=EMPTY_INT32)
            yield Submit(later, client, again)
            if request.options.resumable:
                yield Abort(later + 300, client, (handle,))
        if rng.random() < 0.05:
            again = replace(request, handle=self._new_handle())
            yield Submit(later, 1 - client, again)
            if request.options.resumable:
                yield Abort(later + 300, 1 - client, (again.handle,))

    def _make_chunks(self, turn: int, client: int, request: AddRequest) -> Iterator[Operation]:
        """A few more inputs, the last of them said to be so or not; who waits in vain goes away."""
        rng = self._rng
        num_chunks = rng.randrange(4)
        for number in range(num_chunks):
            turn += rng.choice((0, 1, 10, 40))
            is_last = number == num_chunks - 1 and rng.random() < 0.7
            message = ContinueSession(
                handle=request.handle,
                prompt_token_ids=int32_array(self._tokens(rng.randrange(1, 6))),
                sampling=self._make_sampling(),
                resumable=not is_last,
            )
            yield Continue(turn, client, message)
        yield Abort(turn + 300, client, (request.handle,))

    def _make_interruptions(self, last_turn: int) -> Iterator[Operation]:
        rng = self._rng
        if "pause" in self._features:
            turn = 0
            for _ in range(rng.randrange(1, 6)):
                turn += rng.randrange(1, 30)
                yield Pause(turn, rng.choice((PauseState.PAUSED_NEW, PauseState.PAUSED_ALL)))
                turn += rng.randrange(1, 15)
                yield Pause(turn, PauseState.UNPAUSED)
        if "epoch" in self._features:
            for _ in range(rng.randrange(1, 4)):
                yield BeginEpoch(rng.randrange(last_turn + 60))

    def _new_handle(self) -> int:
        self._num_handles += 1
        return self._num_handles - 1

    def _make_request(self, request_id: str, handle: int, turn: int) -> AddRequest:
        rng = self._rng
        extras = self._make_extras(request_id, turn)
        prompt = self._make_prompt()
        num_outputs = rng.choice((0,) * 6 + (rng.randrange(1, 12),))
        if "pooling" in extras or "resumable" in extras:
            num_outputs = 0
        outputs = [sample_token(request_id, i, self._vocab_size) for i in range(num_outputs)]
        wants_items = "encoder" in self._features and rng.random() < 0.7
        if wants_items and "resumable" not in extras:  # the two together are rejected
            extras["multimodal"] = self._make_items(len(prompt))
        if self._cross is not None:
            extras["multimodal"] = self._make_sounds(self._cross.max_encoder_tokens)
        sampling = self._make_sampling()
        extras["priority"] = rng.choice((0, 0, -2, -1, 1, 2))
        age_s = rng.choice((0.0, 0.0, 0.25, 1.5))
        extras["cache_salt"] = rng.choice((None, None, None, "salt"))
        extras["skip_reading_prefix_cache"] = rng.random() < 0.1
        return AddRequest(
            request_id,
            handle,
            int32_array(prompt),
            sampling,
            RequestOptions(**extras),
            int32_array(outputs),
            age_s,
        )

    def _make_extras(self, request_id: str, turn: int) -> dict[str, Any]:
        """What the workload's features add to a request; pooling, grammars and sessions exclude
        each other."""
        rng = self._rng
        extras: dict[str, Any] = {}
        if "lora" in self._features and rng.random() < 0.7:
            extras["lora"] = LoRARequest(rng.choice(("red", "green", "blue", "black")))
        if "continuum" in self._features and rng.random() < 0.7:
            extras["job_id"] = rng.choice(("job-1", "job-2", "job-3"))
            extras["is_last_step"] = rng.random() < 0.5
        if "fair" in self._features:
            extras["tenant"] = rng.choice((NO_TENANT, Tenant("a"), Tenant("b", 2), Tenant("c", 5)))
        if "hints" in self._features and rng.random() < 0.6:
            ttl_s = rng.choice((0.5, 2.0, 10.0, 1000.0, 1000.0, 1000.0))
            session, priority = rng.choice((None, "s", "s", "t")), rng.choice((1, 1, 2, 3))
            prefixes = tuple(
                CachePrefix(
                    rng.randrange(1, 30), rng.choice((1.0, 5.0, 1000.0)), rng.choice((1, 2))
                )
                for _ in range(rng.choice((0, 0, 1, 2)))
            )
            if prefixes and rng.random() < 0.3:
                ttl_s, priority = 0.0, 1
            extras["cache_hint"] = CacheHint(ttl_s, session, priority, prefixes)
            tenants = (NO_TENANT, NO_TENANT, Tenant("a"), Tenant("b", cache_share=0.1))
            extras.setdefault("tenant", rng.choice(tenants))
        kinds = [kind for kind in ("pooling", "grammar", "session") if kind in self._features]
        kind = rng.choice(kinds) if kinds and rng.random() < 0.6 else None
        if kind == "pooling":
            extras["pooling"] = PoolingParams()
        if kind == "grammar":
            extras["structured_output"] = grammar_for(request_id, turn + rng.randrange(8))
        if kind == "session":
            extras["resumable"] = True
        return extras

    def _make_sampling(self) -> SamplingParams:
        rng = self._rng
        max_tokens = rng.choice((None, None, 1, rng.randrange(1, 40), rng.randrange(1, 40)))
        stop_ids = rng.sample(range(self._vocab_size), rng.choice((0, 0, 0, 1, 2)))
        repetition = None
        if "repetition" in self._features and rng.random() < 0.8:
            smallest = rng.randrange(1, 4)
            repetition = RepetitionDetection(
                max_pattern_size=smallest + rng.randrange(3),
                min_pattern_size=smallest,
                min_count=rng.randrange(2, 5),
            )
            stop_ids = []
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.choice((0, 0, rng.randrange(min(max_tokens or 10, 10) + 1))),
            stop_token_ids=tuple(stop_ids),
            ignore_eos=rng.random() < (0.8 if repetition else 0.3),
            repetition=repetition,
        )

    def _make_items(self, num_prompt: int) -> tuple[MultimodalFeature, ...]:
        """Items that do not overlap, now and then one too large for the encoder."""
        rng = self._rng
        longest = self._config.max_num_encoder_input_tokens + (rng.random() < 0.1)
        items: list[MultimodalFeature] = []
        offset = rng.randrange(4)
        while offset < num_prompt and len(items) < 4:
            num_tokens = rng.randrange(1, min(longest, num_prompt - offset, 12) + 1)
            # Equal content has one size, so the size is part of its name.
            hash_ = f"{rng.choice('abc')}-{num_tokens}"
            items.append(MultimodalFeature(hash_, offset, num_tokens))
            offset += num_tokens + rng.randrange(6)
        return tuple(items)

    def _make_sounds(self, longest: int) -> tuple[MultimodalFeature, ...]:
        """One, now and then another number of them or one that is too long."""
        rng = self._rng
        num_tokens = rng.choice((longest, rng.randrange(1, longest + 1), longest + 1))
        if num_tokens > longest and rng.random() < 0.7:
            num_tokens = longest
        hash_ = f"{rng.choice('abc')}-{num_tokens}"
        sound = MultimodalFeature(hash_, 0, num_tokens, "audio", np.zeros(4, np.uint8))
        return (sound,) * rng.choice((1,) * 20 + (0, 2))

    def _make_prompt(self) -> list[int]:
        rng = self._rng
        if rng.random() < 0.04:
            return rng.choice(([], self._tokens(self._max_model_len + rng.randrange(3))))
        if self._earlier and rng.random() < self._follow_up_share:
            return self._make_follow_up(rng.choice(self._earlier))
        longest = self._longest_prompt
        prompt = rng.choice(self._bases)[: rng.randrange(1, longest + 1)]
        if rng.random() < self._tail_share:
            prompt = prompt + self._tokens(rng.choice((1, rng.randrange(longest + 1))))
        return prompt[:longest]

    def _make_follow_up(self, request: AddRequest) -> list[int]:
        """The next turn of a conversation: an earlier prompt, some of its output, a little more."""
        rng = self._rng
        prompt = request.prompt_token_ids.tolist()
        for position in range(rng.randrange(20)):
            prompt.append(sample_token(request.request_id, position, self._vocab_size))
        prompt += self._tokens(rng.randrange(3))
        return prompt[: self._max_model_len - 1] or self._tokens(1)
