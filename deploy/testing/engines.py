"""Engines for tests of extensions, with a small pool of blocks."""

import importlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from longshore.deploy.llm.in_process_engine import InProcessEngine
from longshore.deploy.llm.remote_engine import RemoteEngine
from longshore.deploy.model.folder import read_model_folder
from longshore.deploy.settings.options import engine_options
from longshore.deploy.supervisor.engine_plan import EnginePlan, plan_engine
from longshore.protocol.statistics import BlockSnapshot, BlockState

AnyEngine: TypeAlias = InProcessEngine | RemoteEngine

POOL_BLOCKS: Final = 30
MAX_REQUEST_BLOCKS: Final = 14
SETTINGS: Final[Mapping[str, Any]] = {
    "device": "cpu",
    "dtype": "float32",  # no token may change with the order of computation
    "block_size": 4,
    "num_blocks": POOL_BLOCKS,
    "max_num_seqs": 6,
    "watermark": 0.0,
    "threads": 1,
    "verify_plan": True,
    "log_level": "error",
}
"""A pool so small that requests are preempted and blocks are evicted."""

SETTLE_TIMEOUT_S: Final = 60.0


def plan_of(model: Path, settings: Mapping[str, Any], state_dir: Path) -> EnginePlan:
    """settings: fields of EngineOptions, in addition to SETTINGS. Engines with the same `state_dir`
    have the same block hashes."""
    chosen = {**SETTINGS, "state_dir": state_dir, **settings}
    block_size = chosen["block_size"]
    chosen.setdefault("max_model_len", MAX_REQUEST_BLOCKS * block_size)
    chosen.setdefault("max_num_batched_tokens", 6 * block_size)
    return plan_engine(engine_options(chosen), read_model_folder(model))


def connector_settings(connector: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": connector,
        "kv_connector_config": msgspec.json.encode(dict(options)).decode(),
    }


def seeded_delays(seed: int) -> Callable[[], None]:
    """Delays that make steps and transfers overlap in unusual ways: most are short, some so long
    that several steps of the demo model, of some 2 ms, run meanwhile."""
    chance = random.Random(seed)
    return lambda: time.sleep(chance.choice((0.0, 0.0, 0.001, chance.uniform(0.0, 0.01))))


@contextmanager
def opened(engine: AnyEngine) -> Iterator[AnyEngine]:
    try:
        yield engine
    finally:
        engine.close()


def settle(engine: AnyEngine, max_unreported: Callable[[], int] | None = None) -> int:
    """Wait until nothing runs, waits or is transferred, and every block is free or in quarantine.
    Returns the number of blocks in quarantine. Raises AssertionError if that does not happen, or if
    a block is not accounted for.

    max_unreported: also wait until no more blocks than this are in quarantine; other loads have
                    ended, or their reports are late.
    """
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    while left := what_is_left(engine):
        assert time.monotonic() < deadline_s, f"leaked, or never ends: {left}"
        engine.receive()
    num_quarantined = _num_quarantined(engine)
    while max_unreported is not None and num_quarantined > max_unreported():
        num_lost = num_quarantined - max_unreported()
        assert time.monotonic() < deadline_s, (
            f"loads of {num_lost} blocks ended, but were not reported"
        )
        engine.receive()
        num_quarantined = _num_quarantined(engine)
    return num_quarantined


def _num_quarantined(engine: AnyEngine) -> int:
    if isinstance(engine, RemoteEngine):
        states = engine.describe_blocks().states.tolist()
        return states.count(BlockState.QUARANTINED)
    engine.scheduler.check()
    return engine.scheduler.make_stats().num_quarantined_blocks


def what_is_left(engine: AnyEngine) -> str:
    """What has not ended; empty if nothing."""
    if isinstance(engine, RemoteEngine):
        return _left_in(engine.describe_blocks())
    scheduler = engine.scheduler
    num_used = scheduler.kv_cache.num_usable_blocks - scheduler.kv_cache.num_free_blocks
    num_quarantined = scheduler.make_stats().num_quarantined_blocks
    states = {
        f"{scheduler.get_request_counts()} requests (running, waiting)": (
            scheduler.has_unfinished_requests()
        ),
        f"{scheduler.num_steps_in_flight} steps": scheduler.num_steps_in_flight,
        "rows that the workers still hold": scheduler.has_finished_requests(),
        f"{num_used} blocks, of which {num_quarantined} are in quarantine": (
            num_used != num_quarantined
        ),
        "has_pending_work of the connector": scheduler.has_pending_work(),
    }
    return ", ".join(name for name, is_left in states.items() if is_left)


def _left_in(snapshot: BlockSnapshot) -> str:
    report = snapshot.report
    ended = (BlockState.RESERVED, BlockState.FREE, BlockState.CACHED, BlockState.QUARANTINED)
    counts = Counter(
        BlockState(state).name for state in snapshot.states.tolist() if state not in ended
    )
    if not (report.num_running or report.num_waiting or report.steps_in_flight or counts):
        return ""
    return (
        f"{report.num_running} running and {report.num_waiting} waiting requests, "
        f"{report.steps_in_flight} steps, blocks {dict(counts)}"
    )


@contextmanager
def importable(connector: str) -> Iterator[None]:
    """Processes started in the block can import a connector `package.module:Class` if this one can:
    the folder that contains its package is on their path."""
    module, colon, _ = connector.partition(":")
    if not colon:
        yield
        return
    before = os.environ.get("PYTHONPATH")
    folders = [before] if before else []
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, str(_import_folder(module))])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _import_folder(module: str) -> Path:
    """The folder from which the module is imported."""
    file = importlib.import_module(module).__file__
    assert file is not None, f"{module} is a folder, not a module"
    path = Path(file)
    if path.name == "__init__.py":
        path = path.parent
    return path.parents[module.count(".")]
