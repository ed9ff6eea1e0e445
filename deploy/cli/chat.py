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
from longshore.deploy.cli.refusal import refusal
from longshore.protocol.errors import LongshoreError

HELP: Final = (
    "/stats   tokens and times of the last answer and of all\n"
    "/reset   forget the conversation\n"
    "/system TEXT   say first what the model is to be; without TEXT: nothing\n"
    "/quit    leave, as does Ctrl-D; Ctrl-C ends an answer\n"
    "A line that ends in \\ goes on in the next."
)
LEAVE: Final = ("/quit", "/exit")


class ChatFailed(LongshoreError):
    """The server could not be asked, or did not answer."""


@dataclass
class Stats:
    """Of one answer, or of all: durations in seconds, counts of tokens."""

    num_answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0

    def add(self, other: "Stats") -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def rows(self) -> list[tuple[str, str]]:
        """What `/stats` shows; times are means per answer."""
        answers = max(self.num_answers, 1)
        decode_s = self.total_s - self.first_token_s
        rate = (self.output_tokens - self.num_answers) / decode_s if decode_s > 0 else 0.0
        return [
            ("prompt tokens", f"{self.prompt_tokens:,}"),
            ("found in the cache", f"{self.cached_tokens:,}"),
            ("answer tokens", f"{self.output_tokens:,}"),
            ("time to first token", f"{self.first_token_s / answers * 1e3:,.0f} ms"),
            ("tokens per second", f"{rate:,.1f}"),
        ]


@dataclass
class Conversation:
    """What has been said, and to whom. on_text: gets the pieces of an answer as they come."""

    endpoint: HttpEndpoint
    options: ChatOptions
    model: str
    on_text: Callable[[str], None]
    messages: list[dict[str, str]] = field(default_factory=list)
    last: Stats = field(default_factory=Stats)
    total: Stats = field(default_factory=Stats)

    def set_system(self, text: str) -> None:
        """What stands before everything else; empty: nothing."""
        said = [message for message in self.messages if message["role"] != "system"]
        self.messages = [*([{"role": "system", "content": text}] if text else []), *said]

    def forget(self) -> None:
        """Only the system message stays."""
        self.messages = [message for message in self.messages if message["role"] == "system"]

    async def ask(self, text: str) -> None:
        """Say something and take the answer in, also one that is cut off by a cancellation. Raises
        ChatFailed, and then nothing has been said."""
        question = {"role": "user", "content": text}
        answer = _Answer(self.on_text)
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
            self._said(question, answer)
            raise
        if response.status != 200 or answer.error is not None:
            raise ChatFailed(answer.error or _error_of(response))
        self._said(question, answer)
        self.last = answer.stats()
        self.total.add(self.last)

    def _said(self, question: dict[str, str], answer: "_Answer") -> None:
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


class _Answer:
    """One answer while it comes."""

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
    """Talk until the input ends; whether everything that a pipe asked has been answered. Raises
    ChatFailed if the server cannot be asked at all."""
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
            said = read_message(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return True
        if said in LEAVE:
            return True
        if said.startswith("/"):
            _command(console, conversation, said)
        elif said:
            _ask(console, conversation, said)


def _answer_all(console: Console, conversation: Conversation, lines: Iterable[str]) -> bool:
    """A question per line, and nothing but answers on standard output."""
    all_well = True
    for said in map(str.strip, lines):
        if said in LEAVE:
            break
        if said.startswith("/"):
            _command(console, conversation, said)
        elif said:
            try:
                asyncio.run(conversation.ask(said))
            except ChatFailed as error:
                print(f"longshore: error: {error}", file=sys.stderr)
                all_well = False
            else:
                console.print()
    return all_well


def _prompt(console: Console) -> str:
    """As this terminal shows it; colours in the marks by which readline knows what has no width."""
    with console.capture() as captured:
        console.print("[bold cyan]you[/bold cyan]  ", end="")
    return re.sub(r"\x1b\[[\d;]*m", lambda colour: f"\1{colour[0]}\2", captured.get())


def _ask(console: Console, conversation: Conversation, said: str) -> None:
    console.print("[bold green]model[/bold green]  ", end="")
    try:
        asyncio.run(_interruptible(conversation.ask(said)))
    except asyncio.CancelledError:
        console.print(" [dim](cut off)[/dim]", end="")
    except ChatFailed as error:
        console.print(str(error), end="", style="red", markup=False, emoji=False)
    console.print()


def show(console: Console, text: str) -> None:
    """As the model wrote it, but for what would command the terminal."""
    console.file.write("".join(c for c in text if c in "\n\t" or c.isprintable()))
    console.file.flush()


async def _interruptible(work: Any) -> None:
    """Ctrl-C cancels the work; the connection closes with it, and the server stops computing."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    await task


def _command(console: Console, conversation: Conversation, line: str) -> None:
    name, _, rest = line.partition(" ")
    match name:
        case "/help":
            console.print(HELP, markup=False)
        case "/reset":
            conversation.forget()
            console.print("forgotten")
        case "/system":
            conversation.set_system(rest.strip())
            console.print("set" if rest.strip() else "none")
        case "/stats":
            console.print(_stats_table(conversation))
        case _:
            console.print(f"{name} is no command; /help lists them", markup=False)


def _stats_table(conversation: Conversation) -> Table:
    table = Table("", "last answer", f"all {conversation.total.num_answers}")
    rows = zip(conversation.last.rows(), conversation.total.rows(), strict=True)
    for (name, last), (_, total) in rows:
        table.add_row(name, last, total)
    return table


async def _served_model(endpoint: HttpEndpoint, options: ChatOptions) -> str:
    """The model that is asked for, or the first. Raises ChatFailed if the server has it not."""
    try:
        answer = await endpoint.request("GET", "/v1/models", timeout_s=options.timeout_s)
    except (OSError, TimeoutError) as error:
        raise ChatFailed(
            f"no server can be asked: {error or type(error).__name__}. Is `longshore serve` "
            "running there? --url says where."
        ) from error
    if answer.status != 200:
        raise ChatFailed(_error_of(answer))
    try:
        served = [str(model["id"]) for model in json.loads(answer.body)["data"]]
        model = options.model or served[0]
    except (ValueError, LookupError, TypeError) as error:
        raise ChatFailed("what answers there is no OpenAI-compatible server") from error
    if model not in served:
        raise ChatFailed(f"--model {model} is not served at {options.url}: {', '.join(served)}")
    return model


def _error_of(answer: HttpAnswer) -> str:
    message = refusal(answer) or f"HTTP {answer.status}"
    if "needs a tokenizer" in message:
        return (
            "this model cannot be talked to: its folder has no tokenizer.json. Put it there and "
            "start `longshore serve` again"
        )
    return message
