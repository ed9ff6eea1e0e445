"""Serve a small model that talks, ask it two questions over HTTP and print the answers as they
stream. Without a network, or with --demo, the bundled model is served, which only finds records.

Runs with the interpreter for which Longshore is installed, from a clone or from a wheel. It only
uses the `longshore` command and the OpenAI-compatible API.
"""

import argparse
import json
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from longshore.deploy.model.demo import DEMO_MODEL_DIR, make_prompt

HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8000
MAX_TOKENS: Final = 100
READY_TIMEOUT_S: Final = 120.0
ANSWER_TIMEOUT_S: Final = 60.0
SHUTDOWN_TIMEOUT_S: Final = 30.0
NUM_LOG_LINES: Final = 40
MODEL: Final = "smollm2"
TEXT: Final = (
    "Honey bees live in colonies of up to sixty thousand bees. Each colony has one queen, who lays "
    "all the eggs. The workers, who are all female, collect nectar and pollen, feed the young and "
    "guard the hive. A worker lives about six weeks in summer, and several months in winter. To "
    "tell the others where flowers are, a worker dances: the direction of the dance shows the "
    "direction of the flowers, and its length shows how far away they are. Bees visit about two "
    "million flowers to make one pound of honey. Without bees, many fruits and nuts would not "
    "grow, because bees carry the pollen from flower to flower."
)
QUESTIONS: Final = ("List three facts about the dance.", "How long does a worker live?")
"""About the text. For the second one, the KV of the text is in the prefix cache."""
LOCAL: Final = build_opener(ProxyHandler({}))  # do not use a proxy for this host


class QuickstartError(Exception):
    """The deployment did not start, or its answer is wrong."""


