"""Starting, draining and dying with real processes: no process and no file remains."""

import contextlib
import shutil
import signal
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until


def open_stream(deployment: Deployment, max_tokens: int, api_key: str = "none") -> Any:
    """A stream whose first token has arrived."""
    client = openai.OpenAI(base_url=f"{deployment.url}/v1", api_key=api_key, max_retries=0)
    stream = client.completions.create(
        model=client.models.list().data[0].id,
        prompt="x",
        max_tokens=max_tokens,
        temperature=0,
        logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    next(iter(stream))
    return stream


@pytest.mark.slow
def test_drain_ends_at_its_deadline(start_deployment: StartDeployment) -> None:
    deployment = start_deployment("--drain-timeout-s", "1").wait_until_ready()
    stream = open_stream(deployment, 4000)
    begin_s = time.monotonic()
    deployment.process.terminate()
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    assert deployment.process.wait(timeout=PATIENCE_S) == 0, deployment.output
    assert time.monotonic() - begin_s < 20  # 30 s without the flag
    assert "Traceback" not in deployment.output
    deployment.assert_nothing_is_left()


def test_sigterm_to_all_processes_at_once_lets_a_live_stream_finish(
    start_deployment: StartDeployment,
) -> None:
    deployment = start_deployment().wait_until_ready()
    stream = open_stream(deployment, 400)
    for process in deployment.members.values():
        process.terminate()
    *_, last = stream
    assert last.usage.completion_tokens == 400
    assert deployment.process.wait(timeout=PATIENCE_S) == 0, deployment.output
    deployment.assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["scheduler", "worker-0"])
def test_process_that_dies_during_the_drain_is_named_and_its_streams_say_so(
    start_deployment: StartDeployment, victim: str
) -> None:
    deployment = start_deployment().wait_until_ready()
    stream = open_stream(deployment, 4000)
    deployment.process.terminate()
    wait_until(lambda: "running requests have" in deployment.output)
    deployment.members[victim].kill()
    with pytest.raises(openai.APIError, match="the engine has stopped"):
        list(stream)
    assert deployment.process.wait(timeout=PATIENCE_S) == 1, deployment.output
    name = victim.replace("-", " ")
    assert f"{name} died (SIGKILL) while gateway was stopping" in deployment.output
    assert "killing gateway" not in deployment.output
    deployment.assert_nothing_is_left()


@pytest.mark.slow
def test_second_signal_cuts_the_drain_short(start_deployment: StartDeployment) -> None:
    deployment = start_deployment().wait_until_ready()
    open_stream(deployment, 4000)
    deployment.process.terminate()
    wait_until(lambda: "30 s to finish; press Ctrl-C again to abort them" in deployment.output)
    deployment.process.send_signal(signal.SIGINT)
    assert deployment.process.wait(timeout=20) == 0, deployment.output
    assert deployment.output.splitlines()[-1].endswith("stopped")
    deployment.assert_nothing_is_left()


def restarts_of(deployment: Deployment) -> dict[tuple[str, str], float]:
    """The counts of /metrics by process and reason, without zeros."""
    with urllib.request.urlopen(f"{deployment.url}/metrics", timeout=PATIENCE_S) as response:
        text = response.read().decode()
    return {
        (sample.labels["process"], sample.labels["reason"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "longshore_process_restarts_total" and sample.value
    }


def rest_of(stream: Any, max_tokens: int) -> list[tuple[int, float]]:
    """The tokens after those of the first event: id, and by how much its log probability is above
    the next one's. The answer must be whole."""
    *chunks, last = stream
    assert last.usage.completion_tokens == max_tokens
    tokens: list[tuple[int, float]] = []
    for (choice,) in (chunk.choices for chunk in chunks):
        margins = [max(best.values()) - min(best.values()) for best in choice.logprobs.top_logprobs]
        tokens += zip(choice.token_ids, margins, strict=True)
    return tokens


def assert_same(answer: list[tuple[int, float]], calm: list[tuple[int, float]]) -> None:
    """The tokens are equal, up to one that rounding could decide. The first event of a stream has
    any number of tokens, so that the two are compared from their common beginning on."""
    length = min(len(answer), len(calm))
    assert length > 100
    answer, calm = answer[-length:], calm[-length:]
    for position, ((token_id, margin), (expected, _)) in enumerate(zip(answer, calm, strict=True)):
        if token_id != expected:
            assert margin < 1e-3, f"token {position} is {token_id} instead of {expected}"
            assert position > 0
            return


@pytest.mark.parametrize(
    ("victim", "fault"),
    [
        ("scheduler", signal.SIGKILL),
        ("worker-0", signal.SIGKILL),
        pytest.param("worker-0", signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("scheduler", signal.SIGSTOP, marks=pytest.mark.long),
    ],
)
def test_streams_go_on_when_a_process_of_their_engine_is_killed_or_hangs(
    start_deployment: StartDeployment, victim: str, fault: signal.Signals
) -> None:
    flags = ("--dtype", "float32", "--hang-timeout-s", "8")
    deployment = start_deployment(*flags).wait_until_ready()
    calm = rest_of(open_stream(deployment, 500), 500)
    stream = open_stream(deployment, 500)
    former = deployment.members[victim]
    former.send_signal(fault)
    assert_same(rest_of(stream, 500), calm)
    how = "was killed (SIGKILL)" if fault == signal.SIGKILL else "hangs or is stopped: it has not"
    assert f"{victim.replace('-', ' ')} {how}" in deployment.output
    assert "Restarting engine-0." in deployment.output
    assert "Traceback" not in deployment.output
    pids = {name: member.pid for name, member in deployment.members.items()}
    deployment.find_members()
    replaced = {name for name, member in deployment.members.items() if member.pid != pids[name]}
    assert replaced == {victim}
    reason = "death" if fault == signal.SIGKILL else "hang"
    assert restarts_of(deployment) == {(victim.replace("-", " "), reason): 1}
    assert deployment.stop() == 0
    deployment.assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)]
)
def test_a_gateway_that_is_killed_or_hangs_returns_on_the_same_port(
    start_deployment: StartDeployment, fault: signal.Signals
) -> None:
    deployment = start_deployment("--hang-timeout-s", "8").wait_until_ready()
    stream = open_stream(deployment, 4000)
    deployment.members["gateway"].send_signal(fault)
    with contextlib.suppress(Exception):  # it does not matter how the stream breaks off
        list(stream)
    client = openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", timeout=PATIENCE_S)
    assert client.models.list().data  # answered by the next gateway, from the port's queue
    wait_until(lambda: "gateway is ready again" in deployment.output)
    assert rest_of(open_stream(deployment, 200), 200)
    deployment.find_members()
    how = "was killed (SIGKILL)" if fault == signal.SIGKILL else "hangs or is stopped: it has not"
    assert f"gateway {how}" in deployment.output
    reason = "death" if fault == signal.SIGKILL else "hang"
    assert restarts_of(deployment) == {("gateway", reason): 1}
    assert deployment.stop() == 0
    deployment.assert_nothing_is_left()


