"""The table of docs/compatibility.md. tests/clients/ compares it with what works."""

import json
import re

import pytest

from tests.clients.compatibility import (
    CLIENTS,
    HERE,
    NODE,
    PAGE,
    clients_of,
    environment_of,
    features_of,
    page_with,
    table,
)
from tests.clients.whole_tasks import AGENTS, page_with_agents


def pinned_versions() -> dict[str, str]:
    npm = json.loads((HERE / NODE / "package.json").read_text())["dependencies"]
    pinned = {f"npm:{name}": version for name, version in npm.items()}
    files = {path.stem: path.read_text() for path in HERE.glob("requirements/*.txt")}
    assert {*files, NODE} == set(map(environment_of, CLIENTS))
    for text in files.values():
        pinned |= re.findall(r"^([\w-]+)(?:\[\w+\])?==(.+)$", text, re.MULTILINE)
    return dict(pinned)


def pinned_agents() -> dict[str, str]:
    """By the names in AGENTS."""
    content = (HERE / "agents" / "package.json").read_text("utf-8")
    pinned = {**pinned_versions(), **json.loads(content)["dependencies"]}
    return {name: pinned[agent.package] for name, agent in AGENTS.items()}


def problems_of(page: str) -> list[str]:
    """Where the table differs from the clients' programs and their pinned versions. Also noticed
    where no client is installed."""
    documented = clients_of(page)
    pinned = pinned_versions()
    problems = [
        f"{client.package} {client.version} is not installed"
        for client in documented
        if pinned.get(client.package) != client.version
    ]
    for name, client in zip(CLIENTS, documented, strict=True):
        differing = features_of(name) ^ set(client.features)
        problems += [f"{client.package}: {feature}" for feature in sorted(differing)]
    if page_with(page, table(documented)) != page:
        problems.append("the table is not as scripts/compatibility writes it")
    if page_with_agents(page, pinned_agents()) != page:
        problems.append("the table of agents is not as scripts/compatibility writes it")
    return problems


def test_table_says_what_the_programs_use() -> None:
    assert problems_of(PAGE.read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (r"\| models \| ✓ ", "| models | "),
        (r"\| models \| ✓ \| ✓ \| \|", "| models | ✓ | ✓ | ✓ |"),
        (r"^\| models .*\n", ""),
        (r"^\| models ", "| other "),
        (r"^\| version \| \S+", "| version | 0.0.1"),
        (r"^\| version \| ", "| version |  "),
        (r"^\| \| `openai`", "| | `other`"),
        (r"`smolagents` \| \S+", "`smolagents` | 0.0.1"),
    ],
)
def test_a_wrong_table_is_noticed(right: str, wrong: str) -> None:
    page = PAGE.read_text("utf-8")
    changed, num_changes = re.subn(right, wrong, page, count=1, flags=re.MULTILINE)
    assert num_changes == 1
    assert problems_of(changed)


def test_every_client_of_the_table_is_explained() -> None:
    _, _, settings = PAGE.read_text("utf-8").partition("## Settings")
    explained = re.findall(r"^\| `([^`]+)`", settings, re.MULTILINE)
    assert explained == [client.package for client in clients_of(PAGE.read_text("utf-8"))]


def test_it_says_how_to_connect_every_agent() -> None:
    _, _, explained = PAGE.read_text("utf-8").partition("### How to point them at Longshore")
    names = {agent.package for agent in AGENTS.values()}
    assert [
        name for name in names if f"`{name}`" not in explained and f" {name}" not in explained
    ] == []
