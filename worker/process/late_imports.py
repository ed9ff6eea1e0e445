"""What a worker imports only when it begins to serve: its connector and the connector's libraries.

A standby imports it while it loads. On a busy machine, or from a cold disk, it takes seconds that
streams would wait for when the standby takes over. What a connector imports depends on its options,
so the worker that serves says what it was.
"""

import logging
import sys
from collections.abc import Collection, Sequence
from importlib import import_module

logger = logging.getLogger(__name__)


def imported_since(before: Collection[str]) -> tuple[str, ...]:
    """The modules that were imported after those of `before`, in this order."""
    return tuple(name for name, found in sys.modules.items() if found and name not in before)


def import_all(names: Sequence[str]) -> None:
    """Import these modules. One that cannot be imported by its name is left out; who needs it will
    say why."""
    for name in names:
        try:
            import_module(name)
        except Exception as error:
            logger.debug("%s is not imported in advance: %r", name, error)
