"""How many different adapters run at once, and who waits for a place."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import LoRARequest
from longshore.scheduler.features.lora import LoRASlots
from longshore.scheduler.queue.policies import FCFSPolicy
from longshore.scheduler.queue.queues import WaitingRequests
from longshore.scheduler.request import Request
from tests.harness.driver import Driver
from tests.harness.shared_drivers import pressed
from tests.harness.tokens import expected_output, prompt_of
from tests.scheduler.test_request import make_request


def add(driver: Driver, name: str, adapter: str | None, **fields: int) -> tuple[int, int]:
    lora = None if adapter is None else LoRARequest(adapter)
    start = 11 * len(driver.requests)
    return driver.add(name, prompt_of(5, start), lora=lora, max_tokens=fields.get("tokens", 8))


def test_an_adapter_has_its_place_until_the_last_of_its_requests_leaves() -> None:
    slots = LoRASlots(1, WaitingRequests(FCFSPolicy()))
    one, same, other, plain = (
        make_request(str(index), lora=None if name is None else LoRARequest(name))
        for index, name in enumerate(("a", "a", "b", None))
    )

    def waits(request: Request) -> bool:
        return slots.waits_for(request, 0.0) is not None

    for request in (one, same, plain):
        slots.admitted(request, 0, 1)
    assert [waits(request) for request in (one, other, plain)] == [False, True, False]
    slots.vacated(one, None)
    assert waits(other)
    slots.vacated(same, None)
    slots.vacated(plain, None)
    assert not waits(other)


@pytest.mark.req("FEA-02")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_only_a_new_adapter_beyond_the_limit_is_set_aside(steps_in_flight: int) -> None:
    driver = Driver(max_loras=2, max_steps_in_flight=steps_in_flight)
    adapters = {"r0": "a", "r1": "b", "r2": "c", "r3": "a", "r4": None, "r5": "d", "r6": "b"}
    for name, adapter in adapters.items():
        add(driver, name, adapter, tokens=4 if name in ("r0", "r3") else 12)
    driver.step()
    assert driver.running == ["r0", "r1", "r3", "r4", "r6"]
    while len(driver.finished) < 2:
        assert "r2" not in driver.running
        driver.step()
    driver.step()
    assert "r2" in driver.running  # the place of `a`, once both of its requests have ended
    assert "r5" not in driver.running
    driver.run()
    for index, name in enumerate(adapters):
        count = 4 if name in ("r0", "r3") else 12
        assert driver.received[0, index] == expected_output(name, count)


@pytest.mark.req("FEA-02")
def test_the_start_of_a_row_has_its_adapter() -> None:
    driver = Driver(max_loras=1)
    driver.add("r", prompt_of(5), lora=LoRARequest("a", "/adapters/a"))
    driver.add("plain", prompt_of(5, 40))
    plan = driver.step()
    assert plan is not None
    assert [start.lora for start in plan.added] == [LoRARequest("a", "/adapters/a"), None]
    driver.run()


@pytest.mark.req("FEA-02")
def test_a_preempted_request_frees_its_adapter_slot() -> None:
    driver = pressed(max_loras=1, enable_prefix_caching=False)
    driver.add("old", prompt_of(15), max_tokens=12)
    driver.add("young", prompt_of(15, 40), max_tokens=12, lora=LoRARequest("a"))
    while not driver.requests["young"].num_preemptions:
        driver.step()
    other = driver.add("other", prompt_of(2, 70), max_tokens=2, lora=LoRARequest("b"), priority=0)
    driver.run()
    assert driver.received[other] == expected_output("other", 2)
    assert len(driver.finished) == 3


def test_an_engine_without_slots_rejects_adapters_with_a_reason() -> None:
    driver = Driver()
    key = add(driver, "r", "a")
    assert driver.reason(key) is FinishReason.ERROR
    assert "max_loras=0" in (driver.finished[key].message or "")


@pytest.mark.req("FEA-02")
@settings(max_examples=40)
@given(
    max_loras=st.integers(1, 3),
    steps_in_flight=st.integers(1, 2),
    policy=st.sampled_from(["fcfs", "priority"]),
    adapters=st.lists(st.sampled_from([None, "a", "b", "c", "d", "e"]), min_size=1, max_size=12),
)
def test_never_more_adapters_than_slots_and_every_request_has_a_turn(
    max_loras: int, steps_in_flight: int, policy: str, adapters: list[str | None]
) -> None:
    driver = Driver(  # which compares the adapters of every plan's rows with max_loras
        num_blocks=18,
        max_loras=max_loras,
        max_num_seqs=4,
        max_steps_in_flight=steps_in_flight,
        policy=policy,
    )
    for index, adapter in enumerate(adapters):
        add(driver, f"r{index}", adapter, tokens=1 + index % 7)
        driver.steps(index % 3)
    driver.run()
    assert len(driver.finished) == len(adapters)
    for index in range(len(adapters)):
        assert driver.received[0, index] == expected_output(f"r{index}", 1 + index % 7)
