"""Keys of KV events in the state directory."""

from pathlib import Path

import msgspec
import pytest
import zmq

from longshore.deploy.supervisor.event_keys import EventKeys, Subscriber
from longshore.deploy.supervisor.state_dir import StateDir
from longshore.protocol.errors import ConfigError
from longshore.protocol.transport.security import AuthorizedKeys

DAY, NEXT_DAY = "2026-01-31", "2026-02-01"


@pytest.fixture
def keys(tmp_path: Path) -> EventKeys:
    return EventKeys(StateDir(tmp_path / "state"))


def is_allowed(keys: EventKeys, public: str) -> bool:
    engines = keys.of_engines()
    assert engines is not None
    assert engines.authorized is not None
    return AuthorizedKeys(engines.authorized).allow("here", public.encode())


def test_without_subscribers_there_are_no_keys(keys: EventKeys) -> None:
    assert keys.of_engines() is None
    assert keys.subscribers() == []
    assert not keys.folder.exists()
    with pytest.raises(ConfigError, match="Run `longshore keys create NAME`"):
        keys.rotate_engines()


def test_first_subscriber_makes_the_keys_of_the_engines(keys: EventKeys) -> None:
    router = keys.authorize("router", is_new=True, today=DAY)
    assert router is not None
    assert zmq.curve_public(router.secret.encode()).decode() == router.public
    engines = keys.of_engines()
    assert engines is not None
    assert router.server == engines.public
    assert is_allowed(keys, router.public)
    monitor = keys.authorize("monitor", is_new=True, today=NEXT_DAY)
    assert monitor is not None
    assert keys.of_engines() == engines
    assert keys.subscribers() == [
        Subscriber(router.public, "router", DAY),
        Subscriber(monitor.public, "monitor", NEXT_DAY),
    ]


def test_files_are_private_and_hold_no_secret_of_a_subscriber(keys: EventKeys) -> None:
    router = keys.authorize("router", is_new=True, today=DAY)
    assert router is not None
    assert keys.folder.stat().st_mode & 0o777 == 0o700
    files = list(keys.folder.iterdir())
    assert len(files) == 2
    for file in files:
        assert file.stat().st_mode & 0o777 == 0o600
        assert router.secret not in file.read_text()
    keys.folder.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        keys.of_engines()


def test_subscriber_can_have_made_its_own_keys(keys: EventKeys) -> None:
    public = zmq.curve_keypair()[0].decode()
    assert keys.authorize("router", is_new=True, today=DAY, public=public) is None
    assert is_allowed(keys, public)
    with pytest.raises(ConfigError, match="authorized already"):
        keys.authorize("other", is_new=True, today=DAY, public=public)
    for wrong in ("", public[1:], public + "x", " " * 40, public[:39] + "\n", "ä" * 40):
        with pytest.raises(ConfigError, match="40 characters"):
            keys.authorize("other", is_new=True, today=DAY, public=wrong)


def test_old_key_is_valid_until_it_is_removed(keys: EventKeys) -> None:
    old = keys.authorize("router", is_new=True, today=DAY)
    other = keys.authorize("monitor", is_new=True, today=DAY)
    new = keys.authorize("router", is_new=False, today=NEXT_DAY)
    assert old is not None and new is not None and other is not None  # noqa: PT018
    assert is_allowed(keys, old.public)
    assert is_allowed(keys, new.public)
    assert keys.remove("router", only_old=True) == 1
    assert not is_allowed(keys, old.public)
    assert is_allowed(keys, new.public)
    assert keys.remove("router", only_old=True) == 0
    assert keys.remove("router", only_old=False) == 1
    assert not is_allowed(keys, new.public)
    assert is_allowed(keys, other.public)


def test_engines_get_a_new_pair_and_keep_their_subscribers(keys: EventKeys) -> None:
    router = keys.authorize("router", is_new=True, today=DAY)
    assert router is not None
    new = keys.rotate_engines()
    engines = keys.of_engines()
    assert engines is not None
    assert engines.public == new != router.server
    assert is_allowed(keys, router.public)


def test_names_are_checked(keys: EventKeys) -> None:
    keys.authorize("router", is_new=True, today=DAY)
    with pytest.raises(ConfigError, match="longshore keys rotate router"):
        keys.authorize("router", is_new=True, today=DAY)
    with pytest.raises(ConfigError, match="no subscriber 'routr'; known are: router"):
        keys.authorize("routr", is_new=False, today=DAY)
    with pytest.raises(ConfigError, match="no subscriber"):
        keys.remove("routr", only_old=False)
    for name in ("", "a b", "../x", "a\nb", "-a", "a" * 65, "x" * 10_000_000):
        with pytest.raises(ConfigError, match="not a name") as raised:
            keys.authorize(name, is_new=True, today=DAY)
        assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"public": "p"}', b'{"public": "p", "secret": ""}', b"[" * 100_000],
    ids=["empty", "cut", "incomplete", "short", "nested"],
)
def test_damaged_pair_is_an_error_that_says_what_to_do(keys: EventKeys, content: bytes) -> None:
    keys.authorize("router", is_new=True, today=DAY)
    (keys.folder / "kv-events.json").write_bytes(content)
    with pytest.raises(ConfigError, match="Restore it from a backup"):
        keys.of_engines()


def test_pair_of_two_different_keys_is_rejected(keys: EventKeys) -> None:
    keys.authorize("router", is_new=True, today=DAY)
    engines = keys.of_engines()
    assert engines is not None
    wrong = msgspec.structs.replace(engines, public=zmq.curve_keypair()[0].decode())
    (keys.folder / "kv-events.json").write_bytes(msgspec.json.encode(wrong))
    with pytest.raises(ConfigError, match="does not belong"):
        keys.of_engines()


def test_list_that_is_no_text_or_cannot_be_written_is_an_error(keys: EventKeys) -> None:
    keys.authorize("router", is_new=True, today=DAY)
    file = keys.folder / "kv-events.authorized"
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        keys.subscribers()
    file.write_text("x" * (1 << 20))
    with pytest.raises(ConfigError, match="longshore keys remove"):
        keys.authorize("other", is_new=True, today=DAY)
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match=r"cannot be read|cannot be written"):
        keys.authorize("other", is_new=True, today=DAY)
