"""Queues and indices of routing with as much as a gateway may have: the work for an event grows
with what the event is about."""

from collections.abc import Callable
from typing import Final
from unittest.mock import patch

import pytest

from longshore.deploy.gateway.router import block_index
from longshore.deploy.gateway.router.block_index import BlockIndex, GroupInfo
from longshore.deploy.gateway.router.expected_blocks import (
    EXPIRED_PER_CALL,
    KEPT_S,
    ExpectedBlocks,
)
from longshore.deploy.gateway.router.policies import RoutedPrompt
from longshore.deploy.gateway.router.role_queue import RoleQueue
from longshore.deploy.gateway.router.router import Router
from longshore.deploy.requests.live_requests import LiveRequest, LiveRequests
from longshore.protocol.sampling import SamplingParams
from tests.harness.operations import count_operations, grows_at_most_n_log_n

SIZES: Final = (256, 512, 1024)
LARGE_SIZES: Final = (1024, 8192)
PROMPT: Final = RoutedPrompt([1, 2, 3])


def requests(count: int) -> list[LiveRequest]:
    table, sampling = LiveRequests(), SamplingParams(seed=1)
    return [table.open("r", [1], sampling, on_change=lambda: None)[0] for _ in range(count)]


def full_queue(count: int) -> RoleQueue[int]:
    """One request has all capacity, the others wait."""
    queue: RoleQueue[int] = RoleQueue(lambda _, engines: engines[0], max_waiting=count)
    queue.set_capacity(0, 1)
    for number in range(count):
        queue.add(number, 1)
    return queue


def index_of(count: int) -> BlockIndex:
    with patch.object(block_index, "MIN_WIDTH", 2):
        index = BlockIndex(1, tokens_per_hash=4, max_hashes=1 << 20)
    index.describe_group(0, GroupInfo(4))
    index.store(0, [number.to_bytes(8, "big") for number in range(count)], 0, "GPU")
    return index


def wait_in_a_queue(count: int) -> Callable[[], None]:
    return lambda: full_queue(count) and None


def abort_what_waits(count: int) -> Callable[[], None]:
    queue = full_queue(count)

    def run() -> None:
        for number in reversed(range(1, count)):
            queue.release(number)
        assert queue.num_waiting == 0

    return run


def abort_at_once(count: int) -> Callable[[], None]:
    queue = full_queue(count)
    return lambda: queue.release(*range(1, count)) and None


def end_one_after_another(count: int) -> Callable[[], None]:
    queue = full_queue(count)

    def run() -> None:
        for number in range(count):
            queue.release(number)

    return run


def be_refused(count: int) -> Callable[[], None]:
    queue = full_queue(count)

    def run() -> None:
        for number in range(count):
            queue.add(count + number, 1)

    return run


def retry(count: int) -> Callable[[], None]:
    queue = full_queue(count)

    def run() -> None:
        for number in range(count):
            queue.retry(number, has_failed=False)

    return run


def lose_the_engine(count: int) -> Callable[[], None]:
    queue = full_queue(count)
    return lambda: queue.remove_engine(0) and None


def be_routed_and_answered(count: int) -> Callable[[], None]:
    router, lives = Router(4), requests(count)

    def run() -> None:
        own = dict.fromkeys(range(4), 0)
        for live in lives:
            decision = router.choose(PROMPT, own, dict.fromkeys(range(4), True), 0.0)
            assert decision is not None
            router.note_sent(decision, live)
        for live in reversed(lives):
            router.note_answer(live, 0.0)

    return run


def be_expected(count: int) -> Callable[[], None]:
    expected, lives = ExpectedBlocks(index_of(0)), requests(count)

    def run() -> None:
        for number, live in enumerate(lives):
            expected.expire(float(number))
            expected.add(live, 0, [number.to_bytes(8, "big")])
        for number, live in enumerate(reversed(lives)):
            expected.note_answer(live, float(number))
        for number in range(count):
            expected.expire(count + KEPT_S + number)

    return run


def store_and_remove(count: int) -> Callable[[], None]:
    index, hashes = index_of(count), [number.to_bytes(8, "big") for number in range(count)]

    def run() -> None:
        for each in hashes:
            index.store(0, [each], 0, "CPU")
        for each in reversed(hashes):
            index.remove(0, [each], 0, "GPU")

    return run


def clear_and_collect(count: int) -> Callable[[], None]:
    index = index_of(count)

    def run() -> None:
        index.clear(0)
        while index.collect(1000):
            pass
        assert len(index) == 0

    return run


@pytest.mark.parametrize(
    "event",
    [
        *(wait_in_a_queue, abort_what_waits, abort_at_once, end_one_after_another, be_refused),
        *(retry, lose_the_engine, be_routed_and_answered, be_expected),
        *(store_and_remove, clear_and_collect),
    ],
)
@pytest.mark.parametrize(
    "sizes",
    [SIZES, pytest.param(LARGE_SIZES, marks=(pytest.mark.slow, pytest.mark.timeout(900)))],
)
def test_the_work_for_an_event_of_every_entry_grows_with_their_number(
    event: Callable[[int], Callable[[], None]], sizes: tuple[int, ...]
) -> None:
    counts = {size: count_operations(event(size)) for size in sizes}
    assert grows_at_most_n_log_n(counts), counts


@pytest.mark.parametrize("num_clears", [1, 2, 5])
def test_an_engine_that_is_cleared_again_and_again_looks_at_no_entries(num_clears: int) -> None:
    def clear(size: int) -> int:
        index = index_of(size)

        def run() -> None:
            for _ in range(num_clears):
                index.store(0, [b"another"], 0, "GPU")
                index.clear(0)

        return count_operations(run)

    assert clear(SIZES[0]) == clear(SIZES[-1])


def test_a_request_removes_few_expected_blocks_of_others() -> None:
    index = index_of(0)
    expected, lives = ExpectedBlocks(index), requests(100)
    for number, live in enumerate(lives):
        expected.add(live, 0, [bytes([number])])
        expected.note_answer(live, 0.0)
    expected.expire(KEPT_S)
    assert len(index) == 100 - EXPIRED_PER_CALL
    for _ in range(100 // EXPIRED_PER_CALL):
        expected.expire(KEPT_S)
    assert len(index) == 0
