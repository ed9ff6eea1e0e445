"""The NIXL library, which is imported only by what uses it."""

import logging
from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple

PROGRESS_INTERVAL_US: Final = 100_000
"""How long an agent's progress thread sleeps without an event of the network."""


class NixlLibrary(NamedTuple):
    """api: its module. errors: its exceptions, which have no common base. disconnected: the one
    that says that the connection to the peer is closed."""

    api: Any
    errors: tuple[type[Exception], ...]
    disconnected: type[Exception]


def load_nixl() -> NixlLibrary:
    """NIXL's Python module. Raises ImportError."""
    api = import_module("nixl._api")
    _let_agents_sleep(api.nixlBind)
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to standard output
    named = [value for name, value in vars(api.nixlBind).items() if name.endswith("Error")]
    errors = (each for each in named if isinstance(each, type) and issubclass(each, Exception))
    return NixlLibrary(
        api, (RuntimeError, *errors), disconnected=api.nixlBind.nixlRemoteDisconnectError
    )


@cache
def _let_agents_sleep(bindings: Any) -> None:
    """`nixl_agent` of NIXL 1.5 sets the interval to 0, and has no parameter for it: the progress
    thread of each agent would poll without a pause, and so use a processor."""
    config = bindings.nixlAgentConfig
    if not hasattr(config, "pthrDelay"):
        return
    interval = config.pthrDelay

    class SleepyConfig(config):  # type: ignore[misc, valid-type]
        @property
        def pthrDelay(self) -> int:
            return int(interval.__get__(self))

        @pthrDelay.setter
        def pthrDelay(self, value: int) -> None:
            interval.__set__(self, value or PROGRESS_INTERVAL_US)

    bindings.nixlAgentConfig = SleepyConfig
