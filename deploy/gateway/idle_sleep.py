"""Lets the engines of a model sleep while nobody asks it, and wakes them for the next request."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from longshore.deploy.admin.actions import SleepEngine, WakeEngine
from longshore.deploy.gateway.engines.engines import Engines
from longshore.deploy.requests.errors import RequestError

logger = logging.getLogger(__name__)

POLL_S: Final = 0.5
RETRY_S: Final = 1.0

Perform = Callable[[dict[str, Any]], Awaitable[bool]]
"""Carries out an action of an operator; returns whether it was done. Raises RequestError."""


class IdleSleep:
    """model:   its name, for the log.
    idle_s:  seconds without a request after which the engines sleep.
    """

    def __init__(self, model: str, engines: Engines, idle_s: float, perform: Perform) -> None:
        self._model = model
        self._engines = engines
        self._idle_s = self._keep_s = idle_s
        self._perform = perform
        self._used_s = time.monotonic()
        self._sleeps = False  # as far as this class has ordered it
        self._is_wanted = asyncio.Event()

    def note_request(self) -> None:
        """A request is submitted."""
        self._used_s = time.monotonic()
        if self._is_asleep:
            self._is_wanted.set()

    def keep_for(self, seconds: float) -> None:
        """Until they have slept, sleep after this time without a request; infinite: never."""
        self._keep_s = seconds

    @property
    def _is_asleep(self) -> bool:
        return self._sleeps or self._engines.is_asleep

    @property
    def sleeps_in_s(self) -> float:
        """Seconds until the engines sleep if no request comes; infinite: they do not."""
        return max(0.0, self._used_s + self._keep_s - time.monotonic())

    async def run(self) -> None:
        """Do it until this is cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_wanted.wait(), POLL_S)
            try:
                await self._change()
            except RequestError as error:
                logger.warning("%s neither sleeps nor wakes: %s", self._model, error)
                await asyncio.sleep(RETRY_S)

    async def _change(self) -> None:
        if self._engines.num_live_requests:
            self._used_s = time.monotonic()
            if self._is_asleep:
                self._is_wanted.set()
        if self._is_wanted.is_set():
            self._is_wanted.clear()
            if self._is_asleep:
                await self._order(WakeEngine.__struct_config__.tag, sleeps=False)
        elif not self._is_asleep and not self.sleeps_in_s:
            await self._order(SleepEngine.__struct_config__.tag, sleeps=True, timeout_s=0)

    async def _order(self, action: Any, *, sleeps: bool, **fields: Any) -> None:
        self._sleeps = True  # a request that comes meanwhile wakes them
        engines, are_done = list(self._engines.clients), False
        try:
            done = await asyncio.gather(
                *(self._perform({"action": action, "engine": each, **fields}) for each in engines)
            )
            are_done = all(done)
        finally:
            self._sleeps = sleeps and are_done
        if not are_done:
            logger.warning("%s: not all engines carry out the %s", self._model, action)
            await asyncio.sleep(RETRY_S)
        elif sleeps:
            self._keep_s = self._idle_s
            idle_s = time.monotonic() - self._used_s
            logger.info("%s sleeps after %.0f s without a request", self._model, idle_s)
        else:
            logger.info("%s is awake", self._model)
