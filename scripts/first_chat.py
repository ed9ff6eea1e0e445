"""Serve the bundled demo model, ask it one question over HTTP and print the answer as it streams.

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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from longshore.deploy.model.demo import DemoPrompt, make_prompt

HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8000
READY_TIMEOUT_S: Final = 120.0
ANSWER_TIMEOUT_S: Final = 60.0
SHUTDOWN_TIMEOUT_S: Final = 30.0
NUM_LOG_LINES: Final = 40
LOCAL: Final = build_opener(ProxyHandler({}))  # do not use a proxy for this host


class QuickstartError(Exception):
    """The deployment did not start, or its answer is wrong."""


@contextmanager
def serve(port: int, log_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `longshore serve` with its output in `log_path`; stop all its processes on exit."""
    command = [str(Path(sys.executable).parent / "longshore"), "serve"]
    command += ["--host", HOST, "--port", str(port)]
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


def chat_body(model: str, prompt: DemoPrompt) -> dict[str, object]:
    """The JSON body of a streamed, greedy request with `prompt`."""
    return {"model": model, "messages": prompt.messages, "temperature": 0, "stream": True}


def stream_answer(url: str, body: dict[str, object]) -> Iterator[str]:
    """Send the chat request and yield the pieces of the answer's text."""
    request = Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with LOCAL.open(request, timeout=ANSWER_TIMEOUT_S) as response:
            for line in response:
                event = line.decode().removeprefix("data:").strip()
                if not event or event == "[DONE]":
                    continue
                for choice in json.loads(event)["choices"]:
                    if text := choice["delta"].get("content"):
                        yield text
    except HTTPError as error:
        reason = error.read().decode(errors="replace")
        raise QuickstartError(f"the server answered {error.code}: {reason}") from error


def served_model(url: str) -> str:
    """The name of the server's model."""
    with LOCAL.open(f"{url}/v1/models", timeout=ANSWER_TIMEOUT_S) as response:
        return str(json.load(response)["data"][0]["id"])


def choose_port() -> int:
    """DEFAULT_PORT, or a free port if it is taken."""
    for port in (DEFAULT_PORT, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                print(f"port {port} is taken, using a free one", flush=True)
                continue
            return int(probe.getsockname()[1])
    raise QuickstartError(f"no free port on {HOST}")


def ask(url: str, prompt: DemoPrompt) -> None:
    """Print the prompt, the streamed answer and an equivalent `curl` command; check the answer."""
    body = chat_body(served_model(url), prompt)
    print(f"\n{prompt.text}\n\n> ", end="", flush=True)
    answer = ""
    for text in stream_answer(url, body):
        print(text, end="", flush=True)
        answer += text
    if answer.strip() != prompt.answer:
        raise QuickstartError(f"the answer is {answer!r}, but should be {prompt.answer!r}")
    print("\n\nThe answer is correct. The same request with curl:\n")
    print(f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\")
    print(f"    -d {shlex.quote(json.dumps(body))}\n")


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
    parser.add_argument("--once", action="store_true", help="exit after the answer")
    parser.add_argument("--port", type=int, help=f"default {DEFAULT_PORT}, or a free one")
    arguments = parser.parse_args()

    signal.signal(signal.SIGTERM, interrupt)
    with tempfile.TemporaryDirectory(prefix="longshore-quickstart-") as folder:
        log_path = Path(folder) / "server.log"
        try:
            port = arguments.port or choose_port()
            url = f"http://{HOST}:{port}"
            with serve(port, log_path) as server:
                print(f"starting the demo model at {url}", flush=True)
                wait_until_ready(url, server)
                ask(url, make_prompt(num_records=8, seed=1))
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
