"""KV events of real processes: subscribers on the sockets rebuild the index."""

import itertools
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from longshore.protocol.arrays import Int32Array
from longshore.protocol.events import ClearedBlocks
from longshore.protocol.handshake import Feature
from longshore.protocol.requests import AddRequest
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.statistics import BlockSnapshot, BlockState, DescribeBlocks
from longshore.protocol.transport.channel import Endpoint
from longshore.protocol.transport.lifeline import STOP_SIGNAL, Failed
from longshore.scheduler.kv_cache.block_hash import BlockHasher
from tests.conftest import ROOT
from tests.docs.blocks import read_blocks
from tests.harness.event_index import EventIndex
from tests.harness.event_sockets import RemoteSubscriber
from tests.integration.deployment import Deployment, wait_until
from tests.integration.engine_process import (
    VOCAB_SIZE,
    Client,
    EngineProcess,
    ScriptedWorker,
    ready_engine,
    running_engine,
)

BLOCK_SIZE = 16
HASHER = BlockHasher(BLOCK_SIZE, bytes(32))


@pytest.fixture
def subscribe() -> Iterator[Callable[..., RemoteSubscriber]]:
    """`subscribe(engine)` opens a subscriber that is closed after the test."""
    opened = []

    def subscribe(engine: EngineProcess | Path, **options: Any) -> RemoteSubscriber:
        folder = engine.runtime_dir if isinstance(engine, EngineProcess) else engine
        addresses = (f"ipc://{folder}/endpoint", f"ipc://{folder}/replay_endpoint")
        opened.append(RemoteSubscriber(*addresses, **options))
        return opened[-1]

    yield subscribe
    for subscriber in opened:
        subscriber.close()


@contextmanager
def publishing(num_blocks: int = 1000, **fields: Any) -> Iterator[tuple[EngineProcess, Client]]:
    """An engine with a worker that answers, and a client."""
    with running_engine(kv_events=fields) as engine:
        client = ready_engine(engine, num_blocks=num_blocks)
        ScriptedWorker(engine)
        yield engine, client


def run(
    client: Client, handles: range, *, prompt_len: int = 40, max_tokens: int = 30, longer: int = 0
) -> None:
    """Requests whose prompts differ from the first token on, until all have ended. Each prompt is
    longer than the one before by `longer`."""
    for handle in handles:
        client.channel.send(
            AddRequest(
                request_id=f"request-{handle}",
                handle=handle,
                prompt_token_ids=prompt_of(handle, prompt_len + longer * handle),
                sampling=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
            )
        )
    client.receive_until(lambda: all(handle in client.finished for handle in handles))


def prompt_of(handle: int, length: int) -> Int32Array:
    return ((np.arange(length) * 3 + 7 * handle) % VOCAB_SIZE).astype(np.int32)


def hashes_of(client: Client, handle: int, prompt_len: int = 40) -> list[bytes]:
    """The hashes of the blocks that a request has filled. Its last token was never computed."""
    tokens = [*prompt_of(handle, prompt_len).tolist(), *client.tokens[handle]][:-1]
    hashes: list[bytes] = []
    HASHER.extend(hashes, np.array(tokens, np.int32))
    return hashes


def is_subscribed(subscriber: RemoteSubscriber, client: Client, handle: int) -> bool:
    """Whether the events of a new request arrive: those sent before the subscription do not."""
    run(client, range(handle, handle + 1), max_tokens=1)
    return subscriber.receive(100) is not None


def check_contents(index: EventIndex) -> None:
    """Every block's hash is that of its tokens after its parent."""
    assert index.blocks
    for (place, block_hash), (parent, tokens) in index.blocks.items():
        assert place == ("GPU", None, 0)
        assert isinstance(block_hash, bytes)
        chain = [] if parent is None else [bytes(str(parent), "ascii"), parent]
        first = np.zeros(BLOCK_SIZE * len(chain), np.int32)
        HASHER.extend(chain, np.concatenate((first, np.array(tokens, np.int32))))  # type: ignore[arg-type]
        assert chain[-1] == block_hash


def num_cached(client: Client) -> int:
    """How many blocks of an idle engine can be found, by the engine's own account."""
    client.channel.send(DescribeBlocks())
    while not isinstance(answer := client.receive(), BlockSnapshot):
        assert answer is not None
    return int(np.count_nonzero(answer.states == BlockState.CACHED))


