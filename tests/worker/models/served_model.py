"""A loaded model with the real scheduler, without processes: requests in, tokens out."""

import copy
import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from longshore.protocol.arrays import int32_array
from longshore.protocol.kv_cache_spec import KVCacheDtype, num_blocks_needed
from longshore.protocol.outputs import FinishedRequest, ModelRunnerOutput, WorkerReport
from longshore.protocol.requests import AddRequest, MultimodalFeature, PoolingParams, RequestOptions
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.features.routed_experts import RoutedExpertsReader
from longshore.scheduler.scheduler import Scheduler
from longshore.worker.config import WorkerConfig
from longshore.worker.queues.compute_queue import Completion, ComputeQueue
from longshore.worker.ranks.parallel import ALONE, Parallel
from longshore.worker.worker import Worker

CLIENT = 0


class ServedModel:
    """Greedy outputs of `num_tokens` tokens; a context manager.

    worker:        its groups are the KV cache plan.
    tokens, ended: by request.
    """

    def __init__(
        self,
        path: Path,
        *,
        num_tokens: int,
        max_model_len: int = 256,
        max_num_batched_tokens: int = 256,
        num_blocks: int | None = 200,
        max_steps_in_flight: int = 2,
        enable_prefix_caching: bool = True,
        kv_cache_dtype: KVCacheDtype = "auto",
        num_encoder_tokens: int = 0,
        routed_experts_fd: int | None = None,
        queue: ComputeQueue | None = None,
        parallel: Parallel = ALONE,
        **settings: Any,
    ) -> None:
        """num_blocks: None takes the minimum for the longest request. num_encoder_tokens: encoder
        tokens per step; 0 without an encoder. queue: of the worker; None: its own. parallel: of the
        only rank that there is, which samples. settings: further ones of WorkerConfig."""
        given = {"max_num_seqs": 16, "poison_kv": True, **settings}
        config = WorkerConfig(
            model=str(path),
            num_blocks=num_blocks or 10_000,
            max_num_batched_tokens=max_num_batched_tokens,
            max_steps_in_flight=max_steps_in_flight,
            max_model_len=max_model_len,
            kv_cache_dtype=kv_cache_dtype,
            show_progress=False,
            routed_experts_fd=routed_experts_fd,
            **given,
        )
        if (drafts := config.drafts) is not None:
            max_steps_in_flight = 1
        scheduling = SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_steps_in_flight=max_steps_in_flight,
            max_num_encoder_input_tokens=num_encoder_tokens,
            num_speculative_tokens=0 if drafts is None else drafts.num_drafts,
            num_lookahead_tokens=0 if drafts is None else drafts.num_drafts,
        )
        cache = CacheConfig(
            enable_prefix_caching=enable_prefix_caching,
            watermark=0.0,
            preempt_threshold=1.0,
            admit_threshold=1.0,
        )
        self.worker = Worker(config, parallel)
        kv_cache = self.worker.kv_cache
        if num_blocks is None:
            num_blocks = num_blocks_needed(kv_cache.groups, scheduling.longest_request(1))
        self._runner = self.worker.start(num_blocks=num_blocks, queue=queue)
        kv_cache = msgspec.structs.replace(kv_cache, num_blocks=num_blocks)
        experts = None
        if routed_experts_fd is not None and self.worker.routed_experts is not None:
            experts = RoutedExpertsReader(routed_experts_fd, self.worker.routed_experts, kv_cache)
        self.scheduler = Scheduler(
            scheduling,
            cache,
            kv_cache=kv_cache,
            hash_seed=b"seed",
            features=frozenset(self.worker.features),
            vocab_size=self.worker.model_config.vocab_size,
            verify_plan=True,
            experts=experts,
        )
        self.num_tokens = num_tokens
        self.tokens: list[list[int]] = []
        self.ended: dict[int, FinishedRequest] = {}
        self._in_flight: deque[tuple[Completion, list[WorkerReport]]] = deque()

    def __enter__(self) -> "ServedModel":
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.close()

    @property
    def border(self) -> int:
        """Prefix hits end at multiples of this number of tokens."""
        return math.lcm(*(group.spec.block_size for group in self.worker.kv_cache.groups))

    def answers(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """The outputs of these prompts, served together."""
        first = len(self.tokens)
        for prompt in prompts:
            self.add(prompt)
        while self.step():
            pass
        self.scheduler.check()
        return self.tokens[first:]

    def add(
        self,
        prompt: Sequence[int],
        *items: MultimodalFeature,
        pooling: PoolingParams | None = None,
        **sampling: Any,
    ) -> None:
        """sampling: settings of SamplingParams other than those of a greedy request."""
        greedy = {"temperature": 0.0, "max_tokens": self.num_tokens, "ignore_eos": True}
        handle = len(self.tokens)
        self.tokens.append([])
        request = AddRequest(
            request_id=f"request-{handle}",
            handle=handle,
            prompt_token_ids=int32_array(list(prompt)),
            sampling=SamplingParams(**greedy | sampling),
            options=RequestOptions(multimodal=items, pooling=pooling),
        )
        self.scheduler.add_request(request, client=CLIENT, now=0.0)

    def step(self) -> bool:
        """Plan as many steps as possible and apply one output. False if nothing is left to do."""
        while (plan := self.scheduler.schedule(0.0)) is not None:
            reports: list[WorkerReport] = []
            completion = self._runner.submit(copy.deepcopy(plan), reports.append)
            assert completion is not None
            self._in_flight.append((completion, reports))
        if not self._in_flight:
            assert not self.scheduler.has_unfinished_requests()
            return False
        completion, reports = self._in_flight.popleft()
        completion.wait()
        (report,) = reports
        assert isinstance(report, ModelRunnerOutput), report
        self.scheduler.update_from_output(report, 0.0)
        for _, outputs in self.scheduler.take_outputs():
            new_tokens = zip(outputs.handles.tolist(), outputs.tokens.tolist(), strict=True)
            for handle, token in new_tokens:
                self.tokens[handle].append(token)
            self.ended |= {finished.handle: finished for finished in outputs.finished}
        return True

    def poison_free_blocks(self) -> None:
        """Set free blocks to NaN, so that reading one gives a wrong output. Only while nothing is
        cached and no step is in flight."""
        pool = self.scheduler.kv_cache.pool
        free = np.array(pool.free_block_ids(), np.int64)
        self._runner._launcher.state.cache.buffer[free] = 0xFF
