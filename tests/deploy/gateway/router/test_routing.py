"""The routing of a gateway, assembled: what waits for knowledge, and what says that it lacks."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.gateway.router import routing
from longshore.deploy.gateway.router.config import PrefixRoutingConfig, RoutingConfig
from longshore.deploy.gateway.router.routing import Routing
from longshore.protocol.commands import EngineMember
from longshore.protocol.events import EventSource
from longshore.protocol.transport.channel import Endpoint
from tests.deploy.gateway.router.test_event_subscriber import block, publishing


def sources_in(folder: Path) -> tuple[EventSource, ...]:
    return tuple(
        EventSource(
            Endpoint(f"ipc://{folder}/events-{engine}"),
            Endpoint(f"ipc://{folder}/replay-{engine}"),
            "kv-events",
        )
        for engine in range(2)
    )


def members(sources: Sequence[EventSource | None]) -> list[EngineMember]:
    return [
        EngineMember(engine, "unified", Endpoint("ipc://unused"), source)
        for engine, source in enumerate(sources)
    ]


def make_routing(sources: tuple[EventSource, ...]) -> Routing:
    prefix = PrefixRoutingConfig("00", "sha256", 4)
    config = RoutingConfig(routing_policy="prefix_aware", routing_index_blocks=1000, prefix=prefix)
    return Routing(config, members(sources), number=0, num_gateways=1)


def values_of(routing: Routing) -> dict[tuple[str, str | None], float]:
    return {
        (sample.name, sample.labels.get("engine")): sample.value
        for metric in routing.collect()
        for sample in metric.samples
    }


async def test_a_gateway_waits_for_the_engines_that_are_ready_and_says_whom_it_does_not_know(
    tmp_path: Path,
) -> None:
    sources = sources_in(tmp_path)
    made = make_routing(sources)
    try:
        await made.wait_until_known()  # no engine is ready
        made.follow(1, True)
        assert made.lacking_knowledge() == "routing does not know the KV blocks of engine 1"
        async with publishing(sources[1]) as publisher:
            publisher.publish([block(1)])
            await made.wait_until_known()
            assert made.lacking_knowledge() is None
            values = values_of(made)
            assert values["longshore_routing_index_blocks", None] == 1
            assert values["longshore_routing_engine_known", "0"] == 0
            assert values["longshore_routing_engine_known", "1"] == 1
            made.follow(1, False)
            assert made.lacking_knowledge() is None  # it gets no prompts
    finally:
        made.close()


async def test_engines_come_and_go_while_the_index_is_in_use(tmp_path: Path) -> None:
    sources = sources_in(tmp_path)
    made = make_routing(sources[:1])
    try:
        async with publishing(sources[0]) as first, publishing(sources[1]) as second:
            first.publish([block(1)])
            second.publish([block(1), block(2)])
            made.follow(0, True)
            made.add_engine(members(sources)[1])
            assert made.lacking_knowledge() == "routing does not know the KV blocks of engine 0"
            made.follow(1, True)
            await made.wait_until_known()
            assert made.lacking_knowledge() is None
            assert values_of(made)["longshore_routing_index_blocks", None] == 2
            made.follow(0, False)
            made.remove_engine(0)
            values = values_of(made)
            assert ("longshore_routing_engine_known", "0") not in values
            assert values["longshore_routing_engine_known", "1"] == 1
            assert values["longshore_routing_index_blocks", None] == 2
    finally:
        made.close()


async def test_the_wait_ends_without_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "MAX_WAIT_S", 0.05)
    made = make_routing(sources_in(tmp_path))
    try:
        made.follow(0, True)
        async with asyncio.timeout(60):
            await made.wait_until_known()
        assert made.lacking_knowledge() is not None
    finally:
        made.close()


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin", "session_affinity"])
async def test_other_policies_follow_nobody(policy: Any) -> None:
    made = Routing(
        RoutingConfig(routing_policy=policy), members((None, None)), number=0, num_gateways=1
    )
    made.follow(0, True)
    await made.wait_until_known()
    assert made.lacking_knowledge() is None
    assert [metric.name for metric in made.collect()] == ["longshore_routing_decisions"]
    made.close()
