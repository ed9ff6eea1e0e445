"""Hooks of the scheduler half that raise: a lookup is a miss, every other hook stops the engine."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from longshore.connectors.base import AskLater, FinishAction, Match, Matched, RequestView
from longshore.protocol.arrays import int32_array
from longshore.protocol.outputs import TransferReport
from longshore.scheduler.features.connector_hooks import ConnectorFailed
from tests.harness.connector import AdversarialConnector, has_leading
from tests.harness.driver import Driver
from tests.harness.shared_drivers import CONNECTED, connected
from tests.harness.tokens import prompt_of


class Failing(AdversarialConnector):
    """Loads in the background, sends every request that ends, and raises in the hook `failing`."""

    failing = ""

    def __init__(self) -> None:
        super().__init__(
            match=has_leading(8, is_async=True), depart=lambda request: FinishAction(True)
        )

    def __getattribute__(self, name: str) -> Any:
        if name == type(self).failing:
            if name == "has_pending_work":
                raise RuntimeError("it does not work")
            return _raises(name)
        return super().__getattribute__(name)


def _raises(name: str) -> Callable[..., None]:
    def hook(*arguments: object) -> None:
        raise RuntimeError("it does not work")

    hook.__name__ = name
    return hook


@pytest.fixture
def failing_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda hook: monkeypatch.setattr(Failing, "failing", hook)


def start() -> Driver:
    return Driver(connector=Failing(), **CONNECTED)


def queue(driver: Driver) -> None:
    driver.add("r", prompt_of(10))


def load(driver: Driver) -> None:
    """A background load begins."""
    queue(driver)
    driver.scheduler.schedule(driver.now)


def report(driver: Driver) -> None:
    load(driver)
    message = TransferReport(1, 0, finished_receiving=("r",))
    driver.scheduler.update_from_transfers(message, driver.now)


def abort(driver: Driver) -> None:
    load(driver)
    driver.scheduler.abort_requests(0, int32_array([0]), driver.now)


def idle(driver: Driver) -> None:
    driver.scheduler.schedule(driver.now)


ENGINES: dict[str, Callable[[Driver], object]] = {
    "on_new_request": queue,
    "skips_prefix_cache": queue,
    "update_state_after_alloc": load,
    "build_connector_meta": load,
    "update_connector_output": report,
    "request_finished": abort,
    "load_abandoned": abort,
    "has_pending_work": idle,
    "take_events": lambda driver: driver.scheduler.take_kv_events(),
    "get_kv_connector_stats": lambda driver: driver.scheduler.make_stats(),
    "reset_cache": lambda driver: driver.scheduler.reset_connector_cache(),
    "on_new_epoch": lambda driver: driver.scheduler.begin_epoch(2, driver.now),
}


@pytest.mark.parametrize("hook", ENGINES)
def test_a_hook_that_raises_stops_the_engine_and_is_named(
    hook: str, failing_in: Callable[[str], None]
) -> None:
    driver = start()
    failing_in(hook)
    message = f"^{hook} of the connector Failing raised RuntimeError: it does not work. The engine"
    with pytest.raises(ConnectorFailed, match=message):
        ENGINES[hook](driver)


def test_blocks_that_cannot_be_bound_stop_the_start(failing_in: Callable[[str], None]) -> None:
    failing_in("bind_blocks")
    with pytest.raises(ConnectorFailed, match=r"^bind_blocks of the connector Failing raised"):
        start()


def test_a_shutdown_that_raises_is_logged(
    failing_in: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    driver = start()
    failing_in("shutdown")
    with caplog.at_level(logging.ERROR):
        driver.scheduler.shutdown()
    assert "shutdown of the connector Failing raised" in caplog.text


def fail_lookup(request: RequestView, num_computed_tokens: int) -> Match:
    raise RuntimeError("the index is damaged")


@pytest.mark.parametrize(
    "match", [fail_lookup, lambda request, num: Matched(-1)], ids=["raises", "negative"]
)
def test_a_lookup_that_raises_is_a_miss_and_counted(
    match: Callable[[RequestView, int], Match], caplog: pytest.LogCaptureFixture
) -> None:
    driver = connected(rules={"match": match})
    with caplog.at_level(logging.ERROR):
        keys = [driver.add(name, prompt_of(10, start)) for name, start in (("a", 0), ("b", 40))]
        driver.run()
    driver.check_complete(*keys)
    driver.check_idle()
    assert driver.adversary.loads_begun == []
    transfers = driver.scheduler._transfers
    assert transfers is not None
    assert transfers.num_failed_lookups == 2
    assert driver.scheduler.make_stats().num_external_hit_tokens == 0
    assert "a lookup in the connector AdversarialConnector failed; a miss" in caplog.text


def test_the_other_requests_of_a_step_with_a_failed_lookup_are_loaded() -> None:
    def match(request: RequestView, num_computed_tokens: int) -> Match:
        if request.request_id == "bad":
            raise RuntimeError("its entry is damaged")
        return Matched(8) if request.request_id == "good" else AskLater()

    driver = connected(rules={"match": match}, max_steps_in_flight=1)
    bad, good = driver.add("bad", prompt_of(10)), driver.add("good", prompt_of(10, 40))
    plan = driver.plan()
    assert plan is not None
    computed = {start.request_id: start.num_computed_tokens for start in plan.added}
    assert computed == {"bad": 0, "good": 8}
    driver.run()
    driver.check_complete(bad, good)
