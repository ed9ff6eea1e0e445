"""The scheduler's end of the grammar process: starts it with the first grammar, sends it what to
compile and which masks to compute, and starts the next one when it dies.

The grammars of a process that has died are lost, and so are their requests; others do not notice.
"""

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, assert_never

import msgspec
import zmq

from longshore.protocol.arrays import UInt8Array, int32_array
from longshore.protocol.errors import EngineDead
from longshore.protocol.grammars import (
    CompileGrammar,
    FillMasks,
    FromGrammarProcess,
    GrammarCompiled,
    GrammarProcessReady,
    MaskedRow,
    MasksFilled,
    ReleaseGrammars,
    ToGrammarProcess,
)
from longshore.protocol.requests import StructuredOutput
from longshore.protocol.transport.channel import Channel, Endpoint, SocketWatcher, open_socket
from longshore.scheduler.config import (
    GrammarProcessConfig,
    SchedulerProcessConfig,
    StructuredOutputConfig,
)
from longshore.scheduler.features.grammar import GrammarError, InvalidGrammar, TokenMasks

logger = logging.getLogger(__name__)

MODULE: Final = "longshore.scheduler.structured_output"

MAX_COMPILING: Final = 64
"""Grammars that the process may have to compile; more wait here."""

START_TIMEOUT_S: Final = 120.0
FILL_TIMEOUT_S: Final = 20.0
"""A process that computes masks for longer is killed: all requests of the step wait for them."""

SILENCE_S: Final = 90.0
"""A process that has grammars to compile, and says nothing for this time after the limit for one of
them, is killed."""

MAX_FAILED_STARTS: Final = 3
"""After so many processes in a row that did not start, the requests that wait for one fail."""

FIRST_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 30.0
CALM_S: Final = 60.0
"""After this time the delay before a restart is the first one again."""


class RemoteGrammar:
    """The grammar of one request in the grammar process.

    error: why there are no masks, or no more.
    """

    def __init__(self, process: "GrammarProcess", grammar_id: int, spec: StructuredOutput) -> None:
        self.grammar_id = grammar_id
        self.spec = spec
        self.error: GrammarError | None = None
        self.has_compiled = self.is_sent = False
        self._process = process
        self._num_bytes = process.mask_bytes
        self._tokens: list[int] = []  # accepted since the last masks were asked for
        self._asked: tuple[int, list[int]] | None = None  # the fill and the drafts, until a token
        self._masks: TokenMasks | None = None  # with those after each draft
        self._num_accepted = 0  # of the drafts that the masks are for

    def is_compiled(self) -> bool:
        if self.error is not None:
            raise self.error
        if not self.has_compiled:
            self._process.compile_waiting()
        return self.has_compiled

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        if self._masks is not None:
            masks = self._masks[self._num_accepted :]
            if not all(map(_allows, masks, token_ids)):
                return False
            self._num_accepted += len(token_ids)
        self._tokens += token_ids
        self._asked = None
        return True

    def num_valid(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)  # the masks show which drafts are not allowed

    def fill_masks(self, draft_token_ids: Sequence[int], masks: TokenMasks) -> bool:
        if self.error is not None:
            raise self.error
        drafts = list(draft_token_ids)
        if self._asked is None or self._asked[1] != drafts:
            row = MaskedRow(self.grammar_id, int32_array(self._tokens), int32_array(drafts))
            self._asked = self._process.ask(self, row), drafts
            self._tokens = []
            self._masks = None
        if self._masks is None:
            return False
        masks[:] = self._masks
        return True

    def receive(self, number: int, masks: UInt8Array) -> None:
        """The masks of a fill; ignored if it is not the latest one."""
        if self._asked is not None and self._asked[0] == number:
            self._masks, self._num_accepted = masks.reshape(-1, self._num_bytes), 0

    def release(self) -> None:
        self._process.release(self)


def _allows(mask: UInt8Array, token_id: int) -> bool:
    return bool(mask[token_id >> 3] >> (token_id & 7) & 1)


