"""Which signals stop a deployment, and which count as a second signal."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from longshore.deploy.supervisor.stop_signals import StopSignals

SECOND_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    with StopSignals() as stop_signals:
        yield stop_signals


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [*SECOND_SIGNALS, signal.SIGHUP])
def test_each_of_them_wakes_a_wait_and_is_named(
    signals: StopSignals, number: signal.Signals
) -> None:
    assert not signals.is_set()
    send(number)
    assert signals.is_set()
    assert select.select([signals], [], [], 0)[0] == [signals]
    assert signals.cause == number.name


@pytest.mark.parametrize("first", [*SECOND_SIGNALS, signal.SIGHUP])
def test_a_hang_up_is_no_second_signal(signals: StopSignals, first: signal.Signals) -> None:
    send(first)
    signals.clear()
    send(signal.SIGHUP)
    assert not signals.is_set()
    assert signals.cause == first.name


@pytest.mark.parametrize("second", SECOND_SIGNALS)
def test_a_signal_after_a_hang_up_is_a_second_one(
    signals: StopSignals, second: signal.Signals
) -> None:
    send(signal.SIGHUP)
    signals.clear()
    send(second)
    assert signals.is_set()
    assert signals.cause == "SIGHUP"


def test_a_request_of_an_operator_is_no_second_signal(signals: StopSignals) -> None:
    signals.request()
    assert signals.is_set()
    assert signals.cause == "an operator's request"
    signals.clear()
    signals.request()
    assert not signals.is_set()


def test_an_ignored_hang_up_stays_ignored() -> None:
    """As under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop_signals:
            send(signal.SIGHUP)
            assert not stop_signals.is_set()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_signals_without_a_meaning_are_ignored_and_their_defaults_inherited(
    signals: StopSignals, number: signal.Signals
) -> None:
    send(number)
    assert not signals.is_set()
    program = f"import signal; print(signal.getsignal({int(number)}) is signal.SIG_DFL)"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert child.stdout == b"True\n"
