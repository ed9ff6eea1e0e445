"""The scheduler half of the lmcache connector, its options, and what is said if LMCache is missing.
LMCache itself need not be installed."""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from typing import Any

import msgspec
import pytest

from longshore.connectors.base import (
    AdmittedRequest,
    AskLater,
    ConnectorConfig,
    ConnectorOutput,
    Matched,
    RequestView,
    StepView,
    StorableBlocks,
)
from longshore.connectors.lmcache import options as options_module
from longshore.connectors.lmcache.messages import Commands, Found, Report
from longshore.connectors.lmcache.scheduler import LMCacheConnector
from longshore.connectors.registry import load_scheduler_connector
from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import ConfigError
from longshore.protocol.install_command import install_command
from longshore.protocol.kv_cache_spec import CrossAttentionSpec, FullAttentionSpec
from longshore.testing.leaks import strings_in
from tests.connectors.holds import Holds

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=4, dtype_bytes=4)
HASHES = [bytes([number]) * 32 for number in range(1, 4)]
REQUEST = RequestView("r", int32_array(list(range(50))), 50, HASHES)
TABLE = (int32_array([7, 8, 9, 10]),)
NO_BLOCKS = (int32_array([]),)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_module, "version", lambda name: "0.5.6")


def config(num_ranks: int = 2, **options: Any) -> ConnectorConfig:
    return ConnectorConfig(
        {"cpu_bytes_to_use": "1MiB"} | options,
        specs=(SPEC,),
        num_blocks=20,
        hash_block_size=16,
        num_ranks=num_ranks,
        rank_block_bytes=(512,) * num_ranks,
    )


class Driven:
    """A connector, and what it has sent to its workers."""

    def __init__(self, **options: Any) -> None:
        self.connector = LMCacheConnector(config(**options))
        self.holds = Holds(self.connector.config.num_ranks)
        self.connector.bind_blocks(self.holds)
        self.num_steps = 0

    def commands(self, **view: Any) -> Commands:
        """Of the next plan; all plans before it are answered."""
        self.num_steps += 1
        data = self.connector.build_connector_meta(
            StepView(self.num_steps, self.num_steps - 1, **view)
        )
        return msgspec.msgpack.decode(data, type=Commands) if data else Commands()

    def match(self, num_computed: int = 0) -> Matched | AskLater:
        return self.connector.get_num_new_matched_tokens(REQUEST, num_computed)

    def answer(self, rank: int, lookup_id: int, indices: list[int]) -> None:
        report = msgspec.msgpack.encode(Report([Found(lookup_id, [indices])]))
        self.connector.update_connector_output(ConnectorOutput(rank=rank, metadata=(report,)))

    def stored(self, rank: int, hold_id: int) -> None:
        report = msgspec.msgpack.encode(Report(stored=[hold_id]))
        self.connector.update_connector_output(ConnectorOutput(rank=rank, metadata=(report,)))

    def looked_up(self, num_found: int = 3) -> int:
        """Ask and answer; returns the lookup id."""
        assert self.match() == AskLater()
        (lookup,) = self.commands().lookups
        for rank in range(self.connector.config.num_ranks):
            self.answer(rank, lookup.lookup_id, list(range(num_found)))
        return lookup.lookup_id


def test_a_lookup_is_asked_once_and_answered_when_all_ranks_have() -> None:
    driven = Driven()
    assert driven.match() == AskLater()
    assert driven.connector.has_pending_work
    (lookup,) = driven.commands().lookups
    assert lookup.groups == [HASHES]
    driven.answer(0, lookup.lookup_id, [0, 1, 2])
    driven.answer(0, lookup.lookup_id, [0, 1, 2])  # repeated
    assert driven.match() == AskLater()
    driven.answer(1, lookup.lookup_id, [0, 1])
    assert driven.match() == Matched(32, is_async=True)
    assert driven.commands() == Commands()


def test_only_leading_blocks_that_every_rank_has_count() -> None:
    driven = Driven()
    assert driven.match() == AskLater()
    (lookup,) = driven.commands().lookups
    driven.answer(0, lookup.lookup_id, [0, 1, 2])
    driven.answer(1, lookup.lookup_id, [0, 2])
    assert driven.match() == Matched(16, is_async=True)


def test_blocks_of_the_prefix_cache_are_not_asked_for() -> None:
    driven = Driven(num_ranks=1)
    assert driven.match(16) == AskLater()
    (lookup,) = driven.commands().lookups
    assert lookup.groups == [HASHES[1:]]
    driven.answer(0, lookup.lookup_id, [0, 1])
    assert driven.match(16) == Matched(32, is_async=True)
    assert driven.match(32) == Matched(16, is_async=True)
    # The first block was evicted from the device: ask again, for all of them.
    assert driven.match(0) == AskLater()
    commands = driven.commands()
    assert commands.released == [lookup.lookup_id]
    assert commands.lookups[0].groups == [HASHES]


def test_a_load_uses_the_locks_of_its_lookup_and_nothing_else_releases_them() -> None:
    driven = Driven()
    lookup_id = driven.looked_up()
    assert driven.match() == Matched(48, is_async=True)
    driven.connector.update_state_after_alloc(REQUEST, TABLE, 48)
    commands = driven.commands(admitted=[AdmittedRequest("r", TABLE)])
    (load,) = commands.loads
    assert (load.request_id, load.lookup_id) == ("r", lookup_id)
    assert load.blocks == [(0, 7, HASHES[0]), (0, 8, HASHES[1]), (0, 9, HASHES[2])]
    driven.connector.update_connector_output(ConnectorOutput(finished_receiving=["r"]))
    driven.connector.request_finished(REQUEST, TABLE)
    assert commands.released == [] == driven.commands().released
    assert strings_in(driven.connector, {"r"}) == set()


