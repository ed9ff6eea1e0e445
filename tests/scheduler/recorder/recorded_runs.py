"""Workloads of the oracle, and drivers, whose scheduler records what it does."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from longshore.scheduler.process import record_files
from longshore.scheduler.recorder import recorder as recorder_module
from longshore.scheduler.recorder.recorder import RecordedScheduler, Recorder
from tests.harness import engine
from tests.harness.driver import Driver
from tests.oracle import fast_adapter
from tests.oracle.driver import Surroundings, drive
from tests.oracle.fast_adapter import FastAdapter
from tests.oracle.workloads import Workload

UNLIMITED = 1 << 40


def begin_files_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, with a snapshot, after 2 kB, and no file is removed."""
    monkeypatch.setattr(recorder_module, "CHUNK_BYTES", 2000)
    monkeypatch.setattr(record_files, "NUM_SEGMENTS", UNLIMITED)


def record_workload(
    workload: Workload, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the workload to its end; its record is complete then."""
    recorded = partial(RecordedScheduler, recorder=recorder)
    monkeypatch.setattr(fast_adapter, "Scheduler", recorded)
    around = Surroundings.of(workload)
    adapter = FastAdapter(
        workload.scheduler,
        workload.cache,
        num_blocks=workload.num_blocks,
        eos_token_ids=workload.eos_token_ids,
        vocab_size=workload.vocab_size,
        verify_plan=workload.seed % 2 == 0,
        drafts_apart=workload.seed % 3 == 0,
        connector=around.connector,
        grammars=around.grammars,
        num_ranks=workload.num_ranks,
        cross=workload.cross,
    )
    drive(adapter, workload, around, check_every=20)
    recorder.close()


def recorded_driver(
    path: Path,
    *,
    limit_bytes: int = UNLIMITED,
    forks: bool = False,
    **settings: Any,
) -> tuple[Driver, Recorder]:
    """A driver and the recorder of its scheduler, to be closed at the end."""
    recorder = Recorder(path, limit_bytes, forks=forks)
    with recorded_schedulers(recorder):
        return Driver(**settings), recorder


@contextmanager
def recorded_schedulers(recorder: Recorder) -> Iterator[None]:
    """The scheduler of an engine that is made in this context is recorded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "Scheduler", partial(RecordedScheduler, recorder=recorder))
        yield
