"""Which test checks a command or a block of the pages, or why no test runs it.

A new command of a program that is known here needs no entry: it is run if it sends requests to a
server and is in a block, otherwise parsed. Any other command needs a line in NOT_RUN. New blocks of
Python are run, and blocks of TOML are read as settings, unless RUN_ELSEWHERE names a separate test.
SERVERS lists what needs another server than that of the demo model; its fixture is in
tests/docs/test_commands.py.
"""

import re
from typing import Final

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from tests.conftest import ROOT
from tests.docs.blocks import Block, Command

NOT_RUN: Final = {  # by the beginning of the command
    "git clone URL": "the tests have a clone",
    "cd longshore": "the folder of the clone",
    "source ": "changes the environment of the reader's shell",
    "longshore COMMAND": "stands for every command",
    "curl -d @file.json": "only a part of a command",
    ".venv/bin/pip install": "as pip install",
    "pip install": "creates the environment of the tests; test_commands.py checks extras",
    "python -m pip ": "needs a network, and a machine with a GPU",
    "python -m cProfile": "tests/scripts/test_instructions.py runs a load without it",
    "python -m tests.worker.kernels.compiled": "tests/worker/kernels/test_compiled.py runs it",
    "python -m pytest": "an example of what not to do",
    "pytest test_host_cache.py": "runs the conformance suite, as tests/testing/ does",
    ".venv/bin/pytest": "runs this",
    ".venv/bin/mkdocs serve": "runs until it is stopped; test_site.py builds the site",
    ".venv/bin/python scripts/reference": "test_reference.py runs it",
    ".venv/bin/python scripts/compatibility": "tests/clients/ compares the table",
    "openssl rand": "makes a key for the next command",
    'curl -H "authorization: Bearer $(cat admin-key)"': "tests/integration/test_admin.py does it",
    "ray start": "tests/integration/test_ray_launcher.py starts a cluster",
    "systemctl ": "needs systemd",
    "docker ": "needs Docker; tests/scripts/test_installation.py builds the image with buildah",
    "helm ": "tests/deploy/test_kubernetes.py renders the chart",
    "kubectl ": "needs a cluster; tests/deploy/test_kubernetes.py reads the base",
    "python -m build": "tests/scripts/test_installation.py runs it",
    "grep ": "reads a file that the tests do not have",
    "lmcache server": "tests/connectors/adapters/ has a server that speaks its protocol",
    "prometheus ": "tests/integration/test_prometheus.py runs one with this configuration",
    "export ANTHROPIC_": "tests/clients/test_agents.py runs Claude Code with these variables",
    "export CLAUDE_": "tests/clients/test_agents.py runs Claude Code with these variables",
    "claude": "tests/clients/test_agents.py runs it",
    "export OPENAI_": "tests/clients/test_agents.py runs qwen-code with these variables",
    "qwen ": "tests/clients/test_agents.py runs it",
    "benchmarks/peers/": "needs other projects, which it downloads",
}
RUN_ELSEWHERE: Final = {  # by page and a part of the block: the test, which names the page
    ("docs/api.md", "anthropic"): "tests/integration/test_anthropic_client.py",
    ("docs/connectors.md", "host"): "tests/connectors/test_docs_example.py",
    ("docs/eviction.md", ""): "tests/docs/test_eviction.py",
    ("docs/kv-events.md", ""): "tests/integration/test_kv_events.py",
    ("docs/models.md", ""): "tests/docs/test_models.py",
    ("docs/python.md", "routed_experts"): "tests/integration/test_routed_experts.py",
    ("docs/tiers.md", ""): "tests/docs/test_tiers.py",
    ("docs/topology.md", ""): "tests/docs/test_topology.py",
    ("docs/tools.md", ""): "tests/integration/test_tools.py",
    ("docs/scheduling_policies.md", ""): "tests/docs/test_scheduling_policies.py",
}
SERVERS: Final = {"/v1/audio/": "speech", ".audio.": "speech"}  # fixtures, by part of the text
EXTRA: Final = re.compile(r"pip install (?:-e )?'?(?P<name>[\w.-]+)\[(?P<extra>\w+)\]'?")
CLIENTS: Final = (["chat"], ["top"], ["doctor"], ["bench", "serve"])
STANDS_FOR: Final = {
    "MODEL": str(DEMO_MODEL_DIR),
    "[MODEL]": str(DEMO_MODEL_DIR),
    "path/to/model": str(DEMO_MODEL_DIR),
    "F": "result.json",
    "N": "4",
    "T": "4",
    "D": "2",
    "KEY": "key",
    "URL": "http://127.0.0.1:8000",
}


def words_of(command: Command) -> list[str]:
    """The words as a user would type them: without a priority and a program's folder, with
    values."""
    words = [STANDS_FOR.get(word, word) for word in command.words]
    if words[0] == "chrt":
        words = words[3:]
    return [words[0].removeprefix(".venv/bin/"), *words[1:]]


def place_of(command: Command) -> str:
    """`run`, `parsed`, `program`, `extra`, or why it is not run. Raises LookupError if the command
    is unknown."""
    if EXTRA.fullmatch(command.text):
        return "extra"
    for begin, reason in NOT_RUN.items():
        if command.text.startswith(begin):
            return reason
    words = words_of(command)
    if words[0] == "longshore":
        asks = any(words[1 : 1 + len(client)] == client for client in CLIENTS)
        return "run" if asks and command.is_block else "parsed"
    if words[0] == "curl" and command.is_block:
        return "run"
    if words[0].startswith(("benchmarks/", "scripts/")):
        return "program"
    if words[0] == "python" and words[1].startswith(("benchmarks/", "scripts/")):
        return "program"
    raise LookupError(f"{command.place}: no test checks {command.text!r}; add it to {__name__}")


def server_of(text: str) -> str:
    """The fixture with the server that a command or a block needs."""
    return next((name for part, name in SERVERS.items() if part in text), "served")


def elsewhere(block: Block) -> str | None:
    """The file of the test that runs the block, if it is not tests/docs/test_commands.py."""
    page = block.page.relative_to(ROOT).as_posix()
    for (of_page, part), test in RUN_ELSEWHERE.items():
        if page == of_page and part in block.text:
            return test
    return None
