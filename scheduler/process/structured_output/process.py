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
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
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
    Release,
    ToGrammarProcess,
)
from longshore.protocol.requests import StructuredOutput
from longshore.protocol.transport.channel import Channel
from longshore.scheduler.config import GrammarProcessConfig
from longshore.scheduler.features.grammar import GrammarError
from longshore.scheduler.process.structured_output.matcher import CompiledGrammar, Matcher
from longshore.scheduler.process.structured_output.work_page import NUM_COMPILERS, WorkPage

logger = logging.getLogger(__name__)

MaskWords: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int32]]
"""(masks, cdiv(vocabulary, 32)): the lowest token id in the lowest bit."""

MAX_MESSAGES_PER_TURN: Final = 64
"""More wait for the next turn."""

MAX_STUCK_S: Final = 60.0
"""After this time with a grammar that no thread can finish, the process ends."""

LOAD_TIMEOUT_S: Final = 60.0
"""Added to the time limit of a grammar that may have to wait for the import of a library."""


class Compiler(Protocol):
    """Compiles on several threads. is_loaded: no library has to be imported for it."""

    @property
    def is_loaded(self) -> bool: ...

    def compile(self, spec: StructuredOutput) -> CompiledGrammar:
        """The compiled grammar. Raises GrammarError."""


@dataclass
class _Job:
    """A grammar to compile.

    grammar_ids: its numbers, more than one if it was released and asked for again meanwhile.
    deadline_s:  set when a thread begins with it.
    """

    grammar_ids: list[int]
    deadline_s: float | None = None
    is_expired: bool = False


@dataclass
class _Request:
    """A request with a grammar. error: since it has failed."""

    matcher: Matcher
    error: str | None = None


