"""The settings of a server as everyone may see them."""

import json
from dataclasses import fields
from pathlib import Path

import msgspec

from longshore.deploy.settings.options import ServeOptions
from longshore.deploy.settings.shown import HIDDEN, shown_settings


def test_all_settings_are_shown_as_plain_data() -> None:
    options = ServeOptions(state_dir=Path("/srv"), served_model_name=("a", "b"))
    shown = shown_settings(options)
    assert shown.keys() == {field.name for field in fields(ServeOptions)}
    assert json.loads(json.dumps(shown)) == json.loads(msgspec.json.encode(shown))
    assert (shown["state_dir"], shown["served_model_name"]) == ("/srv", ("a", "b"))
    assert (shown["port"], shown["api_key"]) == (options.port, None)


def test_secrets_are_hidden() -> None:
    options = ServeOptions(
        api_key=("sesame",),
        kv_connector="offloading",
        kv_connector_config='{"password": "sesame"}',
        otlp_traces_endpoint="https://me:sesame@collector/v1/traces",
    )
    shown = shown_settings(options)
    assert "sesame" not in repr(shown)
    assert (shown["api_key"], shown["kv_connector_config"]) == (HIDDEN, HIDDEN)
    assert shown["otlp_traces_endpoint"] == "https://***@collector/v1/traces"
