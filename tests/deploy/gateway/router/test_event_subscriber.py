"""A gateway's index follows real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import zmq

from longshore.deploy.gateway.router import event_follower, event_subscriber
from longshore.deploy.gateway.router.block_index import BlockIndex
from longshore.deploy.gateway.router.event_subscriber import EventSubscriber
from longshore.protocol.events import AllBlocksCleared, BlockStored, EventSource, KVEventsConfig
from longshore.protocol.transport.channel import Endpoint, SocketWatcher, close_context
from longshore.scheduler.process.kv_event_publisher import EventPublisher, EventSockets
from tests.harness.kv_groups import kv_cache_config

PATIENCE_S = 60.0


@contextlib.asynccontextmanager
async def publishing(source: EventSource, *, answers: bool = True) -> AsyncIterator[EventPublisher]:
    """An engine's publisher. answers: it serves requests."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    config = KVEventsConfig(
        endpoint=source.endpoint,
        replay_endpoint=source.replay_endpoint,
        kv_events_topic=source.topic,
    )
    sockets = EventSockets.open(context, config)
    publisher = EventPublisher(sockets, config, kv_cache_config(10))
    watcher = SocketWatcher(publisher.requests, publisher.on_readable)
    task = asyncio.create_task(publisher.serve_requests()) if answers else None
    try:
        yield publisher
    finally:
        if task is not None:
            task.cancel()
        watcher.close()
        sockets.close()
        close_context(context)


@pytest.fixture
def source(tmp_path: Path) -> EventSource:
    addresses = (Endpoint(f"ipc://{tmp_path}/{name}") for name in ("events", "replay"))
    return EventSource(*addresses, topic="kv")


@contextlib.asynccontextmanager
async def following(source: EventSource) -> AsyncIterator[tuple[EventSubscriber, BlockIndex]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    index = BlockIndex(1, tokens_per_hash=4, max_hashes=1000)
    subscriber = EventSubscriber(context, source, index, 0)
    try:
        yield subscriber, index
    finally:
        subscriber.close()
        context.term()


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def block(number: int) -> BlockStored:
    return BlockStored(number.to_bytes(32, "big"), None, np.zeros(4, np.int32), 0)


async def test_the_index_is_that_of_a_snapshot_and_of_later_events(source: EventSource) -> None:
    async with publishing(source) as publisher, following(source) as (subscriber, index):
        publisher.publish([block(number) for number in range(600)])
        await asyncio.sleep(0.05)
        assert len(index) == 0  # nothing is asked before the engine is ready
        subscriber.follow(True)
        await wait_until(lambda: index.is_known[0] and len(index) == 600)
        for number in range(600, 700):
            publisher.publish([block(number)])
        await wait_until(lambda: len(index) == 700)
        publisher.publish([AllBlocksCleared(), block(1)])
        await wait_until(lambda: len(index) == 1)
        assert not index.has_garbage
        subscriber.follow(True)  # nothing has changed
        assert subscriber.follower.num_snapshots == 1


async def test_another_start_at_the_same_address_is_followed(source: EventSource) -> None:
    async with following(source) as (subscriber, index):
        for count in (10, 20):
            async with publishing(source) as publisher:
                publisher.publish([block(number) for number in range(count)])
                subscriber.follow(True)
                await wait_until(lambda count=count: len(index) == count)  # type: ignore[misc]
            subscriber.follow(False)
            await wait_until(lambda: len(index) == 0)
            assert not index.is_known[0]


async def test_a_connection_without_answers_is_made_anew(
    source: EventSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_follower, "ANSWER_TIMEOUT_S", 0.1)
    monkeypatch.setattr(event_subscriber, "CHECK_EVERY_S", 0.05)
    async with following(source) as (subscriber, index):
        async with publishing(source, answers=False):
            subscriber.follow(True)
            first = subscriber._requests
            await wait_until(lambda: subscriber._requests is not first)
        async with publishing(source) as publisher:
            publisher.publish([block(1)])
            await wait_until(lambda: len(index) == 1 and index.is_known[0])
