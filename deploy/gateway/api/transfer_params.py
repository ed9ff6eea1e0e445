"""`kv_transfer_params` of HTTP requests: a router that proves its key drives the legs of a request
itself, as in vLLM's flow with NIXL. Anybody else could read the KV of others with them."""

import hmac
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.types import Scope

from longshore.deploy.gateway.api_keys import digest_of
from longshore.deploy.requests.errors import invalid
from longshore.protocol.errors import shortened

ROUTER_KEY_HEADER: Final = "x-longshore-router-key"


class TransferAccess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who may transfer what.

    router_key_digest: SHA-256 of the key, in hexadecimal; empty: there is none.
    hosts:             from which engines pull KV; empty: they do not.
    """

    router_key_digest: str = ""
    hosts: tuple[str, ...] = ()


def check_transfer_params(
    params: Mapping[str, Any] | None,
    access: TransferAccess,
    scope: Scope,
    *,
    num_answers: int,
    is_stream: bool,
) -> None:
    """Raises InvalidRequest if the request may not have them, or they cannot have an effect."""
    if params is None:
        return
    reason = (
        _access_problem(access, scope)
        or _values_problem(params, access)
        or _request_problem(params, num_answers=num_answers, is_stream=is_stream)
    )
    if reason is not None:
        raise invalid(f"kv_transfer_params {reason}", param="kv_transfer_params")


def _access_problem(access: TransferAccess, scope: Scope) -> str | None:
    if not access.hosts:
        return "needs engines that pull KV (--prefill and --decode, or --kv-connector nixl)"
    if not access.router_key_digest:
        return "is accepted from a router with a key only, and there is none (--router-key-file)"
    name = ROUTER_KEY_HEADER.encode()
    given = next((value for key, value in scope["headers"] if key == name), b"")
    if not hmac.compare_digest(digest_of(given), access.router_key_digest):
        return f"is accepted from a router only, which sends its key in {ROUTER_KEY_HEADER}"
    return None


def _values_problem(params: Mapping[str, Any], access: TransferAccess) -> str | None:
    for name in ("do_remote_decode", "do_remote_prefill"):
        if not isinstance(params.get(name), bool | None):
            return f"has {name}={shortened(repr(params[name]))}, which must be true or false"
    if bool(params.get("do_remote_decode")) == bool(params.get("do_remote_prefill")):
        return "must have either do_remote_decode=true or do_remote_prefill=true"
    host = params.get("remote_host")
    if params.get("do_remote_prefill") and host not in access.hosts:
        return (
            f"has remote_host={shortened(repr(host))}, which is none of the hosts of this "
            "deployment ('remote_hosts' of --kv-connector-config)"
        )
    return None


def _request_problem(params: Mapping[str, Any], *, num_answers: int, is_stream: bool) -> str | None:
    if num_answers > 1:
        return f"is for one answer, and the request asks for {num_answers}"
    if is_stream and params.get("do_remote_decode"):
        return "with do_remote_decode=true is answered with the response; remove stream=true"
    return None
