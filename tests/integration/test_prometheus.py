"""A served model with Prometheus: scraped metrics, the dashboard's expressions, the alerts."""

import json
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.bench.options import ServeBenchOptions
from longshore.deploy.bench.serve import run as run_bench
from tests.deploy.grafana_board import FOLDER, expressions
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until

pytestmark = pytest.mark.services


def promtool(*arguments: str, text: bytes | None = None) -> None:
    done = subprocess.run(
        ["promtool", *arguments], input=text, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    assert done.stderr == b""


def put_to_work(deployment: Deployment, folder: Path) -> None:
    """Send requests with a common prefix, and read their answers."""
    run_bench(
        ServeBenchOptions(
            url=deployment.url, num_prompts=24, shared_prefix=64, json=folder / "result.json"
        )
    )


class Prometheus:
    """A Prometheus that scrapes one server, with the rules and the settings of deploy/grafana."""

    def __init__(self, target: str, folder: Path) -> None:
        config = (FOLDER / "prometheus.yml").read_text()
        for name, value in (
            ("scrape_interval: 5s", "scrape_interval: 1s"),
            ("127.0.0.1:8000", target),
        ):
            assert name in config
            config = config.replace(name, value)
        shutil.copy(FOLDER / "alerts.yml", folder)
        (folder / "prometheus.yml").write_text(config)
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self._url = f"http://{address}"
        self._log = (folder / "log.txt").open("wb")
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stderr=self._log,
        )

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=PATIENCE_S) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def ask(self, path: str, **query: str) -> Any:
        """The `data` of an answer. Raises HTTPError for a bad query."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
            answer = json.load(response)
        assert answer["status"] == "success"
        assert "warnings" not in answer
        return answer["data"]

    def value(self, expression: str) -> float | None:
        """The value of a sum; None if there are no series."""
        result = self.ask("query", query=expression)["result"]
        return float(result[0]["value"][1]) if result else None

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self._log.close()


@pytest.fixture(scope="module")
def prometheus(
    deployment: Deployment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    target = urllib.parse.urlsplit(deployment.url).netloc
    watching = Prometheus(target, tmp_path_factory.mktemp("prometheus"))
    try:
        wait_until(watching.is_ready, timeout_s=30)
        yield watching
    finally:
        watching.close()


def test_metrics_of_a_busy_server_follow_the_conventions(
    deployment: Deployment, tmp_path: Path
) -> None:
    put_to_work(deployment, tmp_path)
    with urllib.request.urlopen(f"{deployment.url}/metrics", timeout=PATIENCE_S) as response:
        text = response.read()
    # vLLM's names are not as Prometheus recommends.
    promtool("check", "metrics", text=re.sub(rb"(?m)^(# \w+ )?vllm:.*\n", b"", text))


def test_settings_and_rules_are_valid_and_the_rules_do_as_their_tests_say() -> None:
    promtool("check", "config", str(FOLDER / "prometheus.yml"))
    promtool("check", "rules", str(FOLDER / "alerts.yml"))
    promtool("test", "rules", str(FOLDER / "alerts_test.yml"))


def test_prometheus_answers_every_expression_of_the_board(
    prometheus: Prometheus, deployment: Deployment, tmp_path: Path
) -> None:
    wait_until(lambda: prometheus.value("sum(longshore_ready)") == 1, timeout_s=30)
    put_to_work(deployment, tmp_path)
    steps = "sum(rate(longshore_worker_step_seconds_count[1m]))"
    wait_until(lambda: (prometheus.value(steps) or 0.0) > 0, timeout_s=30)
    silent = []
    for expression in expressions():
        if not prometheus.ask("query", query=expression)["result"]:
            silent.append(expression)
    # Some series exist only on some servers: a GPU's memory, offloaded KV.
    others = [line for line in silent if "device_memory" not in line and "_kv_" not in line]
    assert others == []


def test_prometheus_evaluates_every_rule_and_a_server_that_is_well_fires_none(
    prometheus: Prometheus,
) -> None:
    wait_until(lambda: prometheus.value("sum(longshore_ready)") == 1, timeout_s=30)
    (group,) = prometheus.ask("rules")["groups"]
    assert len(group["rules"]) == 7
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}  # not evaluated yet
    assert prometheus.ask("alerts")["alerts"] == []
