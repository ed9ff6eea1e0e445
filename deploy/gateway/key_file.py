"""The key file: named API keys with their shares and limits, in TOML.

    [[key]]
    name = "alice"
    sha256 = "..."               # or key = "...", the key itself
    weight = 2
    max_live_requests = 64
    tokens_per_minute = 200_000
    cache_share = 0.1
    min_priority = -5

It is read when the server starts, and again when an operator asks for it.
"""

import tomllib
from pathlib import Path
from typing import Annotated, Final

import msgspec

from longshore.deploy.gateway.api_keys import ApiKey, CacheSharing, digest_of
from longshore.deploy.gateway.key_usage import MAX_SLOTS
from longshore.protocol.errors import ConfigError
from longshore.protocol.private_files import read_private

MAX_FILE_BYTES: Final = 1 << 20
MAX_KEYS: Final = 1000
"""Every request is compared with all keys, and every key has metrics of its own."""

_Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._-]{1,63}\Z")]
_Key = Annotated[str, msgspec.Meta(pattern=r"\A[!-~]{1,512}\Z")]
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-fA-F]{64}\Z")]
_Limit = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the file; see ApiKey."""

    name: _Name
    key: _Key | None = None
    sha256: _Sha256 | None = None
    weight: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    max_live_requests: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    cache_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.25
    min_priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] = 0


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    key: Annotated[list[KeyEntry], msgspec.Meta(min_length=1, max_length=MAX_KEYS)]


def read_key_file(path: Path, sharing: CacheSharing) -> tuple[ApiKey, ...]:
    """The keys of a file, without the keys themselves. Raises ConfigError, with the line or the
    field, and never with the content of a field."""
    try:
        entries = msgspec.convert(tomllib.loads(_read_private(path)), KeyFile).key
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"api_key_file={path} is not valid TOML: {error}") from error
    except (msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"api_key_file={path}: {str(error)[:200]}") from error
    keys: list[ApiKey] = []
    for number, entry in enumerate(entries):
        where = f"api_key_file={path}: entry {number} ({entry.name})"
        if (entry.key is None) == (entry.sha256 is None):
            raise ConfigError(f"{where} must have either `key` or `sha256`")
        digest = digest_of(entry.key.encode()) if entry.key else (entry.sha256 or "").lower()
        if any(entry.name == other.name for other in keys):
            raise ConfigError(f"{where} has the name of another entry; names must be unique")
        if any(digest == other.digest for other in keys):
            raise ConfigError(f"{where} has the key of another entry")
        keys.append(
            ApiKey(
                name=entry.name,
                digest=digest,
                cache_id=entry.name if sharing == "key" else None,
                weight=entry.weight,
                max_live_requests=entry.max_live_requests,
                tokens_per_minute=entry.tokens_per_minute,
                cache_share=entry.cache_share,
                min_priority=entry.min_priority,
                slot=len(keys),
            )
        )
    return tuple(keys)


class DeploymentKeys:
    """The API keys of a deployment. One thread at a time may read and use new ones.

    keys: the current ones.
    path: of the file from which an operator may have them read again; None: there is none.
    sharing: see `read_key_file`.
    """

    def __init__(
        self,
        keys: tuple[ApiKey, ...] = (),
        path: Path | None = None,
        sharing: CacheSharing = "all",
    ) -> None:
        self.keys = keys
        self._path = path
        self._sharing: CacheSharing = sharing
        self._num_slots = len(keys)

    def read_again(self) -> tuple[ApiKey, ...]:
        """The keys that the file has now. A key that has the name of a current one continues its
        counts. Raises ConfigError."""
        if self._path is None:
            raise ConfigError("this deployment was started without api_key_file")
        slots = {key.name: key.slot for key in self.keys}
        keys = []
        num_slots = self._num_slots
        for key in read_key_file(self._path, self._sharing):
            if (slot := slots.get(key.name)) is None:
                slot, num_slots = num_slots, num_slots + 1
            keys.append(msgspec.structs.replace(key, slot=slot))
        if num_slots > MAX_SLOTS:
            raise ConfigError(
                f"this deployment has had {self._num_slots} API keys, and can have {MAX_SLOTS} "
                "until it is restarted"
            )
        return tuple(keys)

    def use(self, keys: tuple[ApiKey, ...]) -> None:
        """They are the current ones from now on. keys: what `read_again` has returned."""
        self.keys = keys
        self._num_slots = max(self._num_slots, *(key.slot + 1 for key in keys))


def _read_private(path: Path) -> str:
    """The content of a file that only its owner can use."""
    try:
        content = read_private(path, MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"it is larger than {MAX_FILE_BYTES} bytes")
        return content.decode()
    except OSError as error:
        raise ConfigError(f"api_key_file={path} cannot be read: {error.strerror}") from error
    except (ConfigError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file={path}: {error}") from error
