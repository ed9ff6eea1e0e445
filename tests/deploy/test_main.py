"""What the command does before it imports anything: it starts the fork server."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from longshore.deploy.__main__ import needs_utf8_mode, will_serve

PROGRAM = """
import os
from longshore.deploy.supervisor.fork_server import start_first, take_first
assert take_first() is None
start_first()
first = take_first()
print(first.pid)
print(sorted(name for name in first.environment if name.startswith(("LONGSHORE_", "OPENBLAS"))))
raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve"], True),
        (["serve", "model", "--port", "0"], True),
        (["node", "--topology", "t.toml", "--name", "a"], True),
        (["serve", "--help"], False),
        (["node", "--topology", "t.toml", "--name", "a", "--check"], False),
        (["serve", "--topology", "t.toml", "--launcher", "ray"], False),
        (["top"], False),
        (["bench", "serve"], False),
        ([], False),
    ],
)
def test_only_commands_that_start_workers_begin_with_a_fork_server(
    arguments: list[str], expected: bool
) -> None:
    assert will_serve(arguments) is expected


def test_a_command_runs_in_utf8_mode_in_any_locale(tmp_path: Path) -> None:
    """An argument of two bytes is one character again, and writing to an ASCII stream works."""
    ended = subprocess.run(
        [sys.executable, "-m", "longshore", "serve", str(tmp_path / "modèle")],
        env={
            **os.environ,
            "LC_ALL": "C",
            "PYTHONUTF8": "0",
            "PYTHONCOERCECLOCALE": "0",
            "PYTHONIOENCODING": "ascii",
        },
        capture_output=True,
        check=False,
    )
    assert ended.returncode == 2
    assert rb"/mod\xe8le is neither a folder nor a model hub id" in ended.stderr


@pytest.mark.parametrize(
    ("encoding", "variables", "expected"),
    [
        ("UTF-8", {}, False),
        ("utf8", {"PYTHONUTF8": "0"}, False),
        ("ANSI_X3.4-1968", {"PYTHONUTF8": "0"}, True),
        ("ISO-8859-1", {}, True),
        ("ISO-8859-1", {"PYTHONUTF8": "1"}, False),  # -X utf8=0 wins: never in a loop
    ],
)
def test_utf8_mode_is_needed_for_other_encodings(
    encoding: str, variables: dict[str, str], expected: bool
) -> None:
    assert needs_utf8_mode(encoding, variables) is expected


def test_the_first_fork_server_has_no_settings_and_ends_with_its_command() -> None:
    """A command that ends with an error, for example."""
    ended = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM],
        env={**os.environ, "LONGSHORE_API_KEY": "secret"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 3, ended.stderr
    pid, names = ended.stdout.splitlines()
    assert names == "['OPENBLAS_NUM_THREADS']"
    assert not psutil.pid_exists(int(pid))
