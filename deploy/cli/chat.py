"""`longshore chat`: a conversation with a running server, in the terminal."""

import asyncio
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table

from longshore.deploy.bench.error_message import error_code, error_message
from longshore.deploy.bench.sse_client import HttpAnswer, HttpEndpoint
from longshore.deploy.cli.chat_input import read_message, use_line_editing
from longshore.deploy.cli.client_options import ChatOptions
from longshore.protocol.errors import LongshoreError

HELP: Final = (
    "/stats         show tokens and times of the last answer and of all answers\n"
    "/reset         start a new conversation\n"
    "/system TEXT   set the system message; without TEXT: remove it\n"
    "/quit          quit, like Ctrl-D; Ctrl-C stops an answer\n"
    "A line that ends in \\ continues on the next line."
)
QUIT: Final = ("/quit", "/exit")
RESERVED_SHARE: Final = 4
"""Without a limit of the answer's length, this part of the context is kept free for it."""


class ChatFailed(LongshoreError):
    """The server could not be reached, or did not answer."""


class ContextFull(ChatFailed):
    """The conversation is longer than the model's context."""


class ServedModel(NamedTuple):
    """max_model_len: size of its context in tokens, if the server says so."""

    name: str
    max_model_len: int | None = None


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
    """The messages of a conversation. If they do not fit the model's context, the oldest turns (a
    question and its answer) are dropped.

    on_text:   called with each piece of an answer's text.
    on_notice: called with a sentence about the conversation.
    """

    endpoint: HttpEndpoint
    options: ChatOptions
    model: ServedModel
    on_text: Callable[[str], None]
    on_notice: Callable[[str], None] = lambda text: None
    messages: list[dict[str, str]] = field(default_factory=list)
    # Tokens of each turn as the server counted them, the first with the system message.
    _turn_tokens: list[int] = field(default_factory=list)
    last: Stats = field(default_factory=Stats)
    total: Stats = field(default_factory=Stats)

    def set_system(self, text: str) -> None:
        """Replace the system message; an empty text removes it."""
        others = [message for message in self.messages if message["role"] != "system"]
        self.messages = [*([{"role": "system", "content": text}] if text else []), *others]

    def reset(self) -> None:
        """Remove all messages except the system message."""
        self.messages = [message for message in self.messages if message["role"] == "system"]
        self._turn_tokens.clear()

    async def ask(self, text: str) -> None:
        """Send a message and record it with its answer, also with a partial one if cancelled.
        Raises ChatFailed, and then the conversation is as before."""
        if self.options.single:
            self.reset()
        before = list(self.messages), list(self._turn_tokens)
        num_dropped = 0
        while self._is_nearly_full() and self._drop_oldest_turn():
            num_dropped += 1
        while True:
            try:
                return await self._ask(text, num_dropped)
            except ChatFailed as error:
                if not (isinstance(error, ContextFull) and self._drop_oldest_turn()):
                    self.messages, self._turn_tokens = before
                    raise
                num_dropped += 1

    def _is_nearly_full(self) -> bool:
        """Whether the next answer might not fit."""
        size = self.model.max_model_len
        if size is None:
            return False
        reserved = min(self.options.max_tokens or size, size // RESERVED_SHARE)
        return sum(self._turn_tokens) + reserved > size

    def _drop_oldest_turn(self) -> bool:
        """False if there is none."""
        if not self._turn_tokens:
            return False
        del self._turn_tokens[0]
        first = 1 if self.messages[0]["role"] == "system" else 0
        del self.messages[first : first + 2]
        return True

    def _notice_dropped(self, number: int) -> None:
        if number:
            turns = "turn" if number == 1 else f"{number} turns"
            self.on_notice(f"the context is full: dropped the oldest {turns}")

    async def _ask(self, text: str, num_dropped: int) -> None:
        question = {"role": "user", "content": text}
        answer = _StreamedAnswer(self.on_text, lambda: self._notice_dropped(num_dropped))
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
        if error_code(response) == "context_length_exceeded":
            raise ContextFull(error_of(response))
        if response.status != 200 or answer.error is not None:
            raise ChatFailed(answer.error or error_of(response))
        self._record(question, answer)
        self.last = answer.stats()
        self.total.add(self.last)
        num_tokens = self.last.prompt_tokens + self.last.output_tokens
        if answer.finish_reason == "length" and num_tokens >= (self.model.max_model_len or inf):
            self.on_notice("the answer was cut: the context is full")

    def _record(self, question: dict[str, str], answer: "_StreamedAnswer") -> None:
        self.messages += [question, {"role": "assistant", "content": answer.text}]
        self._turn_tokens.append(max(0, answer.num_tokens - sum(self._turn_tokens)))

    def _body(self, messages: list[dict[str, str]]) -> bytes:
        options = self.options
        settings = {
            "temperature": options.temperature,
            "top_p": options.top_p,
            "seed": options.seed,
            "max_completion_tokens": options.max_tokens,
        }
        request = {
            "model": self.model.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in settings.items() if value is not None},
        }
        return json.dumps(request).encode()


