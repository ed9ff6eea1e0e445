"""The profile of a rank's memory, with a meter that stands for that of a GPU."""

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longshore.protocol.errors import ConfigError, KVCacheTooSmall
from longshore.worker.config import WorkerConfig
from longshore.worker.kv_cache.plan import block_bytes
from longshore.worker.sampling import sampler
from longshore.worker.step import device_step, step_launcher
from longshore.worker.step.decode_graphs import GRAPH_ROWS
from longshore.worker.worker import Worker
from tests.models import make_tiny_model
from tests.worker.models.cases import CASES
from tests.worker.plans import Entry, Planner
from tests.worker.step.test_decode_graphs import RerunMaker

MIB = 1 << 20
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 48,
    "max_model_len": 200,
    "show_progress": False,
}


class ScriptedMeter:
    """Steps of n tokens need n MiB.

    sizes: tokens of the steps so far. measured: of each measurement. positions: of the last step.
    limits: bytes beyond those in use; None: no limit.
    """

    positions: Tensor

    def __init__(self, total: int = 1000 * MIB) -> None:
        self.total = total
        self.used = 100 * MIB
        self.sizes: list[int] = []
        self.measured: list[list[int]] = []
        self.limits: list[int | None] = []

    def total_bytes(self) -> int:
        return self.total

    def used_bytes(self) -> int:
        return self.used

    def peak_bytes(self, action: Callable[[], object]) -> int:
        num_before = len(self.sizes)
        action()
        self.measured.append(self.sizes[num_before:])
        return MIB * max(self.measured[-1])

    def limit(self, num_bytes: int | None) -> None:
        self.limits.append(num_bytes)


def observed(config: WorkerConfig, meter: ScriptedMeter) -> Worker:
    """A worker whose meter sees the sizes of its steps."""
    worker = Worker(config, meter_of=lambda device: meter)
    forward = worker.model.run_layers

    def run(x: Tensor, positions: Tensor, *rest: Any) -> Any:
        meter.sizes.append(len(x))
        meter.positions = positions.clone()
        return forward(x, positions, *rest)

    worker.model.run_layers = run  # type: ignore[method-assign]
    return worker


@pytest.fixture
def meter() -> ScriptedMeter:
    return ScriptedMeter()


@pytest.fixture
def worker(checkpoint: tuple[Path, Any], meter: ScriptedMeter) -> Iterator[Worker]:
    with observed(WorkerConfig(model=str(checkpoint[0]), **SETTINGS), meter) as worker:
        yield worker


def test_the_largest_chunk_and_a_decode_in_every_row_are_measured_after_they_ran_once(
    worker: Worker, meter: ScriptedMeter
) -> None:
    num_blocks = worker.kv_cache.num_blocks
    assert meter.sizes == [48, 6, 48, 6]
    assert meter.measured == [[48], [6]]
    left = 1000 * MIB * 9 // 10 - 100 * MIB - 48 * MIB
    assert num_blocks == left // block_bytes(worker.kv_cache.groups)


