"""The scheduler's end of the grammar process: starts it with the first grammar, sends it what to
compile and which masks to compute, and starts the next one when it dies or hangs.

A grammar is compiled once for all requests that have it. What a process that has died knew is
given to the next one: it compiles the grammars of live requests again, and gets their tokens with
the next row of each. Meanwhile their requests wait (`GrammarLost`); others do not notice.

A grammar that a process was working on when it died is a suspect. The next process compiles
suspects alone, so if it dies again it is known why, and only a grammar that ended two processes
fails.
"""

import asyncio
import contextlib
import logging
import math
import os
import socket
import subprocess
import sys
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar, assert_never

import msgspec
import numpy as np
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
    Release,
    ToGrammarProcess,
)
from longshore.protocol.requests import StructuredOutput
from longshore.protocol.transport.channel import Channel, Endpoint, SocketWatcher, open_socket
from longshore.scheduler.config import (
    GrammarProcessConfig,
    SchedulerProcessConfig,
    StructuredOutputConfig,
)
from longshore.scheduler.features.grammar import (
    GrammarError,
    GrammarLost,
    InvalidGrammar,
    TokenMasks,
)
from longshore.scheduler.process.structured_output.work_page import WorkPage, new_page

logger = logging.getLogger(__name__)

MODULE: Final = "longshore.scheduler.process.structured_output"

MAX_COMPILING: Final = 8
"""Grammars that the process may have to compile; more wait here."""

MASK_PATIENCE_S: Final = 1.0
"""Requests whose masks take longer wait for them outside of the steps, which others share."""

START_TIMEOUT_S: Final = 120.0
HANG_S: Final = 10.0
"""A process that has work, and makes no progress for this time, is killed."""

MAX_CHECKS_STOPPED: Final = 2
"""A process that has work, and is found stopped so often in a row, is killed."""

SUSPECT_DELAY_S: Final = 5.0
"""After the start of a process, for which suspects wait for requests that may have ended the last
process: these have to get a mask first."""

MAX_FAILED_STARTS: Final = 3
"""After so many processes in a row that did not start, the requests that wait for one fail."""

MAX_DEATHS: Final = 10
"""After so many deaths without a calm time between two of them, all requests fail."""

FIRST_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 30.0
CALM_S: Final = 60.0
"""A process that has lived for this time is replaced without delay, as the first one is."""

FAILURE_S: Final = 10.0
"""For this time, a grammar that could not be compiled is not compiled again."""

MAX_REMEMBERED: Final = 1024
"""Grammars that are remembered because they could not be compiled, or ended a process."""

Key = TypeVar("Key")
Value = TypeVar("Value")


