"""What all runs of the engine requests of one HTTP request share: submitting and ending a few in a
turn, waiting for them, and what the errors of engines are for a client."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from longshore.deploy.gateway.engines.split_requests import TooManyWaiting
from longshore.deploy.gateway.request_turns import Turn
from longshore.deploy.requests.engine_run import EngineRun
from longshore.deploy.requests.errors import RateLimited, Unavailable
from longshore.protocol.errors import EngineDead

T = TypeVar("T")

SUBMITTED_PER_TURN: Final = 2
ENDED_PER_TURN: Final = 8


@contextmanager
def engine_errors() -> Iterator[None]:
    """Raises RequestError."""
    try:
        yield
    except EngineDead as error:
        raise Unavailable(str(error)) from error
    except TooManyWaiting as error:
        raise RateLimited(str(error), "queue_full", retry_after_s=1) from error


async def start_in_turns(run: EngineRun[Any], turn: Turn, at_a_time: int) -> None:
    """Start all parts that may start now. Raises RequestError."""
    num_started = 0
    while run.can_start:
        if num_started and num_started % at_a_time == 0:
            await turn()
        num_started += 1
        with engine_errors():
            run.start_next()


async def run_in_turns(
    run: EngineRun[Any], is_changed: asyncio.Event, turn: Turn, at_a_time: int
) -> None:
    """Run all parts to their ends. is_changed: what the run's `on_change` sets. Raises
    RequestError if one fails."""
    await start_in_turns(run, turn, at_a_time)
    while not run.is_over:
        await is_changed.wait()
        is_changed.clear()
        while (part := run.take_changed()) is not None:
            with engine_errors():
                has_advanced = run.advance(part)
            if has_advanced:
                await turn()
        await start_in_turns(run, turn, at_a_time)


async def end_in_turns(
    requests: list[T], end: Callable[[list[T]], None], end_turn: Turn, at_a_time: int
) -> None:
    """End the last ones first: forks before their parents. If this is cancelled, too, the rest ends
    at once."""
    try:
        while requests:
            end(requests[-at_a_time:])
            del requests[-at_a_time:]
            if requests:
                await end_turn()
    finally:
        end(requests)