class _StreamedAnswer:
    """One answer while it is streamed. on_begin: called before the first piece of its text."""

    def __init__(self, on_text: Callable[[str], None], on_begin: Callable[[], None]) -> None:
        self._on_text = on_text
        self._on_begin = on_begin
        self._sent_s = time.perf_counter()
        self._first_s: float | None = None
        self._usage: dict[str, Any] = {}
        self.text = ""
        self.error: str | None = None
        self.finish_reason: str | None = None

    def take(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            self.error = str(event["error"]["message"])
            return
        self._usage = event.get("usage") or self._usage
        for choice in event["choices"]:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            piece = choice["delta"].get("content") or ""
            if piece:
                if not self.text:
                    self._on_begin()
                self._first_s = self._first_s or time.perf_counter()
                self.text += piece
                self._on_text(piece)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer; 0 for an answer that was cut off."""
        return int(self._usage.get("total_tokens", 0))

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
    model = asyncio.run(
        served_model(endpoint, options.url, options.model, timeout_s=options.timeout_s)
    )
    conversation = Conversation(
        endpoint,
        options,
        model,
        on_text=lambda piece: show(console, piece),
        on_notice=lambda text: console.print(f" [dim]({text})[/dim]"),
    )
    conversation.set_system(options.system)
    if options.quick is not None or not sys.stdin.isatty():
        conversation.on_notice = lambda text: print(f"({text})", file=sys.stderr, flush=True)
        if options.quick is not None:
            return _answer(console, conversation, options.quick)
        return _answer_all(console, conversation, sys.stdin)
    use_line_editing()
    prompt = _prompt(console)
    console.print(f"{model.name} at {options.url}; /help lists the commands", markup=False)
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
            all_answered &= _answer(console, conversation, line)
    return all_answered


def _answer(console: Console, conversation: Conversation, text: str) -> bool:
    """Send a message and write the answer. False if there is none; the reason is on standard
    error."""
    try:
        asyncio.run(conversation.ask(text))
    except ChatFailed as error:
        print(f"longshore: error: {error}", file=sys.stderr)
        return False
    console.print()
    return True


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


async def served_model(
    endpoint: HttpEndpoint, url: str, name: str | None, *, timeout_s: float
) -> ServedModel:
    """The requested model, or the first one served. Raises ChatFailed if it is not served."""
    try:
        answer = await endpoint.request("GET", "/v1/models", timeout_s=timeout_s)
    except (OSError, TimeoutError) as error:
        raise ChatFailed(
            f"cannot reach {url}: {error or type(error).__name__}. Is `longshore serve` "
            "running there? Set another server with --url."
        ) from error
    if answer.status != 200:
        raise ChatFailed(error_of(answer))
    try:
        served = {
            str(model["id"]): model.get("max_model_len")
            for model in json.loads(answer.body)["data"]
        }
        model = name or next(iter(served))
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
        raise ChatFailed(f"{url} is not an OpenAI-compatible server") from error
    if model not in served:
        raise ChatFailed(
            f"--model {model} is not served at {url}, which serves {', '.join(served)}"
        )
    size = served[model]
    return ServedModel(model, size if isinstance(size, int) else None)


def error_of(answer: HttpAnswer) -> str:
    """Why the server did not answer."""
    message = error_message(answer) or f"HTTP {answer.status}"
    if "needs a tokenizer" in message:
        return (
            "cannot chat with this model: its folder has no tokenizer.json. Add it and restart "
            "`longshore serve`"
        )
    return message
