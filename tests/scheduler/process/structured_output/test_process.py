"""The grammar process, one turn at a time: what it keeps, its limits of time, and masks."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import zmq

from longshore.protocol.arrays import Int32Array, int32_array
from longshore.protocol.grammars import (
    CompileGrammar,
    FillMasks,
    FromGrammarProcess,
    GrammarCompiled,
    MaskedRow,
    MasksFilled,
    Release,
    ToGrammarProcess,
)
from longshore.protocol.requests import StructuredOutput
from longshore.protocol.transport.channel import Channel, Endpoint
from longshore.scheduler.config import GrammarProcessConfig, StructuredOutputConfig
from longshore.scheduler.features.grammar import GrammarError
from longshore.scheduler.process.structured_output.backends import LLGuidance
from longshore.scheduler.process.structured_output.process import (
    LOAD_TIMEOUT_S,
    MAX_MESSAGES_PER_TURN,
    MAX_STUCK_S,
    GrammarServer,
    fill_row,
)
from longshore.scheduler.process.structured_output.work_page import (
    NUM_COMPILERS,
    WorkPage,
    new_page,
)
from tests.harness.sockets import Sockets
from tests.harness.vocabularies import small_vocabulary
from tests.integration.deployment import wait_until

VOCAB_SIZE = 70
TIMEOUT_S = 30.0


class Counting:
    """Allows the tokens n, n + 1, ... in this order."""

    def __init__(self, first: int) -> None:
        self._next = first

    def accept(self, token_id: int) -> bool:
        is_next = token_id == self._next
        self._next += is_next
        return is_next

    def fill(self, mask: Int32Array) -> None:
        if self._next < VOCAB_SIZE:
            mask.view(np.uint32)[self._next // 32] |= np.uint32(1 << (self._next % 32))

    def rollback(self, num_tokens: int) -> None:
        self._next -= num_tokens


class CountingGrammar:
    def __init__(self, first: int, num_bytes: int = 1) -> None:
        self.num_bytes = num_bytes
        self._first = first

    def matcher(self) -> Counting:
        return Counting(self._first)


class FakeBackends:
    """A grammar's text is its first token. stuck: set to go on with the others. page: of the
    process; noted: what it says during each compilation."""

    def __init__(self, page: WorkPage) -> None:
        self.is_loaded = True
        self.compiled: list[str] = []
        self.noted: list[list[int]] = []
        self.stuck = threading.Event()
        self._page = page

    def compile(self, spec: StructuredOutput) -> CountingGrammar:
        self.compiled.append(spec.text)
        self.noted.append(self._page.compiling)
        if spec.text.startswith("stuck"):
            self.stuck.wait(TIMEOUT_S)
        if spec.text.startswith("panic"):
            raise BaseException("a panic")  # as pyo3 raises it
        if not spec.text.isdigit():
            raise GrammarError(f"no grammar: {spec.text}")
        return CountingGrammar(int(spec.text))


class Process:
    """The server, and the scheduler's channel to it."""

    def __init__(self, folder: Path, compile_timeout_s: float) -> None:
        endpoint = Endpoint(f"ipc://{folder}/grammars")
        page_fd = new_page()
        self.page, page_of_process = WorkPage(page_fd), WorkPage(page_fd)
        os.close(page_fd)
        self.backends = FakeBackends(self.page)
        self._sockets = Sockets()
        self.channel: Channel[ToGrammarProcess, FromGrammarProcess] = Channel(
            self._sockets.open(zmq.DEALER, endpoint, bind=True), FromGrammarProcess
        )
        config = GrammarProcessConfig(
            structured_output=StructuredOutputConfig(
                structured_output_backend="auto",
                tokenizer_file="",
                endpoint=endpoint,
                compile_timeout_s=compile_timeout_s,
            ),
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(0,),
            engine="",
            lifeline_fd=-1,
            page_fd=-1,
            is_relayed=False,
            log_level="info",
        )
        socket = self._sockets.open(zmq.DEALER, endpoint, bind=False)
        channel: Channel[FromGrammarProcess, ToGrammarProcess] = Channel(socket, ToGrammarProcess)
        self.server = GrammarServer(config, channel, self.backends, page_of_process)
        assert self.channel.socket.poll(1000 * TIMEOUT_S, zmq.POLLOUT), "not connected"

    def compile(self, grammar_id: int, text: str) -> None:
        self.channel.send(CompileGrammar(grammar_id, StructuredOutput("grammar", text)))

    def compiled(self, *grammar_ids: int, text: str = "5") -> None:
        """Compile grammars of this text."""
        for grammar_id in grammar_ids:
            self.compile(grammar_id, text)
            assert self.answer() == GrammarCompiled(grammar_id, num_bytes=1 + len(text))

    def answer(self) -> FromGrammarProcess:
        """The next answer; the server works until then."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            message = self.channel.receive()
            if message is not None:
                return message
            self.server.turn(10)
        raise AssertionError("no answer has come")

    def fill(self, *rows: MaskedRow) -> tuple[list[list[int]], dict[int, str]]:
        """The ids that each mask allows, and the errors."""
        self.channel.send(FillMasks(7, rows))
        answer = self.answer()
        assert isinstance(answer, MasksFilled)
        assert answer.number == 7
        masks = answer.bits.reshape(-1, -(-VOCAB_SIZE // 8))
        bits = np.unpackbits(masks, axis=1, bitorder="little")
        return [np.flatnonzero(row).tolist() for row in bits], answer.errors

    def close(self) -> None:
        self.backends.stuck.set()
        self._sockets.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(compile_timeout_s: float = TIMEOUT_S) -> Process:
        started.append(Process(tmp_path, compile_timeout_s))
        return started[-1]

    yield start
    for process in started:
        process.close()


def row(matcher_id: int, token_ids: Sequence[int] = (), drafts: Sequence[int] = ()) -> MaskedRow:
    """A row of a request whose grammar is number 1."""
    return MaskedRow(matcher_id, 1, int32_array(list(token_ids)), int32_array(list(drafts)))


def test_a_grammar_that_is_asked_for_again_is_compiled_once(start: Callable[..., Process]) -> None:
    process = start()
    process.compile(1, "5")
    process.compile(2, "5")
    first, second = process.answer(), process.answer()
    assert [first, second] == [GrammarCompiled(1, num_bytes=2), GrammarCompiled(2, num_bytes=2)]
    assert process.backends.compiled == ["5"]


def test_each_request_has_a_state_of_its_own(start: Callable[..., Process]) -> None:
    process = start()
    process.compiled(1)
    assert process.fill(row(11, [5, 6]), row(12)) == ([[7], [5]], {})
    assert process.fill(row(11, [7]), row(12)) == ([[8], [5]], {})


def test_drafts_have_masks_and_leave_the_state(start: Callable[..., Process]) -> None:
    process = start()
    process.compiled(1)
    allowed, errors = process.fill(row(11, drafts=[5, 6, 9, 9]))
    assert (allowed[:3], errors) == ([[5], [6], [7]], {})
    assert len(allowed) == 5
    assert process.fill(row(11)) == ([[5]], {})


@pytest.mark.parametrize(
    ("tokens", "reason"), [([4], "does not match"), (list(range(5, VOCAB_SIZE)), "cannot spell")]
)
def test_a_request_without_a_mask_fails_alone(
    tokens: list[int], reason: str, start: Callable[..., Process]
) -> None:
    process = start()
    process.compiled(1)
    for one in (row(11, tokens), row(11)):
        allowed, errors = process.fill(one, row(12))
        assert allowed == [[5]]
        assert list(errors) == [11]
        assert reason in errors[11]


def test_grammars_and_requests_are_kept_until_they_are_released(
    start: Callable[..., Process],
) -> None:
    process = start()
    process.compiled(1)
    process.fill(row(11, [5]), row(12, [5]))
    process.channel.send(Release((11,)))
    assert process.fill(row(12)) == ([[6]], {})
    assert process.fill(row(11)) == ([[5]], {})  # a new one
    process.channel.send(Release((), (1,)))
    process.compiled(2)
    assert process.backends.compiled == ["5", "5"]


def test_the_page_says_what_the_process_is_working_on(start: Callable[..., Process]) -> None:
    process = start()
    process.compiled(3)
    assert process.backends.noted == [[3]]
    assert (process.page.compiling, process.page.filling) == ([], 0)
    noted: list[int] = []

    class Noting(Counting):
        def fill(self, mask: Int32Array) -> None:
            noted.append(process.page.filling)
            super().fill(mask)

    process.server._grammars[1] = CountingGrammar(5)
    process.server._grammars[1].matcher = lambda: Noting(5)  # type: ignore[method-assign]
    before = process.page.progress
    process.fill(row(11), row(12))
    assert noted == [11, 12]
    assert process.page.progress >= before + 3  # a turn, and two rows


def test_a_turn_takes_so_many_messages_and_no_more(start: Callable[..., Process]) -> None:
    process = start()
    for number in range(3 * MAX_MESSAGES_PER_TURN):
        process.compile(1 + number, f"wrong {number}")
    process.channel.send(Release((), tuple(range(1, 3 * MAX_MESSAGES_PER_TURN + 1))))
    wait_until(lambda: process.server._poller.poll(0) != [])
    process.server.turn(0)
    num_taken = len(process.server._jobs)
    assert 0 < num_taken <= MAX_MESSAGES_PER_TURN


def test_a_grammar_that_is_released_before_a_thread_is_free_is_not_compiled(
    start: Callable[..., Process],
) -> None:
    process = start()
    for number in range(NUM_COMPILERS):
        process.compile(1 + number, f"stuck {number}")
    process.compile(8, "5")
    process.compile(9, "6")
    process.channel.send(Release((), (8,)))
    wait_until(lambda: process.server.turn(10) or len(process.server._job_of) == NUM_COMPILERS + 1)
    process.backends.stuck.set()
    for _ in range(NUM_COMPILERS):
        process.answer()
    assert process.answer() == GrammarCompiled(9, num_bytes=2)
    assert process.backends.compiled[NUM_COMPILERS:] == ["6"]


def test_a_grammar_that_cannot_be_compiled_is_answered_with_the_reason(
    start: Callable[..., Process],
) -> None:
    process = start()
    process.compile(1, "wrong")
    assert process.answer() == GrammarCompiled(1, "no grammar: wrong")


def test_a_grammar_over_its_time_limit_does_not_delay_others(start: Callable[..., Process]) -> None:
    process = start(compile_timeout_s=0.05)
    process.compile(1, "stuck")
    late = process.answer()
    assert isinstance(late, GrammarCompiled)
    assert "was not compiled within 0.05 s" in (late.error or "")
    process.compile(2, "stuck")  # it is still being compiled
    assert process.answer() == GrammarCompiled(2, late.error)
    process.compile(3, "5")
    assert process.answer() == GrammarCompiled(3, num_bytes=2)
    assert process.backends.compiled == ["stuck", "5"]


def test_a_grammar_that_waits_for_a_thread_is_not_too_slow(start: Callable[..., Process]) -> None:
    process = start(compile_timeout_s=0.05)
    for number in range(NUM_COMPILERS):
        process.compile(number, f"stuck {number}")
        process.answer()  # it is over its limit
    process.compile(8, "5")
    process.compile(9, "6")
    process.channel.send(Release((), (9,)))
    deadline_s = time.monotonic() + 0.3
    while time.monotonic() < deadline_s:
        process.server.turn(20)
    process.backends.stuck.set()
    assert process.answer() == GrammarCompiled(8, num_bytes=2)
    process.compiled(10, text="7")
    assert process.backends.compiled == ["stuck 0", "stuck 1", "5", "7"]  # 6 was released


def test_a_backend_that_panics_takes_no_thread_with_it(start: Callable[..., Process]) -> None:
    process = start()
    for number in range(NUM_COMPILERS + 1):
        process.compile(number, f"panic {number}")
        answer = process.answer()
        assert isinstance(answer, GrammarCompiled)
        assert answer.error == "the grammar cannot be compiled: a panic"


def test_the_process_ends_when_no_thread_can_compile(start: Callable[..., Process]) -> None:
    process = start(compile_timeout_s=0.05)
    process.backends.is_loaded = False
    soon, late = 1.0 + LOAD_TIMEOUT_S, 2.0 + LOAD_TIMEOUT_S + MAX_STUCK_S
    for number in range(NUM_COMPILERS):
        assert not process.server.is_stuck(time.monotonic() + late)
        process.compile(number, f"stuck {number}")
        process.server.turn(1000)
    assert not process.server.is_stuck(time.monotonic() + soon)
    assert process.server.is_stuck(time.monotonic() + late)


def test_a_grammar_that_is_released_while_it_is_compiled_is_not_answered(
    start: Callable[..., Process],
) -> None:
    process = start()
    process.compile(1, "5")
    process.channel.send(Release((), (1,)))
    process.compiled(2)


def test_a_draft_that_is_not_allowed_leaves_the_state() -> None:
    """A matcher of llguidance that has seen such a token has no mask any more."""
    vocabulary = small_vocabulary()
    grammar = LLGuidance(vocabulary).compile(StructuredOutput("regex", "ab+c"))
    matcher, num_words = grammar.matcher(), -(-len(vocabulary.tokens) // 32)
    a, b = b"ab"
    for drafts in ([a, a, a], [b], [a, b]):
        masks = np.zeros((1 + len(drafts), num_words), np.int32)
        fill_row(matcher, drafts, masks)
        bits = np.unpackbits(masks[0].view(np.uint8), bitorder="little")
        assert np.flatnonzero(bits).tolist() == [a]


def test_a_draft_that_its_mask_forbids_is_not_accepted_by_the_matcher_either() -> None:
    """llguidance accepts every token that fits a forced text, but its mask has one of them."""
    vocabulary = small_vocabulary()
    matcher = LLGuidance(vocabulary).compile(StructuredOutput("regex", "abc")).matcher()
    masks = np.zeros((2, -(-len(vocabulary.tokens) // 32)), np.int32)
    fill_row(matcher, [vocabulary.tokens.index(b"ab")], masks)
    assert (masks[1] == -1).all()
