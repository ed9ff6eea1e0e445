"""Workers that die at bad moments, in a real deployment whose clients only see a pause."""

import json
import re
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

import openai
import psutil
import pytest

from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until

NUM_TOKENS = 300
OFFLOADING = [
    *("--kv-connector", "offloading"),
    *("--kv-connector-config", '{"cpu_bytes_to_use": "64MiB"}'),
]
PROMPTS = ("one", "two two", "three three three " * 20, "one")


class Answers:
    """Streams in threads, of one prompt each; every other one is seeded, the others are greedy.

    Random draws are from a few tokens: a draw from the whole vocabulary is so often near the border
    of two tokens that the rounding of another batch changes one in some runs.
    """

    def __init__(self, deployment: Deployment, prompts: Sequence[str] = PROMPTS) -> None:
        self._prompts = prompts
        self._client = openai.OpenAI(
            base_url=f"{deployment.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S * 3
        )
        self._model = self._client.models.list().data[0].id
        self.tokens: dict[int, list[int]] = {}
        self.num_cached: dict[int, int] = {}  # prompt tokens, as the last chunk says
        self.errors: list[Exception] = []
        self._threads = [
            threading.Thread(target=self._read, args=(number,)) for number in range(len(prompts))
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, number: int) -> None:
        sampling: dict[str, Any] = {"temperature": 0}
        extra: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}
        if number % 2:
            sampling = {"temperature": 1.0, "seed": number, "presence_penalty": 0.5}
            extra["top_k"] = 4
        try:
            stream = self._client.completions.create(
                model=self._model,
                prompt=self._prompts[number],
                max_tokens=NUM_TOKENS,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=extra,
                **sampling,
            )
            for chunk in stream:
                for choice in chunk.choices:
                    self.tokens.setdefault(number, []).extend(choice.token_ids or ())
                if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
                    details = chunk.usage.prompt_tokens_details
                    self.num_cached[number] = details.cached_tokens or 0
        except Exception as error:
            self.errors.append(error)

    def wait_until_running(self) -> "Answers":
        wait_until(lambda: bool(self.errors) or len(self.tokens) == len(self._threads))
        return self

    def all(self) -> dict[int, list[int]]:
        """All tokens of all streams, which must be whole."""
        for thread in self._threads:
            thread.join(PATIENCE_S * 3)
        assert self.errors == []
        assert {len(tokens) for tokens in self.tokens.values()} == {NUM_TOKENS}
        return self.tokens


def readiness(deployment: Deployment) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{deployment.url}/ready", timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def worker_of(deployment: Deployment) -> psutil.Process | None:
    """The worker that runs now, if there is one."""
    for child in deployment.process.children():
        try:
            if child.cmdline()[-1].endswith("worker-0.json"):
                return child
        except (psutil.Error, IndexError):  # it has just ended
            continue
    return None


@pytest.mark.parametrize(
    ("options", "is_adopted"),
    [
        pytest.param([], True, id="adopted"),
        pytest.param(["--speculative-config", '{"method": "suffix"}'], True, id="drafts"),
        pytest.param(["--tensor-parallel-size", "2"], True, id="two ranks", marks=pytest.mark.long),
        pytest.param(["--no-kv-adoption"], False, id="not adopted", marks=pytest.mark.long),
    ],
)
def test_the_kv_that_a_killed_worker_had_answered_is_kept(
    start_deployment: StartDeployment, options: list[str], is_adopted: bool
) -> None:
    """--poison-kv compares the checksums of adopted blocks."""
    prompts = [f"{number} " + "and so on " * 40 for number in range(8)]
    deployment = start_deployment("--dtype", "float32", "--verify-plan", "--poison-kv", *options)
    deployment.wait_until_ready()
    answers = Answers(deployment, prompts).wait_until_running()
    deployment.members["worker-0"].send_signal(signal.SIGKILL)
    tokens = answers.all()
    num_cached = sum(answers.num_cached.values())
    if is_adopted:
        assert num_cached > 400, "cached_tokens counts from the restart"
    else:
        assert num_cached == 0
    assert Answers(deployment, prompts).all() == tokens
    num_queried, num_kept = (
        metric(deployment, f"longshore_scheduler_preempted_{name}_tokens_total")
        for name in ("queried", "hit")
    )
    assert num_queried > 400
    if is_adopted:
        assert num_kept >= 0.95 * num_queried
        assert "adopted blocks are as they were recorded" in deployment.output
    else:
        assert num_kept == 0
    assert deployment.stop() == 0
    deployment.assert_nothing_is_left()


