"""API keys as a gateway knows them: by digest, with what the requests of each may do.

The keys themselves stay in the process that read them from the settings.
"""

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from longshore.protocol.requests import Tenant

CacheSharing: TypeAlias = Literal["all", "key"]
"""Which requests share cached prefixes: all, or only those with the same API key."""

_SALT_CONTEXT: Final = b"lngshr-key-salt"
_NO_SALT: Final = b"\0"
_CLIENT_SALT: Final = b"\1"


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One API key, or `NO_KEY` for requests to a gateway without keys.

    name:       shown in metrics, logs and errors; empty: NO_KEY.
    digest:     SHA-256 of the key, in hexadecimal.
    cache_id:   what separates its cached prefixes from those of other keys. None: requests share
                prefixes as their own salts say.
    weight:     its share, relative to the weights of the other keys that have requests.
    max_live_requests: limit of its running and waiting requests, in all gateways; None: no limit.
    tokens_per_minute: limit of prompt and generated tokens within a minute, in all gateways.
    cache_share: the share of the KV cache that its cache hints retain at most.
    min_priority: the most urgent priority that its requests may have; None: any.
    slot:       of its counts in KeyUsage. No other key of the deployment has had it.
    """

    name: str = ""
    digest: str = ""
    cache_id: str | None = None
    weight: int = 1
    max_live_requests: int | None = None
    tokens_per_minute: int | None = None
    cache_share: float = 0.25
    min_priority: int | None = None
    slot: int = 0

    @property
    def tenant(self) -> Tenant:
        """Whose requests these are, for the scheduler."""
        return Tenant(self.name, self.weight, self.cache_share)

    @property
    def owner(self) -> str:
        """Whose stored files are its, as a part of a file's name."""
        return hashlib.sha256(self.digest.encode()).hexdigest()[:32]

    def cache_salt(self, given: str | None) -> str | None:
        """The cache salt of a request for which the client sent the salt `given`.

        Two requests have the same one only if both the keys and the given salts are the same. It is
        the same in all gateways and after a restart.
        """
        if self.cache_id is None:
            return given
        cache_id = self.cache_id.encode()
        hashed = hashlib.blake2b(digest_size=32, person=_SALT_CONTEXT)
        hashed.update(len(cache_id).to_bytes(8, "little") + cache_id)
        hashed.update(_NO_SALT if given is None else _CLIENT_SALT + given.encode())
        return hashed.hexdigest()


NO_KEY: Final = ApiKey()


def digest_of(key: bytes) -> str:
    """What a gateway compares a key by."""
    return hashlib.sha256(key).hexdigest()


def plain_keys(keys: Sequence[str], sharing: CacheSharing) -> tuple[ApiKey, ...]:
    """Keys that are given without a name or a limit. Their names are their positions, from 1."""
    digests = [digest_of(key.encode()) for key in keys]
    return tuple(
        ApiKey(
            name=f"key-{number}",
            digest=digest,
            cache_id=digest if sharing == "key" else None,
            slot=number - 1,
        )
        for number, digest in enumerate(digests, start=1)
    )


def find_key(keys: Sequence[ApiKey], given: bytes) -> ApiKey | None:
    """The key that was given; None if it is unknown. Compares with all keys, in constant time."""
    digest = digest_of(given)
    found = None
    for key in keys:
        if hmac.compare_digest(digest, key.digest):
            found = key
    return found