@pytest.mark.parametrize("is_admitted", [True, False], ids=["computed instead", "aborted"])
def test_an_unused_lookup_is_released_once(is_admitted: bool) -> None:
    driven = Driven()
    lookup_id = driven.looked_up()
    driven.match()
    if is_admitted:
        commands = driven.commands(admitted=[AdmittedRequest("r", TABLE)])
    else:
        driven.connector.request_finished(REQUEST, NO_BLOCKS)
        assert driven.connector.has_pending_work
        commands = driven.commands()
    assert commands.released == [lookup_id]
    driven.connector.request_finished(REQUEST, NO_BLOCKS)
    assert driven.commands() == Commands()
    assert strings_in(driven.connector, {"r"}) == set()


def test_a_request_that_ends_before_the_answer_releases_after_it() -> None:
    driven = Driven()
    driven.match()
    (lookup,) = driven.commands().lookups
    driven.connector.request_finished(REQUEST, NO_BLOCKS)
    assert strings_in(driven.connector, {"r"}) == set()
    driven.answer(0, lookup.lookup_id, [0])
    assert not driven.connector.has_pending_work
    driven.answer(1, lookup.lookup_id, [0])
    assert driven.commands().released == [lookup.lookup_id]


def test_blocks_are_held_until_all_ranks_have_stored_them() -> None:
    driven = Driven()
    storable = StorableBlocks(1, "r", 0, [7, 8], HASHES[:2], [0, 1])
    (store,) = driven.commands(storable=[storable]).stores
    assert store.blocks == [(0, 7, HASHES[0]), (0, 8, HASHES[1])]
    assert driven.holds.held == {store.hold_id: [7, 8]}
    driven.stored(0, store.hold_id)
    driven.stored(0, store.hold_id)
    assert driven.holds.held
    driven.stored(1, store.hold_id)
    assert not driven.holds.held


def test_after_a_reset_nothing_that_was_stored_before_has_a_key() -> None:
    driven = Driven()
    driven.looked_up()
    driven.match()
    driven.connector.update_state_after_alloc(REQUEST, TABLE, 48)
    assert not driven.connector.reset_cache()  # a load is in progress
    driven.connector.update_connector_output(ConnectorOutput(finished_receiving=["r"]))
    assert driven.connector.reset_cache()
    driven.match()
    (lookup,) = driven.commands().lookups
    assert set(lookup.groups[0]).isdisjoint(HASHES)
    storable = StorableBlocks(1, "r", 0, [7], HASHES[:1], [0])
    (store,) = driven.commands(storable=[storable]).stores
    assert store.blocks == [(0, 7, lookup.groups[0][0])]


def test_new_workers_have_locked_nothing() -> None:
    driven = Driven()
    driven.looked_up()
    driven.connector.on_new_epoch(2)
    driven.connector.request_finished(REQUEST, NO_BLOCKS)
    assert driven.commands() == Commands()


# Startup


@pytest.mark.req("CRG-04", "CRG-14")
@pytest.mark.parametrize(
    ("installed_version", "words"),
    [(None, "which is not installed"), ("0.6.1", "written for LMCache 0.5.6, but 0.6.1 is")],
)
def test_a_missing_or_unknown_library_is_an_error_with_the_command(
    installed_version: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if installed_version is None:
            raise PackageNotFoundError(name)
        return installed_version

    monkeypatch.setattr(options_module, "version", version)
    with pytest.raises(ConfigError) as raised:
        load_scheduler_connector("lmcache", config())
    assert words in str(raised.value)
    assert str(raised.value).endswith(
        f"{install_command('lmcache')} && pip install --no-deps lmcache==0.5.6"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chunk_size": 256}, "no option 'chunk_size'"),
        ({"cpu_bytes_to_use": "1KiB"}, "at least 2048, the size of two blocks; it is 1024"),
        ({"eviction_policy": "MRU"}, "'eviction_policy' to be 'LRU' or 'ARC'"),
        ({"lookup_timeout_s": 0}, "'lookup_timeout_s' to be a finite number"),
        ({"l2_adapters": {"type": "fs"}}, "'l2_adapters' to be a list"),
        ({"l2_adapters": [{"type": "p2p"}]}, "one of fs, fs_native, resp"),
        ({"l2_adapters": [{"type": "fs", "serde": {"type": "fp8"}}]}, "without 'serde'"),
    ],
)
def test_invalid_options_are_rejected_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match="lmcache") as raised:
        LMCacheConnector(config(**options))
    assert words in str(raised.value)


def test_cross_attention_is_rejected_by_name() -> None:
    cross = CrossAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=4, dtype_bytes=4, max_encoder_tokens=16
    )
    with pytest.raises(ConfigError, match=r"lmcache connector cannot store .* CrossAttentionSpec"):
        LMCacheConnector(replace(config(), specs=(SPEC, cross), num_groups=2))


def test_all_ranks_get_memory_for_the_same_number_of_blocks() -> None:
    unequal = ConnectorConfig({"cpu_bytes_to_use": 4000}, rank_block_bytes=(300, 100))
    read = options_module.read_options(unequal)
    assert [read.rank_cpu_bytes(unequal, rank) for rank in (0, 1)] == [3000, 1000]
    assert read.lookup_timeout_s == 5