@pytest.mark.slow
def test_a_worker_that_crashes_leaves_no_kv(start_deployment: StartDeployment) -> None:
    """It may have written anything."""
    deployment = start_deployment("--dtype", "float32").wait_until_ready()
    answers = Answers(deployment).wait_until_running()
    deployment.members["worker-0"].send_signal(signal.SIGSEGV)
    tokens = answers.all()
    assert Answers(deployment).all() == tokens
    assert re.search(r"[1-4] requests wait, 0 blocks are kept", deployment.output)


@pytest.mark.slow
@pytest.mark.parametrize(
    "connector",
    [
        pytest.param([], id="device only"),
        pytest.param(OFFLOADING, id="offloading", marks=pytest.mark.long),
    ],
)
def test_a_worker_that_dies_again_while_it_is_replaced_only_prolongs_the_pause(
    start_deployment: StartDeployment, connector: list[str]
) -> None:
    """Meanwhile /ready says why, a request is aborted and another one is accepted."""
    deployment = start_deployment("--dtype", "float32", "--verify-plan", *connector)
    deployment.wait_until_ready()
    calm = Answers(deployment).all()
    answers = Answers(deployment).wait_until_running()
    former = deployment.members["worker-0"]
    assert deployment.fork_server is not None
    deployment.fork_server.kill()  # a new interpreter takes long enough to see the pause
    former.send_signal(signal.SIGKILL)
    wait_until(lambda: (worker_of(deployment) or former).pid != former.pid)
    second = worker_of(deployment)
    assert second is not None
    second.send_signal(signal.SIGSTOP)
    wait_until(lambda: readiness(deployment)[0] == 503)
    assert "worker 0 was killed (SIGKILL)" in readiness(deployment)[1]
    with pytest.raises(TimeoutError):
        complete(deployment, timeout_s=0.2)  # whose end aborts the request
    second.send_signal(signal.SIGKILL)
    assert complete(deployment, timeout_s=PATIENCE_S * 2)["usage"]["completion_tokens"] == 3
    assert answers.all() == calm
    wait_until(lambda: readiness(deployment)[0] == 200)
    pids = {name: member.pid for name, member in deployment.members.items()}
    deployment.find_members()
    replaced = {name for name, member in deployment.members.items() if member.pid != pids[name]}
    assert replaced == {"worker-0"}
    assert "Traceback" not in deployment.output
    assert deployment.stop() == 0
    deployment.assert_nothing_is_left()


def metric(deployment: Deployment, name: str) -> float:
    """Its value, when the report that has it has come."""
    with urllib.request.urlopen(f"{deployment.url}/metrics", timeout=PATIENCE_S) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def complete(deployment: Deployment, *, timeout_s: float) -> Any:
    body = {"prompt": "x", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{deployment.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return json.load(response)


@pytest.mark.slow
def test_after_too_many_deaths_the_deployment_ends_and_says_so(
    start_deployment: StartDeployment,
) -> None:
    deployment = start_deployment("--max-restarts", "1").wait_until_ready()
    answers = Answers(deployment).wait_until_running()
    former = deployment.members["worker-0"]
    former.send_signal(signal.SIGKILL)
    wait_until(lambda: (worker_of(deployment) or former).pid != former.pid)
    second = worker_of(deployment)
    assert second is not None
    second.send_signal(signal.SIGKILL)
    assert deployment.process.wait(timeout=PATIENCE_S) == 1
    last_line = deployment.output.strip().splitlines()[-1]
    assert "engine-0 has died 2 times in a row; giving up" in last_line
    wait_until(lambda: len(answers.errors) == 4)
    assert all("the engine has stopped" in str(error) for error in answers.errors)
    deployment.assert_nothing_is_left()


@pytest.mark.parametrize(
    "fault", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.long)]
)
def test_a_worker_is_replaced_without_the_fork_server_and_then_with_the_next_one(
    start_deployment: StartDeployment, fault: signal.Signals
) -> None:
    deployment = start_deployment("--dtype", "float32").wait_until_ready()
    calm = Answers(deployment).all()
    former = deployment.fork_server
    assert former is not None
    former.send_signal(fault)
    answers = Answers(deployment).wait_until_running()
    deployment.members["worker-0"].send_signal(signal.SIGKILL)
    assert answers.all() == calm
    assert not former.is_running()

    def has_another() -> bool:
        deployment.find_members()
        return deployment.fork_server not in (None, former)

    wait_until(has_another)
    answers = Answers(deployment).wait_until_running()
    deployment.members["worker-0"].send_signal(signal.SIGKILL)
    assert answers.all() == calm
    deployment.find_members()
    assert all(child.status() != psutil.STATUS_ZOMBIE for child in deployment.process.children())
    assert deployment.stop() == 0
    deployment.assert_nothing_is_left()
