"""`longshore chat`: a conversation with a running server, in the terminal."""

import asyncio
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from longshore.deploy.bench.sse_client import HttpAnswer, HttpEndpoint
from longshore.deploy.cli.chat_input import read_message, use_line_editing
from longshore.deploy.cli.client_options import ChatOptions
from longshore.deploy.cli.error_message import error_message
from longshore.protocol.errors import LongshoreError

HELP: Final = (
    "/stats         show tokens and times of the last answer and of all answers\n"
    "/reset         start a new conversation\n"
    "/system TEXT   set the system message; without TEXT: remove it\n"
    "/quit          quit, like Ctrl-D; Ctrl-C stops an answer\n"
    "A line that ends in \\ continues on the next line."
)
QUIT: Final = ("/quit", "/exit")


class ChatFailed(LongshoreError):
    """The server could not be reached, or did not answer."""


@dataclass
class Stats:
    """Token counts and durations of one answer, or sums over all answers."""

    num_answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0

    def add(self, other: "Stats") -> None:
        self.num_answers += other.num_answers
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens
        self.first_token_s += other.first_token_s
        self.total_s += other.total_s

    def rows(self) -> list[tuple[str, str]]:
        """The rows of `/stats`; times are means per answer."""
        answers = max(self.num_answers, 1)
        decode_s = self.total_s - self.first_token_s
        rate = (self.output_tokens - self.num_answers) / decode_s if decode_s > 0 else 0.0
        return [
            ("prompt tokens", f"{self.prompt_tokens:,}"),
            ("cached prompt tokens", f"{self.cached_tokens:,}"),
            ("output tokens", f"{self.output_tokens:,}"),
            ("time to first token", f"{self.first_token_s / answers * 1e3:,.0f} ms"),
            ("tokens per second", f"{rate:,.1f}"),
        ]


@dataclass
class Conversation:
    """The messages of a conversation. on_text: called with each piece of an answer's text."""

    endpoint: HttpEndpoint
    options: ChatOptions
    model: str
    on_text: Callable[[str], None]
    messages: list[dict[str, str]] = field(default_factory=list)
    last: Stats = field(default_factory=Stats)
    total: Stats = field(default_factory=Stats)

    def set_system(self, text: str) -> None:
        """Replace the system message; an empty text removes it."""
        others = [message for message in self.messages if message["role"] != "system"]
        self.messages = [*([{"role": "system", "content": text}] if text else []), *others]

    def reset(self) -> None:
        """Remove all messages except the system message."""
        self.messages = [message for message in self.messages if message["role"] == "system"]

    async def ask(self, text: str) -> None:
        """Send a message and record it with its answer, also with a partial one if cancelled.
        Raises ChatFailed, and then records nothing."""
        question = {"role": "user", "content": text}
        answer = _StreamedAnswer(self.on_text)
        body = self._body([*self.messages, question])
        try:
            response = await self.endpoint.request(
                "POST",
                "/v1/chat/completions",
                body,
                timeout_s=self.options.timeout_s,
                on_event=answer.take,
            )
        except (OSError, TimeoutError) as error:
            raise ChatFailed(f"no answer: {error or type(error).__name__}") from error
        except asyncio.CancelledError:
            self._record(question, answer)
            raise
        if response.status != 200 or answer.error is not None:
            raise ChatFailed(answer.error or _error_of(response))
        self._record(question, answer)
        self.last = answer.stats()
        self.total.add(self.last)

    def _record(self, question: dict[str, str], answer: "_StreamedAnswer") -> None:
        self.messages += [question, {"role": "assistant", "content": answer.text}]

    def _body(self, messages: list[dict[str, str]]) -> bytes:
        options = self.options
        settings = {
            "temperature": options.temperature,
            "top_p": options.top_p,
            "seed": options.seed,
            "max_completion_tokens": options.max_tokens,
        }
        request = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in settings.items() if value is not None},
        }
        return json.dumps(request).encode()


