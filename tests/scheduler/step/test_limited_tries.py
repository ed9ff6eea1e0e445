"""A step tries a limited number of waiting requests; those that wait for an event cost nothing."""

from collections.abc import Sequence

import pytest

from longshore.connectors.base import AskLater, Match, Matched, RequestView
from longshore.protocol.requests import LoRARequest
from longshore.scheduler.queue.queues import MIN_TRY_BLOCKS, RETRY_BLOCKS
from longshore.scheduler.request import Request
from longshore.scheduler.step.admission import MAX_TRIED_BLOCKS, Admission, Attempt
from longshore.scheduler.step.planner import PauseState
from tests.harness.connector import AdversarialConnector
from tests.harness.driver import Driver
from tests.harness.tokens import prompt_of

NUM_FIRST = MAX_TRIED_BLOCKS // MIN_TRY_BLOCKS
NUM_AGAIN = RETRY_BLOCKS // MIN_TRY_BLOCKS


class NamesAnswers(AdversarialConnector):
    """Answers AskLater until a request has been named."""

    names_answers = True

    def __init__(self) -> None:
        super().__init__(match=self._answer)
        self.known: set[str] = set()
        self.to_name: list[str] = []

    def _answer(self, request: RequestView, num_computed_tokens: int) -> Match:
        return Matched(0) if request.request_id in self.known else AskLater()

    def take_answered(self, now: float) -> Sequence[str]:
        named, self.to_name = self.to_name, []
        self.known.update(named)
        return named


def add_many(driver: Driver, count: int) -> list[str]:
    names = [f"r{index:04}" for index in range(count)]
    for index, name in enumerate(names):
        driver.add(name, prompt_of(5, index % 50), max_tokens=1)
    return names


def num_asked(connector: AdversarialConnector) -> int:
    return connector.asked.total()


def test_a_step_asks_a_connector_for_a_limited_number_of_requests() -> None:
    connector = AdversarialConnector(match=lambda request, num_computed_tokens: AskLater())
    driver = Driver(connector=connector, max_num_seqs=8)
    names = add_many(driver, 3 * NUM_FIRST)
    before = 0
    while len(connector.asked) < len(names):
        driver.plan()
        asked = num_asked(connector) - before
        assert 0 < asked <= NUM_FIRST + NUM_AGAIN
        before += asked
    rounds = 2 * len(names) // NUM_AGAIN
    for _ in range(rounds):
        driver.plan()
    assert num_asked(connector) - before == rounds * NUM_AGAIN
    assert max(connector.asked.values()) - min(connector.asked.values()) <= 2  # in turn
    connector.match = lambda request, num_computed_tokens: Matched(0)
    driver.run()
    assert len(driver.finished) == len(names)


def test_a_request_is_asked_for_again_when_its_connector_names_it() -> None:
    connector = NamesAnswers()
    driver = Driver(connector=connector, max_num_seqs=8)
    names = add_many(driver, 300)
    while len(connector.asked) < len(names):
        driver.plan()
    for _ in range(5):
        assert driver.plan() is None
    assert set(connector.asked.values()) == {1}
    connector.to_name = ["r0007", "r0200"]
    driver.plan()
    assert driver.running == ["r0007", "r0200"]
    assert num_asked(connector) == len(names) + 2
    connector.to_name = names
    driver.run()
    assert len(driver.finished) == len(names)


def test_a_connector_that_never_names_a_request_keeps_it_only_as_long_as_any_lookup() -> None:
    connector = NamesAnswers()
    driver = Driver(connector=connector, max_num_seqs=8, min_load_wait_s=20.0)
    names = add_many(driver, 3)
    while not driver.running:
        driver.plan()  # a second each
        assert driver.now < 60
    assert driver.now >= 20
    driver.run()
    assert len(driver.finished) == len(names)
    assert set(connector.asked.values()) == {2}


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that steps have tried to admit, in order."""
    names: list[str] = []
    try_to_admit = Admission._try

    def noting_try(self: Admission, request: Request) -> Attempt:
        names.append(request.request_id)
        return try_to_admit(self, request)

    monkeypatch.setattr(Admission, "_try", noting_try)
    return names


@pytest.mark.req("FEA-02")
def test_requests_without_a_slot_for_their_adapter_are_tried_when_one_is_free(
    tried: list[str],
) -> None:
    driver = Driver(max_loras=1, max_num_seqs=8)
    driver.add("first", prompt_of(5), lora=LoRARequest("a"), max_tokens=60)
    for index in range(300):
        driver.add(f"r{index}", prompt_of(5), lora=LoRARequest("b"), max_tokens=1)
    driver.steps(10)
    assert len(tried) == 301
    driver.steps(20)
    assert driver.running == ["first"]
    assert len(tried) == 301
    driver.run()
    assert len(driver.finished) == 301


def test_of_many_requests_whose_loads_must_wait_a_step_tries_the_first(tried: list[str]) -> None:
    connector = AdversarialConnector(
        match=lambda request, num_computed_tokens: Matched(4, is_async=True)
    )
    driver = Driver(connector=connector, max_num_seqs=8, max_loading_blocks=4)
    names = add_many(driver, 300)
    while len(connector.asked) < len(names):
        driver.step()
    num_tried = len(tried)
    for _ in range(10):
        driver.plan()
    assert len(tried) - num_tried == 10
    while driver.transfers.loading or not driver.finished:
        for request_id in list(driver.transfers.loading):
            driver.ranks.end_load(request_id)
        num_begun, num_tried = len(connector.loads_begun), len(tried)
        driver.steps(2)
        # A loaded one is tried to run; the next one is tried, and those after it while loads begin.
        assert len(tried) - num_tried <= 2 * (2 + len(connector.loads_begun) - num_begun) + 2
    assert len(driver.finished) == len(names)


def test_an_engine_goes_on_at_once_if_it_has_not_tried_all() -> None:
    connector = AdversarialConnector(match=lambda request, num_computed_tokens: AskLater())
    driver = Driver(connector=connector, max_num_seqs=8)
    add_many(driver, NUM_FIRST + 1)
    driver.plan()
    assert driver.scheduler.has_untried
    driver.scheduler.set_pause(PauseState.PAUSED_NEW)
    driver.plan()
    assert not driver.scheduler.has_untried  # a paused engine would otherwise never rest
    driver.scheduler.set_pause(PauseState.UNPAUSED)
    driver.plan()
    assert not driver.scheduler.has_untried
