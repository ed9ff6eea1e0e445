"""Starts that cannot succeed end within seconds, with one line that says why, and leave nothing."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from longshore.deploy.machine.device import resolve_device
from tests.deploy.cli.test_wrong_starts import (
    EVERY_FOLDER,
    SLOW_TOKENIZER,
    edit_template,
    edit_tokenizer,
    split,
)
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, wait_until
from tests.integration.forks import template
from tests.integration.test_hostile_http import post, say

TORCH_CACHE: Final = "TORCHINDUCTOR_CACHE_DIR"


def serve(
    folder: Path, temp_dir: Path, *flags: str, **limits: tuple[int, int]
) -> tuple[int, list[str]]:
    """Exit status and lines of `longshore serve`, which has no time to wait for anything."""

    def set_limits() -> None:
        for name, value in limits.items():
            resource.setrlimit(getattr(resource, name), value)

    command = [
        *("longshore.deploy", "serve", str(folder), "--num-blocks", "600", *flags),
        *(() if "--threads" in flags else ("--threads", "1")),
        *(() if "--port" in flags else ("--port", "0")),
    ]
    variables = {name: value for name, value in os.environ.items() if name != TORCH_CACHE}
    variables["TMPDIR"] = str(temp_dir)
    if not limits:
        status, output = template().run(command, variables, PATIENCE_S)
        return status, output.splitlines()
    ended = subprocess.run(
        [sys.executable, "-m", *command],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        preexec_fn=set_limits,
    )
    return ended.returncode, ended.stdout.splitlines()


@pytest.fixture
def folder(tiny_model: tuple[Path, Any], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model[0], tmp_path / "model"))


@pytest.fixture
def temp_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose path is short enough for sockets."""
    return tmp_path_factory.mktemp("t")


@pytest.mark.parametrize("name", [SLOW_TOKENIZER, "width"])
def test_a_folder_that_cannot_be_served_is_refused_in_one_line(
    folder: Path, temp_dir: Path, name: str
) -> None:
    damage, reason = EVERY_FOLDER[name]
    damage(folder)
    status, lines = serve(folder, temp_dir)
    assert status == 2, lines
    (line,) = lines
    assert line.startswith("longshore: error: ")
    assert reason in line
    assert list(temp_dir.iterdir()) == []


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"RLIMIT_NOFILE": (40, 40)}, "a process may open 40 files (hard limit, ulimit -Hn)"),
        ({"RLIMIT_AS": (1 << 30, 1 << 30)}, "limited to 1.00 GiB (ulimit -v, RLIMIT_AS)"),
        ({"RLIMIT_AS": (200 << 20, 200 << 20)}, "limited to 200 MiB (ulimit -v, RLIMIT_AS)"),
        ({"RLIMIT_AS": (32 << 20, 32 << 20)}, "limited to 32 MiB (ulimit -v, RLIMIT_AS)"),
    ],
    ids=["files", "address space", "of a command", "of an interpreter"],
)
def test_limits_that_are_too_low_are_named_in_one_line(
    folder: Path, temp_dir: Path, limits: dict[str, tuple[int, int]], reason: str
) -> None:
    status, lines = serve(folder, temp_dir, **limits)
    assert status == 2, lines
    (line,) = lines
    assert reason in line
    assert list(temp_dir.iterdir()) == []


@pytest.mark.parametrize(
    ("limits", "flags", "reason"),
    [
        # The stacks of so many threads fill it.
        ({"RLIMIT_AS": (2 << 30, 2 << 30)}, ("--threads", "256"), "(ulimit -v, RLIMIT_AS)"),
        ({"RLIMIT_DATA": (200 << 20, 200 << 20)}, (), "(ulimit -d, RLIMIT_DATA)"),
    ],
    ids=["address space", "data"],
)
def test_a_limit_that_a_process_reaches_at_its_start_is_the_last_line(
    folder: Path,
    temp_dir: Path,
    limits: dict[str, tuple[int, int]],
    flags: tuple[str, ...],
    reason: str,
) -> None:
    status, lines = serve(folder, temp_dir, *flags, **limits)
    assert status == 1, lines
    assert lines[-1].startswith("longshore: error: ")
    assert reason in lines[-1]
    assert "unlimited, and limit memory with a control group" in lines[-1]
    assert not any("restart" in line for line in lines)
    assert list(temp_dir.iterdir()) == []


def test_a_device_that_the_machine_lacks_is_one_line_before_a_process_is_started(
    folder: Path, temp_dir: Path
) -> None:
    if resolve_device("auto") != "cpu":
        pytest.skip("the machine has it")
    status, lines = serve(folder, temp_dir, "--device", "cuda")
    assert status == 2, lines
    (line,) = lines
    assert line.startswith("longshore: error: device='cuda' needs a")
    assert list(temp_dir.iterdir()) == []


@pytest.mark.slow
def test_a_folder_that_costs_too_much_for_some_texts_rejects_these_and_serves_others(
    start_deployment: StartDeployment, folder: Path
) -> None:
    spec = json.loads((folder / "tokenizer.json").read_text())
    parts = [split("(x+x+)+y"), spec["pre_tokenizer"]]
    edit_tokenizer(folder, pre_tokenizer={"type": "Sequence", "pretokenizers": parts})
    edit_template(
        folder,
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    )
    served = start_deployment(model_dir=folder).wait_until_ready()
    good = {"prompt": "the ships", "max_tokens": 2}
    bad: list[tuple[str, dict[str, Any], str]] = [
        ("completions", {"prompt": "x" * 64}, "retry-limit-in-match over"),
        ("completions", {"prompt": ("x" * 21 + " ") * 1500}, "took longer than 10 s"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "loops too often"),
    ]
    for path, body, reason in bad:
        sent = json.dumps(body).encode()
        status, _, answer = say(served, post(sent, path=b"/v1/" + path.encode()))
        assert status == 400
        assert reason in json.loads(answer)["error"]["message"]
        assert say(served, post(json.dumps(good).encode()))[0] == 200
    assert served.stop() == 0, served.output
    assert "panicked" not in served.output
    assert "Traceback" not in served.output
    served.assert_nothing_is_left()


@pytest.mark.slow
def test_a_good_start_leaves_nothing_and_the_next_one_removes_what_killed_processes_left(
    start_deployment: StartDeployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TORCH_CACHE, raising=False)
    killed = start_deployment().wait_until_ready()
    members = list(killed.members.values())
    for process in members:  # so that none of them sees that another one has ended
        process.send_signal(signal.SIGSTOP)
    for process in members:
        process.kill()
    psutil.wait_procs(members, timeout=PATIENCE_S)
    (left,) = killed.runtime_dirs
    last = start_deployment().wait_until_ready()
    assert left not in last.runtime_dirs
    assert last.stop() == 0, last.output
    last.assert_nothing_is_left()
    wait_until(lambda: [path.name for path in tmp_path.iterdir()] == ["output.txt"])


@pytest.mark.slow
def test_engines_apart_whose_transport_is_not_installed_say_so(
    folder: Path, temp_dir: Path, tmp_path: Path
) -> None:
    engines = ("--prefill", "1", "--decode", "1", "--kv-connector", "moriio")
    status, lines = serve(folder, temp_dir, *engines, "--state-dir", str(tmp_path / "state"))
    assert status == 1
    assert "--kv-connector moriio needs MoRI, which cannot be imported" in lines[-1]
    assert lines[-1].endswith("Install it on a machine with ROCm: pip install amd_mori")
