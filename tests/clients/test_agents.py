"""Agents with a real server: each does a whole task with several calls of tools."""

import re
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.compatibility import PAGE, NotInstalledError
from tests.clients.whole_tasks import AGENTS, agent_server, do_task, versions_of
from tests.integration.deployment import Deployment, wait_until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agents")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Deployment]:
    with agent_server(folder) as shared:
        yield shared


def looked_up(server: Deployment) -> Counter[str]:
    """Tokens of all prompts so far (`queried`), and those of them that were cached (`hit`)."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
        text = response.read().decode()
    found = re.findall(r"^longshore_scheduler_prefix_(\w+)_tokens_total{.*} (\S+)", text, re.M)
    return Counter({kind: int(float(number)) for kind, number in found})


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if agent.is_long else [])
        for name, agent in AGENTS.items()
    ],
)
def test_an_agent_does_a_whole_task(server: Deployment, folder: Path, name: str) -> None:
    before = looked_up(server)
    try:
        version = do_task(name, server.url, folder)
    except NotInstalledError:
        pytest.skip(f"{name} is not installed; scripts/test --all installs it")
    assert versions_of(PAGE.read_text("utf-8"))[name] == version, "run scripts/compatibility"
    if AGENTS[name].has_long_prompts:
        num_turns = len(AGENTS[name].turns(folder))
        # The counters follow within a second. Without the last prompts, too few tokens are hits.
        wait_until(lambda: is_cached_again(looked_up(server) - before, num_turns))


def is_cached_again(tokens: Counter[str], num_turns: int) -> bool:
    """Whether all prompts but the first one were cached to 95 %."""
    return 0 < 0.95 * tokens["queried"] * (num_turns - 1) / num_turns <= tokens["hit"]
