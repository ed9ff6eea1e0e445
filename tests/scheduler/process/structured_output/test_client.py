"""The scheduler's end of the grammar process, with a real process."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.protocol.grammars import CompileGrammar, ToGrammarProcess
from longshore.protocol.handshake import EngineIdentity
from longshore.protocol.requests import StructuredOutput
from longshore.protocol.transport.channel import Endpoint
from longshore.scheduler.config import (
    CacheConfig,
    SchedulerConfig,
    SchedulerProcessConfig,
    StructuredOutputConfig,
)
from longshore.scheduler.features.grammar import GrammarError, GrammarLost, InvalidGrammar
from longshore.scheduler.process.structured_output import client as client_module
from longshore.scheduler.process.structured_output.client import (
    FAILURE_S,
    HANG_S,
    MASK_PATIENCE_S,
    MAX_CHECKS_STOPPED,
    MAX_COMPILING,
    MAX_DEATHS,
    MAX_FAILED_STARTS,
    MODULE,
    START_TIMEOUT_S,
    GrammarProcess,
    RemoteGrammar,
)
from tests.harness.sockets import Sockets
from tests.harness.vocabularies import demo_vocabulary

VOCAB_SIZE = 1600
END = 2
TIMEOUT_S = 60.0
IDENTITY = EngineIdentity(
    model_fingerprint="a model",
    dtype="float32",
    block_size=16,
    max_model_len=256,
    max_num_seqs=4,
    max_num_batched_tokens=256,
    hash_seed_digest="a seed",
)


class Client:
    """A GrammarProcess, and waiting for what it says."""

    def __init__(self, folder: Path, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        settings = SchedulerConfig(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=256)
        config = SchedulerProcessConfig(
            scheduler=settings,
            cache=CacheConfig(),
            identity=IDENTITY,
            workers=(Endpoint(f"ipc://{folder}/worker"),),
            clients=Endpoint(f"ipc://{folder}/clients"),
            hash_seed="00" * 32,
            vocab_size=VOCAB_SIZE,
            rank_timeout_s=60.0,
            eos_token_ids=(END,),
            structured_output=StructuredOutputConfig(
                structured_output_backend="llguidance",
                tokenizer_file=str(DEMO_MODEL_DIR / "tokenizer.json"),
                endpoint=Endpoint(f"ipc://{folder}/grammars"),
            ),
        )
        self.process = GrammarProcess(config, context)
        self._news = asyncio.Event()
        self._num_grammars = 0
        self.process.attach(self._news.set)

    def compile(self, text: str) -> RemoteGrammar:
        """The grammar of one more request, of a regular expression."""
        self._num_grammars += 1
        return self.process.compile(self._num_grammars, StructuredOutput("regex", text))

    async def next_news(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await self._news.wait()
        self._news.clear()

    async def until_compiled(self, grammar: RemoteGrammar) -> RemoteGrammar:
        while not grammar.is_compiled():
            await self.next_news()
        return grammar

    async def compiled(self, regex: str) -> RemoteGrammar:
        return await self.until_compiled(self.compile(regex))

    def events(self) -> list[int]:
        """The ids of grammars that have become compiled, or have failed."""
        events = []
        while (grammar_id := self.process.next_compiled()) is not None:
            events.append(grammar_id)
        return events

    async def allowed(self, grammar: RemoteGrammar) -> list[int]:
        """The ids that may be next."""
        masks = np.zeros((1, VOCAB_SIZE // 8), np.uint8)
        while not grammar.fill_masks([], masks):
            self.process.flush()
            await self.next_news()
        ids: list[int] = np.flatnonzero(np.unpackbits(masks, bitorder="little")).tolist()
        return ids

    async def step(self, grammar: RemoteGrammar) -> bytes | None:
        """The next token of the output that always takes the highest id; None at its end."""
        token_id = (await self.allowed(grammar))[-1]
        if token_id == END:
            return None
        assert grammar.accept_tokens([token_id])
        return demo_vocabulary().tokens[token_id]

    async def text_of(self, grammar: RemoteGrammar) -> str:
        """The output that always takes the highest id."""
        output = b""
        while (token := await self.step(grammar)) is not None:
            output += token
        return output.decode()

    async def lose_process(self) -> None:
        """Kill the process, and wait until the client knows it."""
        (process,) = grammar_processes()
        process.kill()
        num_starts = self.process.num_starts
        while self.process._connection is not None and self.process.num_starts == num_starts:
            await self.next_news()


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    sockets = Sockets()
    client = Client(tmp_path, sockets.new_context())
    yield client
    client.process.close()
    sockets.close()
    await asyncio.sleep(0)
    assert grammar_processes() == []


def grammar_processes() -> list[psutil.Process]:
    """Those of this process; other tests have left children of other kinds."""
    children = psutil.Process().children()
    return [
        child
        for child in children
        if child.status() != psutil.STATUS_ZOMBIE and MODULE in child.cmdline()
    ]


async def test_masks_follow_the_tokens(client: Client) -> None:
    grammar = await client.compiled("[a-z]{3}-(one|two)")
    text = await client.text_of(grammar)
    assert len(text) == 7
    assert text[3:] in ("-one", "-two")
    assert await client.allowed(grammar) == [END]


async def test_a_token_against_the_mask_is_not_accepted(client: Client) -> None:
    grammar = await client.compiled("a|b")
    first = await client.allowed(grammar)
    other = next(one for one in range(VOCAB_SIZE) if one not in first)
    assert not grammar.accept_tokens([other])
    assert grammar.accept_tokens([first[0]])
    assert await client.allowed(grammar) == [END]


async def test_output_that_was_emitted_elsewhere_counts(client: Client) -> None:
    tokens = demo_vocabulary().encode("birds")
    good, bad = await client.compiled("birds"), await client.compiled("trees")
    for grammar in (good, bad):
        assert grammar.accept_tokens(tokens)
    assert await client.allowed(good) == [END]
    with pytest.raises(GrammarError, match="does not match the grammar"):
        await client.allowed(bad)


async def test_a_grammar_that_cannot_be_compiled_is_invalid(client: Client) -> None:
    with pytest.raises(InvalidGrammar, match="cannot be compiled"):
        await client.compiled("(")
    assert await client.text_of(await client.compiled("a")) == "a"


async def test_masks_of_many_requests_are_computed_together(client: Client) -> None:
    grammars = [await client.compiled(f"{letter}{{{20}}}") for letter in "abc"]
    masks = np.zeros((1, VOCAB_SIZE // 8), np.uint8)
    for _ in range(5):
        for grammar in grammars:
            assert not grammar.fill_masks([], masks)
        client.process.flush()
        for grammar in grammars:
            allowed = await client.allowed(grammar)
            assert grammar.accept_tokens(allowed[:1])
    for grammar in grammars:
        grammar.release()


# The death of the process


async def test_requests_go_on_from_their_tokens_after_a_death(client: Client) -> None:
    """Also one that continues the output of another engine, and one that waits for its grammar."""
    letters, birds = await client.compiled("[a-z]{6}[0-9]"), await client.compiled("(bird){4}")
    assert birds.accept_tokens(demo_vocabulary().encode("birdbird"))
    begun = b"".join([await client.step(letters) or b"" for _ in range(2)])
    await client.allowed(birds)
    await client.lose_process()
    waiting = client.compile("xy")
    for grammar in (letters, birds):
        assert not grammar.is_compiled()
        with pytest.raises(GrammarLost):
            grammar.fill_masks([], np.zeros((1, VOCAB_SIZE // 8), np.uint8))
    client.events()
    for grammar in (letters, birds, waiting):
        await client.until_compiled(grammar)
    assert sorted(client.events()) == [1, 2, 3]
    rest = await client.text_of(letters)
    assert len(begun.decode() + rest) == 7
    assert rest[-1].isdigit()
    assert await client.text_of(birds) == "birdbird"
    assert await client.text_of(waiting) == "xy"
    assert client.process.num_starts == 2


async def test_a_token_that_was_masked_before_the_death_is_accepted_by_its_mask(
    client: Client,
) -> None:
    grammar = await client.compiled("a|b")
    allowed = await client.allowed(grammar)
    other = next(one for one in range(VOCAB_SIZE) if one not in allowed)
    await client.lose_process()
    assert not grammar.accept_tokens([other])
    assert grammar.accept_tokens(allowed[:1])
    await client.until_compiled(grammar)
    assert await client.allowed(grammar) == [END]


async def test_only_grammars_that_requests_have_are_compiled_again(client: Client) -> None:
    kept, ended = await client.compiled("a"), await client.compiled("b")
    ended.release()
    await client.lose_process()
    assert [source.spec.text for source in client.process._sources.values()] == ["a"]
    await client.until_compiled(kept)


async def test_nothing_is_started_for_requests_that_have_ended(client: Client) -> None:
    (await client.compiled("a")).release()
    await client.lose_process()
    await asyncio.sleep(0)
    assert client.process.num_starts == 1
    assert grammar_processes() == []


# Suspects


def stop(process: psutil.Process) -> None:
    process.suspend()
    while process.status() != psutil.STATUS_STOPPED:
        pass  # a thread has not seen it yet


def working_on(client: Client, *, compiling: int = 0, filling: int = 0) -> None:
    """As if the process had noted this, and then died."""
    connection = client.process._connection
    assert connection is not None
    (process,) = grammar_processes()
    stop(process)  # it does not write to the page any more
    connection.page.compile(0, compiling)
    connection.page.filling = filling
    process.kill()


async def dies(client: Client, **work: int) -> None:
    num_starts = client.process.num_starts
    working_on(client, **work)
    while client.process.num_starts == num_starts:
        await client.next_news()


@pytest.fixture
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_BACKOFF_S", "MAX_BACKOFF_S"):
        monkeypatch.setattr(client_module, name, 0.0)


async def until_ready(client: Client) -> None:
    while not client.process._is_ready:
        await client.next_news()


def stops_before_compiling(client: Client, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop each process before it gets this to compile."""
    send = client.process._send

    def stopping(message: ToGrammarProcess) -> None:
        if isinstance(message, CompileGrammar) and message.spec.text == text:
            stop(*grammar_processes())
        send(message)

    monkeypatch.setattr(client.process, "_send", stopping)


