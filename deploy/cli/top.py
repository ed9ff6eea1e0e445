"""`longshore top`: a live view of a running server in the terminal.

All figures come from `/metrics`: gauges as they are, counters and histograms as their increase over
the last few seconds.
"""

import asyncio
import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TextIO

import msgspec
from rich.console import Console
from rich.live import Live

from longshore.deploy.bench.sse_client import HttpEndpoint
from longshore.deploy.cli.client_options import TopOptions
from longshore.deploy.cli.top_screen import TopScreen
from longshore.deploy.gateway.metric_samples import (
    Sample,
    Window,
    read_metrics,
)
from longshore.deploy.gateway.overview import Overview, overview
from longshore.protocol.errors import LongshoreError

WINDOW_S: Final = 5.0
"""Engines report once a second, so rates over a much shorter window would jump."""
_START: Final = "process_start_time_seconds"


class TopFailed(LongshoreError):
    """The server cannot be reached or has no metrics."""


class RecentSamples:
    """The samples of the last seconds."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()

    def add(self, sample: Sample) -> Window:
        """Compare a new sample with the oldest within WINDOW_S. The first sample of a restarted
        server is compared with nothing."""
        samples = self._samples
        if samples and samples[-1].total(_START) != sample.total(_START):
            samples.clear()
        samples.append(sample)
        while len(samples) > 2 and sample.taken_s - samples[1].taken_s >= WINDOW_S:
            samples.popleft()
        return Window(sample, samples[0]) if len(samples) > 1 else Window(sample)


class Keys:
    """Reads single key presses if the input is a terminal. A context manager: it restores the
    terminal."""

    def __init__(self, source: TextIO) -> None:
        self._fd = source.fileno() if source.isatty() else None

    def __enter__(self) -> "Keys":
        if self._fd is not None:
            self._settings = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._settings)

    def quits_within(self, seconds: float) -> bool:
        """Wait for this time, or until `q` is pressed; True if it was."""
        if self._fd is None:
            time.sleep(seconds)
            return False
        poll = select.poll()  # any number of a descriptor
        poll.register(self._fd, select.POLLIN)
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0:
            if poll.poll(left_s * 1000):
                pressed = os.read(self._fd, 64)
                if not pressed or b"q" in pressed.lower():
                    return True
        return False


Show = Callable[[Overview, str | None], None]


def top(options: TopOptions) -> None:
    """Update until `q` or Ctrl-C, or `num_looks` times. Raises TopFailed if the first update fails;
    a server that becomes unreachable later is shown as such until it is back."""
    endpoint = HttpEndpoint(options.url, api_key=options.api_key)
    samples = RecentSamples()
    view = overview(samples.add(_sample(endpoint, options)))
    with _output(options) as show, Keys(sys.stdin) as keys:
        show(view, None)
        num_looks, gone_since_s = 1, 0.0
        while num_looks != options.num_looks and not keys.quits_within(options.interval_s):
            num_looks += 1
            try:
                view = overview(samples.add(_sample(endpoint, options)))
            except TopFailed as error:
                gone_since_s = gone_since_s or time.monotonic()
                gone_s = time.monotonic() - gone_since_s
                show(view, f"unreachable for {gone_s:.0f} s, q ends: {error}")
            else:
                gone_since_s = 0.0
                show(view, None)


@contextmanager
def _output(options: TopOptions) -> Iterator[Show]:
    """The function that shows an update: as a line of JSON, printed once, or on a live screen."""
    if options.json:
        yield lambda view, trouble: print(_as_json(view, trouble), flush=True)
    elif options.num_looks == 1:
        console = Console()
        yield lambda view, trouble: console.print(
            TopScreen(view, options.url, trouble=trouble, fills_terminal=False)
        )
    else:
        is_screen = options.num_looks is None
        with Live(auto_refresh=False, screen=is_screen) as live:
            yield lambda view, trouble: live.update(
                TopScreen(view, options.url, trouble=trouble, fills_terminal=is_screen),
                refresh=True,
            )


def _as_json(view: Overview, trouble: str | None) -> str:
    """One line; only `error` for a server that cannot be reached."""
    content = {"error": trouble} if trouble is not None else msgspec.to_builtins(view)
    return msgspec.json.encode({"time_s": round(time.time(), 3), **content}).decode()


def _sample(endpoint: HttpEndpoint, options: TopOptions) -> Sample:
    try:
        answer = asyncio.run(endpoint.request("GET", "/metrics", timeout_s=options.timeout_s))
    except (OSError, TimeoutError) as error:
        raise TopFailed(
            f"{options.url} does not answer: {error or type(error).__name__}. Is `longshore serve` "
            "running there?"
        ) from error
    if answer.status != 200:
        raise TopFailed(
            f"{options.url}/metrics answers HTTP {answer.status}; is it a Longshore server?"
        )
    try:
        return read_metrics(answer.body.decode(), time.perf_counter())
    except ValueError as error:
        raise TopFailed(f"{options.url}/metrics has no valid metrics: {error}") from error
