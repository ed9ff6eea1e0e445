"""The example connector of docs/connectors.md, taken from the page: its scheduler half with a model
of the workers, and both halves in engines."""

import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from longshore.connectors.base import ConnectorConfig, SchedulerConnector
from longshore.connectors.registry import BUILT_IN, load_scheduler_connector
from longshore.protocol.errors import ConfigError
from longshore.protocol.plan import SchedulerOutput
from tests.connectors.engine import check_tokens_of_demo_model
from tests.harness.driver import Driver
from tests.harness.kv_groups import BLOCK_SIZE
from tests.harness.shared_drivers import CONNECTED
from tests.harness.tokens import prompt_of
from tests.harness.transfers import Commands, Load

PAGE = Path(__file__).resolve().parents[2] / "docs" / "connectors.md"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The page's code, importable as `host_cache` and `host_cache_worker`, also in processes that
    the test starts."""
    for name in ("host_cache", "host_cache_worker"):
        (source,) = re.findall(
            rf'^```python\n("""{name}\.py.*?)^```$', PAGE.read_text(), re.M | re.S
        )
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    import host_cache  # type: ignore[import-not-found]

    yield host_cache
    del sys.modules["host_cache"]
    sys.modules.pop("host_cache_worker", None)


def test_the_page_lists_every_connector_of_the_package() -> None:
    for name in BUILT_IN:
        assert f"\n| `{name}` | " in PAGE.read_text(), name


def build(module: ModuleType, **options: Any) -> SchedulerConnector:
    config = ConnectorConfig(options, block_size=BLOCK_SIZE)
    return load_scheduler_connector("host_cache:HostCache", config)


class HostCacheDriver(Driver):
    """Plays the worker half, as the page describes it; `host` is the host memory, by slot."""

    def __init__(self, module: ModuleType, *, capacity_blocks: int = 64, **settings: Any) -> None:
        self.host: dict[int, list[int]] = {}
        self.to_store: list[Any] = []
        self.num_loaded_blocks = 0
        self._commands = module.Commands
        connector = build(module, capacity_blocks=capacity_blocks)
        super().__init__(connector=connector, **(CONNECTED | settings))

    def commands_of(self, plan: SchedulerOutput) -> Commands:
        if not plan.connector_metadata:
            return Commands()
        commands = msgspec.msgpack.decode(plan.connector_metadata, type=self._commands)
        self.to_store += commands.stores
        loads = []
        for load in commands.loads:
            content = [prefix for slot in load.slots for prefix in self.host[slot]]
            loads.append(Load("", False, 0, (load.block_ids,), content))
            self.num_loaded_blocks += len(load.slots)
        for begun in loads:
            self.transfers.begin(begun)
        return Commands(loads=loads)

    def end_stores(self) -> None:
        """The workers carry out all stores and report them."""
        (memory,) = self.workers.kv_cache.memory
        for store in self.to_store:
            for block_id, slot in zip(store.block_ids, store.slots, strict=True):
                self.host[slot] = list(memory.block(block_id, BLOCK_SIZE))
        hold_ids = [store.hold_id for store in self.to_store]
        self.to_store = []
        self.ranks.report(0, metadata=msgspec.msgpack.encode(hold_ids))


def settle(driver: HostCacheDriver) -> None:
    """Run until all requests and all stores are complete."""
    driver.run()
    while driver.to_store:
        driver.end_stores()
        driver.run()
    driver.check_idle()


@pytest.mark.req("CON-16")
def test_a_prompt_evicted_from_the_device_is_loaded_from_host_memory(
    module: ModuleType,
) -> None:
    driver = HostCacheDriver(module, num_blocks=17)
    keys = [driver.add("first", prompt_of(33))]
    settle(driver)
    keys.append(driver.add("other", prompt_of(58, 45)))
    settle(driver)  # every block has been used
    assert driver.num_loaded_blocks == 0
    keys.append(driver.add("again", prompt_of(33)))
    settle(driver)
    assert driver.num_loaded_blocks == 8
    stats = driver.scheduler.make_stats()
    assert stats.num_external_hit_tokens == 32
    driver.check_complete(*keys)


def test_a_block_that_failed_to_load_is_a_miss_afterwards(module: ModuleType) -> None:
    driver = HostCacheDriver(module, num_blocks=17, fail_sync=lambda load: load.block_ids[0][3:4])
    keys = [driver.add("first", prompt_of(33))]
    settle(driver)
    keys.append(driver.add("other", prompt_of(58, 45)))
    settle(driver)
    keys.append(driver.add("again", prompt_of(33)))
    settle(driver)
    assert driver.scheduler.make_stats().num_rewinds == 1
    driver.check_complete(*keys)


def test_host_memory_is_bounded_and_can_be_reset(module: ModuleType) -> None:
    for capacity_blocks, is_reset in ((3, False), (64, True)):
        driver = HostCacheDriver(module, capacity_blocks=capacity_blocks, num_blocks=17)
        keys = [driver.add("first", prompt_of(33))]
        settle(driver)
        assert len(driver.host) == min(capacity_blocks, 9)
        keys.append(driver.add("other", prompt_of(58, 45)))
        settle(driver)
        if is_reset:
            assert driver.scheduler.reset_connector_cache()
        keys.append(driver.add("again", prompt_of(33)))
        settle(driver)
        assert driver.num_loaded_blocks == 0  # the start of the prompt was evicted first
        driver.check_complete(*keys)


def test_an_invalid_option_is_rejected(module: ModuleType) -> None:
    with pytest.raises(ConfigError, match="capacity_blocks=0 must be a number of blocks"):
        build(module, capacity_blocks=0)


@pytest.mark.parametrize("seed", range(20))
def test_random_requests_get_their_tokens_and_leave_no_block_held(
    module: ModuleType, seed: int
) -> None:
    chance = random.Random(seed)
    driver = HostCacheDriver(
        module,
        capacity_blocks=chance.choice([2, 10, 100]),
        num_blocks=chance.randrange(17, 24),
        max_steps_in_flight=chance.choice([1, 2]),
        fail_sync=lambda load: [ids for ids in load.targets if chance.random() < 0.2],
    )
    keys = []
    for number in range(25):
        prompt = prompt_of(chance.randrange(1, 40), chance.choice([10, 40]))
        max_tokens = chance.randrange(1, 8)
        keys.append(driver.add(f"r{number}", prompt, max_tokens=max_tokens))
        for _ in range(chance.randrange(6)):
            driver.step()
        if chance.random() < 0.4:
            driver.end_stores()
        if chance.random() < 0.02:
            driver.restart_workers(late_outputs=True)
            driver.to_store.clear()
    settle(driver)
    driver.check_complete(*keys)
    assert not driver.connector.storing  # type: ignore[attr-defined]


@pytest.mark.timeout(300)
@pytest.mark.req("CON-16")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"in_process": True}, id="one process"),
        pytest.param({}, id="processes"),
        pytest.param({"tensor_parallel_size": 2}, id="two ranks", marks=pytest.mark.slow),
    ],
)
def test_an_engine_with_it_gives_the_tokens_of_one_without(
    module: ModuleType, settings: dict[str, Any]
) -> None:
    check_tokens_of_demo_model(
        kv_connector="host_cache:HostCache",
        kv_connector_config='{"capacity_blocks": 100}',
        **settings,
    )
