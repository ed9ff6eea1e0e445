"""`longshore keys`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from longshore.deploy.cli.main import app
from longshore.deploy.supervisor.event_keys import EventKeys
from longshore.deploy.supervisor.state_dir import StateDir
from longshore.protocol.errors import ConfigError


@pytest.fixture
def keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs a command in a folder of its own; returns what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LONGSHORE_STATE_DIR", str(tmp_path / "state"))

    def run(*arguments: str) -> str:
        app(["keys", *arguments], exit_on_error=False, result_action="return_value")
        return capsys.readouterr().out

    return run


def test_a_subscriber_is_created_rotated_and_removed(
    keys: Callable[..., str], tmp_path: Path
) -> None:
    assert "No keys in" in keys("show")
    assert "router is authorized. Its keys are in router.json" in keys("create", "router")
    file = tmp_path / "router.json"
    assert file.stat().st_mode & 0o777 == 0o600
    first = json.loads(file.read_bytes())
    keys("rotate", "router", "--output", "new.json")
    second = json.loads((tmp_path / "new.json").read_bytes())
    shown = keys("show")
    for public in (first["public"], second["public"], first["server"]):
        assert public in shown
    for secret in (first["secret"], second["secret"]):
        assert secret not in shown
    assert keys("remove", "router", "--old").startswith("1 key of router removed.")
    shown = json.loads(keys("show", "--json"))
    assert shown["engines"] == first["server"] == second["server"]
    (subscriber,) = shown["subscribers"]
    assert (subscriber["name"], subscriber["public"]) == ("router", second["public"])


def test_an_existing_file_is_not_replaced_and_its_subscriber_not_authorized(
    keys: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "router.json").write_text("precious")
    with pytest.raises(ConfigError, match="File exists"):
        keys("create", "router")
    assert (tmp_path / "router.json").read_text() == "precious"
    assert EventKeys(StateDir(tmp_path / "state")).subscribers() == []


def test_an_error_leaves_no_file(keys: Callable[..., str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no subscriber"):
        keys("rotate", "router")
    assert not (tmp_path / "router.json").exists()


def test_a_public_key_is_authorized_without_a_file(
    keys: Callable[..., str], tmp_path: Path
) -> None:
    public = "k" * 40
    assert keys("create", "router", "--public-key", public) == "The key of router is authorized.\n"
    assert public in keys("show")
    assert not (tmp_path / "router.json").exists()
    with pytest.raises(ConfigError, match="Remove one"):
        keys("create", "other", "--public-key", public, "--output", "x")


def test_the_keys_of_the_engines_are_rotated(keys: Callable[..., str]) -> None:
    keys("create", "router")
    before = json.loads(keys("show", "--json"))["engines"]
    printed = keys("rotate")
    after = json.loads(keys("show", "--json"))["engines"]
    assert after != before
    assert f"New public key of the engines: {after}" in printed
    with pytest.raises(ConfigError, match="need the name"):
        keys("rotate", "--output", "x")


def test_the_keys_of_a_node_are_written_once_and_only_the_public_one_is_shown(
    keys: Callable[..., str], tmp_path: Path
) -> None:
    shown = keys("node")
    written = json.loads((tmp_path / "node.json").read_bytes())
    assert shown == f'public_key = "{written["public"]}"\n'
    assert (tmp_path / "node.json").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match=r"node.json cannot be created .File exists"):
        keys("node")
    assert json.loads((tmp_path / "node.json").read_bytes()) == written


def test_the_secret_of_transfers_is_not_shown(keys: Callable[..., str], tmp_path: Path) -> None:
    shown = keys("transfer", "--output", "t.key")
    secret = (tmp_path / "t.key").read_text().strip()
    assert len(secret) == 40
    assert secret not in shown
    assert (tmp_path / "t.key").stat().st_mode & 0o777 == 0o600
