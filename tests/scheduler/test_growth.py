"""No event costs more than n log n in the number n of waiting requests, whatever they wait for, and
a step costs what changed. Operations are counted, not time (`tests.harness.operations`)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest

from longshore.connectors.base import (
    AskLater,
    Match,
    Matched,
    RequestView,
    SchedulerConnector,
)
from longshore.protocol.arrays import int32_array
from longshore.protocol.outputs import ModelRunnerOutput
from longshore.protocol.requests import LoRARequest, StopFound, Tenant
from longshore.scheduler.queue.policies import POLICIES
from longshore.scheduler.step.planner import PauseState
from tests.harness.engine import Engine
from tests.harness.kv_groups import full, state, window
from tests.harness.operations import count_operations, grows_at_most_n_log_n
from tests.harness.tokens import prompt_of

SIZES = (256, 2048)
LONG_SIZES = (1024, 4096, 16384)
NUM_STEPS = 8
WAIT_S = 1000.0
"""How long a request waits for its connector and its load."""

GROUPS = {
    "full attention": (full(),),
    "a window": (full(), window(16)),
    "a state": (full(), state()),
}

STREAM = 1_000_000
"""The handle of the request that runs all the time."""


def ask_later(request: RequestView, num_computed_tokens: int) -> Match:
    return AskLater() if request.request_id != "stream" else Matched(0)


def load(request: RequestView, num_computed_tokens: int) -> Match:
    is_loaded = request.request_id != "stream" and num_computed_tokens < 4
    return Matched(4 - num_computed_tokens if is_loaded else 0, is_async=is_loaded)


class Matching(SchedulerConnector):
    """Has what `match` says, and neither loads nor stores anything."""

    chunk_blocks = 0

    def __init__(self, match: Callable[[RequestView, int], Match]) -> None:
        super().__init__()
        self._match = match

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        return self._match(request, num_computed_tokens)


REASONS: dict[str, dict[str, Any]] = {
    "a row": {"max_num_seqs": 1},
    "an adapter": {"max_loras": 1},
    "its connector": {"match": ask_later},
    "other loads": {"match": load, "max_loading_blocks": 1},
    "its load": {"match": load, "max_loading_blocks": 40_000},
    "its parent": {"long_prefill_token_threshold": 1},
    "its client": {},
}
"""What the requests wait for, and the settings for it."""


class Crowd:
    """An engine in which one request runs, and `size` others wait for one reason."""

    def __init__(self, policy: str, reason: str, size: int) -> None:
        self.reason, self.size = reason, size
        settings: dict[str, Any] = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 4096,
            "max_model_len": 2048,
        }
        settings |= {"min_load_wait_s": WAIT_S, "load_timeout_s": WAIT_S} | REASONS[reason]
        match = settings.pop("match", None)
        self.engine = Engine(
            policy=policy,
            num_blocks=40_000,
            max_tokens=2000,
            cache={"enable_kv_cache_events": True},
            connector=None if match is None else Matching(match),
            **settings,
        )
        self.scheduler, self.now = self.engine.scheduler, 0.0
        first = prompt_of(700) if reason == "its parent" else [3] * 5
        adapter = LoRARequest("a") if reason == "an adapter" else None
        self.engine.add("stream", first, handle=STREAM, lora=adapter)
        self.step()
        self._common = prompt_of(699)
        self.operations = {"arrive": count_operations(self.arrive)}
        for _ in range(1 + size // 64):  # until all have been tried
            self.step()
        self.count("step", lambda: [self.step() for _ in range(NUM_STEPS)])

    def arrive(self) -> None:
        fields: dict[str, Any] = {}
        match self.reason:
            case "an adapter":
                fields["lora"] = LoRARequest("b")
            case "its parent":
                fields["fork_of"] = STREAM
            case "its client":
                fields["resumable"] = True
        for handle in range(self.size):
            prompt = self._common if self.reason == "its parent" else prompt_of(6, handle % 90)
            self.engine.add(
                f"r{handle}",
                prompt,
                handle=handle,
                client=1,
                max_tokens=1,
                priority=handle % 3,
                job_id=f"job {handle % 700}",
                tenant=Tenant(f"key {handle % 8}"),
                **fields,
            )

    def step(self) -> None:
        """Plan, and answer what can be answered."""
        self.now += 0.01
        scheduler = self.scheduler
        plan = scheduler.schedule(self.now)
        if plan is not None:
            rows = scheduler._in_flight.steps[-1].sampling.rows
            tokens = np.full(len(rows), 7, np.int32)
            scheduler.update_from_output(ModelRunnerOutput(1, plan.step, tokens), self.now)
        scheduler.take_outputs()

    def count(self, event: str, run: Callable[[], object]) -> None:
        self.operations[event] = count_operations(run)

    def tell_and_end(self) -> dict[str, int]:
        """Everything that does not end the requests, and their end."""
        scheduler, size = self.scheduler, self.size
        self.count("statistics", lambda: scheduler.make_stats())
        self.count("report", lambda: scheduler.make_report(self.now, "engine"))
        self.count("snapshot", lambda: scheduler.make_block_snapshot(self.now + 60, "engine"))
        self.count("stall", lambda: scheduler.idle_s(self.now))
        scheduler.set_pause(PauseState.PAUSED_ALL)
        self.count("pause", self.step)
        scheduler.set_pause(PauseState.UNPAUSED)
        self.count("resume", self.step)
        half = int32_array(list(range(0, size, 2)))
        self.count("abort", lambda: scheduler.abort_requests(1, half, self.now))
        self.count("after aborts", self.step)
        self.now += 2 * WAIT_S
        self.count("expire", lambda: [self.step() for _ in range(NUM_STEPS)])
        self.count(
            "reset",
            lambda: scheduler.reset_prefix_cache(self.now, reset_running_requests=True),
        )
        # What runs is preempted, unless loads are in progress.
        assert scheduler.running.num_rows == ("load" in self.reason)
        self.step()  # it may rebuild a heap, which the removals before it have paid for
        self.count("KV events", scheduler.take_kv_events)
        self.count("finish", lambda: scheduler.stop_found(0, StopFound(STREAM, 1), self.now))
        self.count("disconnect", lambda: scheduler.abort_client(1, self.now))
        assert len(scheduler.waiting) + scheduler.running.num_rows == 0
        return self.operations

    def begin_epoch(self) -> dict[str, int]:
        self.count("epoch", lambda: self.scheduler.begin_epoch(2, self.now))
        self.count("first plan", lambda: self.scheduler.schedule(self.now))
        return self.operations


@cache
def operations(policy: str, reason: str, size: int) -> dict[str, int]:
    crowd = Crowd(policy, reason, size)
    assert len(crowd.scheduler.waiting) >= size - 4, "the others do not wait"
    return crowd.tell_and_end() | Crowd(policy, reason, size).begin_epoch()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "policy",
    [pytest.param(each, marks=pytest.mark.long) for each in POLICIES if each != "fair"] + ["fair"],
)
@pytest.mark.parametrize("reason", list(REASONS))
def test_what_happens_to_waiting_requests_costs_at_most_n_log_n(
    policy: str, reason: str, long_run: bool
) -> None:
    sizes = LONG_SIZES if long_run else SIZES
    counts = {size: operations(policy, reason, size) for size in sizes}
    for event in counts[sizes[0]]:
        of_event = {size: max(counts[size][event], size // 8) for size in sizes}
        assert grows_at_most_n_log_n(of_event), (event, of_event)


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
@pytest.mark.parametrize("reason", list(REASONS))
def test_a_step_costs_the_same_however_many_requests_wait(policy: str, reason: str) -> None:
    few, many = (Crowd(policy, reason, size).operations["step"] for size in (256, 2048))
    assert many <= 1.25 * few + 50


def operations_with_drafts(num_rows: int, block_size: int) -> list[int]:
    """Operations of steps in which every row verifies four drafts, of which 0 to 4 are right."""
    num_drafts = 4
    engine = Engine(
        num_blocks=40_000,
        block_size=block_size,
        max_tokens=900,
        max_num_seqs=num_rows,
        max_num_batched_tokens=8 * num_rows,
        max_model_len=1024,
        max_steps_in_flight=1,
        num_speculative_tokens=num_drafts,
    )
    for number in range(num_rows):
        engine.add(f"r{number}", prompt_of(6, number % 90), handle=number)
    rows = np.arange(num_rows)

    def step() -> None:
        plan = engine.scheduler.schedule(0.0)
        assert plan is not None
        drafts = plan.draft_tokens.reshape(num_rows, -1)
        num_right = np.minimum((rows + plan.step) % (num_drafts + 1), drafts.shape[1])
        right = drafts[np.arange(drafts.shape[1]) < num_right[:, np.newaxis]]
        output = ModelRunnerOutput(
            1,
            plan.step,
            np.insert(right, num_right.cumsum(), 7),
            num_sampled=int32_array(num_right + 1),
            draft_rows=int32_array(rows.repeat(num_drafts)),
            draft_tokens=int32_array(np.full(num_rows * num_drafts, 9)),
        )
        engine.scheduler.update_from_output(output, 0.0)
        engine.scheduler.take_outputs()

    step()
    counts = [count_operations(step) for _ in range(20)]
    accepted = engine.scheduler.make_stats().num_accepted_tokens
    assert accepted > 20 * num_rows
    return counts


def test_a_step_with_drafts_costs_at_most_n_log_n_rows() -> None:
    few, many = (operations_with_drafts(num_rows, block_size=16) for num_rows in (32, 256))
    assert grows_at_most_n_log_n({32: sum(few), 256: sum(many)})


def test_drafts_that_complete_no_block_cost_the_same_however_many_rows_have_them() -> None:
    few, many = (operations_with_drafts(num_rows, block_size=512) for num_rows in (32, 256))
    assert np.median(many) <= 1.25 * np.median(few) + 50


def operations_of_chunks(kinds: str, num_tokens: int) -> list[int]:
    """Operations of each step of a prompt in chunks, but of the last one."""
    chunk = 64
    engine = Engine(
        *GROUPS[kinds],
        num_blocks=num_tokens,
        max_model_len=num_tokens + 1,
        max_num_batched_tokens=chunk,
    )
    engine.add("long", prompt_of(num_tokens), max_tokens=1)

    def step() -> None:
        plan = engine.scheduler.schedule(0.0)
        assert plan is not None
        assert plan.num_scheduled_tokens == chunk
        no_tokens = np.empty(0, np.int32)
        engine.scheduler.update_from_output(ModelRunnerOutput(1, plan.step, no_tokens), 0.0)

    return [count_operations(step) for _ in range(num_tokens // chunk - 1)]


@pytest.mark.parametrize("kinds", list(GROUPS))
def test_a_chunk_costs_the_same_wherever_it_is_in_a_long_prompt(kinds: str) -> None:
    short, long = (operations_of_chunks(kinds, num_tokens) for num_tokens in (4096, 16384))
    # The steps that keep a state look at the blocks before it. There are log n of them.
    assert np.median(long[-50:]) <= 1.02 * np.median(long[10:60])
    assert grows_at_most_n_log_n({4096: sum(short), 16384: sum(long)})


@contextmanager
def planted(owner: type, name: str, replacement: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


def test_a_scan_of_the_queue_would_be_found() -> None:
    """The harness sees what it is to guard against."""
    from longshore.scheduler.queue.queues import WaitingRequests

    remove = WaitingRequests.remove

    def slow_remove(self: WaitingRequests, request: Any) -> None:
        assert request in list(self)
        remove(self, request)

    def abort_all(size: int) -> int:
        crowd = Crowd("priority", "a row", size)
        return count_operations(lambda: crowd.scheduler.abort_client(1, 0.0))

    with planted(WaitingRequests, "remove", slow_remove):
        assert not grows_at_most_n_log_n({size: abort_all(size) for size in (64, 256)})
