"""`longshore chat` in a pseudo-terminal, with a real server."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from tests.deploy.tiny_tokenizer import BOS, EOS, byte_level_tokenizer
from tests.integration.deployment import Deployment

WAIT_S = 60.0


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            program = [sys.executable, "-m", "longshore.deploy", *arguments]
            os.execv(sys.executable, program)
        self.screen = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, pattern: str) -> str:
        """The text on the screen up to the pattern, which is then discarded."""
        deadline_s = time.monotonic() + WAIT_S
        while (match := re.search(pattern, self.screen)) is None:
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"{pattern!r} does not appear in {self.screen!r}"
            if select.select([self._fd], [], [], left_s)[0]:
                self.screen += os.read(self._fd, 65536).decode(errors="replace")
        seen, self.screen = self.screen[: match.end()], self.screen[match.end() :]
        return seen

    def close(self) -> int:
        """The exit status; the program is killed if it does not end."""
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self._fd)
                return os.waitstatus_to_exitcode(status)
            select.select([self._fd], [], [], 0.05)
            try:
                os.read(self._fd, 65536)
            except OSError:  # the other end is closed
                continue
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError("the program did not end")


def chat(deployment: Deployment, max_tokens: int) -> Terminal:
    flags = ("--seed", "1", "--max-tokens", str(max_tokens))
    terminal = Terminal("chat", "--url", deployment.url, *flags)
    terminal.wait_for("/help lists the commands")
    terminal.wait_for("you")
    return terminal


def test_a_conversation_goes_on_until_it_is_forgotten(deployment: Deployment) -> None:
    terminal = chat(deployment, 12)
    terminal.type("/system You are a crane.\n")
    terminal.wait_for("set")
    counts = []
    for command in ("", "", "/reset\n"):
        if command:
            terminal.type(command)
            terminal.wait_for("you")  # lines that arrive together are one message
        terminal.type("hello\n")
        terminal.wait_for("model")
        terminal.wait_for("you")
        terminal.type("/stats\n")
        seen = terminal.wait_for("tokens per second(.|\n)*you")
        counts.append(int(re.search(r"prompt tokens\D+([\d,]+)", seen)[1].replace(",", "")))  # type: ignore[index]
    first, second, third = counts
    assert second > first  # the conversation has the first question and its answer
    assert third == first
    terminal.type("/nothing\n")
    terminal.wait_for("unknown command /nothing")
    terminal.wait_for("you")  # Ctrl-D before the prompt would be lost
    terminal.type("\x04")
    assert terminal.close() == 0


def test_ctrl_c_ends_the_answer_and_not_the_conversation(deployment: Deployment) -> None:
    terminal = chat(deployment, 3000)
    terminal.type("go on\n")
    terminal.wait_for(r"model\S*  .{8,}")
    terminal.type("\x03")
    terminal.wait_for(r"\(cut off\)")
    terminal.wait_for("you")
    terminal.type("/quit\n")
    assert terminal.close() == 0


def test_no_server_and_a_rejection_are_said_in_a_line() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "longshore.deploy", "chat", "--url", "http://127.0.0.1:9"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        stdin=subprocess.DEVNULL,
    )
    assert run.returncode == 1
    assert "Is `longshore serve` running there?" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_rejected_question_has_not_been_asked(deployment: Deployment) -> None:
    command = [sys.executable, "-m", "longshore.deploy", "chat", "--url", deployment.url]
    run = subprocess.run(
        [*command, "--temperature", "-1"],
        input="one\ntwo\n/stats\n",
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert run.returncode == 1
    assert run.stderr.count("temperature=-1.0 must be") == 2
    assert "all 0" in run.stdout


def test_a_pipe_gets_the_answers_and_nothing_else(deployment: Deployment) -> None:
    run = piped(deployment, "hello\nhello\n/reset\nhello\n", "--temperature", "0")
    assert (run.returncode, run.stderr) == (0, "")
    first, *_ = run.stdout.split("new conversation")
    (again,) = run.stdout.split("new conversation\n")[1:]
    assert again.endswith("\n")
    assert first.startswith(again)  # without a name of a model there is no prompt
    assert "/help" not in run.stdout


def test_a_quick_message_is_answered_without_reading_the_input(deployment: Deployment) -> None:
    run = piped(deployment, "unread\n", "--temperature", "0", "-q", "hello")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == piped(deployment, "hello\n", "--temperature", "0").stdout


def test_texts_are_continued(deployment: Deployment) -> None:
    run = piped(deployment, "hello\nhello\n", "--temperature", "0", command="complete")
    quick = piped(deployment, "unread\n", "--temperature", "0", "-q", "hello", command="complete")
    assert (run.returncode, run.stderr, quick.returncode) == (0, "", 0)
    assert run.stdout == 2 * quick.stdout != ""


def test_a_text_that_is_not_continued_is_an_error(deployment: Deployment) -> None:
    run = piped(deployment, "one\ntwo\n", "--temperature", "-1", command="complete")
    assert run.returncode == 1
    assert run.stderr.count("temperature=-1.0 must be") == 2


def test_a_model_that_the_server_has_not_is_rejected_with_what_it_has(
    deployment: Deployment,
) -> None:
    run = piped(deployment, "hello\n", "--model", "nope")
    assert run.returncode == 1
    assert "--model nope is not served" in run.stderr
    assert re.search(r" tiny\d+$", run.stderr.strip())
    assert run.stdout == ""


def piped(
    deployment: Deployment, said: str, *arguments: str, command: str = "chat"
) -> "subprocess.CompletedProcess[str]":
    program = [sys.executable, "-m", "longshore.deploy", command, "--url", f"{deployment.url}/v1"]
    return subprocess.run(
        [*program, "--max-tokens", "12", *arguments],
        input=said,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


def test_with_single_each_line_of_a_pipe_is_a_question_of_its_own(deployment: Deployment) -> None:
    run = piped(deployment, "hello\nhello\n", "--temperature", "0", "--single")
    assert (run.returncode, run.stderr) == (0, "")
    half = len(run.stdout) // 2
    assert run.stdout[:half] == run.stdout[half:] != ""


@pytest.mark.parametrize(
    ("term", "typed", "then", "question"),
    [
        # One terminal that marks a paste, and one that does not.
        ("xterm", "\x1b[200~first\nsecond\nthird\x1b[201~", "\n", "first\nsecond\nthird"),
        ("dumb", "first\nsecond\nthird\n", "", "first\nsecond\nthird"),
        ("dumb", "first\nsecond\nthird", "\n", "first\nsecond\nthird"),
        ("dumb", "first\\\n", "second\n", "first\nsecond"),
    ],
)
def test_lines_that_are_pasted_or_end_in_a_backslash_are_one_question(
    deployment: Deployment,
    monkeypatch: pytest.MonkeyPatch,
    term: str,
    typed: str,
    then: str,
    question: str,
) -> None:
    monkeypatch.setenv("TERM", term)
    terminal = chat(deployment, 4)
    terminal.type(typed)
    terminal.wait_for("first")
    terminal.type(then)
    terminal.wait_for("model")
    terminal.wait_for("you")
    terminal.type("/stats\n")
    seen = terminal.wait_for("tokens per second")
    assert "all 1" in seen
    prompt = byte_level_tokenizer().encode(f"{BOS}[user]{question}{EOS}[assistant]")
    assert re.search(rf"prompt tokens +│ {len(prompt.ids)} ", seen), seen
    terminal.type("/quit\n")
    assert terminal.close() == 0
