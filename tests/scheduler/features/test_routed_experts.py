"""The experts of tokens, as the scheduler reads them: each token's must be those of its own KV.

The KV of a position is one number here, and its four bytes stand for the experts of the token.
"""

import os
import random
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from longshore.protocol.arrays import EMPTY_UINT8
from longshore.protocol.errors import ConfigError
from longshore.protocol.outputs import FinishedRequest, FinishReason
from longshore.protocol.routed_experts import (
    MAX_REQUEST_BYTES,
    RoutedExperts,
    RoutedExpertsShape,
    check_longest,
)
from longshore.scheduler.features.routed_experts import RoutedExpertsReader
from longshore.scheduler.request import RequestStatus
from longshore.scheduler.step.client_outputs import ClientOutputs
from tests.harness.clients import RequestKey
from tests.harness.driver import Driver
from tests.harness.kv_groups import config_of, full, window
from tests.harness.tokens import Content, expected_output, prefixes_of, prompt_of

SHAPE: Final = RoutedExpertsShape(num_layers=1, top_k=4, num_experts=256)
BLOCK_SIZE: Final = 4


class CapturingDriver(Driver):
    """Its workers are as early as can be: they run all plans before the scheduler gets an output,
    and their experts are in the shared memory then."""

    def __init__(self, fd: int, *specs: Any, **options: Any) -> None:
        specs = specs or (full(BLOCK_SIZE),)
        self.reader = RoutedExpertsReader(fd, SHAPE, config_of(options["num_blocks"], *specs))
        super().__init__(*specs, scheduler={"experts": self.reader}, **options)

    def answer(self, *args: Any, **options: Any) -> None:
        while any(step.output is None for step in self.unanswered):
            self.execute()
        memory = self.workers.kv_cache.memory[0]
        for block_id in range(self.num_blocks):
            for offset in range(BLOCK_SIZE):
                if (content := memory.read(block_id, offset)) is not None:
                    line = np.frombuffer(np.uint32(content % 2**32).tobytes(), np.uint8)
                    self.reader._lines[block_id, offset] = line
        super().answer(*args, **options)

    def check(self, key: RequestKey, prompt: list[int], *, start: int = 0) -> None:
        end = self.finished[key]
        tokens = [*prompt, *self.received[key]][: len(prompt) + end.num_output_tokens]
        assert experts_of(end) == kv_of(tokens)[start:]


def kv_of(token_ids: list[int]) -> list[int]:
    """What stands for the experts of each token but the last."""
    return prefixes_of(token_ids, Content("None/None"))[:-1]


def experts_of(end: FinishedRequest) -> list[int]:
    assert end.routed_experts is not None
    experts = end.routed_experts.array()
    assert experts.shape[1:] == (1, 4)
    return experts.reshape(-1, 4).copy().view(np.uint32).ravel().tolist()


@pytest.fixture
def fd() -> Iterator[int]:
    memory = os.memfd_create("experts")
    yield memory
    os.close(memory)


@pytest.mark.req("FEA-08")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("is_cached", [True, False])
def test_random_requests_under_pressure_have_the_experts_of_their_own_tokens(
    fd: int, steps_in_flight: int, is_cached: bool
) -> None:
    numbers = random.Random(steps_in_flight)
    driver = CapturingDriver(
        fd,
        num_blocks=14,
        max_model_len=40,
        max_num_batched_tokens=17,
        max_steps_in_flight=steps_in_flight,
        enable_prefix_caching=is_cached,
    )
    prompts, starts = {}, {}
    for number in range(60):
        prompt = prompt_of(numbers.randint(1, 18), numbers.choice([0, 0, 30]))
        start = numbers.choice([0, 0, 3, 8, 30])
        sampling = {"routed_experts_prompt_start": start}
        num_tokens = numbers.randint(1, 20)
        key = driver.add(f"r{number}", prompt, max_tokens=num_tokens, sampling=sampling)
        prompts[key], starts[key] = prompt, min(start, len(prompt))
        driver.steps(numbers.randint(0, 5))
        waiting = [
            each for each in prompts if each not in driver.finished and driver.received[each]
        ]
        if waiting and numbers.random() < 0.4:  # some of them are preempted at that time
            stopped = numbers.choice(waiting)
            driver.stop_found(stopped, numbers.randint(1, len(driver.received[stopped])))
    driver.run_until_idle()
    assert driver.scheduler.make_stats().num_preemptions > 10
    assert len(driver.finished) == 60
    for key, prompt in prompts.items():
        driver.check(key, prompt, start=starts[key])


@pytest.mark.req("FEA-08")
def test_a_token_in_flight_of_a_preempted_request_is_sampled_again(fd: int) -> None:
    """Its experts are in a block that another request gets at once."""
    driver = CapturingDriver(
        fd, num_blocks=9, max_model_len=32, max_steps_in_flight=2, enable_prefix_caching=False
    )
    first, second = prompt_of(15), prompt_of(12, 40)
    old = driver.add("old", first, max_tokens=9)
    young = driver.add("young", second, max_tokens=6)
    while driver.requests["young"].status is not RequestStatus.PREEMPTED:
        driver.step()
    num_tokens = len(driver.received[young])
    assert num_tokens > 0
    driver.run_until_idle()
    assert driver.received[young] == expected_output("young", 6)
    assert driver.scheduler.make_stats().num_stale_tokens > 0
    driver.check(old, first)
    driver.check(young, second)


