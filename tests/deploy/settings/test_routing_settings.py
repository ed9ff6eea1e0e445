"""Settings of routing, and what they give a gateway."""

from typing import Any

import pytest

from longshore.deploy.gateway.router.config import (
    PrefixRoutingConfig,
    RoutingConfig,
    make_policy,
)
from longshore.deploy.gateway.router.policies import (
    LeastLoaded,
    PrefixAware,
    RoundRobin,
    RoutingPolicy,
    SessionAffinity,
)
from longshore.deploy.settings.options import ServeOptions
from longshore.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"routing_policy": "random"}, "routing_policy='random' is unknown; use one of least_load"),
        ({"routing_session_header": "X-Session"}, "lower-case letters, digits and dashes"),
        ({"routing_session_header": ""}, "must be 1 to 64"),
        ({"routing_index_blocks": 0}, "routing_index_blocks=0"),
        (
            {"routing_policy": "prefix_aware", "enable_prefix_caching": False},
            "routing_policy=prefix_aware needs enable_prefix_caching",
        ),
        (
            {"routing_policy": "prefix_aware", "kv_events_format": "maps"},
            "kv_events_format=maps and kv_events_hashes=bytes",
        ),
        (
            {"routing_policy": "prefix_aware", "kv_events_hashes": "int"},
            "kv_events_format=arrays and kv_events_hashes=int",
        ),
    ],
)
def test_settings_that_cannot_work_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeOptions(**settings)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("least_loaded", LeastLoaded),
        ("round_robin", RoundRobin),
        ("session_affinity", SessionAffinity),
    ],
)
def test_each_name_has_its_policy(name: Any, policy: type[RoutingPolicy]) -> None:
    assert type(make_policy(RoutingConfig(routing_policy=name))) is policy


def test_prefix_aware_hashes_as_the_engines_do() -> None:
    prefix = PrefixRoutingConfig("ab" * 32, "sha256", 8)
    policy = make_policy(RoutingConfig(routing_policy="prefix_aware", prefix=prefix))
    assert isinstance(policy, PrefixAware)
    assert policy.index.is_known == {}
