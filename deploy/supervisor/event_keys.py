"""CURVE keys of KV events, in the state directory: one pair of the engines, and the public keys of
their subscribers.

`kv-events.json` has the engines' pair. Each line of `kv-events.authorized` is a subscriber's public
key, its name and the day on which it was added. The scheduler reads this file for each new
connection, so subscribers are added and removed without a restart.
"""

import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import zmq

from longshore.deploy.supervisor.state_dir import StateDir
from longshore.protocol.errors import ConfigError
from longshore.protocol.model_files import read_bytes
from longshore.protocol.private_files import check_private, read_private
from longshore.protocol.transport.security import MAX_AUTHORIZED_BYTES, CurveKeys

_FOLDER: Final = "keys"
_MAX_PAIR_BYTES: Final = 4096
_PAIR_FILE: Final = "kv-events.json"
_AUTHORIZED_FILE: Final = "kv-events.authorized"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY: Final = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # Z85


class Subscriber(NamedTuple):
    """One line of the list. added: a day, as in 2026-01-31."""

    public: str
    name: str
    added: str


class EventKeys:
    """Every method raises ConfigError if a file cannot be read or written, or is damaged."""

    def __init__(self, state_dir: StateDir) -> None:
        self.folder = state_dir.path.absolute() / _FOLDER
        self._pair_file = self.folder / _PAIR_FILE
        self._authorized_file = self.folder / _AUTHORIZED_FILE

    def of_engines(self) -> CurveKeys | None:
        """The keys of the ends that bind; None if there are none."""
        if not self._pair_file.exists():
            return None
        try:
            check_private(self.folder)
            content = read_private(self._pair_file, _MAX_PAIR_BYTES)
            keys = msgspec.json.decode(content, type=CurveKeys)
            if zmq.curve_public(keys.secret.encode()).decode() != keys.public:
                raise ValueError("public does not belong to secret")
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"{self._pair_file} cannot be used: {error}. Restore it from a backup, or delete "
                "it and run `longshore keys create`, which makes new keys."
            ) from error
        return msgspec.structs.replace(keys, authorized=str(self._authorized_file))

    def subscribers(self) -> list[Subscriber]:
        """All authorized subscribers, the first added first."""
        try:
            text = read_bytes(self._authorized_file).decode()
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._authorized_file} cannot be read: {error}") from error
        lines = [line.split(maxsplit=2) for line in text.splitlines() if line.strip()]
        return [Subscriber(*[*parts, "", ""][:3]) for parts in lines]

    def authorize(
        self, name: str, *, is_new: bool, today: str, public: str | None = None
    ) -> CurveKeys | None:
        """Add a subscriber, or another key of one whose old key stays valid until it is removed.
        Makes the engines' keys if there are none.

        public: the subscriber has made its own keys. Else its new keys are returned.
        """
        if _NAME.fullmatch(name) is None:
            raise ConfigError(
                f"{name[:200]!r} is not a name of a subscriber. Use up to 64 letters, digits, "
                "dots, dashes and underscores."
            )
        if public is not None and _KEY.fullmatch(public) is None:
            raise ConfigError(
                f"{public[:200]!r} is not a public key: it must have the 40 characters that "
                "zmq.curve_keypair() returns first"
            )
        others = self.subscribers()
        if any(other.public == public for other in others):
            raise ConfigError(f"this public key is authorized already: {public}")
        if not is_new:
            _check_known(name, others)
        elif any(other.name == name for other in others):
            raise ConfigError(
                f"there is a subscriber {name!r} already. Choose another name, or replace its key "
                f"with `longshore keys rotate {name}`."
            )
        server = (self.of_engines() or self._make_pair()).public
        keys = None
        if public is None:
            keys = _new_pair(server)
            public = keys.public
        self._write_authorized([*others, Subscriber(public, name, today)])
        return keys

    def rotate_engines(self) -> str:
        """Replace the engines' keys; returns the new public key. Engines use them from their next
        start on."""
        if self.of_engines() is None:
            raise ConfigError("there are no keys yet. Run `longshore keys create NAME`.")
        return self._make_pair().public

    def remove(self, name: str, *, only_old: bool) -> int:
        """Remove all keys of a subscriber, or all but the one added last. Returns how many."""
        before = self.subscribers()
        _check_known(name, before)
        keys = [one for one in before if one.name == name]
        removed = keys[:-1] if only_old else keys
        self._write_authorized(one for one in before if one not in removed)
        return len(removed)

    def _make_pair(self) -> CurveKeys:
        keys = _new_pair()
        self._write(self._pair_file, msgspec.json.encode(keys))
        return keys

    def _write_authorized(self, subscribers: Iterable[Subscriber]) -> None:
        text = "".join(" ".join(one).rstrip() + "\n" for one in subscribers).encode()
        if len(text) > MAX_AUTHORIZED_BYTES:
            raise ConfigError(
                f"{self._authorized_file} would have more than {MAX_AUTHORIZED_BYTES} bytes. "
                "Remove old keys with `longshore keys remove`."
            )
        self._write(self._authorized_file, text)

    def _write(self, path: Path, content: bytes) -> None:
        """Replace a private file as a whole."""
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            check_private(self.folder)
            descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=self.folder)  # 0600
            try:
                with open(descriptor, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(descriptor)
                os.replace(name, path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _check_known(name: str, subscribers: list[Subscriber]) -> None:
    if all(one.name != name for one in subscribers):
        known = ", ".join(dict.fromkeys(one.name for one in subscribers)) or "none"
        raise ConfigError(f"there is no subscriber {name[:200]!r}; known are: {known[:200]}")


def _new_pair(server: str | None = None) -> CurveKeys:
    public, secret = zmq.curve_keypair()
    return CurveKeys(public.decode(), secret.decode(), server=server)
