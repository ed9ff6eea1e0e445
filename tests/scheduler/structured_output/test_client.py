"""The scheduler's end of the grammar process, with a real process."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.protocol.handshake import EngineIdentity
from longshore.protocol.requests import StructuredOutput
from longshore.protocol.transport.channel import Endpoint
from longshore.scheduler.config import (
    CacheConfig,
    SchedulerConfig,
    SchedulerProcessConfig,
    StructuredOutputConfig,
)
from longshore.scheduler.features.grammar import GrammarError, InvalidGrammar
from longshore.scheduler.structured_output.client import (
    FILL_TIMEOUT_S,
    MAX_FAILED_STARTS,
    MODULE,
    SILENCE_S,
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
            eos_token_ids=(END,),
            structured_output=StructuredOutputConfig(
                backend="llguidance",
                tokenizer_file=str(DEMO_MODEL_DIR / "tokenizer.json"),
                endpoint=Endpoint(f"ipc://{folder}/grammars"),
            ),
        )
        self.process = GrammarProcess(config, context)
        self._news = asyncio.Event()
        self.process.attach(self._news.set)

    async def next_news(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await self._news.wait()
        self._news.clear()

    async def compiled(self, regex: str) -> RemoteGrammar:
        grammar = self.process.compile(StructuredOutput("regex", regex))
        while not grammar.is_compiled():
            await self.next_news()
        return grammar

    async def allowed(self, grammar: RemoteGrammar) -> list[int]:
        """The ids that may be next."""
        masks = np.zeros((1, VOCAB_SIZE // 8), np.uint8)
        while not grammar.fill_masks([], masks):
            self.process.flush()
            await self.next_news()
        ids: list[int] = np.flatnonzero(np.unpackbits(masks, bitorder="little")).tolist()
        return ids

    async def text_of(self, grammar: RemoteGrammar) -> str:
        """The output that always takes the highest id."""
        output = b""
        while (token_id := (await self.allowed(grammar))[-1]) != END:
            output += demo_vocabulary().tokens[token_id]
            assert grammar.accept_tokens([token_id])
        return output.decode()


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


async def test_a_death_fails_the_requests_in_the_process_and_no_others(client: Client) -> None:
    running = await client.compiled("a+")
    await client.allowed(running)
    (process,) = grammar_processes()
    process.kill()
    await client.next_news()
    for ask in (running.is_compiled, lambda: running.fill_masks([], np.zeros((1, 200), np.uint8))):
        with pytest.raises(GrammarError, match="has died; send the request again") as error:
            ask()
        assert not isinstance(error.value, InvalidGrammar)
    running.release()
    waiting = client.process.compile(StructuredOutput("regex", "b"))
    deadline_s = time.monotonic() + TIMEOUT_S
    while not waiting.is_compiled():  # the next process starts after a delay
        await asyncio.sleep(0.02)
        assert time.monotonic() < deadline_s
    assert await client.text_of(waiting) == "b"
    assert client.process.num_starts == 2


async def test_a_process_that_hangs_is_killed(client: Client) -> None:
    grammar = await client.compiled("a+")
    (process,) = grammar_processes()
    process.suspend()
    masks = np.zeros((1, VOCAB_SIZE // 8), np.uint8)
    assert not grammar.fill_masks([], masks)
    client.process.flush()
    client.process.check(time.monotonic() + FILL_TIMEOUT_S / 2)
    assert not grammar.fill_masks([], masks)
    client.process.check(time.monotonic() + FILL_TIMEOUT_S + 1)
    with pytest.raises(GrammarError, match="computed token masks for more than 20 s"):
        grammar.fill_masks([], masks)
    process.wait(TIMEOUT_S)


async def test_a_process_that_does_not_start_is_killed(client: Client) -> None:
    grammar = client.process.compile(StructuredOutput("regex", "a"))
    assert not grammar.is_compiled()
    (process,) = grammar_processes()
    client.process.check(time.monotonic() + START_TIMEOUT_S + 1)
    process.wait(TIMEOUT_S)
    assert not grammar.is_compiled()  # it waits for the next process


async def test_requests_fail_if_no_process_starts(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/missing/python")
    client.process._backoff_s = 0.0
    grammar = client.process.compile(StructuredOutput("regex", "a"))
    for _ in range(MAX_FAILED_STARTS):
        assert not grammar.is_compiled()
    with pytest.raises(GrammarError, match="cannot be started") as error:
        grammar.is_compiled()
    assert not isinstance(error.value, InvalidGrammar)
    grammar.release()
    monkeypatch.undo()
    assert await client.text_of(await client.compiled("a")) == "a"


async def test_a_process_that_hangs_while_it_compiles_is_killed(client: Client) -> None:
    await client.compiled("a+")
    (process,) = grammar_processes()
    process.suspend()
    grammar = client.process.compile(StructuredOutput("regex", "b"))
    assert not grammar.is_compiled()
    client.process.check(time.monotonic() + SILENCE_S)
    assert not grammar.is_compiled()
    client.process.check(time.monotonic() + SILENCE_S + 11)
    with pytest.raises(GrammarError, match="hangs; send the request again"):
        grammar.is_compiled()
    process.wait(TIMEOUT_S)


async def test_a_request_may_end_before_its_grammar_is_sent(client: Client) -> None:
    first, second = (client.process.compile(StructuredOutput("regex", text)) for text in ("a", "b"))
    assert not first.is_compiled()  # this starts the process
    second.release()
    while not first.is_compiled():
        await client.next_news()
    assert await client.text_of(first) == "a"
    first.release()
