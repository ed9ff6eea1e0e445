"""`longshore doctor` on real processes: serving, stalled, serving again, unreachable."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from typing import Any

import openai
import pytest

from tests.conftest import ROOT
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until
from tests.integration.test_process_life import open_stream


def doctor(url: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "longshore.deploy", "doctor", "--engine", url]
    return subprocess.run([*command, *flags], capture_output=True, text=True, timeout=PATIENCE_S)


def report_of(deployment: Deployment) -> dict[str, Any]:
    run = doctor(deployment.url, "--json", "--stall-after-s", "1")
    report: dict[str, Any] = json.loads(run.stdout)
    assert run.returncode == (1 if report["state"] == "stalled" else 0), run.stdout + run.stderr
    return report


def test_idle_engine_is_healthy(deployment: Deployment) -> None:
    run = doctor(deployment.url)
    assert (run.returncode, run.stderr) == (0, "")
    assert "idle: no requests." in run.stdout
    assert "engine-0.1" in run.stdout


@pytest.mark.slow
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
        wait_until(lambda: report_of(deployment)["state"] == "stalled")
        printed = report_of(deployment)
        assert "the worker has not answered" in printed["verdict"]
        report = printed["report"]
        assert (report["num_running"], report["num_waiting"]) == (1, 1)
        assert report["idle_s"] >= 1
        assert report["steps_in_flight"] == 2
        (waiting,) = report["waiting"]
        assert waiting["request_id"].startswith("cmpl-")
        assert waiting["waits_for"]
        table = doctor(deployment.url, "--stall-after-s", "1")
        assert table.returncode == 1
        assert waiting["waits_for"] in " ".join(table.stdout.split())
    finally:
        worker.send_signal(signal.SIGCONT)
        asking.join(PATIENCE_S)
    *_, last = streams[0]
    assert last.usage.completion_tokens == 1500
    list(streams[1])
    assert report_of(deployment)["state"] == "idle"


def test_stopped_scheduler_is_a_stall_until_it_goes_on(deployment: Deployment) -> None:
    scheduler = deployment.members["scheduler"]
    scheduler.send_signal(signal.SIGSTOP)
    try:
        run = doctor(deployment.url)
    finally:
        scheduler.send_signal(signal.SIGCONT)
    assert run.returncode == 1
    assert "the scheduler of engine 0 has not answered" in " ".join(run.stdout.split())
    assert doctor(deployment.url).returncode == 0


@pytest.mark.parametrize("connector", ["NeverKnows", "NeverLoads"])
def test_the_first_request_of_a_connector_that_never_answers_is_a_stall_that_names_it(
    start_deployment: StartDeployment, connector: str
) -> None:
    name = f"tests.integration.closing_tier:{connector}"
    waits = ("--min-load-wait-s", "300", "--load-timeout-s", "300")
    environment = {"PYTHONPATH": str(ROOT)}
    deployment = start_deployment("--kv-connector", name, *waits, environment=environment)
    deployment.wait_until_ready()
    body = json.dumps({"prompt": [7] * 40, "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{deployment.url}/v1/completions", body, headers)

    def ask() -> None:
        with contextlib.suppress(OSError):  # it is aborted at the end
            urllib.request.urlopen(request, timeout=PATIENCE_S).close()

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: report_of(deployment)["state"] == "stalled")
    printed = report_of(deployment)
    assert printed["report"]["steps_in_flight"] == 0
    assert connector in printed["report"]["waiting"][0]["waits_for"]
    assert f"connector {connector}" in printed["verdict"]
    wait_until(lambda: "request waits for" in deployment.output)
    assert "stalled: no request has advanced for 1" in deployment.output
    (line,) = [line for line in deployment.output.splitlines() if "request waits for" in line]
    assert f"connector {connector}" in line
    deployment.process.terminate()
    wait_until(lambda: "stopping (SIGTERM)" in deployment.output)
    deployment.process.send_signal(signal.SIGINT)  # it does not wait for the request
    asking.join(PATIENCE_S)
    assert deployment.process.wait(timeout=PATIENCE_S) == 0, deployment.output
    deployment.assert_nothing_is_left()


def test_an_address_where_nothing_listens_is_unreachable() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        run = doctor(f"http://127.0.0.1:{closed.getsockname()[1]}")
    assert run.returncode == 2
    assert "unreachable" in run.stdout


def test_openai_client_s_request_with_an_ignored_priority_is_warned_about_once(
    deployment: Deployment,
) -> None:
    client = openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0)
    for _ in range(2):
        client.completions.create(
            model=client.models.list().data[0].id,
            prompt="x",
            max_tokens=2,
            extra_body={"priority": -1},
        )
    warning = "which the scheduling policy ignores"
    wait_until(lambda: warning in deployment.output)
    assert deployment.output.count(warning) == 1