@contextmanager
def serve(model: str, port: int, log_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `longshore serve` with its output in `log_path`; stop all its processes on exit."""
    command = [longshore(), "serve", model, "--host", HOST, "--port", str(port)]
    with log_path.open("wb") as log:
        # Its own session: Ctrl-C in the terminal only reaches this program, which stops the server.
        server = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield server
    finally:
        server.terminate()
        try:
            server.wait(SHUTDOWN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
            raise QuickstartError(
                f"the server did not stop in {SHUTDOWN_TIMEOUT_S:.0f} s"
            ) from None


def wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    """Return when GET /ready answers 200."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise QuickstartError(f"the server ended with exit code {server.returncode}")
        try:
            with LOCAL.open(f"{url}/ready", timeout=5):
                return
        except OSError:  # not listening yet, or 503 while the model loads
            time.sleep(0.1)
    raise QuickstartError(f"the server was not ready after {READY_TIMEOUT_S:.0f} s")


def chat_body(model: str, messages: list[dict[str, str]]) -> dict[str, object]:
    """The JSON body of a streamed, greedy request."""
    return {
        "model": model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@dataclass
class Answer:
    """num_cached: tokens of the prompt whose KV was in the prefix cache. seconds: from the first
    piece of the text to the last one."""

    text: str = ""
    num_prompt_tokens: int = 0
    num_cached: int = 0
    num_tokens: int = 0
    seconds: float = 0.0


def stream_answer(url: str, body: dict[str, object], show: Callable[[str], None]) -> Answer:
    """Send the chat request, and show the pieces of the answer's text as they come."""
    request = Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    answer, began = Answer(), 0.0
    try:
        with LOCAL.open(request, timeout=ANSWER_TIMEOUT_S) as response:
            for line in response:
                event = line.decode().removeprefix("data:").strip()
                if not event or event == "[DONE]":
                    continue
                chunk = json.loads(event)
                for choice in chunk["choices"]:
                    if text := choice["delta"].get("content"):
                        began = began or time.monotonic()
                        answer.seconds = time.monotonic() - began
                        answer.text += text
                        show(text)
                if usage := chunk.get("usage"):
                    answer.num_prompt_tokens = usage["prompt_tokens"]
                    answer.num_cached = usage["prompt_tokens_details"]["cached_tokens"]
                    answer.num_tokens = usage["completion_tokens"]
    except HTTPError as error:
        reason = error.read().decode(errors="replace")
        raise QuickstartError(f"the server answered {error.code}: {reason}") from error
    return answer


def served_model(url: str) -> str:
    """The name of the server's model."""
    with LOCAL.open(f"{url}/v1/models", timeout=ANSWER_TIMEOUT_S) as response:
        return str(json.load(response)["data"][0]["id"])


def choose_port(wanted: int | None) -> int:
    """The wanted port; else DEFAULT_PORT, or a free port if it is taken. Raises QuickstartError if
    another server has the wanted port: it would answer in place of ours."""
    if wanted:
        if free_port(wanted) is None:
            raise QuickstartError(f"port {wanted} is taken by another server; use another --port")
        return wanted
    if (port := free_port(DEFAULT_PORT)) is not None:
        return port
    print(f"port {DEFAULT_PORT} is taken, using a free one", flush=True)
    if (port := free_port(0)) is not None:
        return port
    raise QuickstartError(f"no free port on {HOST}")


def free_port(port: int) -> int | None:
    """The port, or any for 0; None if it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return None
        return int(probe.getsockname()[1])


def ask(url: str, prompt: str, shown: str) -> Answer:
    """Ask the model, and print what is `shown` of the prompt and the streamed answer."""
    print(f"\n{shown}\n\n> ", end="", flush=True)
    body = chat_body(served_model(url), [{"role": "user", "content": prompt}])
    answer = stream_answer(url, body, lambda text: print(text, end="", flush=True))
    print(flush=True)
    return answer


def ask_about_the_text(url: str) -> None:
    """Ask both questions; print how fast the answers came, and what the prefix cache saved."""
    for number, question in enumerate(QUESTIONS):
        text = textwrap.fill(TEXT) if number == 0 else "(the same text)"
        answer = ask(url, f"{TEXT}\n\n{question}", f"{text}\n\n{question}")
        if not answer.text.strip():
            raise QuickstartError("the answer is empty")
        rate = (answer.num_tokens - 1) / answer.seconds if answer.seconds else 0.0
        print(
            f"  {answer.num_tokens} tokens, {rate:.0f} per second; of the prompt's "
            f"{answer.num_prompt_tokens} tokens, {answer.num_cached} came from the prefix cache"
        )


def ask_for_a_record(url: str) -> None:
    """Ask the bundled model what it can do, and check the answer."""
    prompt = make_prompt(num_records=8, seed=1)
    answer = ask(url, prompt.text, prompt.text).text
    if answer.strip() != prompt.answer:
        raise QuickstartError(f"the answer is {answer!r}, but should be {prompt.answer!r}")
    print("\nThe answer is correct.")


def show_request(url: str, prompt: str) -> None:
    """Print a request as a `curl` command."""
    body = {"model": served_model(url), "messages": [{"role": "user", "content": prompt}]}
    print("\nA request with curl:\n")
    print(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\")
    print(f"    -d {shlex.quote(json.dumps(body))}\n")


def fetched(model: str) -> bool:
    """Whether the model is on this machine, after it was fetched if necessary."""
    return subprocess.run([longshore(), "pull", model], stdout=subprocess.DEVNULL).returncode == 0


def longshore() -> str:
    return str(Path(sys.executable).parent / "longshore")


def stay_up(url: str, server: subprocess.Popen[bytes]) -> None:
    """Wait for Ctrl-C. It is an error if the server ends by itself."""
    print(f"Serving at {url} (OpenAI clients: base_url={url}/v1). Ctrl-C stops it.", flush=True)
    try:
        server.wait()
    except KeyboardInterrupt:
        print("\nstopping")
        return
    raise QuickstartError(f"the server ended with exit code {server.returncode}")


def interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    """Handle SIGTERM like Ctrl-C."""
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/quickstart", description=__doc__)
    parser.add_argument("--once", action="store_true", help="exit after the answers")
    parser.add_argument("--port", type=int, help=f"default {DEFAULT_PORT}, or a free one")
    parser.add_argument("--demo", action="store_true", help="serve the bundled model")
    arguments = parser.parse_args()

    signal.signal(signal.SIGTERM, interrupt)
    with tempfile.TemporaryDirectory(prefix="longshore-quickstart-") as folder:
        log_path = Path(folder) / "server.log"
        try:
            port = choose_port(arguments.port)
            url = f"http://{HOST}:{port}"
            talks = not arguments.demo and fetched(MODEL)
            if not talks and not arguments.demo:
                print(f"{MODEL} could not be fetched: the bundled model, which only finds records")
            with serve(MODEL if talks else str(DEMO_MODEL_DIR), port, log_path) as server:
                print(f"starting {MODEL if talks else 'the bundled model'} at {url}", flush=True)
                wait_until_ready(url, server)
                if talks:
                    ask_about_the_text(url)
                    show_request(url, "Name three uses of honey.")
                else:
                    ask_for_a_record(url)
                    show_request(url, make_prompt(num_records=2, seed=2).text)
                if arguments.once:
                    print("Stopping the server; without --once it runs until Ctrl-C.")
                else:
                    stay_up(url, server)
        except KeyboardInterrupt:
            return 130
        except (QuickstartError, OSError) as error:
            lines = log_path.read_text(errors="replace").splitlines() if log_path.exists() else []
            print("\n".join(["", *lines[-NUM_LOG_LINES:]]), file=sys.stderr)
            print(f"scripts/quickstart: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
