"""Which settings a benchmark's result contains, and which it never contains."""

import json
from typing import Any

import pytest

from longshore.deploy.bench.options import ServeBenchOptions, ThroughputOptions
from longshore.deploy.bench.report import conditions
from longshore.deploy.cli.client_options import (
    ChatOptions,
    DoctorOptions,
    TopOptions,
)
from longshore.deploy.settings.options import ServeOptions


@pytest.mark.parametrize(
    "options",
    [
        ServeBenchOptions(api_key="hush"),
        ServeBenchOptions(url="http://me:hush@127.0.0.1:8000/here?token=hush"),
        ThroughputOptions(kv_connector="known:Connector", kv_connector_config='{"key": "hush"}'),
    ],
)
def test_a_secret_is_never_in_a_result(options: Any) -> None:
    assert "hush" not in json.dumps(conditions(options))


@pytest.mark.parametrize(
    "options",
    [
        ChatOptions(api_key="hush"),
        DoctorOptions(api_key="hush"),
        TopOptions(api_key="hush"),
        ServeBenchOptions(api_key="hush"),
        ServeOptions(api_key=("hush",)),
    ],
)
def test_options_that_are_printed_do_not_show_their_key(options: Any) -> None:
    assert "hush" not in repr(options)


def test_a_result_names_every_other_setting() -> None:
    options = ServeBenchOptions(url="http://127.0.0.1:8000/here", model="tiny", api_key="hush")
    settings = conditions(options)["settings"]
    assert settings["url"] == "http://127.0.0.1:8000/here"
    assert settings["request_rate"] == "inf"
    assert set(settings) == set(ServeBenchOptions.__dataclass_fields__) - {"api_key"}