@pytest.mark.req("MET-02")
def test_subscriber_that_loses_messages_rebuilds_the_exact_index(
    subscribe: Callable[..., RemoteSubscriber],
) -> None:
    """The pool holds a fraction of what is computed, so blocks are evicted all the time."""
    with publishing(num_blocks=160) as (engine, client):
        lossy, complete = subscribe(engine), subscribe(engine)
        num_gaps = 0
        for begin in range(0, 100, 10):
            run(client, range(begin, begin + 10))
            while (message := lossy.receive(0)) is not None:
                # Every third message is lost; the next one shows the gap.
                if message[0] % 3 and not lossy.index.receive(*message):
                    num_gaps += 1
                    lossy.catch_up()
        lossy.catch_up()
        complete.catch_up()
        assert lossy.index.blocks == complete.index.blocks
        assert num_gaps > 3
        check_contents(lossy.index)
        assert len(lossy.index.blocks) == num_cached(client)
        assert 0 < len(lossy.index.blocks) < 160
        assert lossy.index.hashes() >= set(hashes_of(client, 99))
        assert complete.index.batches[0].events == [ClearedBlocks()]


@pytest.mark.req("MET-02")
def test_late_subscriber_starts_with_a_snapshot(
    subscribe: Callable[..., RemoteSubscriber],
) -> None:
    """The buffer holds four batches, so a replay alone cannot help it."""
    with publishing(kv_events_buffer=4) as (engine, client):
        run(client, range(20))
        late = subscribe(engine)
        late.restore()
        expected = {block_hash for handle in range(20) for block_hash in hashes_of(client, handle)}
        assert late.index.hashes() == expected
        run(client, range(20, 25))
        # Its subscription may have become valid after some of the new messages were sent.
        while late.index.hashes() < expected | set(hashes_of(client, 24)):
            message = late.receive()
            assert message is not None
            if not late.index.receive(*message):
                late.catch_up()
        late.catch_up()
        check_contents(late.index)
        assert len(late.index.blocks) == num_cached(client)
        ids = {batch.publisher_id for batch in late.index.batches}
        assert ids <= {late.publisher_id}
        assert len(late.publisher_id) == 16


def test_events_of_a_step_are_one_message_and_a_prompt_is_one_event(
    subscribe: Callable[..., RemoteSubscriber],
) -> None:
    with publishing() as (engine, client):
        run(client, range(1), prompt_len=1000, max_tokens=1)
        subscriber = subscribe(engine)
        subscriber.catch_up()
        (cleared,), (stored,) = (batch.events for batch in subscriber.index.batches)
        assert cleared == ClearedBlocks()
        assert list(subscriber.index.hashes()) == list(map(bytes, subscriber.index.hashes()))
        assert stored.block_hashes == hashes_of(client, 0, 1000)  # type: ignore[union-attr]
        assert len(stored.block_hashes) == 62  # type: ignore[union-attr]


def test_subscriber_that_does_not_read_does_not_stall_the_engine(
    subscribe: Callable[..., RemoteSubscriber],
) -> None:
    """The topic is so long that the buffers of the sockets are full soon."""
    topic = "t" * 4096
    with publishing(kv_events_topic=topic) as (engine, client):
        slow = subscribe(engine, topic=topic, max_queued=1)
        handles = itertools.count()
        wait_until(lambda: is_subscribed(slow, client, next(handles)))
        first = next(handles)
        # Each step fills a block.
        run(client, range(first, first + 16), max_tokens=1500, longer=1)
        received = []
        while (message := slow.receive(0)) is not None:
            received.append(message[0])
        slow.catch_up()
        assert slow.index.next_number > 1000
        assert len(received) < slow.index.next_number - 1, "nothing was lost"
        assert len(slow.index.blocks) == num_cached(client)


def test_invalid_requests_are_counted_and_the_next_valid_one_is_answered(
    subscribe: Callable[..., RemoteSubscriber],
) -> None:
    with publishing() as (engine, client):
        subscriber = subscribe(engine)
        for frames in ([b""], [b"", b"short"], [b"", b"12345678", b"more"], [b"x", b"12345678"]):
            subscriber.requests.send_multipart(frames)
        assert [number for number, _ in subscriber.replay(0)] == [0]
        run(client, range(1))
        client.receive_until(lambda: client.stats is not None and client.stats.num_bad_messages > 0)
        assert client.stats is not None
        assert client.stats.num_bad_messages == 4


@pytest.mark.req("MET-02", "SCH-22")
def test_events_are_flushed_on_shutdown(subscribe: Callable[..., RemoteSubscriber]) -> None:
    """The connector reports something each time it is asked, so the last events are those that the
    engine asks for when it stops."""
    connector = "tests.integration.closing_tier:ClosingTier"
    with running_engine(kv_events={}, kv_connector=connector) as engine:
        client = ready_engine(engine, features=(Feature.KV_CONNECTOR,))
        ScriptedWorker(engine)
        subscriber = subscribe(engine)
        run(client, range(2))
        while (message := subscriber.receive()) is not None:  # until one shows no gap
            if subscriber.index.receive(*message):
                break
            subscriber.catch_up()
        while subscriber.index.next_number != (before := last_number(subscriber) + 1):
            subscriber.catch_up()
        engine.process.send_signal(STOP_SIGNAL)
        assert engine.wait() == 0
        number = -1
        while number < before:
            message = subscriber.receive()
            assert message is not None, "the last events were not sent"
            number = message[0]
            assert subscriber.index.receive(*message)
        assert {place for place, _ in subscriber.index.blocks} == {
            ("GPU", None, 0),
            ("CPU", None, 0),
        }


