"""Work that must not slow down other processes."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

NICENESS: Final = 10

_Result = TypeVar("_Result")


def at_low_priority(function: Callable[[], _Result]) -> _Result:
    """Call `function` on a thread of low priority, and wait for its result.

    The priority of a thread can be lowered, but not raised again, and the threads that it starts
    inherit it. So it is not the main thread's.
    """
    future: Future[_Result] = Future()

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="low priority", daemon=True).start()
    return future.result()
