"""simple_cpu: blocks in host memory, in an engine and alone."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from longshore.connectors.base import (
    ConnectorConfig,
    ConnectorOutput,
    Matched,
    RequestView,
    StepView,
    StorableBlocks,
)
from longshore.connectors.registry import load_scheduler_connector
from longshore.connectors.simple_cpu import Commands, Report, SimpleCPUConnector
from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    CustomSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    LongestRequest,
    SlidingWindowSpec,
    StateSpec,
    page_hashes,
)
from longshore.scheduler.config import CacheConfig
from longshore.scheduler.kv_cache.block_pool import BlockPool
from longshore.scheduler.kv_cache.coordinator import make_coordinator
from longshore.scheduler.kv_cache.states import KeptStates, StateManager
from longshore.testing.engines import settle
from tests.connectors.conftest import KINDS
from tests.connectors.engine import Engine, prompts_of
from tests.connectors.holds import Holds

ModelOf = Callable[[str], tuple[Path, Any]]
PROMPTS = prompts_of(100, 130, 60, 150, 95, 140)
SMALL = {
    "num_blocks": 34,
    "max_num_batched_tokens": 32,
    "max_loading_blocks": 33,
}  # the prompts do not fit at once
FEWEST = {"states": {"num_blocks": 20}}  # by kind, for preemptions


def on_host(model: Path, size: int | str = "16MiB", **settings: Any) -> Engine:
    return Engine(model, "simple_cpu", {"cpu_bytes_to_use": size}, **settings)


@pytest.mark.req("CRG-13")
@pytest.mark.parametrize("kind", KINDS)
def test_evicted_prompts_come_back_from_the_host(kind: str, model_of: ModelOf) -> None:
    model, _ = model_of(kind)
    rounds = PROMPTS * 2
    with Engine(model, **SMALL) as plain:
        wanted = plain.run(*rounds)
        hits = plain.stats.num_prefix_hit_tokens
    with on_host(model, **SMALL) as engine:
        assert engine.run(*rounds) == wanted
        assert settle(engine.engine) == 0
        stats = engine.stats
    num_found = stats.num_external_hit_tokens + stats.num_prefix_hit_tokens
    assert num_found > hits
    if kind != "states":  # whose states are stored only at the ends of chunks
        assert num_found == sum((len(prompt) - 1) // 16 * 16 for prompt in PROMPTS)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_at_once_with_preemptions_get_their_tokens(kind: str, model_of: ModelOf) -> None:
    model, _ = model_of(kind)
    with Engine(model) as plain:
        wanted = plain.run(*PROMPTS, max_tokens=40)
    with on_host(model, **(SMALL | FEWEST.get(kind, {}))) as engine:
        for _ in range(3):
            assert engine.run(*PROMPTS, max_tokens=40, is_together=True) == wanted
        assert settle(engine.engine) == 0
        stats = engine.stats
    assert stats.num_preemptions > 0
    assert stats.num_external_hit_tokens > 0


def test_host_memory_is_bounded(model_of: ModelOf) -> None:
    """Room for 12 blocks of 2 layers, keys and values, 2 heads of 16 floats."""
    model, _ = model_of("full")
    block_bytes = 16 * 2 * 2 * 2 * 16 * 4
    with Engine(model, **SMALL) as plain:
        wanted = plain.run(*PROMPTS * 2)
    with on_host(model, 12 * block_bytes + 1, **SMALL) as engine:
        assert engine.run(*PROMPTS * 2) == wanted
        half = engine.engine.scheduler._transfers.connector  # type: ignore[union-attr]
        assert isinstance(half, SimpleCPUConnector)
        assert half._host.num_slots == 12
        settle(engine.engine)  # the last stores end
        assert len(half._host) == 12
    with pytest.raises(
        ConfigError, match=f"'cpu_bytes_to_use' of at least {block_bytes}, the size"
    ):
        on_host(model, block_bytes - 1)


@pytest.mark.timeout(300)
@pytest.mark.req("CRG-13")
@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param({"tensor_parallel_size": 2}, id="shards"),
        pytest.param({"pipeline_parallel_size": 2}, id="stages", marks=pytest.mark.slow),
    ],
)
def test_every_rank_stores_its_share(ranks: dict[str, Any], model_of: ModelOf) -> None:
    model, _ = model_of("windows" if "pipeline_parallel_size" in ranks else "full")
    with Engine(model) as plain:
        wanted = plain.run(*PROMPTS)
    with on_host(model, in_process=False, **SMALL, **ranks) as engine:
        assert engine.run(*PROMPTS) == wanted
        answers = []
        for prompt in PROMPTS:
            answers.append(engine.add(prompt))
            engine.wait(answers[-1])
        assert [answer.token_ids for answer in answers] == wanted
        cached = [answer.end.num_cached_tokens for answer in answers if answer.end is not None]
    assert cached == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]


# The scheduler half


FULL = FullAttentionSpec(4, 1, 8, 4)


def half_of(
    *specs: KVCacheSpec, num_slots: int = 100, num_ranks: int = 1
) -> tuple[SimpleCPUConnector, Holds]:
    """A scheduler half with `num_slots` slots."""
    config = ConnectorConfig(
        {"cpu_bytes_to_use": 10 * num_ranks * num_slots + 9},
        block_size=4,
        hash_block_size=4,
        num_groups=len(specs),
        specs=specs,
        num_ranks=num_ranks,
        rank_block_bytes=(10,) * num_ranks,
    )
    connector = load_scheduler_connector("simple_cpu", config)
    assert isinstance(connector, SimpleCPUConnector)
    holds = Holds(num_ranks)
    connector.bind_blocks(holds)
    return connector, holds


def report(connector: SimpleCPUConnector, sent: Report, *, rank: int = 0, **ended: Any) -> None:
    data = msgspec.msgpack.encode(sent)
    connector.update_connector_output(ConnectorOutput(rank=rank, metadata=(data,), **ended))


def plan(connector: SimpleCPUConnector, step: StepView) -> Commands:
    data = connector.build_connector_meta(step)
    return msgspec.msgpack.decode(data, type=Commands) if data else Commands()


def hash_of(name: object) -> bytes:
    return str(name).encode() + bytes(2)


def storable(names: Sequence[object], block_ids: Sequence[int], group: int = 0) -> StorableBlocks:
    return StorableBlocks(1, "r", group, block_ids, [hash_of(name) for name in names])


def view(names: Sequence[object], num_tokens: int, request_id: str = "r") -> RequestView:
    tokens = int32_array([1] * num_tokens)
    return RequestView(request_id, tokens, num_tokens, [hash_of(name) for name in names])


def store(connector: SimpleCPUConnector, names: Sequence[object], group: int = 0) -> list[int]:
    """Store blocks at once; returns their slots."""
    return store_hashes(connector, [hash_of(name) for name in names], group)


def store_hashes(connector: SimpleCPUConnector, hashes: list[bytes], group: int) -> list[int]:
    blocks = StorableBlocks(1, "r", group, range(1, 1 + len(hashes)), hashes)
    stores = plan(connector, StepView(2, 1, storable=[blocks])).stores
    report(connector, Report(stored=[each.hold_id for each in stores]))
    return [slot for each in stores for _, _, slot in each.slots]


def test_blocks_are_held_until_they_are_stored_and_can_be_loaded_then() -> None:
    connector, holds = half_of(FULL)
    (begun,) = plan(connector, StepView(2, 1, storable=[storable("ab", [7, 8])])).stores
    assert [block_id for _, block_id, _ in begun.slots] == [7, 8]
    assert holds.held == {begun.hold_id: [7, 8]}
    assert connector.get_num_new_matched_tokens(view("abc", 13), 0) == Matched(0, is_async=True)
    report(connector, Report(stored=[begun.hold_id]))
    assert connector.get_num_new_matched_tokens(view("abc", 13), 0) == Matched(8, is_async=True)
    assert not holds.held
    assert not connector.has_pending_work


def test_a_block_counts_when_all_ranks_have_stored_it() -> None:
    connector, holds = half_of(FULL, num_ranks=2)
    for step, blocks in ((2, storable("ab", [7, 8])), (3, storable("cd", [5, 6]))):
        assert len(plan(connector, StepView(step, step - 1, storable=[blocks])).stores) == 1
    report(connector, Report(stored=[1]), rank=1)
    report(connector, Report(stored=[2]), rank=1)
    assert connector.get_num_new_matched_tokens(view("ab", 9), 0) == Matched(0, is_async=True)
    report(connector, Report(stored=[1], failed=[2]), rank=0)
    assert connector.get_num_new_matched_tokens(view("ab", 9), 0) == Matched(8, is_async=True)
    assert connector.get_num_new_matched_tokens(view("cd", 9), 0) == Matched(0, is_async=True)
    assert not holds.held


def test_a_block_is_stored_once() -> None:
    connector, holds = half_of(FULL)
    twice = [storable("ab", [7, 8]), storable("ab", [3, 4])]
    (begun,) = plan(connector, StepView(2, 1, storable=twice)).stores
    assert begun.slots == [(0, 7, begun.slots[0][2]), (0, 8, begun.slots[1][2])]
    report(connector, Report(stored=[begun.hold_id]))
    (begun,) = plan(connector, StepView(3, 2, storable=[storable("abc", [7, 8, 9])])).stores
    assert [block_id for _, block_id, _ in begun.slots] == [9]
    assert list(holds.held) == [begun.hold_id]


@pytest.mark.req("CRG-13")
def test_the_least_recently_used_blocks_are_evicted_ends_of_prompts_first() -> None:
    connector, _ = half_of(FULL, num_slots=5)
    store(connector, "abc")
    store(connector, "xy")
    assert connector.get_num_new_matched_tokens(view("abc", 13), 0) == Matched(12, is_async=True)
    plan(connector, StepView(3, 2, storable=[storable("ab", [1, 2])]))  # used again
    store(connector, "pq")
    assert {key[1] for key in connector._host._slots} == set(map(hash_of, "abxpq"))


def test_a_block_that_is_being_loaded_is_not_evicted() -> None:
    connector, _ = half_of(FULL, num_slots=3)
    slots = store(connector, "abc")
    assert connector.get_num_new_matched_tokens(view("ab", 9), 4).num_tokens == 4  # type: ignore[union-attr]
    connector.update_state_after_alloc(view("ab", 9), (int32_array([5, 6, 7]),), 4)
    (load,) = plan(connector, StepView(3, 2)).loads
    assert load.slots == [(0, 6, slots[1])]
    assert not connector.reset_cache()
    assert set(store(connector, "xyz")) == {slots[0], slots[2]}
    connector.load_abandoned("r")
    report(connector, Report(), finished_receiving=("r",))
    assert set(store(connector, "pqr")) == set(slots)
    assert connector.reset_cache()
    assert connector.get_num_new_matched_tokens(view("p", 5), 0) == Matched(0, is_async=True)


def test_in_a_new_epoch_nothing_is_stored() -> None:
    connector, _ = half_of(FULL, num_slots=2)
    slots = store(connector, "ab")
    connector.on_new_epoch(2)
    assert connector.get_num_new_matched_tokens(view("ab", 9), 0) == Matched(0, is_async=True)
    assert set(store(connector, "ab")) == set(slots)


STATE = StateSpec(block_size=4, shapes=((2,),), dtype_bytes=(4,), num_pages=3)
SPECS: list[tuple[KVCacheSpec, ...]] = [
    (FULL,),
    (SlidingWindowSpec(4, 1, 8, 4, sliding_window=9),),
    (FULL, SlidingWindowSpec(4, 1, 8, 4, sliding_window=9)),
    (
        FULL,
        SlidingWindowSpec(8, 1, 8, 4, sliding_window=20),
        ChunkedLocalAttentionSpec(4, 1, 8, 4, attention_chunk_size=12),
    ),
    (
        SlidingWindowSpec(4, 1, 8, 4, sliding_window=4),
        ChunkedLocalAttentionSpec(8, 1, 8, 4, attention_chunk_size=16),
    ),
    (FULL, STATE),
    (
        FullAttentionSpec(8, 1, 8, 4),
        SlidingWindowSpec(8, 1, 8, 4, sliding_window=12),
        msgspec.structs.replace(STATE, block_size=8),
    ),
]


@pytest.mark.parametrize(
    "specs",
    SPECS,
    ids=lambda specs: "+".join(type(spec).__name__.removesuffix("Spec") for spec in specs),
)
def test_a_hit_is_the_longest_prefix_that_the_prefix_cache_would_accept(
    specs: tuple[KVCacheSpec, ...],
) -> None:
    """Beside the coordinator of the scheduler, with the same blocks cached."""
    num_tokens = 96
    for seed in range(60):
        chance = random.Random(seed)
        share = chance.choice([0.5, 0.8, 0.95, 1.0])
        connector, _ = half_of(*specs)
        states = [spec for spec in specs if isinstance(spec, StateSpec)]
        pool = BlockPool(200, len(specs))
        groups = tuple(KVCacheGroup(("layer",), spec) for spec in specs)
        coordinator = make_coordinator(
            KVCacheConfig(200, groups, "float32"),
            pool,
            CacheConfig(block_size=4, hash_block_size=4),
            max_num_seqs=1,
            longest=LongestRequest(256),
        )
        names = [f"{seed}.{index}" for index in range(num_tokens // 4)]
        for group, spec in enumerate(specs):
            per_block = spec.block_size // 4
            ends = names[per_block - 1 :: per_block]
            hashes = [hash_of(name) for name in ends if chance.random() < share]
            if isinstance(spec, StateSpec):  # of some states, a page is missing
                pages = [each for name in hashes for each in page_hashes(name, spec.num_pages)]
                hashes = [each for each in pages if chance.random() < 0.97]
            pool.cache_blocks(pool.get_new_blocks(len(hashes)), hashes, group)
            store_hashes(connector, hashes, group)
        request = view(names, chance.randrange(1, num_tokens + 1))
        hashes, num_hit = request.block_hashes, request.num_tokens - 1
        _, num_hit = coordinator.find_longest_hit(hashes, num_hit)
        while states and num_hit:
            (manager,) = (each for each in coordinator.managers if isinstance(each, StateManager))
            _, with_state = KeptStates(manager, [], pool, 4).find_last(hashes, num_hit)
            if with_state == num_hit:
                break
            _, num_hit = coordinator.find_longest_hit(hashes, with_state)
        match = connector.get_num_new_matched_tokens(request, 0)
        assert match == Matched(num_hit, is_async=True), seed


@pytest.mark.req("CFG-05")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "'cpu_bytes_to_use', a number of bytes such as '8GiB' or 8589934592; it is None"),
        ({"cpu_bytes_to_use": 0}, "cpu_bytes_to_use=0 must be at least one byte"),
        ({"cpu_bytes_to_use": "8 apples"}, "cpu_bytes_to_use='8 apples' is not a size"),
        ({"cpu_bytes_to_use": True}, "it is True"),
        ({"cpu_bytes_to_use": 1.5}, "it is 1.5"),
        ({"cpu_bytes_to_use": 1, "x": 1}, "no option 'x'; its only option is cpu_bytes_to_use"),
    ],
)
def test_a_wrong_option_is_rejected_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_scheduler_connector("simple_cpu", ConnectorConfig(options, specs=(FULL,)))


def test_kinds_of_attention_whose_kv_does_not_follow_from_tokens_are_rejected() -> None:
    cross = CrossAttentionSpec(16, 2, 16, 4, max_encoder_tokens=32)
    custom = CustomSpec(16, page_size_bytes=64, manager="theirs:Manager")
    for spec in (cross, custom):
        with pytest.raises(ConfigError, match=f"does not support a {type(spec).__name__}"):
            half_of(spec)