class GrammarProcess:
    """Compiles grammars in a process of their own. To be used in a running event loop, after
    `attach`. See `GrammarCompiler` for `compile` and `flush`.

    mask_bytes: size of one mask.
    num_starts: processes so far.
    """

    def __init__(
        self, config: SchedulerProcessConfig, context: "zmq.Context[zmq.Socket[bytes]]"
    ) -> None:
        assert config.structured_output is not None
        self.mask_bytes = -(-config.vocab_size // 8)
        self.num_starts = 0
        self._config = config
        self._settings: StructuredOutputConfig = config.structured_output
        self._context = context
        self._on_news: Callable[[], None] = lambda: None
        self._num_grammars = self._num_fills = 0
        self._grammars: dict[int, RemoteGrammar] = {}
        self._waiting: deque[RemoteGrammar] = deque()
        self._compiling: set[int] = set()
        self._asking: list[tuple[RemoteGrammar, MaskedRow]] = []  # until `flush`
        self._unanswered: deque[tuple[int, float, list[tuple[RemoteGrammar, int]]]] = deque()
        self._connection: _Connection | None = None
        self._is_ready = self._is_closed = False
        self._started_at_s = self._next_start_s = self._heard_at_s = 0.0
        self._num_failed_starts = 0
        self._backoff_s = FIRST_BACKOFF_S
        self._killed: list[subprocess.Popen[bytes]] = []

    def attach(self, on_news: Callable[[], None]) -> None:
        """on_news: called when grammars are compiled, masks are computed, or the process died."""
        self._on_news = on_news

    # GrammarCompiler

    def compile(self, spec: StructuredOutput) -> RemoteGrammar:
        self._num_grammars += 1
        grammar = RemoteGrammar(self, self._num_grammars, spec)
        self._grammars[grammar.grammar_id] = grammar
        self._waiting.append(grammar)
        return grammar

    def flush(self) -> None:
        if not self._asking:
            return
        asking, self._asking = self._asking, []
        rows = [(grammar, 1 + len(row.draft_token_ids)) for grammar, row in asking]
        self._unanswered.append((self._num_fills, time.monotonic(), rows))
        self._send(FillMasks(self._num_fills, tuple(row for _, row in asking)))

    # For RemoteGrammar

    def compile_waiting(self) -> None:
        """Send what the process can take, if it runs; else start it."""
        while self._waiting and len(self._compiling) < MAX_COMPILING:
            if not self._is_ready:
                self._start_process()
                return
            if not self._compiling:
                self._heard_at_s = time.monotonic()
            grammar = self._waiting.popleft()
            self._compiling.add(grammar.grammar_id)
            grammar.is_sent = True
            self._send(CompileGrammar(grammar.grammar_id, grammar.spec))

    def ask(self, grammar: RemoteGrammar, row: MaskedRow) -> int:
        """Ask for masks with the next `flush`; returns its number."""
        if not self._asking:
            self._num_fills += 1
        self._asking.append((grammar, row))
        return self._num_fills

    def release(self, grammar: RemoteGrammar) -> None:
        """A request has ended."""
        self._grammars.pop(grammar.grammar_id, None)
        self._compiling.discard(grammar.grammar_id)
        self._asking = [entry for entry in self._asking if entry[0] is not grammar]
        if not grammar.is_sent:
            self._waiting.remove(grammar)
        elif grammar.error is None or self._is_ready:
            self._send(ReleaseGrammars((grammar.grammar_id,)))

    # The process

    def check(self, now_s: float) -> None:
        """Kill a process that takes too long. To be called about once a second."""
        self._killed = [process for process in self._killed if process.poll() is None]
        if self._connection is None:
            return
        silence_s = self._settings.compile_timeout_s + SILENCE_S
        if not self._is_ready and now_s > self._started_at_s + START_TIMEOUT_S:
            self._end_process(f"did not start within {START_TIMEOUT_S:g} s")
            self._on_news()
        elif self._unanswered and now_s > self._unanswered[0][1] + FILL_TIMEOUT_S:
            self._end_process(f"computed token masks for more than {FILL_TIMEOUT_S:g} s")
            self._on_news()
        elif self._compiling and now_s > self._heard_at_s + silence_s:
            self._end_process("hangs")
            self._on_news()

    def close(self) -> None:
        """End the process, and wait for its end."""
        self._is_closed = True
        if self._connection is not None:
            self._disconnect(self._connection)
        for process in self._killed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)

    def _start_process(self) -> None:
        now_s = time.monotonic()
        if self._connection is not None or self._is_closed or now_s < self._next_start_s:
            return
        self.num_starts += 1
        self._started_at_s = now_s
        try:
            self._connection = _Connection(self._config, self._context, self.num_starts)
        except (OSError, zmq.ZMQError) as error:
            self._end_process(f"cannot be started ({error})")
            return
        self._connection.watch(self._on_message, self._on_lifeline)
        logger.info("the grammar process %d starts", self.num_starts)

    def _on_message(self) -> None:
        connection = self._connection
        assert connection is not None
        self._heard_at_s = time.monotonic()
        for message in connection.channel.drain():
            self._take(message)
            if self._connection is not connection:  # it was ended
                break
        self.compile_waiting()
        self._on_news()

    def _take(self, message: FromGrammarProcess) -> None:
        match message:
            case GrammarProcessReady():
                self._is_ready = True
                self._num_failed_starts = 0
            case GrammarCompiled(grammar_id, error):
                self._compiling.discard(grammar_id)
                if (grammar := self._grammars.get(grammar_id)) is not None:
                    grammar.has_compiled = error is None
                    grammar.error = None if error is None else InvalidGrammar(error)
            case MasksFilled():
                number, _, rows = self._unanswered.popleft()
                if number != message.number:
                    self._end_process(f"answered {message.number} instead of {number}")
                    return
                first = 0
                for grammar, num_masks in rows:
                    error = message.errors.get(grammar.grammar_id)
                    if error is not None:
                        grammar.error = GrammarError(error)
                        continue
                    last = first + num_masks * self.mask_bytes
                    grammar.receive(number, message.bits[first:last])
                    first = last
            case _:
                assert_never(message)

    def _on_lifeline(self) -> None:
        assert self._connection is not None
        if not self._connection.is_alive():
            self._end_process("has died")
            self._on_news()

    def _send(self, message: ToGrammarProcess) -> None:
        if self._connection is None or not self._is_ready:
            return  # it has died: the grammars have an error
        try:
            self._connection.channel.send(message)
        except EngineDead:
            self._end_process("has died, or takes no messages")
            return
        self._connection.check()

    def _end_process(self, what: str) -> None:
        """The requests in the process fail."""
        if not self._is_ready:
            self._num_failed_starts += 1
        if self._connection is not None:
            self._disconnect(self._connection)
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            for grammar in self._waiting:
                grammar.is_sent = True
            self._waiting.clear()
        lost = [grammar for grammar in self._grammars.values() if grammar.is_sent]
        for grammar in lost:
            if grammar.error is None:
                grammar.error = GrammarError(
                    f"the process that computes structured output {what}; send the request again"
                )
        now_s = time.monotonic()
        if now_s > self._started_at_s + CALM_S:
            self._backoff_s = FIRST_BACKOFF_S
        self._next_start_s = now_s + self._backoff_s
        logger.error(
            "the grammar process %d %s; its %d requests fail, and it is started again after %g s",
            self.num_starts,
            what,
            len(lost),
            self._backoff_s,
        )
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)

    def _disconnect(self, connection: "_Connection") -> None:
        connection.close()
        self._killed.append(connection.process)
        self._connection = None
        self._is_ready = False
        self._compiling.clear()
        self._unanswered.clear()
        self._asking = []