def test_the_chunk_is_at_the_end_of_the_longest_prompt_and_decodes_share_that_length(
    worker: Worker, meter: ScriptedMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []

    def peak_bytes(action: Callable[[], object]) -> int:
        action()
        seen.append(meter.positions.tolist())
        return MIB

    monkeypatch.setattr(meter, "peak_bytes", peak_bytes)
    assert worker.kv_cache
    assert seen == [list(range(200 - 48, 200)), [200 // 6 - 1] * 6]


def test_every_row_samples_with_all_settings_that_need_memory(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws_of_step: list[tuple[int, int]] = []
    scored: list[int] = []
    score = device_step.DeviceExtras.score_sampled
    original = sampler.sample

    def sample(logits: Tensor, draws: Any, *, num_whole: int, **rest: Any) -> Tensor:
        draws_of_step.append((len(logits), len(draws.rows) - num_whole))
        return original(logits, draws, num_whole=num_whole, **rest)

    def score_sampled(extras: Any, raw: Any, sampled: Tensor) -> None:
        assert extras.edits is not None
        assert extras.penalties is not None
        scored.append(0 if raw is None else len(raw))
        score(extras, raw, sampled)

    monkeypatch.setattr(device_step, "sample", sample)
    monkeypatch.setattr(device_step.DeviceExtras, "score_sampled", score_sampled)
    assert worker.kv_cache
    assert draws_of_step == [(1, 1), (6, 6)] * 2, "all of them with top-k and top-p"
    assert scored == [1, 6] * 2


def test_the_profile_leaves_nothing_behind_and_changes_no_token(
    checkpoint: tuple[Path, Any], meter: ScriptedMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SETTINGS, "max_model_len": 256}

    def tokens(of: Worker) -> list[int]:
        runner, plans = of.start(num_blocks=60), Planner(num_blocks=60, block_size=16, epoch=1)
        steps = [plans.plan({1: 40}, added=[Entry(1, range(5, 45))])]
        steps += [plans.plan() for _ in range(10)]
        return [token for step in steps for token in runner.execute(step).sampled_tokens.tolist()]

    num_threads = threading.active_count()
    plain = WorkerConfig(model=str(checkpoint[0]), num_blocks=60, **settings)
    config = WorkerConfig(model=str(checkpoint[0]), **settings)
    with observed(config, meter) as worker, Worker(plain) as other:
        caches: list[weakref.ref[Tensor]] = []
        make_cache = worker.make_cache

        def made(*arguments: Any) -> Any:
            cache = make_cache(*arguments)
            caches.append(weakref.ref(cache.buffer))
            return cache

        monkeypatch.setattr(worker, "make_cache", made)
        assert worker.kv_cache
        gc.collect()
        assert [cache() for cache in caches] == [None]
        assert tokens(worker) == tokens(other)
        assert threading.active_count() == num_threads + 2, "each has one compute queue"


@pytest.mark.parametrize(
    "setting", [{"num_blocks": 40}, {"kv_cache_bytes": 4 * MIB}, {"kv_memory_fraction": 0.001}]
)
def test_a_cache_whose_size_is_given_otherwise_needs_no_profile(
    checkpoint: tuple[Path, Any], meter: ScriptedMeter, setting: dict[str, Any]
) -> None:
    with observed(WorkerConfig(model=str(checkpoint[0]), **SETTINGS, **setting), meter) as worker:
        assert worker.kv_cache.num_blocks > 0
    assert not meter.sizes


def test_a_mixture_whose_experts_are_captured_has_a_profile(
    meter: ScriptedMeter, tmp_path: Path
) -> None:
    """Their memory has a place for every block, and is not touched before there are blocks."""
    make_tiny_model("Mixtral", tmp_path)
    fd = os.memfd_create("experts")
    try:
        config = WorkerConfig(model=str(tmp_path), routed_experts_fd=fd, **SETTINGS)
        with observed(config, meter) as worker:
            assert worker.kv_cache.num_blocks > 0
            assert os.fstat(fd).st_size == 0
            assert meter.measured
    finally:
        os.close(fd)


def test_a_cpu_has_no_profile(checkpoint: tuple[Path, Any]) -> None:
    with Worker(WorkerConfig(model=str(checkpoint[0]), **SETTINGS)) as worker:
        assert worker._meter is None


def test_graphs_are_estimated_from_the_two_largest(
    checkpoint: tuple[Path, Any], meter: ScriptedMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one brings the pool; each other one needs what the second did."""
    maker = RerunMaker()
    needs = iter([50 * MIB, 3 * MIB])
    capture = maker.capture

    def captured(decode: Any, *, has_layer_hooks: bool) -> Any:
        meter.used += next(needs)
        return capture(decode, has_layer_hooks=has_layer_hooks)

    monkeypatch.setattr(maker, "capture", captured)
    monkeypatch.setattr(step_launcher, "graph_maker", lambda device: maker)
    monkeypatch.setattr(step_launcher.GroupedAttention, "is_replayable", True)
    settings = {**SETTINGS, "max_num_seqs": 8}
    with observed(WorkerConfig(model=str(checkpoint[0]), **settings), meter) as worker:
        measured = worker._profile(worker_groups(worker), meter)
    num_sizes = len([size for size in GRAPH_ROWS if size <= 8])
    assert num_sizes == 4
    assert measured.graphs == (50 + 3 * 3) * MIB
    assert measured.used == 100 * MIB


def worker_groups(worker: Worker) -> Any:
    with_size = Worker(
        WorkerConfig(model=worker._config.model, num_blocks=60, **SETTINGS), meter_of=lambda _: None
    )
    with with_size:
        return with_size.kv_cache.groups


def test_a_step_that_does_not_fit_ends_the_start_with_what_to_lower(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(worker.model, "run_layers", fail)
    with pytest.raises(ConfigError) as raised:
        assert worker.kv_cache
    assert "the largest step does not fit into the memory of cpu beside the weights" in str(
        raised.value
    )
    assert "Lower max_num_batched_tokens=48, for example to 24, max_num_seqs=6, for example" in str(
        raised.value
    )


def test_a_warm_up_that_does_not_fit_beside_the_cache_says_what_to_lower(
    checkpoint: tuple[Path, Any], meter: ScriptedMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    config = WorkerConfig(model=str(checkpoint[0]), num_blocks=40, **SETTINGS)
    with observed(config, meter) as worker:
        monkeypatch.setattr(worker.model, "run_layers", fail)
        with pytest.raises(ConfigError, match="the warm-up does not fit") as raised:
            worker.start()
    assert "Lower num_blocks=40, for example to 36, max_num_batched" in str(raised.value)


def test_too_little_memory_for_one_request_is_told_before_anything_is_allocated(
    checkpoint: tuple[Path, Any],
) -> None:
    meter = ScriptedMeter(total=164 * MIB)
    with (
        observed(WorkerConfig(model=str(checkpoint[0]), **SETTINGS), meter) as worker,
        pytest.raises(KVCacheTooSmall, match=r"^gpu_memory_utilization=0\.9 of 164\.00 MiB"),
    ):
        assert worker.kv_cache


def test_steps_are_limited_to_what_is_left_until_the_worker_sleeps(tmp_path: Path) -> None:
    """The largest step needs 48 MiB; of 900 MiB, 880 or 100 are in use after the warm-up."""
    make_tiny_model("Llama", tmp_path)
    meter = ScriptedMeter()
    with observed(WorkerConfig(model=str(tmp_path), **SETTINGS), meter) as worker:
        assert worker.kv_cache.num_blocks > 0
        assert meter.limits == []
        meter.used = 880 * MIB
        worker.start()
        assert meter.limits[-1] == 48 * MIB
        worker.sleep()
        assert meter.limits[-1] is None
        meter.used = 100 * MIB
        worker.start(epoch=2)
        assert meter.limits[-1] == 800 * MIB
    assert meter.limits[-1] is None


FAMILIES = {case.family: case for case in reversed(CASES)}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_profiled(family: str, tmp_path: Path) -> None:
    case = FAMILIES[family]
    make_tiny_model(family, tmp_path, **case.settings)
    meter = ScriptedMeter()
    meter.peak_bytes = lambda action: action() or MIB  # type: ignore[method-assign]
    config = WorkerConfig(model=str(tmp_path), **{**SETTINGS, "max_model_len": 64})
    with Worker(config, meter_of=lambda device: meter) as worker:
        assert worker.kv_cache.num_blocks > 0
