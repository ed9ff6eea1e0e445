"""Starts that cannot succeed end within seconds, with one line that says why, and leave nothing."""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from longshore.deploy.machine.device import resolve_device
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, wait_until
from tests.integration.test_hostile_http import post, say

TORCH_CACHE: Final = "TORCHINDUCTOR_CACHE_DIR"


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def replace_by_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def replace_by_circle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def nest(path: Path) -> None:
    path.write_text('{"a":' * 100_000)


def serve(
    folder: Path, temp_dir: Path, *flags: str, **limits: tuple[int, int]
) -> tuple[int, list[str]]:
    """Exit status and lines of `longshore serve`, which has no time to wait for anything."""

    def set_limits() -> None:
        for name, value in limits.items():
            resource.setrlimit(getattr(resource, name), value)

    ended = subprocess.run(
        [
            *(sys.executable, "-m", "longshore.deploy", "serve", str(folder)),
            *("--num-blocks", "600", *flags),
            *(() if "--threads" in flags else ("--threads", "1")),
            *(() if "--port" in flags else ("--port", "0")),
        ],
        env={
            **{name: value for name, value in os.environ.items() if name != TORCH_CACHE},
            "TMPDIR": str(temp_dir),
        },
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


def edit_tokenizer(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_template(folder: Path, template: object) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def edit_header(folder: Path, header: bytes) -> None:
    """Replace the weights by the header of a safetensors file."""
    length = len(header).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(length + header)


def split(regex: str) -> dict[str, object]:
    pattern = {"Regex": regex}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


TENFOLD: Final = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}

BAD_TEXT_FILES: Final[dict[str, tuple[Callable[[Path], None], str]]] = {
    "regex that panics": (
        lambda folder: edit_tokenizer(folder, pre_tokenizer=split("(a|aa)+$")),
        "retry-limit-in-match over",
    ),
    "no regex": (
        lambda folder: edit_tokenizer(folder, pre_tokenizer=split("(a")),
        "end pattern with unmatched parenthesis",
    ),
    "exploding normalizers": (
        lambda folder: edit_tokenizer(
            folder, normalizer={"type": "Sequence", "normalizers": [TENFOLD] * 12}
        ),
        "cannot be used as a tokenizer",
    ),
    "table that panics": (
        lambda folder: edit_tokenizer(
            folder, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAA"}
        ),
        "Cannot parse precompiled_charsmap",
    ),
    "chunks of nothing": (
        lambda folder: edit_tokenizer(folder, pre_tokenizer={"type": "FixedLength", "length": 0}),
        "chunk size must be non-zero",
    ),
    "decoder that panics": (
        lambda folder: edit_tokenizer(
            folder, decoder={"type": "Strip", "content": "a", "start": 1, "stop": 1}
        ),
        "a decoder that is not supported",
    ),
    "decoder that grows": (
        lambda folder: edit_tokenizer(folder, decoder=TENFOLD | {"content": "a" * 1000}),
        "up to 1000 times as long",
    ),
    "no vocabulary": (
        lambda folder: edit_tokenizer(folder, model={"type": "BPE", "vocab": 5}),
        "cannot be read as a tokenizer",
    ),
    "another model": (
        lambda folder: edit_tokenizer(folder, model={"type": "Later"}),
        "cannot be used as a tokenizer",
    ),
    "nested tokenizer": (lambda folder: nest(folder / "tokenizer.json"), "nested too deeply"),
    "tokenizer is a pipe": (
        lambda folder: replace_by_pipe(folder / "tokenizer.json"),
        "it is not a regular file",
    ),
    "tokenizer is a circle": (
        lambda folder: replace_by_circle(folder / "tokenizer.json"),
        "Too many levels of symbolic links",
    ),
    "tokenizer is a device": (
        lambda folder: (
            (folder / "tokenizer.json").unlink(),
            (folder / "tokenizer.json").symlink_to("/dev/zero"),
        )[1],
        "it is not a regular file",
    ),
    "tokenizer is huge": (
        lambda folder: os.truncate(folder / "tokenizer.json", 1 << 40),
        "it has more than 268,435,456 bytes",
    ),
    "500 nested ifs": (
        lambda folder: edit_template(folder, "{% if a %}" * 500 + "{% endif %}" * 500),
        "the chat template does not compile",
    ),
    "long sum": (
        lambda folder: edit_template(folder, "{{ 1" + " + 1" * 20_000 + " }}"),
        "the chat template does not compile",
    ),
    "huge template": (
        lambda folder: edit_template(folder, "a" * (1 << 20)),
        "the chat template has 1048576 characters",
    ),
    "template is a pipe": (
        lambda folder: replace_by_pipe(folder / "chat_template.jinja"),
        "it is not a regular file",
    ),
    "nested template settings": (
        lambda folder: nest(folder / "tokenizer_config.json"),
        "nested too deeply",
    ),
    "settings of no type": (
        lambda folder: (folder / "generation_config.json").write_text('{"temperature": []}'),
        "generation_config.json",
    ),
    "end of no type": (
        lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": {}}'),
        "neither an id nor a list of ids",
    ),
    "vocabulary of no type": (lambda folder: edit(folder, vocab_size=[1]), "vocab_size"),
    "vocabulary without end": (lambda folder: edit(folder, vocab_size=10**30), "vocab_size"),
}

BAD_FOLDERS: Final[dict[str, tuple[Callable[[Path], None], str]]] = {
    "layers": (
        lambda folder: edit(folder, num_hidden_layers=10**9),
        "num_hidden_layers=1000000000 must be a number of at most 16,384",
    ),
    "nested config": (lambda folder: nest(folder / "config.json"), "nested too deeply"),
    "nested defaults": (
        lambda folder: nest(folder / "generation_config.json"),
        "nested too deeply",
    ),
    "config is a pipe": (
        lambda folder: replace_by_pipe(folder / "config.json"),
        "config.json is not readable JSON: [Errno 22] it is not a regular file",
    ),
    "weights are a pipe": (
        lambda folder: replace_by_pipe(folder / "model.safetensors"),
        "it is not a regular file",
    ),
    "config is a circle": (
        lambda folder: replace_by_circle(folder / "config.json"),
        "Too many levels of symbolic links",
    ),
    "folder is a circle": (
        lambda folder: (shutil.rmtree(folder), folder.symlink_to(folder))[1],
        "cannot be opened (Too many levels of symbolic links)",
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        *(*BAD_FOLDERS, "regex that panics", "exploding normalizers", "500 nested ifs"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in BAD_TEXT_FILES),
    ],
)
def test_a_folder_that_cannot_be_read_is_rejected_in_one_line(
    folder: Path, temp_dir: Path, name: str
) -> None:
    damage, reason = (BAD_FOLDERS | BAD_TEXT_FILES)[name]
    damage(folder)
    status, lines = serve(folder, temp_dir)
    assert status == 2, lines
    (line,) = lines
    assert line.startswith("longshore: error: ")
    assert reason in line
    assert list(temp_dir.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [*BAD_FOLDERS, *(pytest.param(name, marks=pytest.mark.long) for name in BAD_TEXT_FILES)],
)
def test_doctor_says_in_one_line_why_a_folder_cannot_be_served(
    folder: Path, temp_dir: Path, name: str
) -> None:
    damage, reason = (BAD_FOLDERS | BAD_TEXT_FILES)[name]
    damage(folder)
    ended = subprocess.run(
        [sys.executable, "-m", "longshore.deploy", "doctor", "--plan", str(folder)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode != 0, ended.stdout
    (line,) = ended.stderr.splitlines()
    assert reason in line


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


def test_what_the_machine_lacks_is_one_line_before_a_process_is_started(
    folder: Path, temp_dir: Path
) -> None:
    (folder / "broken.jinja").write_text("{% if %}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        starts = [
            (("--port", port), f"cannot listen on 127.0.0.1:{port}: Address already in use"),
            (("--chat-template", str(folder / "none.jinja")), "none.jinja"),
            (
                ("--chat-template", str(folder / "broken.jinja")),
                "the chat template does not compile",
            ),
        ]
        if resolve_device("auto") == "cpu":
            starts.append((("--device", "cuda"), "device='cuda' needs a"))
        for flags, reason in starts:
            status, lines = serve(folder, temp_dir, *flags)
            assert status == 2, lines
            (line,) = lines
            assert line.startswith("longshore: error: ")
            assert reason in line
            assert list(temp_dir.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            lambda folder: edit(folder, hidden_size=10**7, num_attention_heads=4),
            "but config.json implies",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64),
            "is not a complete safetensors file",
        ),
        (
            lambda folder: edit_header(folder, b'{"a":' * 10_000),
            "is not a complete safetensors file",
        ),
        (
            lambda folder: (
                (folder / "model.safetensors").unlink(),
                (folder / "model.safetensors.index.json").write_text(
                    '{"weight_map": {"a": "../../etc/passwd"}}'
                ),
            )[1],
            "the name of a file in the same folder",
        ),
    ],
    ids=["width", "header without end", "nested header", "weights of another folder"],
)
def test_what_only_a_process_finds_is_the_last_line(
    folder: Path, temp_dir: Path, damage: Callable[[Path], None], reason: str
) -> None:
    damage(folder)
    status, lines = serve(folder, temp_dir)
    assert status == 1, lines
    assert lines[-1].startswith("longshore: error: ")
    assert reason in lines[-1]
    assert not any("Traceback" in line for line in lines)
    assert list(temp_dir.iterdir()) == []


def open_to_others(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (open_to_others, "has mode 0777, so other users can write to it. Run: chmod 700 "),
        (os.mkfifo, "the disk tier cannot use "),
    ],
    ids=["open to others", "pipe"],
)
def test_a_disk_path_that_another_user_could_have_planted_is_the_last_line(
    folder: Path, temp_dir: Path, tmp_path: Path, plant: Callable[[Path], None], reason: str
) -> None:
    plant(tmp_path / "tier")
    tier = {"disk_path": str(tmp_path / "tier"), "disk_bytes": "32MiB"}
    options = json.dumps({"cpu_bytes_to_use": "8MiB", **tier})
    flags = ("--kv-connector", "offloading", "--kv-connector-config", options)
    status, lines = serve(folder, temp_dir, *flags, "--state-dir", str(tmp_path / "state"))
    assert status == 1, lines
    assert lines[-1].startswith("longshore: error: worker 0: ")
    assert reason in lines[-1]
    assert not any("Traceback" in line or "restart" in line for line in lines)
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
        ("completions", {"prompt": ("x" * 20 + " ") * 700}, "took longer than 10 s"),
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
