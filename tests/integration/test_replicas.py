"""Two engines behind two gateways: one port, the same tokens, complete metrics, no process
remains."""

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from longshore.deploy.bench.options import ServeBenchOptions
from longshore.deploy.bench.serve import run as run_bench
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until
from tests.integration.test_process_life import assert_same, open_stream, rest_of
from tests.integration.test_serving import reference

TWO_BY_TWO: Final = ("--replicas", "2", "--gateways", "2")
NUM_TOKENS: Final = 8
SAMPLE = re.compile(r'(\w+)\{(?:.*,)?(?:gateway|engine)="(\d)"(?:,.*)?\} (\S+)')


@pytest.fixture(scope="module")
def shared(
    tiny_model: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    with Deployment(tiny_model[0], tmp_path_factory.mktemp("two"), *TWO_BY_TWO) as deployment:
        yield deployment.wait_until_ready()
        assert deployment.stop() == 0, deployment.output
        deployment.assert_nothing_is_left()


def get(deployment: Deployment, path: str, timeout_s: float = PATIENCE_S) -> str:
    with urllib.request.urlopen(f"{deployment.url}{path}", timeout=timeout_s) as response:
        text: str = response.read().decode()
    return text


def by_process(deployment: Deployment, name: str) -> list[float]:
    """The sum of a metric's values over gateways or engines."""
    values = [0.0, 0.0]
    for sample, number, value in SAMPLE.findall(get(deployment, "/metrics")):
        if sample == name:
            values[int(number)] += float(value)
    return values


def ask(deployment: Deployment, prompts: Sequence[Sequence[int]], **settings: Any) -> Any:
    """On a separate connection, which the kernel assigns to one of the gateways."""
    with openai.OpenAI(
        base_url=f"{deployment.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        return client.completions.create(
            model=deployment_model(deployment),
            prompt=prompts,  # type: ignore[arg-type]
            max_tokens=NUM_TOKENS,
            extra_body={"return_token_ids": True, "ignore_eos": True},
            **settings,
        )


def deployment_model(deployment: Deployment) -> str:
    name: str = json.loads(get(deployment, "/v1/models"))["data"][0]["id"]
    return name


@pytest.mark.slow
def test_requests_go_to_both_engines_through_both_gateways(shared: Deployment) -> None:
    def added(name: str) -> list[float]:
        return [n - b for n, b in zip(by_process(shared, name), before[name], strict=True)]

    prompts, ends = (
        "longshore_scheduler_prefix_queried_tokens_total",
        "longshore_requests_finished_total",
    )
    before = {name: by_process(shared, name) for name in (prompts, ends)}
    with ThreadPoolExecutor(4) as threads:
        for _ in range(24):
            threads.submit(ask, shared, [[5, 6, 7]])
    wait_until(lambda: sum(added(ends)) == 24)  # counted after the answer
    assert min(added(ends)) > 0  # all requests go through one gateway in one of 2 ** 23 runs
    wait_until(lambda: min(added(prompts)) > 0)  # engines report once a second


def test_tokens_are_those_of_one_engine(shared: Deployment, tiny_model: tuple[Path, Any]) -> None:
    prompts = [list(range(20 + 3 * i, 50 + i)) for i in range(6)]
    before = by_process(shared, "longshore_scheduler_steps_total")
    choices = ask(shared, prompts, temperature=0).choices
    expected = [reference(tiny_model, prompt, NUM_TOKENS) for prompt in prompts]
    assert [choice.token_ids for choice in choices] == expected
    # The prompts of one request are distributed.
    wait_until(
        lambda: all(
            now > then
            for now, then in zip(
                by_process(shared, "longshore_scheduler_steps_total"), before, strict=True
            )
        )
    )


def test_samples_of_a_prompt_are_the_same_wherever_they_are_computed(shared: Deployment) -> None:
    prompt = list(range(30, 90))
    answers = [ask(shared, [prompt], n=3, temperature=1.0, seed=11) for _ in range(4)]
    tokens = [[choice.token_ids for choice in answer.choices] for answer in answers]
    assert tokens == [tokens[0]] * 4
    assert len(set(map(tuple, tokens[0]))) == 3


def test_metrics_of_the_gateways_add_up(shared: Deployment) -> None:
    before = by_process(shared, "longshore_generated_tokens_total")
    for _ in range(5):
        ask(shared, [[5, 6, 7]])
    added = sum(by_process(shared, "longshore_generated_tokens_total")) - sum(before)
    assert added == 5 * NUM_TOKENS
    assert by_process(shared, "longshore_gateway_up") == [1, 1]
    series = re.findall(r"^(\w.*) ", get(shared, "/metrics"), re.MULTILINE)
    assert len(series) == len(set(series))


def test_the_report_is_of_one_engine_or_of_all(shared: Deployment) -> None:
    reports = json.loads(get(shared, "/engine/report"))
    assert [report["engine_id"] for report in reports] == ["engine-0.1", "engine-1.1"]
    assert json.loads(get(shared, "/engine/report?engine=1"))["engine_id"] == "engine-1.1"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(shared, "/engine/report?engine=2")


def test_doctor_top_and_bench_see_one_server(shared: Deployment, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "longshore.deploy"]
    doctor = subprocess.run(
        [*command, "doctor", "--engine", shared.url],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert doctor.returncode == 0, doctor.stderr
    assert "engine-0.1 is idle" in doctor.stdout
    assert "engine-1.1 is idle" in doctor.stdout
    result_file = tmp_path / "result.json"
    run_bench(
        ServeBenchOptions(
            url=shared.url, num_prompts=6, input_len=20, output_len=5, json=result_file
        )
    )
    assert json.loads(result_file.read_text())["completed"] == 6

    def top_shows_all_blocks() -> bool:
        top = subprocess.run(
            [*command, "top", "--url", shared.url, "--num-looks", "1"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert top.returncode == 0, top.stderr
        return "1,198 free" in top.stdout

    wait_until(top_shows_all_blocks)  # engines report once a second


def test_the_ready_message_tells_what_each_engine_holds(shared: Deployment) -> None:
    (line,) = (line for line in shared.output.splitlines() if "ready at" in line)
    assert "2 gateways, 2 engines, each with a KV cache of 9,584 tokens" in line
    assert "KV cache: 2 engines, each with 600 blocks of 16 tokens" in shared.output
    assert set(shared.members) == {
        "supervisor", "worker-0.0", "worker-1.0", "scheduler-0", "scheduler-1", "gateway-0",
        "gateway-1",
    }  # fmt: skip


@pytest.mark.slow
def test_a_gateway_that_hangs_is_noted_and_costs_the_others_little(shared: Deployment) -> None:
    shared.members["gateway-1"].send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: _up(shared) == [1, 0])
        wait_until(lambda: "gateway 1 does not answer" in _not_ready(shared))
    finally:
        shared.members["gateway-1"].send_signal(signal.SIGCONT)
    assert by_process(shared, "longshore_gateway_up") == [1, 1]
    assert get(shared, "/ready") == "ready\n"


def _up(deployment: Deployment) -> list[float]:
    """Empty if the kernel assigned the connection to the gateway that hangs."""
    try:
        text = get(deployment, "/metrics", timeout_s=2)
    except OSError:
        return []
    return [float(value) for name, _, value in SAMPLE.findall(text) if name.endswith("gateway_up")]


def _not_ready(deployment: Deployment) -> str:
    try:
        return get(deployment, "/ready", timeout_s=2)
    except urllib.error.HTTPError as error:
        return error.read().decode()
    except OSError:
        return ""


@pytest.mark.slow
def test_an_engine_that_is_slow_gets_less_to_do(shared: Deployment) -> None:
    num_prompts = 40
    worker = shared.members["worker-0.0"]
    worker.send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(num_prompts) as threads:
            answers: list[Future[Any]] = []
            for _ in range(num_prompts):
                answers.append(threads.submit(ask, shared, [[9] * 40], temperature=0))
                wait(answers[-1:], timeout=1)  # an answer comes at once, or with the slow engine
            # With a blind choice it would be half of them.
            wait_until(lambda: 0 < sum(not a.done() for a in answers) <= num_prompts // 5)
            worker.send_signal(signal.SIGCONT)
            tokens = [answer.result(60).choices[0].token_ids for answer in answers]
    finally:
        worker.send_signal(signal.SIGCONT)
    assert tokens == [tokens[0]] * num_prompts


@pytest.mark.slow
def test_told_to_stop_all_gateways_finish_their_streams_and_answer_who_waits_at_the_door(
    start_deployment: StartDeployment,
) -> None:
    deployment = start_deployment(*TWO_BY_TWO).wait_until_ready()
    streams = [open_stream(deployment, 400) for _ in range(6)]
    gateways = [deployment.members[f"gateway-{number}"] for number in range(2)]
    for gateway in gateways:
        gateway.send_signal(signal.SIGSTOP)
    waiting = [at_the_door(deployment) for _ in range(8)]
    deployment.process.terminate()
    wait_until(lambda: "running requests have" in deployment.output)
    for gateway in gateways:
        gateway.send_signal(signal.SIGCONT)
    for connection in waiting:
        with connection:
            assert connection.recv(12) == b"HTTP/1.1 200"
    for stream in streams:
        *_, last = stream
        assert last.usage.completion_tokens == 400
    assert deployment.process.wait(timeout=PATIENCE_S) == 0, deployment.output
    deployment.assert_nothing_is_left()


def at_the_door(deployment: Deployment) -> socket.socket:
    """A connection with a request that no gateway has accepted yet."""
    url = urllib.parse.urlsplit(deployment.url)
    connection = socket.create_connection((url.hostname, url.port), timeout=PATIENCE_S)
    body = b'{"prompt": "x", "max_tokens": 2}'
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    return connection


@pytest.mark.slow
def test_a_gateway_that_returns_while_an_engine_is_down_serves_with_the_other(
    start_deployment: StartDeployment,
) -> None:
    deployment = start_deployment("--replicas", "2").wait_until_ready()
    deployment.members["scheduler-0"].suspend()
    deployment.members["gateway"].kill()
    wait_until(lambda: "gateway is ready again" in deployment.output)
    assert len(ask(deployment, [[5, 6, 7]] * 2).choices) == 2
    deployment.members["scheduler-0"].resume()
    steps = "longshore_scheduler_steps_total"
    wait_until(
        lambda: bool(ask(deployment, [[5, 6, 7]] * 2)) and by_process(deployment, steps)[0] > 0
    )
    deployment.find_members()
    assert deployment.stop() == 0
    deployment.assert_nothing_is_left()


def test_the_other_engine_takes_over_the_streams_of_one_that_is_killed(
    start_deployment: StartDeployment,
) -> None:
    deployment = start_deployment(*TWO_BY_TWO, "--dtype", "float32").wait_until_ready()
    streams = [open_stream(deployment, 1000) for _ in range(4)]
    deployment.members["worker-1.0"].kill()
    answers = [rest_of(stream, 1000) for stream in streams]
    for answer in answers[1:]:
        assert_same(answer, answers[0])
    assert "worker 1.0 was killed (SIGKILL)" in deployment.output
    assert "Restarting engine-1." in deployment.output
    assert "engine-0" not in deployment.output
    wait_until(lambda: "engine-1 is ready again" in deployment.output)
    deployment.find_members()
    assert deployment.stop() == 0
    deployment.assert_nothing_is_left()
