"""Limits of the operating system at startup."""

import resource

import pytest

from longshore.deploy.supervisor import limits
from longshore.deploy.supervisor.limits import (
    check_address_space,
    connections_left,
    raise_file_limit,
)
from longshore.protocol.errors import ConfigError

NEEDED = 64 + 8 * 3
GIB = 1 << 30


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """(soft, hard) of each limit, which the test and the code may set."""
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    values = {resource.RLIMIT_NOFILE: unlimited, resource.RLIMIT_AS: unlimited}
    monkeypatch.setattr(limits.resource, "getrlimit", values.__getitem__)
    monkeypatch.setattr(limits.resource, "setrlimit", values.__setitem__)
    return values


def test_the_limit_of_open_files_is_raised_to_the_hard_one(
    limit: dict[int, tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    limit[resource.RLIMIT_NOFILE] = (10, NEEDED + 500)
    raise_file_limit(3, 500)
    assert limit[resource.RLIMIT_NOFILE] == (NEEDED + 500, NEEDED + 500)
    assert connections_left(3) == 500
    assert caplog.records == []


def test_fewer_files_than_connections_are_a_warning(
    limit: dict[int, tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    limit[resource.RLIMIT_NOFILE] = (10, NEEDED + 100)
    raise_file_limit(3, 500)
    (record,) = caplog.records
    assert "accepts about 100 connections, fewer than --max-live-requests=500" in record.message


def test_too_few_files_to_start_are_rejected(limit: dict[int, tuple[int, int]]) -> None:
    limit[resource.RLIMIT_NOFILE] = (10, NEEDED)
    with pytest.raises(ConfigError, match=rf"may open {NEEDED} files .*need {NEEDED}, plus one"):
        raise_file_limit(3, 500)
    assert connections_left(3) == 1


def test_no_limits_are_no_problem(
    limit: dict[int, tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    raise_file_limit(3, 500)
    check_address_space("cuda")
    assert connections_left(3) > 1 << 40
    assert caplog.records == []


@pytest.mark.parametrize(("size", "device"), [(GIB, "cpu"), (64 * GIB, "cuda")])
def test_too_little_address_space_is_rejected(
    limit: dict[int, tuple[int, int]], size: int, device: str
) -> None:
    limit[resource.RLIMIT_AS] = (size, size)
    with pytest.raises(ConfigError, match=r"limited to \d+\.00 GiB \(ulimit -v, RLIMIT_AS\)"):
        check_address_space(device)


def test_a_limit_of_address_space_is_logged(
    limit: dict[int, tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    limit[resource.RLIMIT_AS] = (4 * GIB, resource.RLIM_INFINITY)
    check_address_space("cpu")
    (record,) = caplog.records
    assert "limited to 4.00 GiB (ulimit -v, RLIMIT_AS)" in record.message
