"""What deployments leave whose processes were all killed at once."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from longshore.deploy.supervisor.abandoned_dirs import PREFIX
from longshore.deploy.supervisor.runtime_dir import RuntimeDir

CREATE = """
import os, signal
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
made = RuntimeDir()
print(made.path, flush=True)
signal.raise_signal(signal.SIGKILL)
"""


@pytest.fixture
def temp_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def leave(temp_dir: Path) -> Path:
    """The runtime directory of a process that was killed."""
    died = subprocess.run(
        [sys.executable, "-c", CREATE],
        env={**os.environ, "TMPDIR": str(temp_dir)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert died.returncode == -signal.SIGKILL
    return Path(died.stdout.strip())


def test_the_next_start_removes_what_a_killed_deployment_left(temp_dir: Path) -> None:
    left = leave(temp_dir)
    (left / "worker-0.json").write_text("{}")
    made = RuntimeDir()
    assert list(temp_dir.iterdir()) == [made.path]
    made.remove()
    assert list(temp_dir.iterdir()) == []


def test_the_directory_of_a_deployment_that_lives_is_not_removed(temp_dir: Path) -> None:
    living, new = RuntimeDir(), RuntimeDir()
    assert living.path.exists()
    living.remove()
    new.remove()


def test_nothing_else_is_removed(temp_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    left = leave(elsewhere)
    (temp_dir / f"{PREFIX}link").symlink_to(left)
    (temp_dir / f"{PREFIX}data").mkdir()
    (temp_dir / f"{PREFIX}data" / "important").touch()
    (temp_dir / f"{PREFIX}file").touch()
    pipe = temp_dir / f"{PREFIX}pipe"
    pipe.mkdir()
    os.mkfifo(pipe / "supervisor.lock")
    found = set(temp_dir.rglob("*"))
    RuntimeDir().remove()
    assert set(temp_dir.rglob("*")) - {pipe, pipe / "supervisor.lock"} == found - {
        pipe,
        pipe / "supervisor.lock",
    }
    assert left.exists()
