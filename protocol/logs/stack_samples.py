"""A statistical profile of this process: which functions its threads were in, at regular intervals.

It needs no support by the code that is profiled, and shows a thread that hangs, too. The file has
one line per different stack, `thread;outermost;...;innermost count`, which flamegraph.pl and
speedscope.app draw.
"""

import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Final

INTERVAL_S: Final = 0.005
MAX_FRAMES: Final = 128


def sample_stacks(duration_s: float, path: Path) -> int:
    """Sample all other threads for `duration_s`, then write the new file `path`, for its owner
    only. Returns the number of samples of the process. Raises OSError if it cannot be written."""
    stacks: Counter[str] = Counter()
    num_samples = 0
    own = threading.get_ident()
    end_s = time.monotonic() + duration_s
    while (remaining_s := end_s - time.monotonic()) > 0:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident != own:
                stacks[f"{_plain(names.get(ident, str(ident)))};{_stack_of(frame)}"] += 1
        num_samples += 1
        time.sleep(min(INTERVAL_S, remaining_s))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(f"{stack} {count}\n" for stack, count in stacks.most_common())
    return num_samples


def _stack_of(innermost: FrameType) -> str:
    """The stack, outermost frame first; of a deep one, the innermost MAX_FRAMES."""
    frames: list[str] = []
    frame: FrameType | None = innermost
    while frame is not None and len(frames) < MAX_FRAMES:
        module = frame.f_globals.get("__name__", "?")
        frames.append(_plain(f"{module}.{frame.f_code.co_qualname}"))
        frame = frame.f_back
    return ";".join(reversed(frames))


def _plain(name: str) -> str:
    """Without the separators of the format."""
    return name.replace(";", ",").replace("\n", " ")
