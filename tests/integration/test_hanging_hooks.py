"""Connector hooks that never return, in real processes."""

import json
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from longshore.testing.faults import FAULTY_CONNECTOR
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until
from tests.integration.test_process_life import open_stream, rest_of

LIMITS = ("--hang-timeout-s", "4", "--step-timeout-s", "5")


def start_with_switch(start: StartDeployment, folder: Path) -> tuple[Deployment, Path]:
    """A deployment whose connector obeys what is written to the file."""
    switch = folder / "switch"
    options = {
        "connector": "offloading",
        "options": {"cpu_bytes_to_use": "8MiB"},
        "faults": {"switch": str(switch)},
    }
    connector = ("--kv-connector", FAULTY_CONNECTOR, "--kv-connector-config", json.dumps(options))
    return start(*LIMITS, *connector), switch


def not_ready_reasons(deployment: Deployment, is_over: threading.Event) -> list[str]:
    """Every reason that /ready gives until `is_over`."""
    reasons: list[str] = []
    while not is_over.is_set():
        try:
            urllib.request.urlopen(f"{deployment.url}/ready", timeout=PATIENCE_S).close()
        except urllib.error.HTTPError as error:
            reasons.append(error.read().decode())
        except OSError:
            return reasons  # the deployment has ended
        time.sleep(0.02)
    return reasons


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        pytest.param(
            "FaultyWorker.start_load_kv",
            "worker 0 hangs or is stopped: it has not reported for",
            marks=pytest.mark.long,
        ),
        ("FaultyWorker.wait_for_save", "worker 0 hangs: step"),
        pytest.param(
            "FaultyConnector.on_new_request",
            "scheduler hangs or is stopped: it has not reported",
            marks=pytest.mark.long,
        ),
        ("FaultyConnector.build_connector_meta", "scheduler hangs or is stopped: it has not"),
    ],
)
def test_a_hook_that_never_returns_is_a_hang_of_its_process(
    start_deployment: StartDeployment, tmp_path: Path, hook: str, reason: str
) -> None:
    """Also if it is called before the process has first reported to be alive."""
    deployment, switch = start_with_switch(start_deployment, tmp_path)
    switch.write_text(f"hang {hook}")
    deployment.wait_until_ready()
    reasons: list[str] = []
    is_over = threading.Event()
    watch = threading.Thread(
        target=lambda: reasons.extend(not_ready_reasons(deployment, is_over)), daemon=True
    )
    watch.start()
    assert rest_of(open_stream(deployment, 100), 100)
    is_over.set()
    watch.join(PATIENCE_S)
    assert not switch.exists()
    assert reason in deployment.output
    assert any(reason in each for each in reasons), reasons
    wait_until(lambda: "engine-0 is ready again" in deployment.output)
    assert deployment.stop() == 0, deployment.output
    deployment.assert_nothing_is_left()