@dataclass
class CompilerThreads:
    """Compiles on threads. `wake_fd` is readable when `take` has something."""

    compiler: Compiler
    page: WorkPage
    wake_fd: int = field(default_factory=lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    _waiting: "queue.SimpleQueue[tuple[int, StructuredOutput]]" = field(
        default_factory=queue.SimpleQueue
    )
    _done: "deque[tuple[StructuredOutput, CompiledGrammar | str]]" = field(default_factory=deque)

    def __post_init__(self) -> None:
        for index in range(NUM_COMPILERS):
            threading.Thread(target=self._run, args=(index,), name="compiler", daemon=True).start()

    def start(self, grammar_id: int, spec: StructuredOutput) -> None:
        """Compile on a thread, of which there are NUM_COMPILERS."""
        self._waiting.put((grammar_id, spec))

    def take(self) -> list[tuple[StructuredOutput, CompiledGrammar | str]]:
        """What has been compiled since the last call, or why it cannot be."""
        try:
            os.eventfd_read(self.wake_fd)
        except BlockingIOError:
            return []
        return [self._done.popleft() for _ in range(len(self._done))]

    def _run(self, index: int) -> None:
        while True:
            grammar_id, spec = self._waiting.get()
            self.page.compile(index, grammar_id)
            result: CompiledGrammar | str
            try:
                result = self.compiler.compile(spec)
            except GrammarError as error:
                result = str(error)
            except BaseException as error:  # of a backend: a panic in Rust is no Exception
                logger.exception("a backend has failed")
                result = f"the {spec.kind} cannot be compiled: {error}"
            self.page.compile(index, 0)
            self._done.append((spec, result))
            os.eventfd_write(self.wake_fd, 1)


class GrammarServer:
    """Answers one scheduler, which decides what is kept here."""

    def __init__(
        self,
        config: GrammarProcessConfig,
        channel: Channel[FromGrammarProcess, ToGrammarProcess],
        compiler: Compiler,
        page: WorkPage,
    ) -> None:
        self._timeout_s = config.structured_output.compile_timeout_s
        self._vocab_size = config.vocab_size
        self._channel = channel
        self._compiler = compiler
        self._page = page
        self._threads = CompilerThreads(compiler, page)
        self._grammars: dict[int, CompiledGrammar] = {}
        self._requests: dict[int, _Request] = {}
        self._jobs: dict[StructuredOutput, _Job] = {}
        self._job_of: dict[int, StructuredOutput] = {}  # of grammars that are not compiled
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
        self._page.advance()
        for message in islice(self._channel.drain(), MAX_MESSAGES_PER_TURN):
            self._take(message)
        for spec, result in self._threads.take():
            self._end_job(spec, result)
        self._begin_jobs(time.monotonic())
        self._expire_jobs(time.monotonic())

    def _take(self, message: ToGrammarProcess) -> None:
        match message:
            case CompileGrammar(grammar_id, spec):
                self._start_job(grammar_id, spec)
            case FillMasks():
                self._channel.send(self._fill(message))
            case Release():
                for matcher_id in message.matcher_ids:
                    self._requests.pop(matcher_id, None)
                for grammar_id in message.grammar_ids:
                    self._release_grammar(grammar_id)
            case _:
                assert_never(message)

    # Compilation

    def _start_job(self, grammar_id: int, spec: StructuredOutput) -> None:
        job = self._jobs.get(spec)
        if job is None:
            job = self._jobs[spec] = _Job([])
            self._waiting.append(spec)
        if job.is_expired:
            self._channel.send(GrammarCompiled(grammar_id, self._too_slow(spec)))
        else:
            job.grammar_ids.append(grammar_id)
            self._job_of[grammar_id] = spec

    def _release_grammar(self, grammar_id: int) -> None:
        self._grammars.pop(grammar_id, None)
        if (spec := self._job_of.pop(grammar_id, None)) is not None:
            self._jobs[spec].grammar_ids.remove(grammar_id)

    def _begin_jobs(self, now_s: float) -> None:
        """Give free threads what is waiting, except grammars that have been released."""
        num_begun = sum(job.deadline_s is not None for job in self._jobs.values())
        while self._waiting and num_begun < NUM_COMPILERS:
            spec = self._waiting.popleft()
            job = self._jobs[spec]
            if not job.grammar_ids:
                del self._jobs[spec]
                continue
            timeout_s = self._timeout_s + (0.0 if self._compiler.is_loaded else LOAD_TIMEOUT_S)
            job.deadline_s = now_s + timeout_s
            self._threads.start(job.grammar_ids[0], spec)
            num_begun += 1

    def _end_job(self, spec: StructuredOutput, result: CompiledGrammar | str) -> None:
        for grammar_id in self._jobs.pop(spec).grammar_ids:
            del self._job_of[grammar_id]
            if isinstance(result, str):
                self._channel.send(GrammarCompiled(grammar_id, result))
            else:
                self._grammars[grammar_id] = result
                num_bytes = result.num_bytes + len(spec.text)
                self._channel.send(GrammarCompiled(grammar_id, num_bytes=num_bytes))

    def _expire_jobs(self, now_s: float) -> None:
        for spec, job in self._jobs.items():
            if job.deadline_s is not None and now_s > job.deadline_s and not job.is_expired:
                job.is_expired = True
                for grammar_id in job.grammar_ids:
                    del self._job_of[grammar_id]
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
            self._page.filling = row.matcher_id
            try:
                fill_row(self._advanced(row), row.draft_token_ids.tolist(), masks)
                first += len(masks)
            except GrammarError as error:
                self._requests[row.matcher_id].error = errors[row.matcher_id] = str(error)
                masks[:] = 0  # for the next row
            self._page.filling = 0
            self._page.advance()
        return MasksFilled(message.number, packed(words[:first], self._vocab_size), errors)

    def _advanced(self, row: MaskedRow) -> Matcher:
        request = self._requests.get(row.matcher_id)
        if request is None:
            # The scheduler releases no grammar whose requests it asks for.
            matcher = self._grammars[row.grammar_id].matcher()
            request = self._requests[row.matcher_id] = _Request(matcher)
        if request.error is not None:
            raise GrammarError(request.error)
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
            draft = drafts[index]
            # By the mask: a matcher may accept a token that its mask forbids, and have none after.
            if not masks[index, draft >> 5] >> (draft & 31) & 1:
                masks[index + 1 :] = -1  # the masks after it are not used
                break
            matcher.accept(draft)
            num_accepted += 1
    if num_accepted:
        matcher.rollback(num_accepted)


def packed(words: MaskWords, vocab_size: int) -> UInt8Array:
    """The bits of whole words without the last ones that no token has."""
    bits = words.astype("<i4", copy=False).view(np.uint8)
    return np.ascontiguousarray(bits[:, : -(-vocab_size // 8)]).reshape(-1)