@pytest.mark.req("FEA-08")
def test_a_stop_string_that_is_found_while_a_request_is_preempted_gives_its_experts(
    fd: int,
) -> None:
    driver = CapturingDriver(fd, num_blocks=9, max_model_len=32, enable_prefix_caching=False)
    first, second = prompt_of(15), prompt_of(12, 40)
    driver.add("old", first, max_tokens=12)
    key = driver.add("young", second, max_tokens=12)
    while driver.requests["young"].status is not RequestStatus.PREEMPTED:
        driver.step()
    assert len(driver.received[key]) >= 2
    driver.steps(2)  # others write into its blocks
    driver.stop_found(key, 2)
    assert driver.finished[key].reason is FinishReason.STOPPED
    driver.check(key, second)
    assert len(experts_of(driver.finished[key])) == 13


def test_forks_have_the_experts_of_the_shared_prompt(fd: int) -> None:
    driver = CapturingDriver(fd, num_blocks=20)
    prompt = prompt_of(10)
    keys = [driver.add("parent", prompt, max_tokens=6)]
    keys += [driver.add(f"fork{n}", prompt, max_tokens=6, fork_of=keys[0][1]) for n in range(3)]
    driver.run_until_idle()
    assert sum(len(plan.copy_source_ids) for plan in driver.plans) > 0
    for key in keys:
        driver.check(key, prompt)


def test_each_output_of_a_session_has_the_experts_of_all_tokens_before(fd: int) -> None:
    driver = CapturingDriver(fd, num_blocks=20)
    prompt = prompt_of(6)
    key = driver.add("talk", prompt, max_tokens=3, resumable=True, keeps_blocks=True)
    driver.run_until_idle()
    tokens = prompt + driver.received[key]
    assert experts_of(driver.continued[key][0]) == kv_of(tokens)
    driver.continue_session(key, [50, 51], max_tokens=2, resumable=False)
    driver.run_until_idle()
    tokens += [50, 51, *driver.received[key][3:]]
    assert experts_of(driver.finished[key]) == kv_of(tokens)


def test_the_experts_are_in_the_slots_of_the_group_that_keeps_all_blocks(fd: int) -> None:
    driver = CapturingDriver(fd, window(6), full(BLOCK_SIZE), num_blocks=40)
    prompt = prompt_of(23)
    key = driver.add("r", prompt, max_tokens=12)
    driver.run_until_idle()
    driver.check(key, prompt)


def test_requests_that_fail_or_are_aborted_have_no_experts(fd: int) -> None:
    driver = CapturingDriver(fd, num_blocks=20)
    bad, gone = driver.add("bad", prompt_of(6)), driver.add("gone", prompt_of(5, 30))
    driver.step()
    assert driver.plan(nan_ids=["bad"]) is not None
    driver.answer()
    driver.abort(gone)
    assert driver.finished[bad].reason is FinishReason.ERROR
    assert driver.finished[bad].routed_experts is driver.finished[gone].routed_experts is None


def test_a_request_that_is_aborted_while_it_is_preempted_has_no_experts(fd: int) -> None:
    driver = CapturingDriver(fd, num_blocks=9, max_model_len=32, enable_prefix_caching=False)
    driver.add("old", prompt_of(15), max_tokens=9)
    young = driver.add("young", prompt_of(12, 40), max_tokens=6)
    while driver.requests["young"].status is not RequestStatus.PREEMPTED:
        driver.step()
    assert driver.requests["young"].routed_experts is not None
    driver.abort(young)
    assert driver.finished[young].routed_experts is None


def test_what_is_preempted_before_it_is_computed_keeps_no_experts(fd: int) -> None:
    """Its slots hold the experts of other requests' tokens."""
    driver = CapturingDriver(
        fd,
        num_blocks=9,
        max_model_len=32,
        max_num_batched_tokens=4,
        enable_prefix_caching=False,
    )
    driver.add("old", prompt_of(4), max_tokens=26)
    driver.add("young", prompt_of(25, 40), max_tokens=6)
    while driver.requests["young"].status is not RequestStatus.PREEMPTED:
        driver.step()
    assert driver.requests["young"].routed_experts is None


@pytest.mark.req("FEA-08")
def test_an_engine_without_experts_rejects_a_request_that_asks_for_a_part_of_them() -> None:
    driver = Driver()
    key = driver.add("r", prompt_of(6), sampling={"routed_experts_prompt_start": 2})
    end = driver.finished[key]
    assert end.reason is FinishReason.IGNORED
    assert "routed_experts_prompt_start=2" in str(end.message)


def test_ends_with_many_experts_are_divided_among_messages() -> None:
    third = RoutedExperts(SHAPE, np.empty(MAX_REQUEST_BYTES // 3, np.uint8))
    outputs = ClientOutputs()
    for handle, experts in enumerate([third, third, None, third, third, None]):
        end = FinishedRequest(handle, FinishReason.STOPPED, 1, routed_experts=experts)
        outputs._buckets[0].finished.append(end)
    messages = [message for _, message in outputs.take()]
    assert [[end.handle for end in each.finished] for each in messages] == [[0, 1, 2, 3], [4, 5]]


def test_ids_of_more_than_256_experts_have_two_bytes() -> None:
    shape = RoutedExpertsShape(num_layers=2, top_k=1, num_experts=300)
    assert shape.token_bytes == 4
    experts = RoutedExperts(shape, np.array([[299, 0], [1, 256]], "<i2").view(np.uint8).ravel())
    assert experts.array().tolist() == [[[299], [0]], [[1], [256]]]
    assert RoutedExperts(shape, EMPTY_UINT8).array().shape == (0, 2, 1)
    assert msgspec.structs.astuple(SHAPE) == (1, 4, 256)


def test_requests_whose_experts_do_not_fit_in_a_message_are_excluded_at_the_start() -> None:
    check_longest(SHAPE, MAX_REQUEST_BYTES // 4)
    with pytest.raises(ConfigError, match=rf"Use a max_model_len of at most {1 << 25}"):
        check_longest(SHAPE, MAX_REQUEST_BYTES // 4 + 1)
