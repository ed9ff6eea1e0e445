"""The conformance suite for connectors: random requests, faults of every kind, and a comparison of
every token with an engine without a connector.

A test module inherits the tests, and pytest collects them:

    from longshore.testing.connectors import ConnectorConformance

    class TestHostCache(ConnectorConformance):
        connector = "host_cache:HostCache"

        def options(self, tmp_path):
            return {"capacity_blocks": 64}
"""

import threading
from collections.abc import Callable, Container, Iterator, Mapping
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Final

try:
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "longshore.testing.connectors needs pytest, which is not installed: pip install pytest",
        name=error.name,
    ) from None

import msgspec

from longshore.connectors.base import SchedulerConnector, WorkerConnector
from longshore.deploy.llm.in_process_engine import InProcessEngine
from longshore.deploy.llm.remote_engine import RemoteEngine
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.protocol.errors import LongshoreError
from longshore.protocol.requests import AddRequest
from longshore.testing.engines import (
    POOL_BLOCKS,
    AnyEngine,
    connector_settings,
    importable,
    opened,
    plan_of,
    seeded_delays,
    settle,
)
from longshore.testing.faults import (
    FAULTY_CONNECTOR,
    Faults,
    FaultyConnector,
    FaultyWorker,
)
from longshore.testing.leaks import strings_in
from longshore.testing.player import Player
from longshore.testing.prompts import KnownPrompt, known_prompts

