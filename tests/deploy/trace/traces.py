"""Traces of a real scheduler that is driven by hand."""

from pathlib import Path
from typing import Any

from longshore.scheduler.inspect.trace import SchedulerTrace
from tests.harness.driver import Driver
from tests.harness.tokens import prompt_of


def driven(path: Path, **options: Any) -> Driver:
    """A driver whose scheduler writes its trace to `path`."""

    def append(lines: bytes) -> None:
        with path.open("ab") as file:
            file.write(lines)

    return Driver(scheduler={"trace": SchedulerTrace(append)}, **options)


def short_of_blocks(path: Path, *, num_requests: int = 4) -> Driver:
    """The trace of requests that find each other's prefixes, and are preempted."""
    driver = driven(path, num_blocks=14, max_model_len=32, max_steps_in_flight=2)
    for number in range(num_requests):
        driver.add(f"r{number}", prompt_of(9, number % 2), max_tokens=20, job_id=f"job-{number}")
    driver.run()
    return driver
