"""The contract of features: who is called, and in which order."""

import re
from pathlib import Path
from typing import Any

import pytest

import longshore.scheduler
from longshore.connectors.base import FinishAction, Match, Matched, RequestView, SchedulerConnector
from longshore.protocol.arrays import Int32Array
from longshore.scheduler.hooks import HOOK_NAMES, Hooks, SchedulerFeature
from tests.harness.driver import Driver
from tests.harness.shared_drivers import connected
from tests.harness.tokens import prompt_of

NEVER_IN_A_STEP = {"begin_epoch", "counts", "check"}


class Eventful(SchedulerFeature):
    def is_eventful(self) -> bool:
        return True


class Polled(Eventful):
    def poll(self, now: float) -> None:
        pass


def test_hooks_are_called_in_the_order_of_attachment_and_only_where_they_exist() -> None:
    first, second, hooks = Eventful(), Polled(), Hooks()
    hooks.attach(first, None, second)
    assert hooks.is_eventful == (first, second)
    assert hooks.poll == (second,)
    others = set(HOOK_NAMES) - {"is_eventful", "poll"}
    assert not any(getattr(hooks, name) for name in others)


def test_a_feature_that_wakes_is_called_at_its_place() -> None:
    first, second, hooks = Eventful(), Eventful(), Hooks()
    hooks.attach(first, second, asleep=(first,))
    assert hooks.is_eventful == (second,)
    for _ in range(2):
        hooks.wake(first)
        assert hooks.is_eventful == (first, second)


@pytest.mark.parametrize("name", HOOK_NAMES)
def test_a_hook_that_is_not_implemented_does_nothing(name: str) -> None:
    assert name not in SchedulerFeature().hook_names()
    assert getattr(Hooks(), name) == ()


def test_the_policy_calls_exactly_the_hooks_of_the_contract() -> None:
    (folder,) = longshore.scheduler.__path__
    texts = [path.read_text() for path in Path(folder).rglob("*.py")]
    called = {name for text in texts for name in re.findall(r"in [a-z._]*hooks\.(\w+)[:)]", text)}
    assert called == set(HOOK_NAMES)
    with pytest.raises(AttributeError, match="admited is not a hook"):
        _ = Hooks().admited


def called_hooks(driver: Driver) -> set[str]:
    hooks = driver.scheduler._hooks
    return {name for name in HOOK_NAMES if getattr(hooks, name)} - NEVER_IN_A_STEP


def test_plain_requests_call_no_hook() -> None:
    driver = Driver()
    driver.add("r", prompt_of(9))
    assert called_hooks(driver) == set()


@pytest.mark.parametrize(
    ("options", "hook"),
    [({"resumable": True}, "output_ended"), ({"fork_of": 0}, "begin")],
)
def test_the_first_session_or_fork_wakes_its_feature(options: dict[str, Any], hook: str) -> None:
    driver = Driver()
    driver.add("parent", prompt_of(9))
    assert hook not in called_hooks(driver)
    driver.add("r", prompt_of(9), **options)
    assert hook in called_hooks(driver)
    assert not called_hooks(connected()) & {"queue", "output_ended"}


class Naming(SchedulerConnector):
    """Loads and stores nothing; tells the clients of ended requests its name for them."""

    chunk_blocks = 0

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        return Matched(0)

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        return FinishAction(params={"name": request.request_id})


def test_what_the_connector_answers_to_an_end_counts_whatever_is_asked_after_it() -> None:
    driver = Driver(connector=Naming(), policy="fair", max_tokens=2)
    assert len(driver.scheduler._hooks.ended) == 2  # its shares come after it
    key = driver.add("r", prompt_of(9))
    driver.run()
    assert driver.finished[key].kv_transfer_params == {"name": "r"}


def test_a_request_goes_on_if_one_feature_says_so_whatever_is_asked_after_it() -> None:
    class Later(SchedulerFeature):
        def output_ended(self, *_: Any, **__: Any) -> bool:
            return False

    driver = Driver(max_tokens=2)
    driver.add("r", prompt_of(9), resumable=True)
    hooks: Any = driver.scheduler._hooks
    hooks.output_ended += (Later(),)
    driver.run_until_idle()
    assert len(driver.scheduler.waiting) == 1
