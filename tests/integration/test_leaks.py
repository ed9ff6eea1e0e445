"""Ten thousand requests with aborts at any moment, through real processes: no block, request or
memory is lost."""

import random
import time
from pathlib import Path

import pytest

from longshore.deploy.llm.remote_engine import RemoteEngine
from longshore.deploy.model.folder import read_model_folder
from longshore.deploy.requests.live_requests import LiveRequest, LiveRequests, seed_source
from longshore.deploy.settings.options import engine_options
from longshore.deploy.supervisor.engine_plan import plan_engine
from longshore.protocol.outputs import FinishReason
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.statistics import SchedulerStats
from tests.models import make_tiny_llama

NUM_REQUESTS = 10_000
ABORT_SHARE = 0.3
MAX_LIVE = 300
TIMEOUT_S = 60.0


class Load:
    """Keeps MAX_LIVE requests alive and aborts some of them at random moments."""

    def __init__(self, engine: RemoteEngine, rng: random.Random) -> None:
        self._engine = engine
        self._rng = rng
        self._requests = LiveRequests(seed_source(0))
        self._live: dict[str, LiveRequest] = {}
        self._bases = [[rng.randrange(128) for _ in range(100)] for _ in range(4)]
        self.num_sent = 0
        self.num_aborted = 0
        self.num_finished = 0
        self.last_stats: SchedulerStats | None = None

    def run(self, num_requests: int) -> None:
        while self.num_sent < num_requests or self._live:
            while self.num_sent < num_requests and len(self._live) < MAX_LIVE:
                self._send()
            self._abort_some()
            self._receive()

    def _send(self) -> None:
        rng = self._rng
        prompt = [*rng.choice(self._bases)[: rng.randrange(1, 100)], rng.randrange(128)]
        live, message = self._requests.open(
            f"request-{self.num_sent}",
            prompt,
            SamplingParams(temperature=rng.choice((0.0, 1.0)), max_tokens=rng.randrange(1, 12)),
            on_change=lambda: None,
        )
        self.num_sent += 1
        self._live[live.request_id] = live
        self._engine.send(message)

    def _abort_some(self) -> None:
        rng = self._rng
        # About the number that keeps the share of aborted requests right.
        chosen = [live for live in self._live.values() if rng.random() < ABORT_SHARE / 8]
        message = self._requests.abort(chosen)
        if message is not None:
            self._engine.send(message)
        for live in chosen:
            del self._live[live.request_id]
        self.num_aborted += len(chosen)

    def _receive(self) -> None:
        outputs = self._engine.receive()
        if outputs is None:
            return
        self._requests.apply(outputs)
        self.last_stats = outputs.stats or self.last_stats
        for live in [live for live in self._live.values() if not live.is_live]:
            assert live.finished is not None
            assert live.finished.reason in (FinishReason.STOPPED, FinishReason.LENGTH_CAPPED)
            assert live.finished.num_output_tokens == len(live.new_token_ids)
            del self._live[live.request_id]
            self.num_finished += 1

    def idle_stats(self) -> SchedulerStats:
        """The counts in the engine's report once no request runs."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            self._receive()
            stats = self.last_stats
            if stats is not None and stats.num_running == stats.num_waiting == 0:
                return stats
        raise TimeoutError(f"the engine is not idle: {self.last_stats}")


@pytest.mark.req("POO-11")
def test_every_block_is_free_after_ten_thousand_requests_with_aborts(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    no_gates = {"watermark": 0.0, "preempt_threshold": 1.0, "admit_threshold": 1.0}
    options = engine_options(
        {"num_blocks": 120, "device": "cpu", "threads": 1, "log_level": "warning", **no_gates}
    )
    engine = RemoteEngine(plan_engine(options, read_model_folder(tmp_path)))
    try:
        load = Load(engine, random.Random(0))
        load.run(NUM_REQUESTS)
        stats = load.idle_stats()
    finally:
        engine.close()
    assert load.num_aborted > 0.1 * NUM_REQUESTS
    assert load.num_finished + load.num_aborted == NUM_REQUESTS
    assert stats.num_free_blocks == stats.num_blocks - 1
    assert stats.num_preemptions > 0
    assert stats.num_stale_tokens > 0
