"""Environment variables in the options of a connector."""

import pytest

from longshore.deploy.supervisor.connector_options import with_variables
from longshore.protocol.errors import ConfigError


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
