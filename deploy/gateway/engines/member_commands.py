"""Carries out the supervisor's commands about what comes and goes, on the gateway's loop: engines
and API keys."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, assert_never

from longshore.protocol.commands import (
    CommandAnswer,
    EngineMember,
    GatewayCommand,
    ReleaseEngine,
    UseEngine,
    UseKeys,
)
from longshore.protocol.errors import EngineDead, HandshakeRejected

logger = logging.getLogger(__name__)


class MemberCommands:
    """The commands of one gateway, which is not running yet when the first one may come."""

    def __init__(self) -> None:
        self._received: deque[tuple[int, GatewayCommand]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_new = asyncio.Event()

    def take(self, number: int, command: GatewayCommand) -> None:
        """Carry out a command soon. May be called on any thread."""
        self._received.append((number, command))
        if (loop := self._loop) is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                loop.call_soon_threadsafe(self._is_new.set)

    async def run(
        self,
        add: Callable[[EngineMember], Coroutine[Any, Any, None]],
        remove: Callable[[int], None],
        use_keys: Callable[[Path], int],
        answer: Callable[[CommandAnswer], None],
    ) -> None:
        """Carry out the commands in their order, for ever.

        add, remove: of a gateway; both do nothing if that was done before.
        use_keys:    takes the API keys of a file; returns their number.
        answer:      sends an answer to the supervisor.
        """
        self._loop = asyncio.get_running_loop()
        self._is_new.set()
        while True:
            await self._is_new.wait()
            self._is_new.clear()
            while self._received:
                number, command = self._received.popleft()
                try:
                    message = await _carry_out(command, add, remove, use_keys)
                except (EngineDead, HandshakeRejected, ValueError) as error:
                    answer(CommandAnswer(number, False, str(error)))
                except Exception as error:
                    logger.exception("%s failed", command)
                    why = f"{type(error).__name__}: {error}"
                    answer(CommandAnswer(number, False, f"{why}; the gateway's log has the cause"))
                else:
                    answer(CommandAnswer(number, True, message))


async def _carry_out(
    command: GatewayCommand,
    add: Callable[[EngineMember], Coroutine[Any, Any, None]],
    remove: Callable[[int], None],
    use_keys: Callable[[Path], int],
) -> str:
    match command:
        case UseEngine(member):
            await add(member)
            return f"uses engine {member.number}"
        case ReleaseEngine(engine):
            remove(engine)
            return f"does not use engine {engine} any more"
        case UseKeys(path):
            return f"has {use_keys(Path(path))} API keys"
        case _:
            assert_never(command)
