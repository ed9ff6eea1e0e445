"""The NIXL library, which is imported only by what uses it."""

import logging
from importlib import import_module
from typing import Any, NamedTuple


class NixlLibrary(NamedTuple):
    """api: its module. errors: its exceptions, which have no common base. disconnected: the one
    that says that the connection to the peer is closed."""

    api: Any
    errors: tuple[type[Exception], ...]
    disconnected: type[Exception]


def load_nixl() -> NixlLibrary:
    """Raises ImportError."""
    api = import_module("nixl._api")
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to standard output
    named = [value for name, value in vars(api.nixlBind).items() if name.endswith("Error")]
    errors = (each for each in named if isinstance(each, type) and issubclass(each, Exception))
    return NixlLibrary(
        api, (RuntimeError, *errors), disconnected=api.nixlBind.nixlRemoteDisconnectError
    )
