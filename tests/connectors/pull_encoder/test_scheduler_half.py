"""Which slot has which output, without workers."""

import re
from typing import Any

import msgspec
import pytest

from longshore.connectors.base import CacheLookup, ECRole, EncoderConnectorConfig
from longshore.connectors.pull_encoder.messages import Commands, Report
from longshore.connectors.pull_encoder.options import read_encoder_options
from longshore.connectors.pull_encoder.scheduler import NixlEncoderConnector
from longshore.protocol.errors import ConfigError
from longshore.protocol.handshake import EngineIdentity
from longshore.protocol.requests import MultimodalFeature

IDENTITY = EngineIdentity("model", "float32", 16, 64, 4, 64, "digest")
PEERS = ["127.0.0.1:5600"]


def sound(name: str) -> MultimodalFeature:
    return MultimodalFeature(name, 0, 100, "audio")


class Half(NixlEncoderConnector):
    """Counts its steps."""

    def __init__(self, role: ECRole, *, num_ranks: int = 1, **options: Any) -> None:
        if role != "ec_producer":
            options["peers"] = PEERS
        super().__init__(EncoderConnectorConfig(options, role, num_ranks, "engine.1", IDENTITY))
        self.step = 0

    def plan(self, *rows: str, is_answered: bool = True) -> Commands:
        """A plan in which requests with these sounds get rows 0, 1, ..."""
        for row, name in enumerate(rows):
            assert self.has_caches(sound(name)) is not CacheLookup.PENDING
            self.update_state_after_alloc(sound(name), row)
        self.step += 1
        data = self.build_connector_meta(self.step, self.step - 1 if is_answered else 0)
        return msgspec.msgpack.decode(data, type=Commands) if data else Commands()

    def report(self, rank: int = 0, **fields: Any) -> None:
        self.update_connector_output(rank, msgspec.msgpack.encode(Report(**fields)))


@pytest.mark.req("FEA-09")
def test_a_producer_saves_what_it_encodes_and_loads_it_afterwards() -> None:
    half = Half("ec_producer")
    assert half.has_caches(sound("a")) is CacheLookup.MISSING
    commands = half.plan("a", "a", "b")
    assert [(each.row, each.slot) for each in commands.saves] == [(0, 1), (2, 2)]
    assert [(each.row, each.slot) for each in commands.loads] == [(1, 1)]
    assert half.has_caches(sound("a")) is CacheLookup.LOADABLE
    assert not commands.pulls


@pytest.mark.req("FEA-09")
def test_a_consumer_pulls_and_loads_when_all_ranks_have_the_output() -> None:
    half = Half("ec_consumer", num_ranks=2)
    assert half.has_caches(sound("a")) is CacheLookup.PENDING
    assert half.has_pending_work
    (pull,) = half.plan().pulls
    assert not half.has_pending_work
    half.report(rank=0, pulled=[pull.key])
    assert half.has_caches(sound("a")) is CacheLookup.PENDING
    half.report(rank=1, pulled=[pull.key])
    assert half.has_caches(sound("a")) is CacheLookup.LOADABLE
    (load,) = half.plan("a").loads
    assert (load.slot, load.num_tokens) == (pull.slot, 100)


def test_an_output_that_one_rank_could_not_pull_is_encoded_once_and_then_asked_for_again() -> None:
    half = Half("ec_consumer", num_ranks=2)
    half.has_caches(sound("a"))
    (pull,) = half.plan().pulls
    half.report(rank=0, pulled=[pull.key])
    half.report(rank=1, failed=[pull.key])
    assert half.num_missed == 1
    assert half.has_caches(sound("a")) is CacheLookup.MISSING
    assert half.plan("a") == Commands()  # a consumer saves nothing
    assert half.has_caches(sound("a")) is CacheLookup.PENDING


def test_slots_in_use_by_a_plan_in_flight_are_not_reused() -> None:
    half = Half("ec_producer", max_outputs=1)
    half.plan("a")
    assert half.plan("b", is_answered=False) == Commands()  # no slot: it is encoded, not saved
    assert half.plan("c").withdrawn  # now that its step is answered
    assert half.plan("d") == Commands()  # until the owner has confirmed
    half.report(free_slots=[1])
    (save,) = half.plan("e").saves
    assert save.slot == 1


def test_a_consumer_evicts_the_output_used_longest_ago() -> None:
    half = Half("ec_consumer", max_outputs=2)
    for name in "ab":
        half.has_caches(sound(name))
        half.report(pulled=[half.plan().pulls[0].key])
    half.plan("a", "b")
    half.plan("a")
    half.plan()
    half.has_caches(sound("c"))
    assert half.has_caches(sound("a")) is CacheLookup.LOADABLE
    assert half.plan().pulls[0].slot == 2
    assert half.reset_cache() is False  # a pull is in progress
    half.on_new_epoch()
    assert half.has_caches(sound("a")) is CacheLookup.PENDING


@pytest.mark.parametrize(
    ("role", "options", "error"),
    [
        ("ec_producer", {"peers": PEERS}, "'peers' is for engines that load outputs"),
        ("ec_consumer", {}, "'peers' must name the engines to ask; --ec-role is ec_consumer"),
        ("ec_both", {"peers": ["10.0.0.1"]}, "'peers' to be a list of at most 64 addresses"),
        ("ec_both", {"peers": "10.0.0.1:1"}, "'peers' to be a list of at most 64 addresses"),
        ("ec_producer", {"max_outputs": 0}, "'max_outputs' to be a whole number of at least 1"),
        ("ec_producer", {"max_outputs": 1 << 20}, "'max_outputs' to be at most 65536"),
        ("ec_producer", {"remote_hosts": []}, "no option 'remote_hosts'"),
        ("ec_producer", {"host": "0.0.0.0"}, "'host' to be an address"),
    ],
)
def test_bad_options_are_rejected_by_name(
    role: ECRole, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=f"^--ec-connector-config.*{re.escape(error)}"):
        read_encoder_options("nixl", options, role)


def test_peers_may_have_addresses_of_ipv6() -> None:
    peers = ["[::1]:5600", "prefill.local:5601"]
    options = read_encoder_options("nixl", {"peers": peers}, "ec_consumer")
    assert options.peers == (("::1", 5600), ("prefill.local", 5601))
    assert options.pull.remote_hosts == ("127.0.0.1", "::1", "prefill.local")
