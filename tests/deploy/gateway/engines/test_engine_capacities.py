"""How many tokens of a gateway's requests the prefill and decode engines have KV blocks for."""

import sys
from dataclasses import dataclass

from longshore.deploy.gateway.engines.engine_capacities import EngineCapacities
from longshore.protocol.commands import Role
from longshore.protocol.handshake import EngineIdentity, EngineReady


@dataclass
class FakeEngine:
    """An engine that runs up to 8 requests of up to 400 tokens, in blocks of 16 tokens."""

    ready: EngineReady | None = None
    is_running: bool = True
    closed_reason: str | None = None


def engine(num_blocks: int = 100) -> FakeEngine:
    identity = EngineIdentity("model", "float32", 16, 400, 8, 64, "seed")
    return FakeEngine(EngineReady("engine", identity, num_blocks=num_blocks))


def capacities_of(
    roles: dict[int, Role], engines: dict[int, FakeEngine], num_gateways: int = 1
) -> EngineCapacities:
    return EngineCapacities(engines, roles, num_gateways=num_gateways, max_leased_share=0.5)


def test_gateways_divide_the_capacity_and_prefill_engines_keep_a_share_of_it() -> None:
    roles: dict[int, Role] = {0: "prefill", 1: "decode", 2: "decode", 3: "unified"}
    engines = {0: engine(), 1: engine(), 2: engine(400), 3: engine(1000)}
    capacities = capacities_of(roles, engines, num_gateways=2)
    assert [capacities.update(number) for number in (0, 1, 2)] == [400, 800, 3200]
    assert capacities.update(0) is None  # as before
    assert capacities.largest("prefill") == 400
    assert capacities.largest("decode") == 3200
    assert capacities.tokens_per_request == 200  # 1,600 tokens for 8 requests
    engines[0].ready = engine(10).ready  # it was started again
    assert capacities.update(0) == 40


def test_an_engine_that_has_not_started_or_is_closed_or_lost_is_not_open() -> None:
    roles: dict[int, Role] = {number: "decode" for number in range(5)}
    engines = {number: engine() for number in range(4)}  # 4 is not connected
    capacities = capacities_of(roles, engines)
    for number in range(4):
        capacities.update(number)
    assert capacities.closed_engines == []
    engines[1].closed_reason = "drained"
    engines[2].is_running = False
    engines[3].ready = None
    assert capacities.closed_engines == [1, 2, 3]
    assert list(capacities.open_engines("decode")) == [0]
    assert capacities.any_open("decode")
    assert not capacities.any_open("prefill")
    capacities.remove(1)
    assert 1 not in capacities
    assert capacities.closed_engines == [2, 3]
    del engines[0]
    assert not capacities.any_open("decode")


def test_without_engines_nothing_fits_and_no_prompt_is_too_long() -> None:
    capacities = capacities_of({}, {})
    assert capacities.largest("decode") == 0
    assert capacities.tokens_per_request == 1
    assert capacities.max_model_len == sys.maxsize
