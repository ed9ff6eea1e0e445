"""Two engines with real processes: a prompt goes where its prefix is."""

import re
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from longshore.deploy.supervisor.event_keys import EventKeys
from longshore.deploy.supervisor.state_dir import StateDir
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until

SAMPLE = re.compile(r"^longshore_routing_(\w+?)(?:_total)?(?:\{(.*)\})? (\S+)$", re.MULTILINE)
PREFIX_AWARE = ("--replicas", "2", "--routing-policy", "prefix_aware")


def is_ready(deployment: Deployment) -> bool:
    try:
        with urllib.request.urlopen(f"{deployment.url}/ready", timeout=60):
            return True
    except OSError:  # also a status 503
        return False


def prompt(number: int, length: int = 200) -> list[int]:
    """Prompts that differ from the first token on."""
    return [3 + (7 * number + 5 * i) % 90 for i in range(length)]


def metrics(deployment: Deployment) -> str:
    with urllib.request.urlopen(f"{deployment.url}/metrics", timeout=60) as response:
        text: str = response.read().decode()
    return text


def routing(deployment: Deployment, name: str, **labels: str) -> float:
    """The sum of a routing metric's samples with these labels, over gateways."""
    wanted = {f'{label}="{value}"' for label, value in labels.items()}
    return sum(
        float(value)
        for found, given, value in SAMPLE.findall(metrics(deployment))
        if found == name and wanted <= set(given.split(","))
    )


def ask(deployment: Deployment, tokens: list[int], **settings: Any) -> Any:
    with openai.OpenAI(
        base_url=f"{deployment.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        return client.completions.create(
            model=client.models.list().data[0].id,
            prompt=tokens,
            max_tokens=2,
            temperature=0,
            **settings,
        )


def num_cached(answer: Any) -> int:
    details = answer.usage.prompt_tokens_details
    return 0 if details is None else int(details.cached_tokens)


def num_known(deployment: Deployment) -> float:
    return routing(deployment, "index_blocks")


def ask_until_known(deployment: Deployment, tokens: list[int]) -> Any:
    """Ask, and wait until the gateways know what the engine has stored."""
    before = num_known(deployment)
    answer = ask(deployment, tokens)
    wait_until(lambda: num_known(deployment) >= before + len(tokens) // 16)
    return answer


@pytest.mark.req("MET-02")
def test_a_prompt_goes_to_the_engine_that_has_its_prefix(start_deployment: StartDeployment) -> None:
    """Least loaded engines would take turns. The other prompts in between change the turn."""
    deployment = start_deployment(*PREFIX_AWARE).wait_until_ready()
    for number in range(5):
        assert num_cached(ask_until_known(deployment, prompt(number))) == 0
    assert routing(deployment, "decisions", reason="load") == 5
    for number in (0, 3, 1, 4, 2):
        answer = ask(deployment, [*prompt(number), 5, 6, 7])
        assert num_cached(answer) == 192
    assert routing(deployment, "decisions", reason="prefix") == 5
    assert routing(deployment, "decisions", engine="0") > 0
    assert routing(deployment, "decisions", engine="1") > 0
    assert routing(deployment, "decisions", reason="unknown") == 0
    assert routing(deployment, "engine_known") == 2
    salted = ask(deployment, prompt(0), extra_body={"cache_salt": "another"})
    assert num_cached(salted) == 0


@pytest.mark.slow
def test_a_gateway_that_is_restarted_knows_what_the_engines_have(
    start_deployment: StartDeployment,
) -> None:
    deployment = start_deployment(*PREFIX_AWARE).wait_until_ready()
    for number in range(4):
        ask_until_known(deployment, prompt(number))
    victim: psutil.Process = deployment.members["gateway"]
    victim.send_signal(signal.SIGKILL)
    victim.wait(PATIENCE_S)
    wait_until(lambda: is_ready(deployment))
    answers = [ask(deployment, [*prompt(number), 5]) for number in range(4)]
    assert [num_cached(answer) for answer in answers] == [192] * 4
    assert routing(deployment, "decisions", reason="prefix") == 4
    assert routing(deployment, "decisions") == 4


@pytest.mark.slow
def test_nothing_is_known_of_an_engine_that_is_restarted(
    start_deployment: StartDeployment,
) -> None:
    deployment = start_deployment(*PREFIX_AWARE, "--no-kv-adoption").wait_until_ready()
    for number in range(4):
        ask_until_known(deployment, prompt(number))
    before = num_known(deployment)
    victim: psutil.Process = deployment.members["scheduler-0"]
    victim.send_signal(signal.SIGKILL)
    wait_until(lambda: routing(deployment, "event_snapshots", engine="0") >= 2)
    wait_until(lambda: routing(deployment, "engine_known") == 2)
    wait_until(lambda: 0 < num_known(deployment) < before)
    answers = [ask(deployment, [*prompt(number), 5]) for number in range(4)]
    cached = sorted(num_cached(answer) for answer in answers)
    assert cached == [0, 0, 192, 192]


@pytest.mark.parametrize(
    "has_keys",
    [
        pytest.param(False, id="private", marks=pytest.mark.slow),
        pytest.param(True, id="keys"),
    ],
)
def test_two_gateways_know_the_same(
    start_deployment: StartDeployment, tmp_path: Path, has_keys: bool
) -> None:
    """With keys of KV events, gateways need no entry in the list of subscribers."""
    if has_keys:
        (tmp_path / "state").mkdir(mode=0o700)
        EventKeys(StateDir(tmp_path / "state")).authorize("m", is_new=True, today="2026-01-31")
    deployment = start_deployment(
        *PREFIX_AWARE, "--gateways", "2", "--state-dir", str(tmp_path / "state")
    ).wait_until_ready()
    ask(deployment, prompt(0))
    wait_until(lambda: num_known(deployment) == 2 * (200 // 16))
    for _ in range(8):  # through both gateways, except in one of 128 runs
        assert num_cached(ask(deployment, [*prompt(0), 5])) == 192


def engine_of(deployment: Deployment, act: Callable[[], Any]) -> str:
    """The engine to which a request is sent."""
    before = {e: routing(deployment, "decisions", engine=e) for e in "01"}
    act()
    (engine,) = [e for e in "01" if routing(deployment, "decisions", engine=e) > before[e]]
    return engine


@pytest.mark.slow
def test_requests_of_a_session_go_to_one_engine(start_deployment: StartDeployment) -> None:
    deployment = start_deployment(
        "--replicas", "2", "--routing-policy", "session_affinity",
        "--routing-session-header", "x-conversation",
    ).wait_until_ready()  # fmt: skip

    def engines_of(**settings: Any) -> set[str]:
        return {
            engine_of(deployment, lambda: ask(deployment, prompt(0), **settings)) for _ in range(3)
        }

    chosen = set()
    for number in range(6):
        name = f"session {number}"
        by_header = engines_of(extra_headers={"X-Conversation": name}, user="ignored")
        assert len(by_header) == 1
        assert engines_of(extra_body={"prompt_cache_key": name}, user="ignored") == by_header
        assert engines_of(user=name) == by_header
        chosen |= by_header
    assert chosen == {"0", "1"}
    assert len(engines_of()) == 2
