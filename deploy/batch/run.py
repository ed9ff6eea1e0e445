"""Runs the lines of a batch: some at a time, with answers in order and bounded memory."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

from longshore.deploy.batch.lines import BatchAnswer, BatchLine

MAX_WINDOW: Final = 1024
"""Limit of lines between the oldest without an answer and the newest that was read."""
MAX_HELD_BYTES: Final = 64 << 20
"""Limit of answers that wait for an earlier one; beyond it, no line is begun."""
RECHECK_S: Final = 0.5
"""How often `num_at_a_time` is called while no answer arrives."""


async def run_lines(
    lines: Iterator[BatchLine],
    ask: Callable[[BatchLine], Awaitable[BatchAnswer]],
    write: Callable[[Sequence[BatchAnswer]], Awaitable[None]],
    num_at_a_time: Callable[[int], int],
) -> None:
    """Ask each line, and write the answers in the order of the lines. Lines are taken on another
    thread, because they may be read from a disk.

    write: also called without answers, at times, while none arrives.
    num_at_a_time: called with the number of lines that are asked now, returns how many may be.
    Raises what one of the functions raises; then no line is asked any more.
    """
    window: deque[asyncio.Task[BatchAnswer]] = deque()
    running: set[asyncio.Task[BatchAnswer]] = set()
    num_held_bytes = 0
    has_more = True
    try:
        while has_more or window:
            while (
                has_more
                and len(running) < num_at_a_time(len(running))
                and len(window) < MAX_WINDOW
                and num_held_bytes < MAX_HELD_BYTES
            ):
                line = await asyncio.to_thread(next, lines, None)
                if line is None:
                    has_more = False
                    break
                task = asyncio.ensure_future(ask(line))
                window.append(task)
                running.add(task)
                await asyncio.sleep(0)  # it begins, which `num_at_a_time` may depend on
            done: set[asyncio.Task[BatchAnswer]] = set()
            if running:
                done, running = await asyncio.wait(
                    running, timeout=RECHECK_S, return_when=asyncio.FIRST_COMPLETED
                )
                num_held_bytes += sum(map(_size_bytes, done))
            elif not window:
                if has_more:
                    await asyncio.sleep(RECHECK_S)
                continue
            answers = []
            while window and window[0].done():
                num_held_bytes -= _size_bytes(window[0])
                answers.append(window.popleft().result())
            if answers or not done:
                await write(answers)
    finally:
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


def _size_bytes(task: asyncio.Task[BatchAnswer]) -> int:
    """Of a task that is done. Raises what it has raised."""
    return len(bytes(task.result().response.body))
