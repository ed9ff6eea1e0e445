"""The grammar process of a scheduler: compiles grammars on threads of its own, and computes the
token masks of running requests between them.

It is a process of its own because a backend may import torch, crash, or run without end. It ends
with the scheduler, which holds the other end of its lifeline.
"""

import logging
import os
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias, assert_never

import numpy as np
import zmq

from longshore.protocol.arrays import UInt8Array
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
from longshore.protocol.transport.channel import Channel
from longshore.scheduler.config import GrammarProcessConfig
from longshore.scheduler.features.grammar import GrammarError
from longshore.scheduler.structured_output.backends import CompiledGrammar, Matcher

logger = logging.getLogger(__name__)

MaskWords: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int32]]
"""(masks, cdiv(vocabulary, 32)): the lowest token id in the lowest bit."""

NUM_COMPILERS: Final = 2
"""Threads that compile. One of them can be busy with a grammar that has passed its time limit."""

MAX_STUCK_S: Final = 60.0
"""After this time with a grammar that no thread can finish, the process ends."""

LOAD_TIMEOUT_S: Final = 60.0
"""Added to the time limit of a grammar that may have to wait for the import of a library."""


class Compiler(Protocol):
    """Compiles on several threads. is_loaded: no library has to be imported for it."""

    @property
    def is_loaded(self) -> bool: ...

    def compile(self, spec: StructuredOutput) -> CompiledGrammar:
        """Raises GrammarError."""


@dataclass
class _Job:
    """A grammar to compile.

    grammar_ids: of the requests that wait for it.
    deadline_s:  set when a thread begins with it.
    """

    grammar_ids: list[int]
    deadline_s: float | None = None
    is_expired: bool = False


@dataclass
class _Request:
    """A request with a grammar. matcher: since it is compiled. error: since it has failed."""

    matcher: Matcher | None = None
    error: str | None = None


class GrammarCache:
    """The compiled grammars used last, bounded in number and bytes."""

    def __init__(self, max_grammars: int, max_bytes: int) -> None:
        self._max_grammars, self._max_bytes = max_grammars, max_bytes
        self._grammars: OrderedDict[StructuredOutput, CompiledGrammar] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._grammars)

    def get(self, spec: StructuredOutput) -> CompiledGrammar | None:
        """The grammar, which is the one used last from now on."""
        if spec in self._grammars:
            self._grammars.move_to_end(spec)
        return self._grammars.get(spec)

    def add(self, spec: StructuredOutput, grammar: CompiledGrammar) -> None:
        """Keep a grammar, unless it is larger than the cache, and evict what is over the limits."""
        if grammar.num_bytes + len(spec.text) > self._max_bytes:
            return
        self.num_bytes -= self._size(spec)
        self._grammars[spec] = grammar
        self._grammars.move_to_end(spec)
        self.num_bytes += self._size(spec)
        while len(self._grammars) > self._max_grammars or self.num_bytes > self._max_bytes:
            oldest = next(iter(self._grammars))
            self.num_bytes -= self._size(oldest)
            del self._grammars[oldest]

    def _size(self, spec: StructuredOutput) -> int:
        grammar = self._grammars.get(spec)
        return 0 if grammar is None else grammar.num_bytes + len(spec.text)


