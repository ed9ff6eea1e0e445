"""Drivers with the settings that many tests share."""

from collections.abc import Sequence
from typing import Any, Final

from longshore.protocol.kv_cache_spec import KVCacheSpec
from tests.harness.driver import Driver
from tests.harness.tokens import prompt_of

CONNECTED: Final[dict[str, Any]] = {
    "verify_plan": True,
    "max_steps_in_flight": 2,
    "max_tokens": 4,
    "cache": {"watermark": 0.0},
}
"""Settings of a driver in whose tests the connector has the main part."""


def connected(*specs: KVCacheSpec, **settings: Any) -> Driver:
    """A driver with an `AdversarialConnector` and the settings `CONNECTED`."""
    cache = CONNECTED["cache"] | settings.pop("cache", {})
    return Driver(*specs, **({"rules": {}} | CONNECTED | {"cache": cache} | settings))


def pressed(policy: str = "fcfs", **settings: Any) -> Driver:
    """A driver with eight usable blocks of four tokens."""
    return Driver(num_blocks=9, max_model_len=32, policy=policy, **settings)


def in_admission_order(driver: Driver, requests: Sequence[tuple[str, int, int]]) -> None:
    """Admit (name, prompt length, priority) one per step, whatever their priorities are."""
    for index, (name, length, priority) in enumerate(requests):
        driver.add(name, prompt_of(length, 25 * index), max_tokens=16, priority=priority)
        driver.step()
        assert driver.running[-1] == name