@pytest.mark.parametrize(
    "victim",
    [
        *(pytest.param(name, marks=pytest.mark.long) for name in ("gateway", "scheduler")),
        "worker-0",
        pytest.param("supervisor", marks=pytest.mark.slow),
    ],
)
def test_without_restarts_a_killed_process_takes_all_others_along(
    start_deployment: StartDeployment, victim: str
) -> None:
    deployment = start_deployment("--max-restarts", "0").wait_until_ready()
    assert len(deployment.members) == 4
    assert len(deployment.runtime_dirs) == 1
    stream = open_stream(deployment, 4000)
    deployment.members[victim].send_signal(signal.SIGKILL)
    if victim in ("scheduler", "worker-0"):
        name = victim.replace("-", " ")
        with pytest.raises(openai.APIError, match=f"the engine has stopped: {name} was killed"):
            list(stream)
    deployment.assert_nothing_is_left()
    if victim != "supervisor":
        assert deployment.process.wait() == 1
        last_line = deployment.output.strip().splitlines()[-1]
        assert victim.replace("-", " ") in last_line
        assert "SIGKILL" in last_line
        assert "restart the server" in last_line
        assert "Traceback" not in deployment.output


def test_port_in_use_is_said_before_anything_is_loaded(start_deployment: StartDeployment) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        deployment = start_deployment(port=port)
        assert deployment.process.wait(timeout=PATIENCE_S) != 0
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in deployment.output
    assert len(deployment.output.splitlines()) == 1
    assert deployment.runtime_dirs == []


def test_broken_checkpoint_is_named_once(
    start_deployment: StartDeployment, tiny_model: tuple[Path, Any], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model[0], broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    deployment = start_deployment(model_dir=broken)
    assert deployment.process.wait(timeout=PATIENCE_S) != 0
    assert "Traceback" not in deployment.output
    last_line = deployment.output.strip().splitlines()[-1]
    assert "model.safetensors is not a complete safetensors file" in last_line
    assert deployment.output.count(last_line) == 1
    wait_until(lambda: deployment.runtime_dirs == [])


@pytest.mark.parametrize(
    "victim",
    [
        "worker-0",
        pytest.param("scheduler", marks=pytest.mark.slow),
        pytest.param("gateway", marks=pytest.mark.long),
    ],
)
def test_a_process_that_is_stopped_at_the_first_start_is_named_and_ends_it(
    start_deployment: StartDeployment, victim: str
) -> None:
    deployment = start_deployment("--hang-timeout-s", "4")
    deployment.find_members()
    while victim not in deployment.members:
        deployment.find_members()
    deployment.members[victim].suspend()
    assert deployment.process.wait(timeout=PATIENCE_S) == 1, deployment.output
    *_, last_line = deployment.output.splitlines()
    assert f"{victim.replace('-', ' ')} (" in last_line
    assert "is stopped, as by SIGSTOP or a debugger: it has not run for" in last_line
    assert "Traceback" not in deployment.output
    deployment.assert_nothing_is_left()


def test_stop_while_loading_is_no_error(start_deployment: StartDeployment) -> None:
    deployment = start_deployment()
    wait_until(lambda: len(deployment.process.children()) >= 3)
    children = deployment.process.children()
    assert deployment.stop() == 0, deployment.output
    assert not any(child.is_running() for child in children)
    wait_until(lambda: deployment.runtime_dirs == [])
