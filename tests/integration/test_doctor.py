"""`longshore doctor` on real processes: well, stalled, well again, gone."""

import json
import signal
import subprocess
import sys
import threading
from typing import Any

import openai
import pytest

from tests.integration.conftest import StartDeployment
from tests.integration.deployment import Deployment, wait_until
from tests.integration.test_process_life import open_stream


def doctor(deployment: Deployment, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "longshore.deploy", "doctor", "--engine", deployment.url]
    return subprocess.run([*command, *flags], capture_output=True, text=True, timeout=30)


def report_of(deployment: Deployment) -> dict[str, Any]:
    run = doctor(deployment, "--json", "--stall-after-s", "1")
    report: dict[str, Any] = json.loads(run.stdout)
    assert run.returncode == (1 if report["state"] == "stalled" else 0), run.stdout + run.stderr
    return report


def test_idle_engine_is_healthy(deployment: Deployment) -> None:
    run = doctor(deployment)
    assert (run.returncode, run.stderr) == (0, "")
    assert "idle: no requests." in run.stdout
    assert "engine-0.1" in run.stdout


@pytest.mark.timeout(180)
def test_stopped_worker_is_a_stall_that_names_who_waits_until_it_goes_on(
    deployment: Deployment,
) -> None:
    streams = [open_stream(deployment, 1500)]
    assert report_of(deployment)["state"] == "serving"
    worker = deployment.members["worker-0"]
    worker.send_signal(signal.SIGSTOP)
    asking = threading.Thread(target=lambda: streams.append(open_stream(deployment, 5)))
    asking.start()
    try:
        wait_until(lambda: report_of(deployment)["state"] == "stalled", 30)
        printed = report_of(deployment)
        assert "the worker has not answered" in printed["verdict"]
        report = printed["report"]
        assert (report["num_running"], report["num_waiting"]) == (1, 1)
        assert report["idle_s"] >= 1
        assert report["steps_in_flight"] == 2
        (waiting,) = report["waiting"]
        assert waiting["request_id"].startswith("cmpl-")
        assert waiting["waits_for"]
        table = doctor(deployment, "--stall-after-s", "1")
        assert table.returncode == 1
        assert waiting["waits_for"] in " ".join(table.stdout.split())
    finally:
        worker.send_signal(signal.SIGCONT)
        asking.join(30)
    *_, last = streams[0]
    assert last.usage.completion_tokens == 1500
    list(streams[1])
    assert report_of(deployment)["state"] == "idle"


@pytest.mark.timeout(180)
def test_stopped_scheduler_is_a_stall_and_a_stopped_deployment_is_out_of_reach(
    start_deployment: StartDeployment,
) -> None:
    deployment = start_deployment().wait_until_ready()
    scheduler = deployment.members["scheduler"]
    scheduler.send_signal(signal.SIGSTOP)
    run = doctor(deployment)
    scheduler.send_signal(signal.SIGCONT)
    assert run.returncode == 1
    assert "the scheduler has not answered" in " ".join(run.stdout.split())
    assert doctor(deployment).returncode == 0
    assert deployment.stop() == 0, deployment.output
    gone = doctor(deployment)
    assert gone.returncode == 2
    assert "unreachable" in gone.stdout


def test_openai_client_s_request_with_an_ignored_priority_is_warned_about_once(
    start_deployment: StartDeployment,
) -> None:
    deployment = start_deployment().wait_until_ready()
    client = openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0)
    for _ in range(2):
        client.completions.create(
            model=client.models.list().data[0].id,
            prompt="x",
            max_tokens=2,
            extra_body={"priority": -1},
        )
    assert deployment.stop() == 0
    assert deployment.output.count("which the scheduling policy ignores") == 1
