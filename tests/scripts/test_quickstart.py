"""The quick start: its client with a fake server, and all of it with real processes."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from longshore.deploy.model.demo import DEMO_MODEL_DIR, make_prompt
from tests.conftest import ROOT, load_script

first_chat = load_script("first_chat.py")


@contextmanager
def server_that_answers(text: str, usage: dict[str, object] | None = None) -> Iterator[str]:
    """A fake gateway that streams `text`, one word per event, and `usage`; yields its URL."""

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
            if usage is not None:
                events.append(json.dumps({"choices": [], "usage": usage}))
            self.answer(*(f"data: {event}\n" for event in events), "data: [DONE]\n")

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_right_answer_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = make_prompt(num_records=8, seed=1)
    with server_that_answers(prompt.answer.replace(" ", "| ")) as url:
        first_chat.ask_for_a_record(url)
        first_chat.show_request(url, prompt.text)
    printed = capsys.readouterr().out
    assert f"> {prompt.answer}\n" in printed
    assert "The answer is correct." in printed
    assert f"curl {url}/v1/chat/completions" in printed


@pytest.mark.parametrize("answer", ["C000 B00 plaid", ""])
def test_wrong_answer_is_an_error(answer: str) -> None:
    with server_that_answers(answer) as url, pytest.raises(first_chat.QuickstartError):
        first_chat.ask_for_a_record(url)


def test_the_second_question_about_a_text_shows_what_was_cached(
    capsys: pytest.CaptureFixture[str],
) -> None:
    usage = {
        "prompt_tokens": 250,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 224},
    }
    with server_that_answers("It|was|white.", usage) as url:
        first_chat.ask_about_the_text(url)
    printed = capsys.readouterr().out
    assert " ".join(printed.split()).count(first_chat.TEXT) == 1
    assert printed.count("> Itwaswhite.\n") == len(first_chat.QUESTIONS)
    assert "of the prompt's 250 tokens, 224 came from the prefix cache" in printed
    with server_that_answers("") as url, pytest.raises(first_chat.QuickstartError, match="empty"):
        first_chat.ask_about_the_text(url)


def test_the_bundled_model_answers_where_no_other_can_be_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`pull` fails, and `serve` shows what it was asked for."""
    command = tmp_path / "longshore"
    command.write_text('#!/bin/sh\n[ $1 = pull ] && exit 1\necho "asked for $2"\nexit 3\n')
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "argv", ["first_chat.py", "--once"])
    assert first_chat.main() == 1
    printed = capsys.readouterr()
    assert "smollm2 could not be fetched" in printed.out
    assert f"asked for {DEMO_MODEL_DIR}" in printed.err


def test_taken_port_is_replaced_by_a_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with server_that_answers("") as url:
        taken = int(url.rpartition(":")[2])
        monkeypatch.setattr(first_chat, "DEFAULT_PORT", taken)
        assert first_chat.choose_port(None) not in (taken, 0)


def test_a_wanted_port_of_another_server_is_an_error_and_its_answer_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with server_that_answers("of another server") as url:
        port = url.rpartition(":")[2]
        monkeypatch.setattr(sys, "argv", ["first_chat.py", "--once", "--port", port])
        assert first_chat.main() == 1
    printed = capsys.readouterr()
    assert f"port {port} is taken by another server" in printed.err
    assert "of another server" not in printed.out


@pytest.mark.parametrize(
    ("has_gpu", "index", "is_warned"),
    [
        (False, None, True),
        (False, "https://download.example.org/whl/cpu", False),
        (True, None, False),
    ],
)
def test_a_cuda_download_without_a_gpu_is_warned_of(
    tmp_path: Path, has_gpu: bool, index: str | None, is_warned: bool
) -> None:
    if has_gpu:
        (tmp_path / "nvidiactl").touch()
    script = f'source {ROOT}/scripts/environment.sh; warn_of_cuda_build "{tmp_path}/nvidiactl"'
    variables = {"PATH": os.environ["PATH"], "PIP_CONFIG_FILE": os.devnull}
    if index is not None:
        variables["PIP_EXTRA_INDEX_URL"] = index
    run = subprocess.run(
        ["bash", "-c", script], env=variables, cwd=ROOT, capture_output=True, text=True
    )
    assert (run.returncode, "CUDA build of torch" in run.stderr) == (0, is_warned), run.stderr


def test_log_of_a_server_that_dies_at_start_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = tmp_path / "longshore"
    command.write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "argv", ["first_chat.py", "--once", "--demo"])
    assert first_chat.main() == 1
    assert "no such model\nscripts/quickstart: the server ended with exit code 3" in (
        capsys.readouterr().err
    )


def answer_once(python: Path, folder: Path) -> str:
    """Run the quick start's client with `python`, outside the tree; return its output."""
    command = [str(python), "-P", str(ROOT / "scripts" / "first_chat.py"), "--once", "--demo"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_quickstart_answers_right_and_ends(tmp_path: Path) -> None:
    assert "The answer is correct." in answer_once(Path(sys.executable), tmp_path)
