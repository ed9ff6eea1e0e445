"""The quick start: its client with a fake server, and all of it with real processes."""

import json
import shutil
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from longshore.deploy.model.demo import make_prompt
from tests.conftest import ROOT, load_script

PACKAGES = ("protocol", "scheduler", "worker", "connectors", "deploy")
first_chat = load_script("first_chat.py")


@contextmanager
def server_that_answers(text: str) -> Iterator[str]:
    """A fake gateway that streams `text`, one word per event; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_arguments: object) -> None:
            pass

        def answer(self, *lines: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write("\n".join(lines).encode())

        def do_GET(self) -> None:
            self.answer(json.dumps({"data": [{"id": "stand-in"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if body["model"] != "stand-in":
                self.send_error(404)
                return
            deltas = [{"role": "assistant"}, *({"content": word} for word in text.split("|"))]
            events = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas]
            self.answer(*(f"data: {event}\n" for event in events), "data: [DONE]\n")

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_right_answer_is_printed_with_a_curl_line(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = make_prompt(num_records=4, seed=0)
    with server_that_answers(prompt.answer.replace(" ", "| ")) as url:
        first_chat.ask(url, prompt)
    printed = capsys.readouterr().out
    assert f"> {prompt.answer}\n" in printed
    assert f"curl -N {url}/v1/chat/completions" in printed


def test_wrong_answer_is_an_error() -> None:
    prompt = make_prompt(num_records=4, seed=0)
    with (
        server_that_answers("C000 B00 plaid") as url,
        pytest.raises(first_chat.QuickstartError, match="plaid"),
    ):
        first_chat.ask(url, prompt)


def test_taken_port_is_replaced_by_a_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with server_that_answers("") as url:
        taken = int(url.rpartition(":")[2])
        monkeypatch.setattr(first_chat, "DEFAULT_PORT", taken)
        assert first_chat.choose_port() not in (taken, 0)


def test_log_of_a_server_that_dies_at_start_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = tmp_path / "longshore"
    command.write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "argv", ["first_chat.py", "--once"])
    assert first_chat.main() == 1
    assert "no such model\nscripts/quickstart: the server ended with exit code 3" in (
        capsys.readouterr().err
    )


def answer_once(python: Path, folder: Path) -> str:
    """Run the quick start's client with `python`, outside the tree; return its output."""
    command = [str(python), "-P", str(ROOT / "scripts" / "first_chat.py"), "--once"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_quickstart_answers_right_and_ends(tmp_path: Path) -> None:
    assert "The answer is correct." in answer_once(Path(sys.executable), tmp_path)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tree, because a build folder in the tree could contain
    old files."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in ("src", *PACKAGES):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tree / "dist"), str(tree)]
    subprocess.run(command, check=True, timeout=180)
    (built,) = (tree / "dist").glob("*.whl")
    return built


@pytest.mark.slow
def test_wheel_holds_every_module_the_demo_model_and_the_dashboard(wheel: Path) -> None:
    expected = {"longshore/__init__.py", "longshore/py.typed"}
    for package in PACKAGES:
        files = [
            path
            for pattern in ("**/*.py", "demo_model/*", "gateway/dashboard/dashboard.*")
            for path in (ROOT / package).glob(pattern)
        ]
        expected |= {f"longshore/{path.relative_to(ROOT).as_posix()}" for path in files}
    # These files have one name: the link src/longshore/testing gives them theirs.
    expected = {
        name.replace("longshore/deploy/testing/", "longshore/testing/") for name in expected
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert "longshore/deploy/demo_model/model.safetensors" in packed
    assert packed == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_wheel_answers_from_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = ROOT / "constraints.txt"
    subprocess.run([*pip, "--constraint", str(constraints), str(wheel)], check=True, timeout=500)
    assert "The answer is correct." in answer_once(python, tmp_path)