class _StreamedAnswer:
    """One answer while it is streamed."""

    def __init__(self, on_text: Callable[[str], None]) -> None:
        self._on_text = on_text
        self._sent_s = time.perf_counter()
        self._first_s: float | None = None
        self._usage: dict[str, Any] = {}
        self.text = ""
        self.error: str | None = None

    def take(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            self.error = str(event["error"]["message"])
            return
        self._usage = event.get("usage") or self._usage
        for choice in event["choices"]:
            piece = choice["delta"].get("content") or ""
            if piece:
                self._first_s = self._first_s or time.perf_counter()
                self.text += piece
                self._on_text(piece)

    def stats(self) -> Stats:
        end_s = time.perf_counter()
        details = self._usage.get("prompt_tokens_details") or {}
        return Stats(
            num_answers=1,
            prompt_tokens=self._usage.get("prompt_tokens", 0),
            cached_tokens=details.get("cached_tokens", 0),
            output_tokens=self._usage.get("completion_tokens", 0),
            first_token_s=(self._first_s or end_s) - self._sent_s,
            total_s=end_s - self._sent_s,
        )


def chat(options: ChatOptions) -> bool:
    """Chat until the input ends. False if a message read from a pipe was not answered. Raises
    ChatFailed if the server cannot be reached at the start."""
    console = Console(highlight=False)
    endpoint = HttpEndpoint(options.url, api_key=options.api_key)
    model = asyncio.run(_served_model(endpoint, options))
    conversation = Conversation(endpoint, options, model, lambda piece: show(console, piece))
    conversation.set_system(options.system)
    if not sys.stdin.isatty():
        return _answer_all(console, conversation, sys.stdin)
    use_line_editing()
    prompt = _prompt(console)
    console.print(f"{model} at {options.url}; /help lists the commands", markup=False)
    while True:
        try:
            line = read_message(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return True
        if line in QUIT:
            return True
        if line.startswith("/"):
            _command(console, conversation, line)
        elif line:
            _ask(console, conversation, line)


def _answer_all(console: Console, conversation: Conversation, lines: Iterable[str]) -> bool:
    """Send each line as a message; write only the answers to standard output."""
    all_answered = True
    for line in map(str.strip, lines):
        if line in QUIT:
            break
        if line.startswith("/"):
            _command(console, conversation, line)
        elif line:
            try:
                asyncio.run(conversation.ask(line))
            except ChatFailed as error:
                print(f"longshore: error: {error}", file=sys.stderr)
                all_answered = False
            else:
                console.print()
    return all_answered


def _prompt(console: Console) -> str:
    """The prompt with its colour codes marked as having no width, as readline needs it."""
    with console.capture() as captured:
        console.print("[bold cyan]you[/bold cyan]  ", end="")
    return re.sub(r"\x1b\[[\d;]*m", lambda colour: f"\1{colour[0]}\2", captured.get())


def _ask(console: Console, conversation: Conversation, text: str) -> None:
    console.print("[bold green]model[/bold green]  ", end="")
    try:
        asyncio.run(_interruptible(conversation.ask(text)))
    except asyncio.CancelledError:
        console.print(" [dim](cut off)[/dim]", end="")
    except ChatFailed as error:
        console.print(str(error), end="", style="red", markup=False, emoji=False)
    console.print()


def show(console: Console, text: str) -> None:
    """Print the model's text unchanged, except for control characters."""
    console.file.write("".join(c for c in text if c in "\n\t" or c.isprintable()))
    console.file.flush()


async def _interruptible(work: Any) -> None:
    """Let Ctrl-C cancel the work, which closes the connection, so that the server aborts."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    await task


def _command(console: Console, conversation: Conversation, line: str) -> None:
    name, _, rest = line.partition(" ")
    match name:
        case "/help":
            console.print(HELP, markup=False)
        case "/reset":
            conversation.reset()
            console.print("new conversation")
        case "/system":
            conversation.set_system(rest.strip())
            console.print("system message " + ("set" if rest.strip() else "removed"))
        case "/stats":
            console.print(_stats_table(conversation))
        case _:
            console.print(f"unknown command {name}; /help lists the commands", markup=False)


def _stats_table(conversation: Conversation) -> Table:
    table = Table("", "last answer", f"all {conversation.total.num_answers}")
    rows = zip(conversation.last.rows(), conversation.total.rows(), strict=True)
    for (name, last), (_, total) in rows:
        table.add_row(name, last, total)
    return table


async def _served_model(endpoint: HttpEndpoint, options: ChatOptions) -> str:
    """The requested model, or the first one served. Raises ChatFailed if it is not served."""
    try:
        answer = await endpoint.request("GET", "/v1/models", timeout_s=options.timeout_s)
    except (OSError, TimeoutError) as error:
        raise ChatFailed(
            f"cannot reach {options.url}: {error or type(error).__name__}. Is `longshore serve` "
            "running there? Set another server with --url."
        ) from error
    if answer.status != 200:
        raise ChatFailed(_error_of(answer))
    try:
        served = [str(model["id"]) for model in json.loads(answer.body)["data"]]
        model = options.model or served[0]
    except (ValueError, LookupError, TypeError) as error:
        raise ChatFailed(f"{options.url} is not an OpenAI-compatible server") from error
    if model not in served:
        raise ChatFailed(
            f"--model {model} is not served at {options.url}, which serves {', '.join(served)}"
        )
    return model


def _error_of(answer: HttpAnswer) -> str:
    message = error_message(answer) or f"HTTP {answer.status}"
    if "needs a tokenizer" in message:
        return (
            "cannot chat with this model: its folder has no tokenizer.json. Add it and restart "
            "`longshore serve`"
        )
    return message