@pytest.mark.usefixtures("no_backoff")
async def test_a_grammar_that_ends_two_processes_by_its_compilation_fails_alone(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    innocent = await client.compiled("a{40}")
    await client.step(innocent)
    stops_before_compiling(client, "bad", monkeypatch)
    bad, other = client.compile("bad"), client.compile("other")
    number = bad.source.number
    await dies(client, compiling=number, filling=innocent.grammar_id)
    await client.until_compiled(innocent)
    assert not client.process._compiling.keys() & {bad.source}  # the other suspect is first
    await client.step(innocent)
    while bad.source not in client.process._compiling:
        await client.next_news()
    assert list(client.process._compiling) == [bad.source]  # it is tried alone
    await dies(client, compiling=number, filling=innocent.grammar_id)
    with pytest.raises(InvalidGrammar, match="has died while it worked on this regex, twice"):
        bad.is_compiled()
    assert bad.grammar_id in client.events()
    for grammar in (innocent, other):
        await client.until_compiled(grammar)
        await client.step(grammar)
    again = client.compile("bad")
    with pytest.raises(InvalidGrammar, match="twice"):  # it ends no third process
        again.is_compiled()
    for grammar in (innocent, bad, other, again):
        grammar.release()


@pytest.mark.usefixtures("no_backoff")
async def test_a_request_whose_masks_end_two_processes_fails_alone(client: Client) -> None:
    bad, other = await client.compiled("a+b"), await client.compiled("a+b")
    await client.step(bad)
    await dies(client, filling=bad.grammar_id)
    for grammar in (bad, other):
        await client.until_compiled(grammar)
    await dies(client, filling=bad.grammar_id)
    with pytest.raises(InvalidGrammar, match="while it worked on this regex, twice"):
        bad.is_compiled()
    await client.until_compiled(other)
    assert (await client.step(other)) is not None


@pytest.mark.usefixtures("no_backoff")
async def test_a_suspect_that_gets_a_mask_is_none_any_more(client: Client) -> None:
    grammar = await client.compiled("a{40}")
    for _ in range(3):
        await client.step(grammar)
        await dies(client, filling=grammar.grammar_id)
        await client.until_compiled(grammar)
    assert await client.step(grammar) is not None


@pytest.mark.usefixtures("no_backoff")
async def test_a_suspect_is_remembered_although_its_request_has_ended(client: Client) -> None:
    await client.compiled("a")
    for _ in range(2):
        bad = client.compile("bad")
        await until_ready(client)
        while bad.source not in client.process._compiling:
            await client.next_news()
        number = bad.source.number
        (process,) = grammar_processes()
        stop(process)
        bad.release()
        await dies(client, compiling=number)
    with pytest.raises(InvalidGrammar, match="twice"):
        client.compile("bad").is_compiled()


@pytest.mark.usefixtures("no_backoff")
async def test_all_requests_fail_after_too_many_deaths_in_a_row(client: Client) -> None:
    grammar = await client.compiled("a")
    for _ in range(MAX_DEATHS):
        await client.lose_process()
        await client.until_compiled(grammar)
    await client.lose_process()
    with pytest.raises(GrammarError, match="send the request later") as error:
        grammar.is_compiled()
    assert not isinstance(error.value, InvalidGrammar)
    grammar.release()
    await client.compiled("b")


async def test_processes_that_die_soon_are_replaced_after_longer_and_longer_delays(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    grammar = await client.compiled("a")
    delays = ["at once", "after 0.5 s"]
    for _ in delays:
        await client.lose_process()
        await client.until_compiled(grammar)
    ends = [text for text in caplog.messages if "wait for the next one" in text]
    assert [text.partition("starts ")[2] for text in ends] == delays


# A process that hangs


async def test_a_process_that_is_stopped_is_soon_replaced(client: Client) -> None:
    grammar = await client.compiled("a+b")
    (process,) = grammar_processes()
    stop(process)
    masks = np.zeros((1, VOCAB_SIZE // 8), np.uint8)
    for _ in range(MAX_CHECKS_STOPPED + 1):
        client.process.check(time.monotonic())  # it has nothing to do
    assert not grammar.fill_masks([], masks)
    client.process.flush()
    for _ in range(MAX_CHECKS_STOPPED):
        assert process.is_running()
        assert grammar.is_compiled()
        client.process.check(time.monotonic())
    process.wait(TIMEOUT_S)
    assert not grammar.is_suspect
    await client.until_compiled(grammar)
    assert await client.step(grammar) == b"a"


async def test_a_process_that_is_stopped_for_a_moment_is_not_replaced(client: Client) -> None:
    grammar = await client.compiled("a+b")
    (process,) = grammar_processes()
    stop(process)
    assert not grammar.fill_masks([], np.zeros((1, VOCAB_SIZE // 8), np.uint8))
    client.process.flush()
    client.process.check(time.monotonic())
    process.resume()
    while process.status() == psutil.STATUS_STOPPED:
        await asyncio.sleep(0.001)
    for _ in range(MAX_CHECKS_STOPPED):
        client.process.check(time.monotonic())
    assert await client.step(grammar) == b"a"
    assert client.process.num_starts == 1


@pytest.fixture
def unseen_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stopped seems to compute."""
    monkeypatch.setattr(client_module._Connection, "is_stopped", lambda self: False)


@pytest.mark.usefixtures("unseen_stops")
async def test_a_process_that_makes_no_progress_is_replaced(client: Client) -> None:
    grammar = await client.compiled("a+b")
    (process,) = grammar_processes()
    stop(process)
    assert not grammar.fill_masks([], np.zeros((1, VOCAB_SIZE // 8), np.uint8))
    client.process.flush()
    now_s = time.monotonic()
    client.process.check(now_s)
    client.process.check(now_s + HANG_S - 1)
    assert process.is_running()
    client.process.check(now_s + HANG_S + 1)
    process.wait(TIMEOUT_S)
    await client.until_compiled(grammar)
    assert await client.step(grammar) == b"a"


@pytest.mark.usefixtures("unseen_stops")
async def test_a_process_that_hangs_while_it_compiles_is_replaced(client: Client) -> None:
    await client.compiled("a+")
    (process,) = grammar_processes()
    stop(process)
    grammar = client.compile("b")
    now_s = time.monotonic()
    client.process.check(now_s)
    client.process.check(now_s + HANG_S + 1)
    process.wait(TIMEOUT_S)
    assert await client.text_of(await client.until_compiled(grammar)) == "b"


@pytest.mark.usefixtures("unseen_stops")
async def test_late_masks_are_not_waited_for_and_used_when_they_come(client: Client) -> None:
    grammar = await client.compiled("a+b")
    await client.step(grammar)
    client.events()
    (process,) = grammar_processes()
    stop(process)
    masks = np.zeros((1, VOCAB_SIZE // 8), np.uint8)
    assert not grammar.fill_masks([], masks)
    client.process.flush()
    asked_s = time.monotonic()
    client.process.check(asked_s + MASK_PATIENCE_S / 2)
    assert not grammar.fill_masks([], masks)
    client.process.check(asked_s + MASK_PATIENCE_S + 1)
    with pytest.raises(GrammarLost):
        grammar.fill_masks([], masks)
    assert not grammar.is_compiled()
    process.resume()
    await client.until_compiled(grammar)
    assert client.events() == [grammar.grammar_id]
    assert grammar.fill_masks([], masks)
    assert client.process.num_starts == 1


async def test_a_process_that_does_not_start_is_replaced(client: Client) -> None:
    grammar = client.compile("a")
    (process,) = grammar_processes()
    client.process.check(time.monotonic() + START_TIMEOUT_S + 1)
    process.wait(TIMEOUT_S)
    assert await client.text_of(await client.until_compiled(grammar)) == "a"


async def test_requests_fail_if_no_process_starts(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/missing/python")
    monkeypatch.setattr(client_module, "FIRST_BACKOFF_S", 0.001)
    grammar = client.compile("a")
    with pytest.raises(GrammarError, match="cannot be started") as error:
        await client.until_compiled(grammar)
    assert client.process.num_starts == MAX_FAILED_STARTS
    assert not isinstance(error.value, InvalidGrammar)
    grammar.release()
    monkeypatch.undo()
    assert await client.text_of(await client.compiled("a")) == "a"


# Many requests


class Messages:
    """What the client sends. counts: per kind."""

    def __init__(self, process: GrammarProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: dict[str, int] = {}
        send: Callable[..., None] = process._send

        def counting(message: object) -> None:
            name = type(message).__name__
            self.counts[name] = self.counts.get(name, 0) + 1
            send(message)

        monkeypatch.setattr(process, "_send", counting)


async def test_equal_grammars_are_compiled_once_and_are_ready_at_once(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.compiled("a{3}")
    client.events()
    messages = Messages(client.process, monkeypatch)
    grammars = [client.compile("a{3}") for _ in range(100)]
    assert all(grammar.is_compiled() for grammar in grammars)
    assert client.events() == [grammar.grammar_id for grammar in grammars]
    assert messages.counts == {}
    assert await client.text_of(grammars[0]) == await client.text_of(grammars[1]) == "aaa"


async def test_what_the_process_has_to_compile_is_bounded_and_so_are_messages_about_it(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.compiled("a")
    (process,) = grammar_processes()
    stop(process)
    messages = Messages(client.process, monkeypatch)
    grammars = [client.compile(f"a{{{number + 1}}}") for number in range(4000)]
    assert messages.counts == {"CompileGrammar": MAX_COMPILING}
    for grammar in grammars:
        grammar.release()
    client.process.check(time.monotonic())
    assert messages.counts == {"CompileGrammar": MAX_COMPILING, "Release": 1}
    assert not client.process._waiting
    process.resume()
    assert await client.text_of(await client.compiled("b")) == "b"


async def test_compiled_grammars_are_kept_as_far_as_the_settings_allow(client: Client) -> None:
    settings = client.process._settings
    client.process._settings = replace(settings, max_cached_grammars=2)
    grammars = [await client.compiled(text) for text in "abc"]
    assert len(client.process._sources) == 3  # all are in use
    for grammar in grammars:
        grammar.release()
    assert [source.spec.text for source in client.process._unused] == ["b", "c"]
    client.process._settings = replace(settings, max_cached_bytes=1)
    client.compile("c").release()
    assert not client.process._sources
    assert client.process._num_unused_bytes == 0
    assert await client.text_of(await client.compiled("a")) == "a"


async def test_a_grammar_that_cannot_be_compiled_is_not_tried_again_soon(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidGrammar):
        await client.compiled("(")
    messages = Messages(client.process, monkeypatch)
    client.events()
    again = client.compile("(")
    assert client.events() == [again.grammar_id]
    with pytest.raises(InvalidGrammar, match="cannot be compiled"):
        again.is_compiled()
    assert messages.counts == {}
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + FAILURE_S + 1)
    assert not client.compile("(").is_compiled()
    assert messages.counts == {"CompileGrammar": 1}


async def test_a_request_may_end_before_its_grammar_is_sent(client: Client) -> None:
    first, second = client.compile("a"), client.compile("b")
    second.release()
    await client.until_compiled(first)
    assert await client.text_of(first) == "a"
    first.release()
