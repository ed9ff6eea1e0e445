"""A scheduler with its clients and its connector, and what tests look at."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from longshore.connectors.base import SchedulerConnector
from longshore.protocol.arrays import int32_array
from longshore.protocol.handshake import Feature
from longshore.protocol.kv_cache_spec import KVCacheSpec
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import AddRequest, ContinueSession, RequestOptions, StopFound
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.request import Request
from longshore.scheduler.scheduler import Scheduler
from tests.harness.clients import Clients, RequestKey
from tests.harness.connector import AdversarialConnector
from tests.harness.grammar import FakeCompiler
from tests.harness.kv_cache import tokens_per_entry
from tests.harness.kv_groups import config_of, full
from tests.harness.tokens import (
    EOS,
    VOCAB_SIZE,
    Content,
    Sample,
    steady_token,
)
from tests.harness.transfers import Transfers

OF_A_DECODER: Final = frozenset(Feature) - {Feature.POOLING_ONLY, Feature.BIDIRECTIONAL}


class Engine:
    """Builds one Scheduler. Settings not given are small; `settings` go to SchedulerConfig, those
    in `cache` to CacheConfig, those in `scheduler` to Scheduler.

    specs:      of the KV cache groups; else `num_groups` of full attention.
    rules:      of an `AdversarialConnector`, unless a `connector` is given; None: no connector.
    sample:     the output tokens of a request by position.
    max_tokens: of requests for which no other number is given.

    now:        the time, in seconds; it goes on by one with each request and each plan.
    contents:   by request id, what the KV of each request depends on beside its tokens.
    received, finished, continued, scored, names: see `Clients`.
    """

    def __init__(
        self,
        *specs: KVCacheSpec,
        num_blocks: int = 40,
        block_size: int = 4,
        num_groups: int = 1,
        num_ranks: int = 1,
        enable_prefix_caching: bool = True,
        sample: Sample = steady_token,
        max_tokens: int = 8,
        verify_plan: bool = False,
        cache: dict[str, Any] | None = None,
        grammars: FakeCompiler | None = None,
        connector: SchedulerConnector | None = None,
        rules: dict[str, Any] | None = None,
        scheduler: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        defaults = {
            "max_model_len": 64,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_steps_in_flight": 1,
            "min_load_wait_s": 1e9,  # a step takes a second, so computing is always slower
        }
        self.config = SchedulerConfig(**(defaults | settings))
        self.specs = specs or (full(block_size),) * num_groups
        self.num_blocks = num_blocks
        self.num_ranks = num_ranks
        self.contents: dict[str, Content] = {}
        self.transfers = Transfers(num_ranks)
        self.connector = connector
        if connector is None and rules is not None:
            self.connector = AdversarialConnector(**rules)
        if isinstance(self.connector, AdversarialConnector):
            sizes = [tokens_per_entry(spec) for spec in self.specs]
            self.connector.bind(self.transfers, sizes, self.contents)
        self.scheduler = Scheduler(
            self.config,
            CacheConfig(
                block_size=block_size,
                **({"enable_prefix_caching": enable_prefix_caching} | (cache or {})),
            ),
            kv_cache=config_of(num_blocks, *self.specs),
            hash_seed=b"seed",
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            verify_plan=verify_plan,
            grammars=grammars,
            connector=self.connector,
            num_ranks=num_ranks,
            **({"features": OF_A_DECODER} | (scheduler or {})),
        )
        self.requests: dict[str, Request] = {}
        self.clients = Clients(sample)
        self.received, self.finished = self.clients.received, self.clients.finished
        self.continued, self.scored = self.clients.continued, self.clients.scored
        self.names = self.clients.names
        self.now = 0.0
        self._num_added = 0
        self._max_tokens = max_tokens
        self._sample = sample

    @property
    def adversary(self) -> AdversarialConnector:
        assert isinstance(self.connector, AdversarialConnector)
        return self.connector

    # What clients do

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        outputs: Sequence[int] = (),
        client: int = 0,
        handle: int | None = None,
        max_tokens: int | None = -1,
        sampling: dict[str, Any] | None = None,
        age_s: float = 0.0,
        fork_of: int | None = None,
        **options: Any,
    ) -> RequestKey:
        """Queue a request; returns its key in `received` and `finished`. max_tokens: -1 stands for
        the engine's. options: fields of `RequestOptions`."""
        key = client, self._num_added if handle is None else handle
        max_tokens = self._max_tokens if max_tokens == -1 else max_tokens
        self._num_added += 1
        self.now += 1.0
        message = AddRequest(
            request_id,
            key[1],
            int32_array(list(prompt)),
            SamplingParams(temperature=0.0, max_tokens=max_tokens, **(sampling or {})),
            RequestOptions(**options),
            output_token_ids=int32_array(list(outputs)),
            age_s=age_s,
            fork_of=fork_of,
        )
        is_new = self.scheduler._lifecycle.get(*key) is None
        self.scheduler.add_request(message, client=client, now=self.now)
        request = self.scheduler._lifecycle.get(*key)
        if is_new:
            self.clients.add(key, request_id, outputs, max_tokens)
        if is_new and request is not None:
            lora_name = message.options.lora.name if message.options.lora is not None else None
            root = f"{message.options.cache_salt}/{lora_name}"
            self.contents[request_id] = Content(root, message.options.multimodal)
            self.requests[request_id] = request
        self.collect()
        return key

    def abort(self, *keys: RequestKey) -> None:
        """The clients lose interest."""
        for client, handle in keys:
            self.scheduler.abort_requests(client, int32_array([handle]), self.now)
        self.collect()

    def stop_found(self, key: RequestKey, num_tokens: int) -> None:
        """The gateway found a stop string."""
        self.scheduler.stop_found(key[0], StopFound(key[1], num_tokens), self.now)
        self.collect()

    def continue_session(
        self,
        key: RequestKey,
        prompt: Sequence[int],
        *,
        max_tokens: int = 8,
        resumable: bool = True,
    ) -> None:
        """More input for a session."""
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        message = ContinueSession(key[1], int32_array(list(prompt)), sampling, resumable)
        self.scheduler.continue_session(key[0], message, self.now)
        self.collect()

    def collect(self, *, is_ours: bool = True) -> None:
        """Clients get their outputs; see `Clients.collect`."""
        self.clients.collect(self.scheduler.take_outputs(), is_ours=is_ours)

    # What can be looked at

    def table(self, request_id: str) -> list[int]:
        """Block table of a running request, first group."""
        row = self.requests[request_id].row
        assert row >= 0, f"{request_id} does not run"
        return self.scheduler.kv_cache.block_ids(row)[0].tolist()

    def num_held(self, request_id: str) -> list[int]:
        """Blocks per group that a running request holds."""
        tables = self.scheduler.kv_cache.block_ids(self.requests[request_id].row)
        return [int(np.count_nonzero(table)) for table in tables]

    def reason(self, key: RequestKey) -> FinishReason:
        """Why a request ended."""
        return self.finished[key].reason

    @property
    def running(self) -> list[str]:
        """Request ids in admission order."""
        return [request.request_id for request in self.scheduler.running.requests_in_order()]

    @property
    def num_free_blocks(self) -> int:
        return self.scheduler.kv_cache.num_free_blocks
