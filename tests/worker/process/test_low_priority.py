import os
import threading

import pytest

from longshore.worker.process.low_priority import NICENESS, at_low_priority


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_only_the_function_and_the_threads_it_starts_have_a_low_priority() -> None:
    before, of_threads = niceness(), []

    def work() -> int:
        thread = threading.Thread(target=lambda: of_threads.append(niceness()))
        thread.start()
        thread.join()
        return niceness()

    assert at_low_priority(work) == NICENESS
    assert of_threads == [NICENESS]
    assert niceness() == before


def test_an_error_of_the_function_is_raised() -> None:
    with pytest.raises(ValueError, match="wrong"):
        at_low_priority(lambda: int("wrong"))
