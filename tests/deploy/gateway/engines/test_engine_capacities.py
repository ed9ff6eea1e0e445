"""How many KV blocks the prefill and decode engines have for the requests of a gateway."""

import sys
from dataclasses import dataclass

from longshore.deploy.gateway.engines.engine_capacities import EngineCapacities
from longshore.protocol.commands import Role
from longshore.protocol.handshake import EngineIdentity, EngineReady
from longshore.protocol.kv_cache_spec import (
    FullAttentionSpec,
    KVCacheSpec,
    KVCapacity,
    LongestRequest,
    SlidingWindowSpec,
)

FULL = FullAttentionSpec(16, 1, 2, 4)
WINDOW = SlidingWindowSpec(16, 1, 2, 4, sliding_window=33)


@dataclass
class FakeEngine:
    """An engine that runs up to 8 requests of up to 400 tokens, in blocks of 16 tokens, half of
    which it may lease."""

    ready: EngineReady | None = None
    is_running: bool = True
    closed_reason: str | None = None


def engine(num_blocks: int = 100, *specs: KVCacheSpec) -> FakeEngine:
    identity = EngineIdentity("model", "float32", 16, 400, 8, 64, "seed")
    longest = LongestRequest(400, num_in_flight=64)
    capacity = KVCapacity(num_blocks, num_blocks // 2, specs or (FULL,), longest)
    return FakeEngine(EngineReady("engine", identity, num_blocks + 1, capacity))


def capacities_of(
    roles: dict[int, Role], engines: dict[int, FakeEngine], num_gateways: int = 1
) -> EngineCapacities:
    return EngineCapacities(engines, roles, num_gateways=num_gateways)


def test_gateways_divide_the_capacity_and_prefill_engines_keep_a_share_of_it() -> None:
    roles: dict[int, Role] = {0: "prefill", 1: "decode", 2: "decode", 3: "unified"}
    engines = {0: engine(), 1: engine(), 2: engine(400), 3: engine(1000)}
    capacities = capacities_of(roles, engines, num_gateways=2)
    assert [capacities.update(number) for number in (0, 1, 2)] == [25, 50, 200]
    assert capacities.update(0) is None  # as before
    assert capacities.largest("prefill") == 25
    assert capacities.largest("decode") == 200
    assert capacities.blocks_per_request == 12  # 100 for 8 requests
    engines[0].ready = engine(10).ready  # it was started again
    assert capacities.update(0) == 2


def test_a_request_has_the_blocks_of_all_groups_where_it_needs_the_most() -> None:
    engines = {0: engine(), 1: engine(100, FULL, WINDOW), 2: FakeEngine()}
    capacities = capacities_of(dict.fromkeys(engines, "decode"), engines)
    assert capacities.blocks_of(160) == 10 + 7
    assert capacities.blocks_of(320) == 20 + 7  # a window of 33 tokens, and 64 in flight
    del engines[1]
    assert capacities.blocks_of(320) == 20


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
    assert capacities.blocks_per_request == 1
    assert capacities.max_model_len == sys.maxsize