class RemoteGrammar:
    """The grammar of one request. Its state after the tokens so far is in the grammar process.

    error: why there are no masks, or no more.
    is_known:   the process has a matcher for it.
    is_suspect: a process died while it computed masks of this request.
    """

    def __init__(self, process: "GrammarProcess", grammar_id: int, source: "_Source") -> None:
        self.grammar_id = grammar_id
        self.source = source
        self.error: GrammarError | None = None
        self.is_suspect = False
        self._process = process
        self._num_bytes = process.mask_bytes
        self._tokens = array("i")
        self._num_sent = 0  # of the tokens, to the current process
        self.is_known = False
        self._asked: tuple[int, list[int]] | None = None  # the fill and the drafts, until a token
        self._is_late = False
        self._masks: TokenMasks | None = None  # with those after each draft
        self._num_accepted = 0  # of the drafts that the masks are for

    def is_compiled(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.source.is_compiled and not self._is_late

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        if self._masks is not None:
            masks = self._masks[self._num_accepted :]
            if not all(map(_allows, masks, token_ids)):
                return False
            self._num_accepted += len(token_ids)
        self._tokens.extend(token_ids)
        self._asked = None
        return True

    def num_valid(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)  # the masks show which drafts are not allowed

    def fill_masks(self, draft_token_ids: Sequence[int], masks: TokenMasks) -> bool:
        if not self.is_compiled():
            raise GrammarLost("the grammar has to be compiled again, or its masks are late")
        drafts = list(draft_token_ids)
        if self._asked is None or self._asked[1] != drafts:
            tokens = np.array(self._tokens[self._num_sent :], np.int32)
            row = MaskedRow(self.grammar_id, self.source.number, tokens, int32_array(drafts))
            self._asked = self._process.ask(self, row), drafts
            self._num_sent = len(self._tokens)
            self.is_known = True
            self._masks = None
        if self._masks is None:
            return False
        masks[:] = self._masks
        return True

    def receive(self, number: int, masks: UInt8Array) -> bool:
        """The masks of a fill; ignored if it is not the latest one. Whether they were late."""
        if self._asked is None or self._asked[0] != number:
            return False
        self._masks, self._num_accepted = masks.reshape(-1, self._num_bytes), 0
        was_late, self._is_late = self._is_late, False
        return was_late

    def give_up_on(self, number: int) -> None:
        """The masks of a fill are late; ignored if it is not the latest one."""
        if self._asked is not None and self._asked[0] == number:
            self._is_late = True

    def lose_state(self) -> None:
        """The process has died. The latest masks remain: a token may be accepted by them."""
        self._num_sent = 0
        self._asked = None
        self._is_late = self.is_known = False

    def release(self) -> None:
        self._process.release(self)


def _allows(mask: UInt8Array, token_id: int) -> bool:
    return bool(mask[token_id >> 3] >> (token_id & 7) & 1)


class _Source:
    """A grammar's text, and the requests that have it.

    number:     of the grammar in the process.
    is_sent:    the process compiles it, or has it.
    users:      by the id of their grammar; they have not failed.
    """

    def __init__(self, spec: StructuredOutput, number: int) -> None:
        self.spec = spec
        self.number = number
        self.is_sent = self.is_compiled = False
        self.num_bytes = 0
        self.users: dict[int, RemoteGrammar] = {}


def _fatal(spec: StructuredOutput, what: str) -> InvalidGrammar:
    return InvalidGrammar(
        f"the process that computes structured output {what} while it worked on this {spec.kind}, "
        "twice; change it, or make it simpler"
    )


def _remember(known: "OrderedDict[Key, Value]", key: Key, value: Value) -> None:
    """The latest MAX_REMEMBERED entries are kept."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > MAX_REMEMBERED:
        known.popitem(last=False)


class GrammarProcess:
    """Compiles grammars in a process of their own. To be used in a running event loop, after
    `attach`. See `GrammarCompiler` for `compile`, `next_compiled` and `flush`.

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
        self._num_sources = self._num_fills = 0
        self._grammars: dict[int, RemoteGrammar] = {}
        self._sources: dict[StructuredOutput, _Source] = {}
        self._by_number: dict[int, _Source] = {}
        self._unused: OrderedDict[_Source, None] = OrderedDict()  # compiled, the oldest first
        self._num_unused_bytes = 0
        self._waiting: OrderedDict[_Source, None] = OrderedDict()
        self._suspects: OrderedDict[_Source, None] = (
            OrderedDict()
        )  # wait as well, to be tried alone
        self._compiling: dict[_Source, None] = {}
        self._unproven: dict[RemoteGrammar, None] = {}  # suspects that have had no mask since
        # Errors by text, with the time until which they hold.
        self._failures: OrderedDict[StructuredOutput, tuple[InvalidGrammar, float]] = OrderedDict()
        # Texts during whose compilation a process died; they have not been compiled since.
        self._suspicions: OrderedDict[StructuredOutput, None] = OrderedDict()
        # By number, what the process may still compile, although no request needs it.
        self._abandoned: OrderedDict[int, StructuredOutput] = OrderedDict()
        self._news: deque[int] = deque()
        self._asking: list[tuple[RemoteGrammar, MaskedRow]] = []  # until `flush`
        self._unanswered: deque[tuple[int, float, list[tuple[RemoteGrammar, int]]]] = deque()
        self._ended: list[int] = []  # matchers and grammars to be released
        self._dropped: list[int] = []
        self._connection: _Connection | None = None
        self._is_ready = self._is_closed = False
        self._started_at_s = self._next_start_s = self._ready_at_s = 0.0
        self._restart: asyncio.TimerHandle | None = None
        self._progress = 0
        self._progress_at_s = 0.0
        self._num_checks_stopped = 0
        self._num_failed_starts = self._num_deaths = 0
        self._backoff_s = 0.0
        self._killed: list[subprocess.Popen[bytes]] = []

    def attach(self, on_news: Callable[[], None]) -> None:
        """on_news: called when grammars are compiled, masks are computed, or the process died."""
        self._on_news = on_news

    # GrammarCompiler

    def compile(self, grammar_id: int, spec: StructuredOutput) -> RemoteGrammar:
        source = self._sources.get(spec)
        is_new = source is None
        if source is None:
            self._num_sources += 1
            source = _Source(spec, self._num_sources)
        grammar = self._grammars[grammar_id] = RemoteGrammar(self, grammar_id, source)
        error, until_s = self._failures.get(spec, (None, 0.0))
        if error is not None and time.monotonic() < until_s:
            self._fail(grammar, error)
            return grammar
        if is_new:
            self._sources[spec] = self._by_number[source.number] = source
            self._queue_for(source)[source] = None
        elif source in self._unused:
            del self._unused[source]
            self._num_unused_bytes -= source.num_bytes
        source.users[grammar_id] = grammar
        if source.is_compiled:
            self._news.append(grammar_id)
        else:
            self._send_waiting()
        return grammar

    def next_compiled(self) -> int | None:
        while self._news:
            grammar_id = self._news.popleft()
            if grammar_id in self._grammars:
                return grammar_id
        return None

    def flush(self) -> None:
        if not self._asking:
            return
        asking, self._asking = self._asking, []
        rows = [(grammar, 1 + len(row.draft_token_ids)) for grammar, row in asking]
        self._begin_work()
        self._unanswered.append((self._num_fills, time.monotonic(), rows))
        self._send_released()
        self._send(FillMasks(self._num_fills, tuple(row for _, row in asking)))

    # For RemoteGrammar

    def ask(self, grammar: RemoteGrammar, row: MaskedRow) -> int:
        """Ask for masks with the next `flush`; returns its number."""
        if not self._asking:
            self._num_fills += 1
        self._asking.append((grammar, row))
        return self._num_fills

    def release(self, grammar: RemoteGrammar) -> None:
        """A request has ended. The process hears of it with the next message."""
        self._grammars.pop(grammar.grammar_id, None)
        self._unproven.pop(grammar, None)
        self._asking = [entry for entry in self._asking if entry[0] is not grammar]
        if grammar.is_known:
            self._ended.append(grammar.grammar_id)
        source = grammar.source
        if source.users.pop(grammar.grammar_id, None) is None or source.users:
            return
        if source.is_compiled:
            self._unused[source] = None
            self._num_unused_bytes += source.num_bytes
            self._evict()
        else:
            self._drop(source)

    def _evict(self) -> None:
        """Keep of the compiled grammars that no request has what the settings allow."""
        settings = self._settings
        while self._unused and (
            len(self._unused) > settings.max_cached_grammars
            or self._num_unused_bytes > settings.max_cached_bytes
        ):
            source, _ = self._unused.popitem(last=False)
            self._num_unused_bytes -= source.num_bytes
            self._drop(source)

    def _drop(self, source: _Source) -> None:
        """No request needs this grammar."""
        del self._sources[source.spec], self._by_number[source.number]
        self._waiting.pop(source, None)
        self._suspects.pop(source, None)
        if source in self._compiling:
            del self._compiling[source]
            _remember(self._abandoned, source.number, source.spec)
        if source.is_sent:
            self._dropped.append(source.number)

    def _fail(self, grammar: RemoteGrammar, error: GrammarError) -> None:
        if grammar.error is None:
            grammar.error = error
            self._unproven.pop(grammar, None)
            self._news.append(grammar.grammar_id)

    def _fail_text(self, spec: StructuredOutput, error: InvalidGrammar, until_s: float) -> None:
        """A grammar has failed, and with it the requests that have it. It is not compiled again
        before that time."""
        self._suspicions.pop(spec, None)
        _remember(self._failures, spec, (error, until_s))
        if (source := self._sources.get(spec)) is not None:
            for grammar in source.users.values():
                self._fail(grammar, error)
            source.users = {}
            self._drop(source)

    # What the process compiles

    def _queue_for(self, source: _Source) -> OrderedDict[_Source, None]:
        return self._suspects if source.spec in self._suspicions else self._waiting

    def _compiled_text(self, number: int) -> StructuredOutput | None:
        """What a thread of the process compiles; None if its result is known."""
        source = self._by_number.get(number)
        if source is None:
            return self._abandoned.get(number)
        return source.spec if source in self._compiling else None

    def _send_waiting(self) -> None:
        """Send what the process can take, if it runs; else start it."""
        if not self._is_ready:
            if self._waiting or self._suspects:
                self._start_process()
            return
        self._send_released()
        while self._is_ready and len(self._compiling) < MAX_COMPILING:
            source = self._next_source()
            if source is None:
                return
            self._begin_work()
            self._compiling[source] = None
            source.is_sent = True
            self._send(CompileGrammar(source.number, source.spec))

    def _next_source(self) -> _Source | None:
        """What to compile next. A suspect is compiled alone, and not while a request that is a
        suspect itself may end the process."""
        if any(source.spec in self._suspicions for source in self._compiling):
            return None
        is_its_turn = not self._unproven or time.monotonic() > self._ready_at_s + SUSPECT_DELAY_S
        if self._suspects and is_its_turn:
            return None if self._compiling else self._suspects.popitem(last=False)[0]
        return self._waiting.popitem(last=False)[0] if self._waiting else None

    def _send_released(self) -> None:
        if self._ended or self._dropped:
            message = Release(tuple(self._ended), tuple(self._dropped))
            self._ended, self._dropped = [], []
            self._send(message)

    # The process

    @property
    def _has_work(self) -> bool:
        return bool(self._compiling or self._unanswered)

    def _begin_work(self) -> None:
        """The process is about to get work: its progress counts from now on."""
        if not self._has_work:
            self._progress_at_s = time.monotonic()
            self._num_checks_stopped = 0

    def check(self, now_s: float) -> None:
        """Kill a process that takes too long. To be called about once a second."""
        self._killed = [process for process in self._killed if process.poll() is None]
        connection = self._connection
        if connection is None:
            return
        if not self._is_ready:
            if now_s > self._started_at_s + START_TIMEOUT_S:
                self._end_process(f"did not start within {START_TIMEOUT_S:g} s")
                self._on_news()
            return
        if self._has_work and (self._is_stopped(connection) or self._hangs(connection, now_s)):
            is_stopped = self._num_checks_stopped >= MAX_CHECKS_STOPPED
            what = "was stopped" if is_stopped else f"has made no progress for {HANG_S:g} s"
            self._end_process(what, is_stopped=is_stopped)
            self._on_news()
            return
        self._send_waiting()  # a suspect may have waited for its time
        if self._unanswered and now_s > self._unanswered[0][1] + MASK_PATIENCE_S:
            for number, _, rows in self._unanswered:
                for grammar, _ in rows:
                    grammar.give_up_on(number)
            self._on_news()

    def _is_stopped(self, connection: "_Connection") -> bool:
        is_stopped = connection.is_stopped()
        self._num_checks_stopped = self._num_checks_stopped + 1 if is_stopped else 0
        return self._num_checks_stopped >= MAX_CHECKS_STOPPED

    def _hangs(self, connection: "_Connection", now_s: float) -> bool:
        if connection.page.progress != self._progress:
            self._progress, self._progress_at_s = connection.page.progress, now_s
        return now_s > self._progress_at_s + HANG_S

    def close(self) -> None:
        """End the process, and wait for its end."""
        self._is_closed = True
        if self._restart is not None:
            self._restart.cancel()
        if self._connection is not None:
            self._disconnect(self._connection)
        for process in self._killed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)

    def _start_process(self) -> None:
        now_s = time.monotonic()
        if self._connection is not None or self._is_closed or self._restart is not None:
            return
        if now_s < self._next_start_s:
            loop = asyncio.get_running_loop()
            self._restart = loop.call_later(self._next_start_s - now_s, self._start_again)
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

    def _start_again(self) -> None:
        self._restart = None
        self._send_waiting()
        if self._news:  # it cannot be started, so requests have failed
            self._on_news()

    def _on_message(self) -> None:
        connection = self._connection
        assert connection is not None
        for message in connection.channel.drain():
            self._take(message)
            if self._connection is not connection:  # it was ended
                break
        self._send_waiting()
        self._on_news()

    def _take(self, message: FromGrammarProcess) -> None:
        match message:
            case GrammarProcessReady():
                self._is_ready = True
                self._ready_at_s = time.monotonic()
                self._num_failed_starts = 0
            case GrammarCompiled():
                if (source := self._by_number.get(message.grammar_id)) is not None:
                    self._end_compilation(source, message)
            case MasksFilled():
                self._take_masks(message)
            case _:
                assert_never(message)

    def _end_compilation(self, source: _Source, message: GrammarCompiled) -> None:
        del self._compiling[source]
        self._suspicions.pop(source.spec, None)
        if message.error is not None:
            error = InvalidGrammar(message.error)
            self._fail_text(source.spec, error, time.monotonic() + FAILURE_S)
            return
        source.is_compiled = True
        source.num_bytes = message.num_bytes
        self._news.extend(source.users)

    def _take_masks(self, message: MasksFilled) -> None:
        number, _, rows = self._unanswered.popleft()
        if number != message.number:
            self._end_process(f"answered {message.number} instead of {number}")
            return
        first = 0
        for grammar, num_masks in rows:
            if grammar.is_suspect:
                grammar.is_suspect = False
                self._unproven.pop(grammar, None)
            error = message.errors.get(grammar.grammar_id)
            if error is not None:
                self._fail(grammar, GrammarError(error))
                continue
            last = first + num_masks * self.mask_bytes
            if grammar.receive(number, message.bits[first:last]):
                self._news.append(grammar.grammar_id)
            first = last

    def _on_lifeline(self) -> None:
        assert self._connection is not None
        if not self._connection.is_alive():
            self._end_process("has died")
            self._on_news()

    def _send(self, message: ToGrammarProcess) -> None:
        if self._connection is None or not self._is_ready:
            return  # it has died
        try:
            self._connection.channel.send(message)
        except EngineDead:
            self._end_process("has died, or takes no messages")
            return
        self._connection.check()

    # The end of a process

    def _end_process(self, what: str, *, is_stopped: bool = False) -> None:
        """What it knew is given to the next process, except for what has ended two of them.
        is_stopped: by a signal, so it does not matter what it was working on."""
        now_s = time.monotonic()
        was_ready, connection = self._is_ready, self._connection
        if now_s > self._started_at_s + CALM_S:
            self._backoff_s, self._num_deaths = 0.0, 0
        self._num_deaths += was_ready
        self._num_failed_starts += not was_ready
        blamed = [] if connection is None or is_stopped else self._blame(connection.page, what)
        if connection is not None:
            self._disconnect(connection)
        self._next_start_s = now_s + self._backoff_s
        logger.error(
            "the grammar process %d %s%s; %d requests wait for the next one, which starts %s",
            self.num_starts,
            what,
            f" while it worked on {', '.join(blamed)}" if blamed else "",
            sum(grammar.error is None for grammar in self._grammars.values()),
            f"after {self._backoff_s:g} s" if self._backoff_s else "at once",
        )
        self._backoff_s = min(max(2 * self._backoff_s, FIRST_BACKOFF_S), MAX_BACKOFF_S)
        if self._num_failed_starts >= MAX_FAILED_STARTS or self._num_deaths > MAX_DEATHS:
            self._fail_all(what)
        self._send_waiting()

    def _blame(self, page: WorkPage, what: str) -> list[str]:
        """Suspect what the process was working on, or fail it if it was suspected already. Returns
        what that is, for the log."""
        filled = self._grammars.get(page.filling)
        compiled = [spec for number in page.compiling if (spec := self._compiled_text(number))]
        suspects = [spec for spec in compiled if spec in self._suspicions]
        is_known = bool(suspects) or (filled is not None and filled.is_suspect)
        for spec in suspects:
            self._fail_text(spec, _fatal(spec, what), math.inf)
        if filled is not None and filled.is_suspect:
            self._fail(filled, _fatal(filled.source.spec, what))
        if not is_known:
            for spec in compiled:
                _remember(self._suspicions, spec, None)
            if filled is not None:
                filled.is_suspect = True
                self._unproven[filled] = None
        blamed = [f"a {spec.kind} to compile" for spec in compiled]
        return blamed if filled is None else [*blamed, f"masks of a {filled.source.spec.kind}"]

    def _fail_all(self, what: str) -> None:
        """No process can be relied on: nothing waits for the next one."""
        error = GrammarError(
            f"the process that computes structured output {what}, as {self._num_deaths} processes "
            "before it; send the request later"
            if self._num_deaths > MAX_DEATHS
            else f"the process that computes structured output {what}; send the request again"
        )
        for grammar in self._grammars.values():
            self._fail(grammar, error)
        for source in list(self._sources.values()):
            source.users = {}
            self._drop(source)

    def _disconnect(self, connection: "_Connection") -> None:
        """Everything that the process had is to be sent to the next one."""
        connection.close()
        self._killed.append(connection.process)
        self._connection = None
        self._is_ready = False
        self._unanswered.clear()
        self._asking, self._ended, self._dropped = [], [], []
        for source in list(self._unused):
            self._drop(source)
        self._unused.clear()
        self._num_unused_bytes = 0
        self._dropped, self._compiling = [], {}
        self._abandoned.clear()
        not_begun, self._waiting = self._waiting, OrderedDict()
        for source in self._sources.values():
            if source.is_sent:
                source.is_sent = source.is_compiled = False
                self._queue_for(source)[source] = None
        self._waiting.update(not_begun)
        for grammar in self._grammars.values():
            grammar.lose_state()


class _Connection:
    """One grammar process: it has a socket, a lifeline and a page of its own."""

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
        page_fd = new_page()
        self.page = WorkPage(page_fd)
        process_config = GrammarProcessConfig(
            structured_output=replace(settings, endpoint=endpoint),
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            engine=f"{config.engine_id}.{config.epoch}",
            lifeline_fd=child_end.fileno(),
            page_fd=page_fd,
            is_relayed=config.lifeline_fd is not None,
            log_level=config.log_level,
        )
        try:
            with child_end:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", MODULE],
                    stdin=subprocess.PIPE,
                    pass_fds=(child_end.fileno(), page_fd),
                )
        except OSError:
            self._lifeline.close()
            self.page.close()
            self.channel.socket.close(linger=0)
            raise
        finally:
            os.close(page_fd)
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

    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def close(self) -> None:
        """Kill the process; its end is not awaited."""
        if self._watcher is not None:
            self._watcher.close()
            with contextlib.suppress(RuntimeError):  # the loop has ended
                asyncio.get_running_loop().remove_reader(self._lifeline.fileno())
        self.process.kill()
        self._lifeline.close()
        self.page.close()
        self.channel.socket.close(linger=0)