@dataclass
class CompilerThreads:
    """Compiles on threads. `wake_fd` is readable when `take` has something."""

    compiler: Compiler
    wake_fd: int = field(default_factory=lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    _waiting: "queue.SimpleQueue[StructuredOutput]" = field(default_factory=queue.SimpleQueue)
    _done: "deque[tuple[StructuredOutput, CompiledGrammar | str]]" = field(default_factory=deque)

    def __post_init__(self) -> None:
        for _ in range(NUM_COMPILERS):
            threading.Thread(target=self._run, name="compiler", daemon=True).start()

    def start(self, spec: StructuredOutput) -> None:
        """Compile on a thread, of which there are NUM_COMPILERS."""
        self._waiting.put(spec)

    def take(self) -> list[tuple[StructuredOutput, CompiledGrammar | str]]:
        """What has been compiled since the last call, or why it cannot be."""
        try:
            os.eventfd_read(self.wake_fd)
        except BlockingIOError:
            return []
        return [self._done.popleft() for _ in range(len(self._done))]

    def _run(self) -> None:
        while True:
            spec = self._waiting.get()
            result: CompiledGrammar | str
            try:
                result = self.compiler.compile(spec)
            except GrammarError as error:
                result = str(error)
            except BaseException as error:  # of a backend: a panic in Rust is no Exception
                logger.exception("a backend has failed")
                result = f"the {spec.kind} cannot be compiled: {error}"
            self._done.append((spec, result))
            os.eventfd_write(self.wake_fd, 1)


class GrammarServer:
    """Answers one scheduler."""

    def __init__(
        self,
        config: GrammarProcessConfig,
        channel: Channel[FromGrammarProcess, ToGrammarProcess],
        compiler: Compiler,
    ) -> None:
        settings = config.structured_output
        self._timeout_s = settings.compile_timeout_s
        self._vocab_size = config.vocab_size
        self._eos_token_ids = config.eos_token_ids
        self._channel = channel
        self._compiler = compiler
        self._threads = CompilerThreads(compiler)
        self._cache = GrammarCache(settings.max_cached_grammars, settings.max_cached_bytes)
        self._requests: dict[int, _Request] = {}
        self._jobs: dict[StructuredOutput, _Job] = {}
        self._waiting: deque[StructuredOutput] = deque()  # jobs for which no thread was free
        self._poller = zmq.Poller()
        self._poller.register(channel.socket, zmq.POLLIN)
        self._poller.register(self._threads.wake_fd, zmq.POLLIN)

    def run(self) -> None:
        """Serve until the process is killed, or no thread can compile any more."""
        self._channel.send(GrammarProcessReady())
        while not self.is_stuck(time.monotonic()):
            self.turn(1000 if self._jobs else None)  # a job may pass its time limit
        logger.error(
            "%d grammars have been compiled for more than %g s; the grammar process ends",
            len(self._jobs),
            MAX_STUCK_S,
        )

    def turn(self, timeout_ms: int | None) -> None:
        """Answer what has arrived and what has been compiled; wait for it at most so long."""
        self._poller.poll(timeout_ms)
        for message in self._channel.drain():
            self._take(message)
        for spec, result in self._threads.take():
            self._end_job(spec, result)
        self._begin_jobs(time.monotonic())
        self._expire_jobs(time.monotonic())

    def _take(self, message: ToGrammarProcess) -> None:
        match message:
            case CompileGrammar(grammar_id, spec):
                self._requests[grammar_id] = _Request()
                self._start_job(grammar_id, spec)
            case FillMasks():
                self._channel.send(self._fill(message))
            case ReleaseGrammars():
                for grammar_id in message.grammar_ids:
                    self._requests.pop(grammar_id, None)
            case _:
                assert_never(message)

    # Compilation

    def _start_job(self, grammar_id: int, spec: StructuredOutput) -> None:
        grammar = self._cache.get(spec)
        if grammar is not None:
            self._compiled(grammar_id, grammar)
            return
        job = self._jobs.get(spec)
        if job is None:
            self._jobs[spec] = _Job([grammar_id])
            self._waiting.append(spec)
        elif job.is_expired:
            self._channel.send(GrammarCompiled(grammar_id, self._too_slow(spec)))
        else:
            job.grammar_ids.append(grammar_id)

    def _begin_jobs(self, now_s: float) -> None:
        """Give free threads what is waiting, except grammars whose requests have all ended."""
        num_begun = sum(job.deadline_s is not None for job in self._jobs.values())
        while self._waiting and num_begun < NUM_COMPILERS:
            spec = self._waiting.popleft()
            job = self._jobs[spec]
            if self._requests.keys().isdisjoint(job.grammar_ids):
                del self._jobs[spec]
                continue
            timeout_s = self._timeout_s + (0.0 if self._compiler.is_loaded else LOAD_TIMEOUT_S)
            job.deadline_s = now_s + timeout_s
            self._threads.start(spec)
            num_begun += 1

    def _end_job(self, spec: StructuredOutput, result: CompiledGrammar | str) -> None:
        if not isinstance(result, str):
            self._cache.add(spec, result)
        for grammar_id in self._jobs.pop(spec).grammar_ids:
            if isinstance(result, str):
                self._channel.send(GrammarCompiled(grammar_id, result))
            else:
                self._compiled(grammar_id, result)

    def _compiled(self, grammar_id: int, grammar: CompiledGrammar) -> None:
        request = self._requests.get(grammar_id)
        if request is not None:  # it has not been released meanwhile
            request.matcher = grammar.matcher()
            self._channel.send(GrammarCompiled(grammar_id))

    def _expire_jobs(self, now_s: float) -> None:
        for spec, job in self._jobs.items():
            if job.deadline_s is not None and now_s > job.deadline_s and not job.is_expired:
                job.is_expired = True
                for grammar_id in job.grammar_ids:
                    self._channel.send(GrammarCompiled(grammar_id, self._too_slow(spec)))
                job.grammar_ids = []

    def _too_slow(self, spec: StructuredOutput) -> str:
        return (
            f"the {spec.kind} was not compiled within {self._timeout_s:g} s; make it smaller, or "
            "its bounds on lengths and numbers of items"
        )

    def is_stuck(self, now_s: float) -> bool:
        """Whether no thread can compile any more."""
        deadlines = [job.deadline_s for job in self._jobs.values() if job.deadline_s is not None]
        return sum(now_s > deadline_s + MAX_STUCK_S for deadline_s in deadlines) >= NUM_COMPILERS

    # Masks

    def _fill(self, message: FillMasks) -> MasksFilled:
        num_masks = sum(1 + len(row.draft_token_ids) for row in message.rows)
        width = -(-self._vocab_size // 32)
        words = np.zeros((num_masks, width), np.int32)
        errors: dict[int, str] = {}
        first = 0
        for row in message.rows:
            masks = words[first : first + 1 + len(row.draft_token_ids)]
            try:
                fill_row(self._advanced(row), row.draft_token_ids.tolist(), masks)
            except GrammarError as error:
                self._requests[row.grammar_id].error = errors[row.grammar_id] = str(error)
                masks[:] = 0  # for the next row
                continue
            first += len(masks)
        return MasksFilled(message.number, packed(words[:first], self._vocab_size), errors)

    def _advanced(self, row: MaskedRow) -> Matcher:
        request = self._requests[row.grammar_id]
        if request.error is not None:
            raise GrammarError(request.error)
        assert request.matcher is not None, "the scheduler asks after GrammarCompiled"
        for token_id in row.token_ids.tolist():
            if not request.matcher.accept(token_id):
                raise GrammarError("the output so far does not match the grammar")
        return request.matcher


def fill_row(matcher: Matcher, drafts: Sequence[int], masks: MaskWords) -> None:
    """The mask of the next token, and one after each draft. Raises GrammarError."""
    num_accepted = 0
    for index in range(len(masks)):
        matcher.fill(masks[index])
        if not masks[index].any():
            raise GrammarError(
                "no token continues the output as the grammar demands: the vocabulary cannot "
                "spell it"
            )
        if index < len(drafts):
            if not matcher.accept(drafts[index]):
                masks[index + 1 :] = -1  # the masks after it are not used
                break
            num_accepted += 1
    if num_accepted:
        matcher.rollback(num_accepted)


def packed(words: MaskWords, vocab_size: int) -> UInt8Array:
    """The bits of whole words without the last ones that no token has."""
    bits = words.astype("<i4", copy=False).view(np.uint8)
    return np.ascontiguousarray(bits[:, : -(-vocab_size // 8)]).reshape(-1)