def last_number(subscriber: RemoteSubscriber) -> int:
    """The newest batch in the buffer."""
    return max(number for number, _ in subscriber.replay(0))


def test_engine_without_events_opens_no_sockets() -> None:
    with running_engine() as engine:
        ready_engine(engine)
        assert not (engine.runtime_dir / "endpoint").exists()


def test_address_that_cannot_be_used_is_an_error_of_the_start() -> None:
    with running_engine(kv_events={}) as engine:
        os.mkdir(engine.runtime_dir / "endpoint")
        report = engine.next_report()
        assert isinstance(report, Failed)
        assert re.search("ipc://.*endpoint.*cannot be used", report.reason)
        assert engine.wait() == 1


# A whole deployment


def answer(deployment: Deployment) -> None:
    with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        client.completions.create(model=model, prompt="berth " * 20, max_tokens=40, temperature=0)


@pytest.mark.slow
@pytest.mark.req("HSH-07")
def test_block_hashes_are_the_same_after_a_restart_and_differ_with_another_state(
    start_deployment: Callable[..., Deployment],
    subscribe: Callable[..., RemoteSubscriber],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "events"
    folder.mkdir(mode=0o700)
    hashes, publishers = [], set()
    for state in ("state", "state", "another"):
        deployment = start_deployment(
            "--enable-kv-cache-events",
            "--kv-events-endpoint", f"ipc://{folder}/endpoint",
            "--kv-events-replay-endpoint", f"ipc://{folder}/replay_endpoint",
            "--state-dir", str(tmp_path / state),
        )  # fmt: skip
        deployment.wait_until_ready()
        answer(deployment)
        subscriber = subscribe(folder)
        subscriber.catch_up()
        subscriber.restore()
        hashes.append(subscriber.index.hashes())
        publishers.add(subscriber.publisher_id)
        assert deployment.stop() == 0
    assert len(hashes[0]) >= 8
    assert hashes[0] == hashes[1]
    assert not hashes[0] & hashes[2]
    assert len(publishers) == 3


def program_of_the_page(folder: Path) -> str:
    """The program of docs/kv-events.md, with the addresses of this test."""
    page = ROOT / "docs" / "kv-events.md"
    (program,) = [each for each in read_blocks() if each.page == page and each.language == "python"]
    text = program.text.replace("/run/user/1000/kv-events-replay", f"{folder}/replay_endpoint")
    return text.replace("/run/user/1000/kv-events", f"{folder}/endpoint")


def test_program_of_the_page_follows_an_engine_and_its_next_start(
    subscribe: Callable[..., RemoteSubscriber], tmp_path: Path
) -> None:
    """It prints the number of blocks that a snapshot has, also of another engine at the same
    addresses."""
    names = ("endpoint", "replay_endpoint")
    addresses = {name: Endpoint(f"ipc://{tmp_path}/{name}") for name in names}
    subscriber = subscribe(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", program_of_the_page(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as program:
        printed: queue.SimpleQueue[str] = queue.SimpleQueue()
        reader = threading.Thread(target=lambda: [*map(printed.put, program.stdout or ())])
        reader.start()

        def follows(client: Client, handles: Iterator[int]) -> bool:
            """Events are needed each time, because it may have subscribed after earlier ones."""
            handle = next(handles)
            run(client, range(handle, handle + 1))
            subscriber.restore()
            expected.add(f"{len(subscriber.index.blocks)} blocks\n")
            lines.update(printed.get() for _ in range(printed.qsize()))
            return not expected.isdisjoint(lines)

        try:
            for first in (0, 100):
                expected, lines, handles = set[str](), set[str](), itertools.count(first)
                with publishing(**addresses) as (_, client):
                    wait_until(partial(follows, client, handles))
        finally:
            program.kill()
            reader.join()


def test_each_replica_publishes_on_a_private_socket_that_the_log_names(
    start_deployment: Callable[..., Deployment], subscribe: Callable[..., RemoteSubscriber]
) -> None:
    deployment = start_deployment("--enable-kv-cache-events", "--replicas", "2")
    deployment.wait_until_ready()
    found = re.findall(
        r"KV events at (ipc://\S+), replays and snapshots at (ipc://\S+)", deployment.output
    )
    assert len(set(found)) == 2
    ranks = set()
    for endpoint, replay_endpoint in found:
        assert Path(endpoint.removeprefix("ipc://")).parent.stat().st_mode & 0o777 == 0o700
        subscriber = RemoteSubscriber(endpoint, replay_endpoint)
        try:
            subscriber.catch_up()
            ranks |= {batch.data_parallel_rank for batch in subscriber.index.batches}
        finally:
            subscriber.close()
    assert ranks == {0, 1}