class _Connection:
    """One grammar process: it has a socket and a lifeline of its own."""

    def __init__(
        self,
        config: SchedulerProcessConfig,
        context: "zmq.Context[zmq.Socket[bytes]]",
        number: int,
    ) -> None:
        settings = config.structured_output
        assert settings is not None
        base = settings.endpoint
        endpoint = Endpoint(f"{base.address}.{number}", base.curve, base.secret)
        self.channel: Channel[ToGrammarProcess, FromGrammarProcess] = Channel(
            open_socket(context, zmq.DEALER, endpoint, bind=True), FromGrammarProcess
        )
        self._lifeline, child_end = socket.socketpair()
        self._lifeline.setblocking(False)
        self._watcher: SocketWatcher | None = None
        process_config = GrammarProcessConfig(
            structured_output=msgspec.structs.replace(settings, endpoint=endpoint),
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            engine=f"{config.engine_id}.{config.epoch}",
            lifeline_fd=child_end.fileno(),
            is_relayed=config.lifeline_fd is not None,
            log_level=config.log_level,
        )
        try:
            with child_end:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", MODULE],
                    stdin=subprocess.PIPE,
                    pass_fds=(child_end.fileno(),),
                )
        except OSError:
            self._lifeline.close()
            self.channel.socket.close(linger=0)
            raise
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.process.stdin as stdin:
            stdin.write(msgspec.json.encode(process_config))  # fits into the pipe

    def watch(self, on_message: Callable[[], None], on_lifeline: Callable[[], None]) -> None:
        """Call these when the process has sent something, and when it may have died."""
        self._watcher = SocketWatcher(self.channel.socket, on_message)
        asyncio.get_running_loop().add_reader(self._lifeline.fileno(), on_lifeline)

    def check(self) -> None:
        """After a message was sent: it may have consumed the event of one that has arrived."""
        if self._watcher is not None:
            self._watcher.check()

    def is_alive(self) -> bool:
        """Whether the other end of the lifeline is open. Reports are discarded."""
        try:
            return bool(self._lifeline.recv(4096))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Kill the process; its end is not awaited."""
        if self._watcher is not None:
            self._watcher.close()
            with contextlib.suppress(RuntimeError):  # the loop has ended
                asyncio.get_running_loop().remove_reader(self._lifeline.fileno())
        self.process.kill()
        self._lifeline.close()
        self.channel.socket.close(linger=0)
