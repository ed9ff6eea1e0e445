"""Notifications to a service manager, as a socket of one receives them."""

import socket
from pathlib import Path

import pytest

from longshore.deploy.supervisor.service_manager import notify_ready, notify_stopping


@pytest.mark.parametrize("is_abstract", [False, True])
def test_states_are_single_datagrams(tmp_path: Path, is_abstract: bool) -> None:
    address = f"@longshore-{tmp_path.name}" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address.replace("@", "\0"))
        manager.settimeout(5)
        variables = {"NOTIFY_SOCKET": address}
        notify_ready("ready at URL", variables)
        notify_stopping(1.5, variables)
        assert manager.recv(4096) == b"READY=1\nSTATUS=ready at URL"
        assert manager.recv(4096) == b"STOPPING=1\nEXTEND_TIMEOUT_USEC=1500000"


def test_without_a_service_manager_nothing_is_sent_or_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    notify_ready("ready at URL", {})
    assert caplog.messages == []


def test_a_service_manager_that_is_gone_is_only_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    notify_ready("ready at URL", {"NOTIFY_SOCKET": str(tmp_path / "gone")})
    (message,) = caplog.messages
    assert message.startswith(f"cannot notify the service manager at {tmp_path}/gone: ")
