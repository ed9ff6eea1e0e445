"""Turns of API keys in one gateway: a flood of requests does not occupy the event loop.

All connections that are readable at a time wake their requests in one iteration of the loop, and
one request may have a thousand answers. Without turns, that iteration would read and submit all of
them in a row, while no token is delivered and no other connection accepted. Their ends have turns
of their own, so that what is over does not delay what begins.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

REQUESTS_PER_TURN: Final = 4
"""Reading and submitting one takes about 0.4 ms; so does what a request with many answers does in
one turn."""

Turn: TypeAlias = Callable[[], Awaitable[None]]
"""Waits for the next turn of one API key."""


class RequestTurns:
    """Lets a bounded number of requests go on in each iteration of the event loop, one key after
    the other."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # keys in order of their turns
        self._num_left = REQUESTS_PER_TURN
        self._is_scheduled = False

    async def wait(self, key: str) -> None:
        """Wait for a turn of the key; returns at once if there is no flood."""
        self._schedule()
        if self._num_left and not self._waiting:
            self._num_left -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        await turn

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_iteration)

    def _begin_iteration(self) -> None:
        self._is_scheduled = False
        self._num_left = REQUESTS_PER_TURN
        while self._waiting and self._num_left:
            key = next(iter(self._waiting))
            turns = self._waiting.pop(key)
            turn = turns.popleft()
            if turns:
                self._waiting[key] = turns  # behind all other keys
            if not turn.cancelled():
                turn.set_result(None)
                self._num_left -= 1
        if self._waiting:
            self._schedule()
