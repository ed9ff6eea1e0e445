"""Profiles of a real process: this one."""

import re
import threading
from pathlib import Path

import pytest

from longshore.protocol.logs.stack_samples import sample_stacks


@pytest.fixture
def waiting_thread() -> object:
    done = threading.Event()

    def wait_for_the_test() -> None:
        done.wait(60)

    thread = threading.Thread(target=wait_for_the_test, name="a;b")
    thread.start()
    yield thread
    done.set()
    thread.join()


@pytest.mark.usefixtures("waiting_thread")
def test_the_file_has_a_line_per_stack_with_its_samples(tmp_path: Path) -> None:
    path = tmp_path / "stacks.folded"
    num_samples: list[int] = []
    sampler = threading.Thread(target=lambda: num_samples.append(sample_stacks(0.2, path)))
    sampler.start()
    sampler.join(60)
    assert num_samples[0] > 0
    assert path.stat().st_mode & 0o777 == 0o600
    lines = [re.fullmatch(r"(.+) (\d+)", line) for line in path.read_text().splitlines()]
    counts = {line[1]: int(line[2]) for line in lines if line is not None}
    assert len(counts) == len(lines)
    (waited,) = [stack for stack in counts if "wait_for_the_test" in stack]
    thread, *frames = waited.split(";")
    assert thread == "a,b"
    assert frames[0] == "threading.Thread._bootstrap"
    assert counts[waited] <= num_samples[0]
    assert not [stack for stack in counts if "sample_stacks" in stack]
    assert [stack for stack in counts if stack.startswith("MainThread;")]


def test_a_file_that_exists_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "stacks.folded"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        sample_stacks(0.01, path)
    assert path.read_text() == "mine"
