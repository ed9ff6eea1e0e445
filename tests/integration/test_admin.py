"""`longshore admin` and `/admin` on real deployments, under load."""

import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until
from tests.integration.forks import template
from tests.integration.test_process_life import assert_same, open_stream, rest_of

ADMIN_KEY = "the-key-of-the-operator"
NUM_STREAMS = 4
NUM_TOKENS = 300
PROCESSES = [
    "worker 0.0",
    "worker 1.0",
    "scheduler 0",
    "scheduler 1",
    "gateway 0",
    "gateway 1",
]


STATUS = ["engine 0", "engine 1", *PROCESSES, "fork server"]


@pytest.fixture(scope="module")
def shared(
    tiny_model: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Two engines and two gateways. A test leaves no engine paused."""
    folder = tmp_path_factory.mktemp("admin")
    key_file = folder / "admin-key"
    key_file.write_text(f"{ADMIN_KEY}\n")
    key_file.chmod(0o600)
    flags = ["--replicas", "2", "--gateways", "2", "--dtype", "float32", "--api-key", "of-a-client"]
    flags += ["--state-dir", str(folder / "state"), "--admin-key-file", str(key_file)]
    flags += ["--enable-kv-cache-events"]
    with Deployment(tiny_model[0], folder, *flags) as deployment:
        yield deployment.wait_until_ready()
        assert deployment.stop() == 0, deployment.output
        deployment.assert_nothing_is_left()


def admin(
    deployment: Deployment, *arguments: str, status: int = 0, timeout_s: float = 3 * PATIENCE_S
) -> str:
    """What `longshore admin` prints; it finds the deployment by its temporary directory."""
    variables = {**os.environ, "TMPDIR": str(deployment.tmp_dir)}
    ended, printed = template().run(["longshore.deploy", "admin", *arguments], variables, timeout_s)
    assert ended == status, printed
    return printed


def lines(deployment: Deployment, *arguments: str, status: int = 0) -> dict[str, str]:
    """The printed messages by process."""
    printed = admin(deployment, *arguments, status=status).splitlines()
    return dict(line.split(": ", 1) for line in printed)


def ready(deployment: Deployment) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{deployment.url}/ready", timeout=PATIENCE_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def complete(deployment: Deployment, prompt: list[int], max_tokens: int = 8) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{deployment.url}/v1/completions",
        json.dumps(
            {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        ).encode(),
        {"content-type": "application/json", "authorization": "Bearer of-a-client"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer


def test_the_socket_is_private(shared: Deployment) -> None:
    (runtime_dir,) = shared.runtime_dirs
    assert runtime_dir.stat().st_mode & 0o777 == 0o700
    assert (runtime_dir / "admin.sock").stat().st_mode & 0o777 == 0o600


def test_status_names_all_processes(shared: Deployment) -> None:
    assert list(lines(shared, "status")) == STATUS
    one = lines(shared, "status", "--engine", "1")
    assert list(one) == ["engine 1", "worker 1.0", "scheduler 1"]
    assert one["engine 1"] == "unified, ready"
    answer = json.loads(admin(shared, "status", "--json"))
    by_name = {result["process"]: result for result in answer["results"]}
    assert by_name["scheduler 0"]["values"]["pid"] == shared.members["scheduler-0"].pid
    assert shared.fork_server is not None
    of_fork_server = by_name["fork server"]["values"]
    assert of_fork_server["pid"] == shared.fork_server.pid
    assert of_fork_server["resident_bytes"] > 1 << 26  # it has imported torch
    assert by_name["scheduler 0"]["values"]["pause"] == "unpaused"
    assert "engine=7 does not exist" in admin(shared, "status", "--engine", "7", status=2)
    assert "must be the number" in admin(shared, "status", "--engine", "x", status=2)


def test_a_paused_engine_gets_no_requests_and_with_all_paused_they_wait(
    shared: Deployment,
) -> None:
    assert lines(shared, "pause", "--engine", "0", "--mode", "keep") == {
        "scheduler 0": "paused by the operator; 0 requests run, 0 wait"
    }
    assert ready(shared)[0] == 200
    for _ in range(3):
        complete(shared, [5, 6, 7])
    assert list(lines(shared, "pause", "--mode", "wait")) == ["scheduler 0", "scheduler 1"]
    wait_until(lambda: ready(shared)[0] == 503)
    assert "paused by the operator; requests wait" in ready(shared)[1]
    answers: list[dict[str, Any]] = []
    client = threading.Thread(target=lambda: answers.append(complete(shared, [5, 6, 7])))
    client.start()
    wait_until(lambda: any("1 wait" in line for line in lines(shared, "status").values()))
    assert answers == []
    admin(shared, "resume")
    client.join(PATIENCE_S)
    assert answers[0]["usage"]["completion_tokens"] == 8
    wait_until(lambda: ready(shared)[0] == 200)


def test_the_prefix_cache_is_reset_on_demand(shared: Deployment) -> None:
    prompt = list(range(20, 100))

    def num_cached() -> int:
        details = complete(shared, prompt)["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"])

    admin(shared, "pause", "--engine", "1")
    num_cached()
    assert num_cached() == 64
    assert lines(shared, "reset-prefix-cache") == {
        "scheduler 0": "the prefix cache is empty",
        "scheduler 1": "the prefix cache is empty",
    }
    assert num_cached() == 0
    admin(shared, "resume")
    assert len(lines(shared, "reset-encoder-cache")) == 2
    without = lines(shared, "reset-connector-cache", "--engine", "0", status=1)
    assert "there is no connector" in without["scheduler 0"]


def test_a_snapshot_can_be_written_to_a_file_or_a_pipe(shared: Deployment, tmp_path: Path) -> None:
    complete(shared, list(range(30, 80)))
    output = tmp_path / "snapshot.jsonl"
    admin(shared, "kv-snapshot", "--output", str(output))
    objects = [json.loads(line) for line in output.read_text().splitlines()]
    heads = [each for each in objects if "snapshot_after" in each]
    assert [head["engine"] for head in heads] == [0, 1]
    assert any(each.get("type") == "BlockStored" for each in objects)
    piped = subprocess.run(
        [sys.executable, "-m", "longshore.deploy", "admin", "kv-snapshot", "--engine", "1"],
        env={**os.environ, "TMPDIR": str(shared.tmp_dir)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    assert json.loads(piped.stdout.splitlines()[0])["engine"] == 1
    assert "File exists" in admin(shared, "kv-snapshot", "--output", str(output), status=2)
    assert list(shared.runtime_dirs[0].glob("kv-snapshot*")) == []


def test_profiles_of_all_processes_are_written(shared: Deployment) -> None:
    answer = json.loads(admin(shared, "profile", "--duration-s", "0.2", "--json"))
    assert [result["process"] for result in answer["results"]] == PROCESSES
    for result in answer["results"]:
        path = Path(result["values"]["path"])
        assert path.parent == shared.tmp_dir / "state" / "profiles"
        assert "MainThread;" in path.read_text()
    (line,) = lines(shared, "profile", "--process", "worker 1.0", "--duration-s", "0.1")
    assert line == "worker 1.0"
    assert "there is no process 'x'" in admin(shared, "profile", "--process", "x", status=2)
    assert "duration_s" in admin(shared, "profile", "--duration-s", "61", status=2)


def test_the_log_level_changes_at_once(shared: Deployment) -> None:
    assert "a request has arrived" not in shared.output
    changed = lines(shared, "log-level", "debug", "--process", "scheduler 0")
    assert changed == {"scheduler 0": "logs debug and above"}
    for _ in range(4):
        complete(shared, [5, 6, 7])
    wait_until(lambda: "[scheduler 0] DEBUG" in shared.output)
    assert "[scheduler 1] DEBUG" not in shared.output
    assert list(lines(shared, "log-level", "info")) == ["supervisor", *PROCESSES]


def test_a_pause_and_a_log_level_hold_when_their_scheduler_dies(shared: Deployment) -> None:
    admin(shared, "pause", "--engine", "0", "--mode", "keep")
    admin(shared, "log-level", "debug", "--process", "scheduler 0")
    num_ready = shared.output.count("engine-0 is ready again")
    shared.members["scheduler-0"].kill()
    wait_until(lambda: shared.output.count("engine-0 is ready again") > num_ready)
    shared.find_members()
    state = lines(shared, "status", "--engine", "0")["scheduler 0"]
    assert state == "paused by the operator; 0 requests run, 0 wait"
    num_lines = shared.output.count("[scheduler 0] DEBUG")
    for _ in range(3):  # all go to the other engine
        complete(shared, [5, 6, 7])
    assert shared.output.count("[scheduler 0] DEBUG") == num_lines
    admin(shared, "resume")
    for _ in range(4):
        complete(shared, [5, 6, 7])
    wait_until(lambda: shared.output.count("[scheduler 0] DEBUG") > num_lines)
    admin(shared, "log-level", "info")


def test_the_same_actions_need_their_own_key_over_http(shared: Deployment) -> None:
    def post(key: str) -> tuple[int, bytes]:
        request = urllib.request.Request(
            f"{shared.url}/admin/reset-prefix-cache",
            b'{"engine": 1}',
            {"authorization": f"Bearer {key}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    for _ in range(4):  # connections go to both gateways
        status, body = post(ADMIN_KEY)
        assert status == 200
        assert [result["process"] for result in json.loads(body)["results"]] == ["scheduler 1"]
        assert post("of-a-client")[0] == 401


class Load:
    """Clients that ask for one stream after the other."""

    def __init__(self, deployment: Deployment) -> None:
        self.answers: list[list[tuple[int, float]]] = []
        self.failures: list[Exception] = []
        self._deployment = deployment
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(NUM_STREAMS)]

    def _ask(self) -> None:
        try:
            while not self._is_over.is_set():
                stream = open_stream(self._deployment, NUM_TOKENS, api_key="of-a-client")
                self.answers.append(rest_of(stream, NUM_TOKENS))
        except Exception as error:  # whatever a client would see
            self.failures.append(error)

    def wait_for(self, num_answers: int) -> None:
        wait_until(lambda: bool(self.failures) or len(self.answers) >= num_answers)
        assert self.failures == []

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("timeout_s", ["120", pytest.param("0", marks=pytest.mark.long)])
def test_engines_restart_one_after_the_other_under_load_and_nothing_is_lost(
    shared: Deployment, timeout_s: str
) -> None:
    """Without time to finish, streams go on at the other engine."""
    before = {name: member.pid for name, member in shared.members.items()}
    with Load(shared) as load:
        load.wait_for(NUM_STREAMS)
        for engine in (1, 0):
            answer = admin(
                shared, "restart", "--engine", str(engine), "--timeout-s", timeout_s, "--json"
            )
            (result,) = json.loads(answer)["results"]
            assert result["process"] == f"engine {engine}"
            if timeout_s != "0":  # only because new requests went to the other engine
                assert result["values"]["was_drained"] is True
            load.wait_for(len(load.answers) + 1)
    assert load.failures == []
    for answer in load.answers[1:]:
        assert_same(answer, load.answers[0])
    shared.find_members()
    changed = {name for name, member in shared.members.items() if member.pid != before[name]}
    assert changed == {"worker-0.0", "worker-1.0", "scheduler-0", "scheduler-1"}
    assert list(lines(shared, "status")) == STATUS


@pytest.mark.slow
def test_the_only_engine_is_restarted_while_requests_wait(
    start_deployment: StartDeployment,
) -> None:
    deployment = start_deployment("--dtype", "float32").wait_until_ready()
    with Load(deployment) as load:
        load.wait_for(NUM_STREAMS)
        answer = json.loads(admin(deployment, "restart", "--timeout-s", "120", "--json"))
        assert answer["results"][0]["values"]["was_drained"] is True
        load.wait_for(len(load.answers) + 1)
    assert load.failures == []
    for answer in load.answers[1:]:
        assert_same(answer, load.answers[0])
    deployment.find_members()
    stream = open_stream(deployment, NUM_TOKENS)
    assert "stopping" in admin(deployment, "drain")  # which waits for the end
    assert deployment.process.wait(PATIENCE_S) == 0, deployment.output
    rest_of(stream, NUM_TOKENS)
    deployment.assert_nothing_is_left()
    assert "no deployment of this user" in admin(deployment, "status", status=2)