NO_FAULTS: Final = Faults()
ALL_FAULTS: Final = Faults(
    ask_later=0.2,
    partial=0.3,
    failed_lookup=0.1,
    failed_load=0.3,
    late=0.4,
    duplicate=0.3,
    unreported=0.1,
    max_unreported_blocks=POOL_BLOCKS // 4,
)
FAILED_LOADS: Final = Faults(failed_load=0.6)
KINDS_OF_FAULTS: Final[Mapping[str, Faults]] = {
    "none": NO_FAULTS,
    "lookups": Faults(ask_later=0.4, partial=0.5, failed_lookup=0.2),
    "failed loads": FAILED_LOADS,
    "late and repeated reports": Faults(late=0.7, duplicate=0.5),
    "missing reports": Faults(unreported=0.3, max_unreported_blocks=POOL_BLOCKS // 3),
    "all": ALL_FAULTS,
}
KINDS_OF_A_VARIANT: Final = ("none", "all")
SHORT_TIMEOUT: Final = {"load_timeout_s": 0.2}
REMOTE_TIMEOUT: Final = {"load_timeout_s": 0.4}
"""For engines whose loads may never be reported, in one process and in several."""

NUM_REQUESTS: Final = 40

BUDGET: Final = 192
FAILED_STEPS: Final = (7, 20, 21, 60)
"""After these, a step has 16 tokens, and could not be smaller."""

FAILED_TRANSFERS: Final = 0.3

MAX_RUNS_PER_SEED: Final = 4
"""A slow tier can keep the requests of a run apart, so that none is preempted. Then there are more
runs, at most this many times `num_seeds`."""

NUM_FLUSHING: Final = 12
"""Prompts that together need more blocks than the pool has."""

MAX_FLUSHES: Final = 3
"""A tier that is slow may not store every block. What it lacks, it is offered again."""

NOT_PLAYED: Final = {
    "FaultyConnector.on_new_epoch",
    "FaultyConnector.release_transfers",
    "FaultyConnector.take_events",
    "FaultyConnector.get_kv_connector_stats",
    "FaultyConnector.reset_cache",
}
"""Hooks that no request causes to be called."""


RARE_HOOKS: Final = (
    "bind_blocks",
    "register_kv_caches",
    "handle_preemptions",
    "load_abandoned",
    "shutdown",
)


def hooks_of(half: type, contract: type) -> list[str]:
    """`Class.hook` of every hook of the contract."""
    names = [
        name
        for name, value in vars(contract).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    ]
    hooks = [f"{half.__name__}.{name}" for name in names]
    return [hook for hook in hooks if hook not in NOT_PLAYED]


HOOKS: Final = [
    *hooks_of(FaultyConnector, SchedulerConnector),
    *hooks_of(FaultyWorker, WorkerConnector),
]
FEW_HOOKS: Final = [
    "FaultyConnector.build_connector_meta",
    "FaultyWorker.register_kv_caches",
    "FaultyWorker.start_load_kv",
    "FaultyWorker.get_finished",
]
"""Those at which the resources of a tier are half open, or in use."""

RANKS: Final[Mapping[str, dict[str, int]]] = {
    "two shards": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
}
"""Settings of engines with real processes. One worker has the same faults in one process."""


_uncalled_hooks: dict[type, set[str]] = {}
"""By class: hooks that a whole run did not call. Another run calls none of them either, except for
RARE_HOOKS, which are left out."""


class ConnectorConformance:
    """Tests of one connector. Set the attributes in a subclass whose name begins with `Test`.

    connector: value of `--kv-connector`. A module of your own must be importable in the tests.
    model:     folder of the model; the default is the bundled demo model.
    settings:  settings of the engine (the fields of EngineOptions), for example a `block_size`.
    num_seeds: number of random runs per kind of fault.
    is_variant: another class tests the same connector, and this one has other options for it, such
               as another tier. What concerns the connector's own code alone is not repeated: of
               the hooks, only FEW_HOOKS raise; faults of one kind alone do not occur; and of the
               engines with real processes, all faults occur only in that with two stages, whose
               ranks store blocks of different sizes.
    survives_restart: an engine finds what an earlier one has stored.
    """

    connector: ClassVar[str] = ""
    model: ClassVar[Path] = DEMO_MODEL_DIR
    settings: ClassVar[Mapping[str, Any]] = {}
    num_seeds: ClassVar[int] = 2
    is_variant: ClassVar[bool] = False
    survives_restart: ClassVar[bool] = False

    @pytest.fixture
    def prompts(self) -> list[KnownPrompt]:
        """Prompts with the tokens of an engine without a connector."""
        return known_prompts(self.model, self.settings)

    @pytest.fixture(autouse=True)
    def connector_is_importable(self) -> Iterator[None]:
        with importable(self.connector):
            yield

    def options(self, tmp_path: Path) -> dict[str, Any]:
        """Value of `--kv-connector-config`. tmp_path: an empty folder for the connector's files, a
        new one for each test."""
        return {}

    def prepare(self, message: AddRequest) -> AddRequest:
        """Called with each request of the suite; returns the one that is sent. A connector that
        loads what another engine has computed adds its `kv_transfer_params`."""
        return message

    # Engines

    def player(self, engine: AnyEngine, prompts: list[KnownPrompt], seed: int) -> Player:
        return Player(engine, prompts, seed, self.prepare)

    def plan(self, tmp_path: Path, faults: Faults | None, seed: int, **settings: Any) -> Any:
        """faults: None: the connector without a FaultyConnector around it."""
        connector, options = self.connector, self.options(tmp_path)
        if faults is not None:
            options = {
                "connector": connector,
                "options": options,
                "seed": seed,
                "faults": msgspec.to_builtins(faults),
            }
            connector = FAULTY_CONNECTOR
        chosen = {**connector_settings(connector, options), **self.settings, **settings}
        return plan_of(self.model, chosen, tmp_path / "state")

    def in_process(
        self, tmp_path: Path, faults: Faults, seed: int, **settings: Any
    ) -> InProcessEngine:
        plan = self.plan(tmp_path, faults, seed, **SHORT_TIMEOUT, **settings)
        return InProcessEngine(plan, delay=seeded_delays(seed))

    # Tests

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "hook" in metafunc.fixturenames:
            metafunc.parametrize("hook", FEW_HOOKS if self.is_variant else HOOKS)
        if "kind" in metafunc.fixturenames:
            kinds = KINDS_OF_A_VARIANT if self.is_variant else tuple(KINDS_OF_FAULTS)
            metafunc.parametrize("kind", kinds)
        if "ranks" in metafunc.fixturenames:
            names = ["two stages"] if self.is_variant else list(RANKS)
            metafunc.parametrize("ranks", [RANKS[name] for name in names], ids=names)

    def test_random_requests_get_their_tokens_and_nothing_is_left(
        self, kind: str, prompts: list[KnownPrompt], tmp_path: Path
    ) -> None:
        num_hits = num_preemptions = 0
        for seed in range(MAX_RUNS_PER_SEED * self.num_seeds):
            is_covered = num_preemptions > 0 and (num_hits > 0 or kind != "none")
            if seed >= self.num_seeds and is_covered:
                break
            folder = tmp_path / str(seed)
            folder.mkdir()
            with opened(self.in_process(folder, KINDS_OF_FAULTS[kind], seed)) as engine:
                assert isinstance(engine, InProcessEngine)
                player = self.player(engine, prompts, seed)
                player.play(NUM_REQUESTS)
                check_idle(engine, player)
                stats = engine.scheduler.make_stats()
                num_hits += stats.num_external_hit_tokens
                num_preemptions += stats.num_preemptions
        assert num_preemptions, "no request was preempted"
        if kind == "none":
            assert num_hits, "nothing was loaded"

    @pytest.mark.parametrize("faults", [NO_FAULTS, FAILED_LOADS], ids=["none", "failed loads"])
    def test_steps_without_memory_are_computed_again(
        self, faults: Faults, prompts: list[KnownPrompt], tmp_path: Path
    ) -> None:
        with opened(self.in_process(tmp_path, faults, 0, max_num_batched_tokens=BUDGET)) as engine:
            assert isinstance(engine, InProcessEngine)
            hooks = engine.worker.connector
            if hooks is None or not hooks.may_repeat_steps:
                pytest.skip("the worker is replaced instead")
            num_failed = lack_memory(engine, FAILED_STEPS)
            player = self.player(engine, prompts, seed=0)
            player.play(2 * NUM_REQUESTS)
            check_idle(engine, player)
            assert num_failed() == len(FAILED_STEPS)

    def test_transfers_without_memory_are_misses(
        self, prompts: list[KnownPrompt], tmp_path: Path
    ) -> None:
        delay, chance = seeded_delays(0), Random(0)

        def lack_memory() -> None:
            delay()
            is_transfer = threading.current_thread().name != "compute"
            if is_transfer and chance.random() < FAILED_TRANSFERS:
                raise MemoryError("no memory for a transfer")

        plan = self.plan(tmp_path, NO_FAULTS, 0, **SHORT_TIMEOUT)
        with opened(InProcessEngine(plan, delay=lack_memory)) as engine:
            assert isinstance(engine, InProcessEngine)
            player = self.player(engine, prompts, seed=0)
            player.play(2 * NUM_REQUESTS)
            check_idle(engine, player)

    def test_a_hook_that_raises_stops_the_engine_and_names_the_hook(
        self, hook: str, prompts: list[KnownPrompt], tmp_path: Path
    ) -> None:
        if hook in _uncalled_hooks.get(type(self), ()):
            pytest.skip("the connector does not need this hook")
        num_calls, error = self._play_until_failure(hook, prompts, tmp_path)
        half, _, name = hook.partition(".")
        is_survived = name in ("get_num_new_matched_tokens", "shutdown")
        if not num_calls:
            assert error is None, error
            pytest.skip("the connector does not need this hook, or it was not called")
        if is_survived:
            assert error is None, error
        else:
            assert error is not None, "the engine went on"
            assert f"{name} of the connector {half} raised InjectedFault" in str(error)
        if self.survives_restart:
            with opened(self.in_process(tmp_path, NO_FAULTS, 1)) as engine:
                player = self.player(engine, prompts, seed=1)
                player.play(NUM_REQUESTS // 2)
                settle(engine)

    def _play_until_failure(
        self, hook: str, prompts: list[KnownPrompt], tmp_path: Path
    ) -> tuple[int, LongshoreError | None]:
        """How often the hook was called, and the error of the engine."""
        raise_at = 1 if hook.endswith(RARE_HOOKS) else 5
        faults = Faults(raise_in=hook, raise_at=raise_at)
        try:
            engine = self.in_process(tmp_path, faults, 0)
        except LongshoreError as error:
            return 1, error
        half, _, name = hook.partition(".")
        halves = halves_of(engine)
        connector = halves[0 if half == "FaultyConnector" else 1]
        failure = None
        with opened(engine):
            try:
                player = self.player(engine, prompts, seed=0)
                player.play(NUM_REQUESTS, aborts=0.5)
                settle(engine)
            except LongshoreError as error:
                failure = error
        num_calls = connector.num_calls[name]
        if num_calls == 0 and failure is None:
            called = {f"{type(each).__name__}.{name}" for each in halves for name in each.num_calls}
            uncalled = {each for each in HOOKS if not each.endswith(RARE_HOOKS)} - called
            _uncalled_hooks[type(self)] = uncalled
        return max(0, num_calls - raise_at + 1), failure

    def test_random_requests_through_real_processes(
        self, ranks: dict[str, int], prompts: list[KnownPrompt], tmp_path: Path
    ) -> None:
        plan = self.plan(tmp_path, ALL_FAULTS, 0, **REMOTE_TIMEOUT, **ranks)
        with opened(RemoteEngine(plan)) as engine:
            player = self.player(engine, prompts, seed=0)
            player.play(NUM_REQUESTS)
            settle(engine)
            player.play(NUM_REQUESTS // 2)  # on the same blocks
            settle(engine, lambda: plan.options.num_ranks * ALL_FAULTS.max_unreported_blocks)

    def test_a_prompt_evicted_from_the_device_is_loaded(
        self, prompts: list[KnownPrompt], tmp_path: Path
    ) -> None:
        """Through real processes. A connector whose blocks survive a restart is restarted."""
        by_length = sorted(prompts, key=lambda prompt: -len(prompt.token_ids))
        longest, others = by_length[0], by_length[1:]
        plan = self.plan(tmp_path, None, 0)
        with opened(RemoteEngine(plan)) as engine:
            player = self.player(engine, prompts, seed=0)
            player.ask(longest)
            for _ in range(MAX_FLUSHES):
                settle(engine)
                for prompt in others[:NUM_FLUSHING]:
                    player.ask(prompt)
                settle(engine)
                if is_loaded(player, longest):
                    break
            else:
                raise AssertionError(f"nothing was loaded; the statistics are {player.stats}")
        if self.survives_restart:
            with opened(RemoteEngine(plan)) as engine:
                player = self.player(engine, prompts, seed=0)
                # Both fit into the pool, so all that is loaded was stored by the earlier engine.
                assert any(is_loaded(player, prompt) for prompt in by_length[:2])


def is_loaded(player: Player, prompt: KnownPrompt) -> bool:
    """Whether the connector loads some tokens of this prompt."""
    before = 0 if player.stats is None else player.stats.num_external_hit_tokens
    player.ask(prompt)
    return player.await_stats(lambda stats: stats.num_external_hit_tokens > before)


def lack_memory(engine: InProcessEngine, failed_steps: Container[int]) -> Callable[[], int]:
    """Have the device run out of memory in these steps, counted from now on, when it has written
    some KV. Returns a function that counts those that were reached."""
    model: Any = engine.worker.model
    run_layers, steps, failed = model.run_layers, count(1), []

    def run(*arguments: Any) -> Any:
        hidden = run_layers(*arguments)
        if (step := next(steps)) in failed_steps:
            failed.append(step)
            raise MemoryError(f"no memory for step {step}")
        return hidden

    model.run_layers = run
    return lambda: len(failed)


def halves_of(engine: InProcessEngine) -> tuple[FaultyConnector, FaultyWorker]:
    """The faulty connector of the engine."""
    scheduler_half, worker_half = engine.connector_halves
    assert isinstance(scheduler_half, FaultyConnector)
    assert isinstance(worker_half, FaultyWorker)
    return scheduler_half, worker_half


def check_idle(engine: InProcessEngine, player: Player) -> None:
    """All requests and transfers end, no block remains in use, and both halves of the connector
    forget the requests, except for those whose loads were never reported."""
    halves = halves_of(engine)
    settle(engine, lambda: len(halves[1].unreported_blocks))
    ended = player.request_ids - halves[1].unreported_ids
    for half in halves:
        left = sorted(strings_in(half.wrapped, ended))
        name = type(half.wrapped).__name__
        assert not left, f"{name} still has the ids of requests that have ended: {left}"
