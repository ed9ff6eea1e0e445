"""Errors that a limit on a process has caused are explained in one line."""

import errno
import resource

import pytest

from longshore.protocol import process_limits
from longshore.protocol.process_limits import limit_reached, memory_limits

GIB = 1 << 30


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The soft limits in force, which the test may set."""
    names = ("RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_NPROC")
    values = {getattr(resource, name): resource.RLIM_INFINITY for name in names}
    monkeypatch.setattr(process_limits.resource, "getrlimit", lambda which: (values[which], -1))
    return values


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("unable to mmap 4364848 bytes from file <m>: Cannot allocate memory (12)"),
        RuntimeError("can't start new thread"),
    ],
    ids=repr,
)
def test_an_error_below_a_limit_of_address_space_names_the_limit(
    limits: dict[int, int], error: Exception
) -> None:
    assert limit_reached(error) is None or "thread" in str(error)
    limits[resource.RLIMIT_AS] = 2 * GIB
    for raised in (error, ExceptionGroup("tasks", [ValueError(), ExceptionGroup("", [error])])):
        line = limit_reached(raised)
        assert line is not None
        assert "limited to 2,048 MiB (ulimit -v, RLIMIT_AS)" in line
        assert "Run ulimit -v unlimited" in line
        assert "\n" not in line


def test_the_cause_of_an_error_is_found(limits: dict[int, int]) -> None:
    limits[resource.RLIMIT_DATA] = GIB
    try:
        try:
            raise MemoryError
        except MemoryError as error:
            raise ValueError("the model cannot be read") from error
    except ValueError as raised:
        line = limit_reached(raised)
    assert line is not None
    assert "1,024 MiB (ulimit -d, RLIMIT_DATA)" in line


def test_other_errors_are_not_explained(limits: dict[int, int]) -> None:
    limits[resource.RLIMIT_AS] = GIB
    for error in (ValueError("no such model"), OSError(errno.EACCES, "Permission denied")):
        assert limit_reached(error) is None


def test_a_thread_that_cannot_be_started_without_a_limit_of_memory_names_that_of_threads(
    limits: dict[int, int],
) -> None:
    limits[resource.RLIMIT_NPROC] = 64
    line = limit_reached(RuntimeError("can't start new thread"))
    assert line is not None
    assert "limited to 64 (ulimit -u, RLIMIT_NPROC)" in line
    assert "pids.max" in line


def test_all_limits_of_memory_are_named(limits: dict[int, int]) -> None:
    assert memory_limits() is None
    limits |= {resource.RLIMIT_AS: 2 * GIB, resource.RLIMIT_DATA: GIB}
    line = memory_limits()
    assert line is not None
    assert "RLIMIT_AS) and the data segment" in line
    assert "Run ulimit -v unlimited and ulimit -d unlimited" in line
