"""What a grammar process is working on, in memory that outlives it.

So it is known which grammars a process was working on when it died or was killed, and whether a
process makes progress, without a message per mask. One thread writes each word.
"""

import mmap
import os
from typing import Final

NUM_COMPILERS: Final = 2
"""Threads that compile. One of them can be busy with a grammar that has passed its time limit."""

_NUM_WORDS: Final = 2 + NUM_COMPILERS


class WorkPage:
    """Shared by a scheduler, which makes it, and its grammar process, which writes it."""

    def __init__(self, fd: int) -> None:
        """fd: from `new_page`; may be closed afterwards."""
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        self._words = memoryview(self._memory)[: 8 * _NUM_WORDS].cast("q")

    @property
    def progress(self) -> int:
        """Grows with each turn of the process's loop and each row of masks."""
        return self._words[0]

    def advance(self) -> None:
        """The process's loop makes progress."""
        self._words[0] += 1

    @property
    def filling(self) -> int:
        """The matcher whose masks are being computed; 0: none."""
        return self._words[1]

    @filling.setter
    def filling(self, matcher_id: int) -> None:
        self._words[1] = matcher_id

    def compile(self, thread: int, grammar_id: int) -> None:
        """A thread begins to compile a grammar; 0: it waits for one."""
        self._words[2 + thread] = grammar_id

    @property
    def compiling(self) -> list[int]:
        """The grammars that are being compiled."""
        return [grammar_id for grammar_id in self._words[2:] if grammar_id]

    def close(self) -> None:
        """Unmap the memory."""
        self._words.release()
        self._memory.close()


def new_page() -> int:
    """The descriptor of a page of zeros, which the caller closes."""
    fd = os.memfd_create("longshore-grammars")
    os.ftruncate(fd, mmap.PAGESIZE)
    return fd
