"""`Scheduler.check` recounts everything that is counted."""

from collections.abc import Callable
from typing import Any

import pytest

from longshore.connectors.base import Match, Matched, RequestView
from longshore.protocol.errors import LongshoreError
from longshore.protocol.requests import LoRARequest, MultimodalFeature
from longshore.scheduler.request import Hold, HoldKind
from longshore.scheduler.scheduler import Scheduler
from tests.harness.driver import Driver
from tests.harness.shared_drivers import connected
from tests.harness.tokens import prompt_of


def busy() -> Driver:
    """`first` runs with an adapter and an item, `loading` loads, `loaded` has loaded and waits."""

    def match(request: RequestView, num_computed_tokens: int) -> Match:
        return Matched(8 * request.request_id.startswith("load"), is_async=True)

    driver = connected(
        rules={"match": match},
        max_loras=1,
        max_num_encoder_input_tokens=8,
        max_num_scheduled_tokens=7,
        max_steps_in_flight=1,
    )
    items = (MultimodalFeature("image", 0, 8),)
    stops = {"stop_token_ids": (99,)}
    driver.add("loaded", prompt_of(9, 20))
    driver.add("loading", prompt_of(9, 40))
    driver.add(
        "first", prompt_of(20, 60), multimodal=items, lora=LoRARequest("red"), sampling=stops
    )
    driver.plan()
    driver.ranks.end_load("loaded")
    driver.scheduler.check()
    return driver


def damage(name: str, change: Callable[[Any], object]) -> Callable[[Scheduler], object]:
    return lambda scheduler: change(getattr(scheduler, name))


def shift(name: str, attribute: str, by: int = 1) -> Callable[[Scheduler], object]:
    def change(part: Any) -> None:
        setattr(part, attribute, getattr(part, attribute) + by)

    return damage(name, change)


@pytest.mark.parametrize(
    ("break_it", "complaint"),
    [
        (shift("_transfers", "num_loading_blocks"), "num_loading_blocks is"),
        (damage("_transfers", lambda part: part.loads.clear()), "but 0 loads are waited for"),
        (
            damage("_transfers", lambda part: part.loads["loading"].ranks_done.add(0)),
            "the transfer of loading is over",
        ),
        (shift("_holds", "num_loaded_blocks"), "num_loaded_blocks is"),
        (damage("_holds", lambda part: part.holders.clear()), "1 waiting requests hold blocks"),
        (shift("running", "num_rows"), "num_rows of the rows"),
        (shift("running", "fewest_left", 10**6), "fewest_left of the rows"),
        (damage("running", lambda part: part.num_of_width.update([7])), "num_of_width of the rows"),
        (damage("running", lambda part: part._free_rows.append(0)), "free rows of the rows"),
        (damage("_lifecycle", lambda part: part._request_ids.add("gone")), "counted wrongly"),
        (damage("_lifecycle", lambda part: part._of_clients.popitem()), "requests are live"),
        (damage("_attached", lambda part: part.loras._running.update(["blue"])), "adapters run as"),
        (damage("_encoder", lambda part: part._sizes.update(other=3)), "encoder outputs are cach"),
        (damage("_encoder", lambda part: part._sizes.update(image=99)), "exceed their capacity"),
        (
            damage("_encoder", lambda part: part.pending.update(gone=None)),
            "a request without a row needs an encoder output",
        ),
    ],
)
def test_a_count_that_is_wrong_is_noticed(
    break_it: Callable[[Scheduler], object], complaint: str
) -> None:
    driver = busy()
    break_it(driver.scheduler)
    with pytest.raises(LongshoreError, match=complaint):
        driver.scheduler.check()


@pytest.mark.parametrize("part", ["waiting", "parents"])
def test_a_fork_that_is_recorded_on_one_side_only_is_noticed(part: str) -> None:
    driver = Driver()
    parent = driver.add("parent", prompt_of(9))
    driver.add("fork", prompt_of(9), fork_of=parent[1])
    driver.scheduler.check()
    forks = driver.scheduler._forks
    assert forks.waiting
    getattr(forks, part).clear()
    with pytest.raises(LongshoreError, match="fork"):
        driver.scheduler.check()


def test_a_loading_request_with_blocks_of_its_own_is_noticed() -> None:
    """As a fork had them whose parent ended while it was loading."""
    driver = busy()
    request = driver.requests["loading"]
    scheduler = driver.scheduler
    blocks = scheduler.kv_cache.hold([])
    scheduler._holds.add(request, Hold(HoldKind.FORK, blocks, 0, order=1))
    with pytest.raises(LongshoreError, match="loading holds blocks beside those of its load"):
        scheduler.check()
