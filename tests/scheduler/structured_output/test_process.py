"""The grammar process, one turn at a time: its cache, its limits of time, and masks."""

import threading
import time
from collections.abc import Callable, Iterator
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
    ReleaseGrammars,
    ToGrammarProcess,
)
from longshore.protocol.requests import StructuredOutput
from longshore.protocol.transport.channel import Channel, Endpoint
from longshore.scheduler.config import GrammarProcessConfig, StructuredOutputConfig
from longshore.scheduler.features.grammar import GrammarError
from longshore.scheduler.structured_output.backends import LLGuidance
from longshore.scheduler.structured_output.process import (
    LOAD_TIMEOUT_S,
    MAX_STUCK_S,
    NUM_COMPILERS,
    GrammarCache,
    GrammarServer,
    fill_row,
)
from tests.harness.sockets import Sockets
from tests.harness.vocabularies import small_vocabulary

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
    """A grammar's text is its first token. stuck: set to go on with the others."""

    def __init__(self) -> None:
        self.is_loaded = True
        self.compiled: list[str] = []
        self.stuck = threading.Event()

    def compile(self, spec: StructuredOutput) -> CountingGrammar:
        self.compiled.append(spec.text)
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
        self.backends = FakeBackends()
        self._sockets = Sockets()
        self.channel: Channel[ToGrammarProcess, FromGrammarProcess] = Channel(
            self._sockets.open(zmq.DEALER, endpoint, bind=True), FromGrammarProcess
        )
        config = GrammarProcessConfig(
            structured_output=StructuredOutputConfig(
                backend="auto",
                tokenizer_file="",
                endpoint=endpoint,
                compile_timeout_s=compile_timeout_s,
            ),
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(0,),
            engine="",
            lifeline_fd=-1,
            is_relayed=False,
            log_level="info",
        )
        socket = self._sockets.open(zmq.DEALER, endpoint, bind=False)
        self.server = GrammarServer(config, Channel(socket, ToGrammarProcess), self.backends)
        assert self.channel.socket.poll(1000 * TIMEOUT_S, zmq.POLLOUT), "not connected"

    def compile(self, grammar_id: int, text: str) -> None:
        self.channel.send(CompileGrammar(grammar_id, StructuredOutput("grammar", text)))

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


def test_a_grammar_is_compiled_once_for_all_its_requests(start: Callable[..., Process]) -> None:
    process = start()
    process.compile(1, "5")
    process.compile(2, "5")
    assert [process.answer(), process.answer()] == [GrammarCompiled(1), GrammarCompiled(2)]
    process.compile(3, "5")
    assert process.answer() == GrammarCompiled(3)
    assert process.backends.compiled == ["5"]


def test_each_request_has_a_state_of_its_own(start: Callable[..., Process]) -> None:
    process = start()
    for grammar_id in (1, 2):
        process.compile(grammar_id, "5")
        assert process.answer() == GrammarCompiled(grammar_id)
    rows = (MaskedRow(1, int32_array([5, 6])), MaskedRow(2))
    assert process.fill(*rows) == ([[7], [5]], {})
    assert process.fill(MaskedRow(1, int32_array([7])), MaskedRow(2)) == ([[8], [5]], {})


def test_drafts_have_masks_and_leave_the_state(start: Callable[..., Process]) -> None:
    process = start()
    process.compile(1, "5")
    process.answer()
    drafts = int32_array([5, 6, 9, 9])
    allowed, errors = process.fill(MaskedRow(1, draft_token_ids=drafts))
    assert (allowed[:3], errors) == ([[5], [6], [7]], {})
    assert len(allowed) == 5
    assert process.fill(MaskedRow(1)) == ([[5]], {})


@pytest.mark.parametrize(
    ("tokens", "reason"), [([4], "does not match"), (list(range(5, VOCAB_SIZE)), "cannot spell")]
)
def test_a_request_without_a_mask_fails_alone(
    tokens: list[int], reason: str, start: Callable[..., Process]
) -> None:
    process = start()
    for grammar_id in (1, 2):
        process.compile(grammar_id, "5")
        process.answer()
    for row in (MaskedRow(1, int32_array(tokens)), MaskedRow(1)):
        allowed, errors = process.fill(row, MaskedRow(2))
        assert allowed == [[5]]
        assert list(errors) == [1]
        assert reason in errors[1]


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
    answer = process.answer()
    assert isinstance(answer, GrammarCompiled)
    assert answer.grammar_id == 3
    assert process.backends.compiled == ["stuck", "5"]


def test_a_grammar_that_waits_for_a_thread_is_not_too_slow(start: Callable[..., Process]) -> None:
    process = start(compile_timeout_s=0.05)
    for number in range(NUM_COMPILERS):
        process.compile(number, f"stuck {number}")
        process.answer()  # it is over its limit
    process.compile(8, "5")
    process.compile(9, "6")
    process.channel.send(ReleaseGrammars((9,)))
    deadline_s = time.monotonic() + 0.3
    while time.monotonic() < deadline_s:
        process.server.turn(20)
    process.backends.stuck.set()
    assert process.answer() == GrammarCompiled(8)
    process.compile(10, "7")
    assert process.answer() == GrammarCompiled(10)
    assert process.backends.compiled == ["stuck 0", "stuck 1", "5", "7"]  # 6 has no request


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


def test_a_request_that_ends_while_its_grammar_is_compiled_is_not_answered(
    start: Callable[..., Process],
) -> None:
    process = start()
    process.compile(1, "5")
    process.channel.send(ReleaseGrammars((1,)))
    process.compile(2, "5")
    assert process.answer() == GrammarCompiled(2)


# The cache


def spec(text: str) -> StructuredOutput:
    return StructuredOutput("regex", text)


def test_the_cache_evicts_what_was_used_last_the_longest_time_ago() -> None:
    cache = GrammarCache(max_grammars=2, max_bytes=1000)
    for text in "ab":
        cache.add(spec(text), CountingGrammar(0))
    assert cache.get(spec("a")) is not None
    cache.add(spec("c"), CountingGrammar(0))
    assert [text for text in "abc" if cache.get(spec(text)) is not None] == ["a", "c"]


def test_the_cache_is_limited_in_bytes() -> None:
    cache = GrammarCache(max_grammars=10, max_bytes=100)
    for text in "abcab":
        cache.add(spec(text), CountingGrammar(0, num_bytes=40))
        assert cache.num_bytes == 41 * len(cache) <= 100
    cache.add(spec("large"), CountingGrammar(0, num_bytes=101))
    assert (len(cache), cache.num_bytes) == (2, 82)  # it is not kept, and evicts nothing


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
