"""Who may be a peer of a ZMQ socket: CURVE, by a shared secret or by a list of public keys.

ZMQ checks a peer in its own thread, before the peer belongs to the socket: one that fails receives
no message, and what it sends is not delivered.
"""

import logging
import struct
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import msgspec
import zmq
from zmq.utils import z85

from longshore.protocol.errors import ConfigError
from longshore.protocol.logs.limits import LogLimit
from longshore.protocol.model_files import open_regular

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

logger = logging.getLogger(__name__)

MAX_AUTHORIZED_BYTES: Final = 1 << 20
_KEY_BYTES: Final = 32


class CurveKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Z85 keys of one end (`zmq.curve_keypair()`).

    server:     public key of the server, for an end that connects.
    authorized: file with the public keys of the only clients that an end that binds accepts, one at
                the start of each line. It is read for each new connection.
    also_authorized: public keys of clients that are accepted in addition, or without a file.
    """

    public: str
    secret: str
    server: str | None = None
    authorized: str | None = None
    also_authorized: tuple[str, ...] = ()


def is_key(text: str) -> bool:
    """Whether this can be a key: 40 characters of Z85."""
    try:
        return len(z85.decode(text)) == _KEY_BYTES
    except (KeyError, ValueError, struct.error):
        return False


def new_secret() -> str:
    """A secret for `use_secret`."""
    return zmq.curve_keypair()[1].decode()


def use_secret(socket: "zmq.Socket[bytes]", secret: str, *, bind: bool) -> None:
    """Accept only peers that know the same secret; both ends are checked, and messages encrypted.

    A CURVE client proves that it knows the server's public key, which is never sent. Here this key
    is derived from the secret, so no list of clients is needed.
    """
    public = zmq.curve_public(secret.encode())
    socket.curve_publickey = public
    socket.curve_secretkey = secret.encode()
    if bind:
        socket.curve_server = True
        # Without a domain, the context's authenticator, if there is one, is not asked.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    else:
        socket.curve_serverkey = public


def use_keys(
    context: "zmq.Context[zmq.Socket[bytes]]",
    socket: "zmq.Socket[bytes]",
    address: str,
    keys: CurveKeys,
    *,
    bind: bool,
) -> None:
    """Accept only peers with authorized keys, or connect to the server with its key."""
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()
    if not bind:
        if keys.server is None:
            raise ConfigError(f"endpoint {address!r} needs the server's public key")
        socket.curve_serverkey = keys.server.encode()
        return
    if keys.authorized is None and not keys.also_authorized:
        raise ConfigError(f"endpoint {address!r} allows no client keys; no client could connect")
    # The address is the ZAP domain, so that each endpoint has its own list.
    authorized = AuthorizedKeys(keys.authorized, keys.also_authorized)
    _authenticator(context).configure_curve_callback(
        domain=address,
        credentials_provider=SimpleNamespace(callback=authorized.allow),
    )
    socket.setsockopt(zmq.ZAP_DOMAIN, address.encode())
    socket.curve_server = True


class AuthorizedKeys:
    """The list of clients in a file, if there is one, and `others`. Keys can be added to and
    removed from the file while the socket is in use."""

    def __init__(self, path: str | None, others: Sequence[str] = ()) -> None:
        self._path = None if path is None else Path(path)
        self._others = {key.encode() for key in others}
        self._warnings = LogLimit(logger, max_per_second=1)

    def allow(self, domain: str, key: bytes) -> bool:
        """Whether a client with this public key may connect. Called in ZMQ's authenticator thread,
        which would end with an exception."""
        if key in self._others:
            return True
        if self._path is None:
            self._warnings.warning(
                "a client of %s was rejected: its public key %s is not authorized",
                domain,
                key.decode(errors="replace"),
            )
            return False
        try:
            with open_regular(self._path) as file:
                lines = file.read(MAX_AUTHORIZED_BYTES).splitlines()
        except OSError as error:
            self._warnings.warning(
                "a client of %s was rejected, because %s cannot be read: %s",
                domain,
                self._path,
                error.strerror,
            )
            return False
        if any(line.split(maxsplit=1)[:1] == [key] for line in lines):
            return True
        self._warnings.warning(
            "a client of %s was rejected: its public key %s is not in %s",
            domain,
            key.decode(errors="replace"),
            self._path,
        )
        return False


# ZMQ has one authenticator per context. It owns a socket, so it must stop before the context ends.
_authenticators: WeakKeyDictionary["zmq.Context[zmq.Socket[bytes]]", "ThreadAuthenticator"] = (
    WeakKeyDictionary()
)


def _authenticator(context: "zmq.Context[zmq.Socket[bytes]]") -> "ThreadAuthenticator":
    from zmq.auth.thread import ThreadAuthenticator

    authenticator = _authenticators.get(context)
    if authenticator is None:
        authenticator = _authenticators[context] = ThreadAuthenticator(context)
        authenticator.start()
    return authenticator


def stop_authenticator(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    """Stop the context's authenticator, if there is one."""
    authenticator = _authenticators.pop(context, None)
    if authenticator is not None:
        authenticator.stop()
