"""Options of a connector: environment variables in them, and those of split requests."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from longshore.connectors.pull.transports import TRANSPORTS
from longshore.deploy.settings.options import ServeOptions
from longshore.deploy.supervisor.connector_options import (
    PULL_CONNECTORS,
    check_router_key,
    pull_options,
    with_pull_connector,
    with_variables,
)
from longshore.protocol.errors import ConfigError

OWN_SETTINGS: Final = '{"secret_file": "/mine", "lease_s": 5}'


def test_a_text_that_names_a_variable_is_replaced_at_any_depth() -> None:
    options = {
        "remote_options": {"password": "${REDIS_PASSWORD}", "username": "me"},
        "connectors": [{"options": {"path": "${FOLDER}"}}],
        "size": 5,
        "text": "a${FOLDER}",
    }
    assert with_variables(options, {"REDIS_PASSWORD": "${FOLDER}", "FOLDER": "/tmp"}) == {
        "remote_options": {"password": "${FOLDER}", "username": "me"},
        "connectors": [{"options": {"path": "/tmp"}}],
        "size": 5,
        "text": "a${FOLDER}",
    }
    assert options["remote_options"] == {"password": "${REDIS_PASSWORD}", "username": "me"}


def test_a_variable_that_is_not_set_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match="environment variable REDIS_PASSWORD, which is not set"):
        with_variables({"remote_options": {"password": "${REDIS_PASSWORD}"}}, {})


def test_engines_that_pull_have_a_connector_and_a_secret(tmp_path: Path) -> None:
    split = with_pull_connector(ServeOptions(prefill=1, decode=2, state_dir=tmp_path / "state"))
    secret_file = tmp_path / "state" / "transfer_secret"
    assert split.roles == ("prefill", "decode", "decode")
    assert split.kv_connector == "nixl"
    assert json.loads(split.kv_connector_config) == {"secret_file": str(secret_file)}
    assert secret_file.exists()


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("mooncake", OWN_SETTINGS),
        ("p2p_nccl", OWN_SETTINGS),
        ("theirs:Mine", OWN_SETTINGS),
        (
            "multi",
            '{"connectors": [{"connector": "example"}, '
            f'{{"connector": "mooncake", "options": {OWN_SETTINGS}}}]}}',
        ),
        ("multi", '{"connectors": [{"connector": "theirs:Mine", "options": {}}]}'),
    ],
)
def test_the_settings_of_a_connector_that_was_chosen_are_kept(
    tmp_path: Path, name: str, config: str
) -> None:
    options = ServeOptions(
        prefill=1, decode=1, state_dir=tmp_path, kv_connector=name, kv_connector_config=config
    )
    split = with_pull_connector(options)
    assert split.kv_connector == name
    assert json.loads(split.kv_connector_config) == json.loads(config)
    assert not list(tmp_path.iterdir())


def test_the_pull_connector_in_multi_has_a_secret(tmp_path: Path) -> None:
    children = [{"connector": "example", "options": {"path": "/kv"}}, {"connector": "nixl"}]
    options = ServeOptions(
        prefill=1,
        decode=1,
        state_dir=tmp_path,
        kv_connector="multi",
        kv_connector_config=json.dumps({"connectors": children}),
    )
    split = with_pull_connector(options)
    example, nixl = json.loads(split.kv_connector_config)["connectors"]
    assert example == children[0]
    assert nixl["options"] == {"secret_file": str(tmp_path / "transfer_secret")}
    found = pull_options(split.kv_connector, split.kv_connector_config)
    assert found is not None
    assert found.secret is not None


@pytest.mark.parametrize(
    "connectors", [None, 5, [], [5, {"connector": 5}], [{"connector": "example", "options": {}}]]
)
def test_multi_without_a_connector_that_pulls_is_rejected(tmp_path: Path, connectors: Any) -> None:
    options = ServeOptions(
        prefill=1,
        decode=1,
        state_dir=tmp_path,
        kv_connector="multi",
        kv_connector_config=json.dumps({"connectors": connectors}),
    )
    with pytest.raises(ConfigError, match=r"'multi' does not pull KV .* its option 'connectors'"):
        with_pull_connector(options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [None, "offloading", "theirs:Mine"])
def test_a_router_key_without_a_connector_that_pulls_is_rejected(name: str | None) -> None:
    options = ServeOptions(kv_connector=name, router_key_file=Path("key"))
    with pytest.raises(ConfigError, match=r"router_key_file=key is set, but .* has no effect"):
        check_router_key(options, pull_options(name, "{}"))
    check_router_key(ServeOptions(kv_connector=name), None)
    check_router_key(options, pull_options("nixl", "{}"))


def test_a_connector_that_cannot_pull_is_rejected(tmp_path: Path) -> None:
    options = ServeOptions(
        prefill=1,
        decode=1,
        state_dir=tmp_path,
        kv_connector="offloading",
        kv_connector_config='{"cpu_bytes_to_use": "1GiB"}',
    )
    with pytest.raises(ConfigError, match="multi to combine one of them with offloading"):
        with_pull_connector(options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefill": 1}, "prefill=1 and decode=0: both kinds .* Set decode to 1 or more"),
        ({"decode": 1}, "Set prefill to 1 or more"),
        ({"prefill": 1, "decode": 1, "replicas": 2}, "Remove replicas"),
        ({"prefill": 65, "decode": 1}, "prefill=65 must be between 0 and 64"),
        ({"prefill": 1, "decode": 1, "device": "cuda:0"}, "prefill=1 and decode=1 need 2"),
        (
            {"prefill": 1, "decode": 1, "kv_connector": "nixl", "kv_role": "kv_producer"},
            "kv_role='kv_producer' is not supported with prefill=1",
        ),
        (
            {"prefill": 1, "decode": 1, "kv_connector": "nixl", "kv_role": "kv_consumer"},
            "kv_role='kv_consumer' is not supported with prefill=1",
        ),
        ({"disaggregation_min_tokens": 65}, "disaggregation_min_tokens=65 is set, but prefill"),
        ({"disaggregation_max_waiting": 0}, "disaggregation_max_waiting=0 is set, but prefill"),
    ],
)
def test_roles_that_cannot_work_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeOptions(**settings)


def test_the_options_of_the_pull_connector_are_found_also_in_multi() -> None:
    options = {"host": "10.0.0.1", "remote_hosts": ["10.0.0.2"], "max_leased_share": 0.25}
    children = [{"connector": "example"}, {"connector": "mooncake", "options": options}]
    for name, values in (("nixl", options), ("multi", {"connectors": children})):
        found = pull_options(name, json.dumps(values))
        assert found is not None
        assert (found.remote_hosts, found.max_leased_share) == (("10.0.0.2",), 0.25)
    assert pull_options("offloading", "{}") is None
    assert pull_options(None, "{}") is None


def test_all_transports_can_be_those_of_prefill_and_decode_engines() -> None:
    assert set(PULL_CONNECTORS) == TRANSPORTS.keys() - {"local"}  # which tests add
