"""Explains errors that a limit of the operating system on a process (ulimit) has caused.

Libraries report such an error in many ways, and some end the process instead. Then only the limits
in force can be named.
"""

import errno
import resource
from collections.abc import Iterator
from typing import Final

_MEMORY: Final = (
    ("address space", "ulimit -v", resource.RLIMIT_AS, "RLIMIT_AS"),
    ("data segment", "ulimit -d", resource.RLIMIT_DATA, "RLIMIT_DATA"),
)
_NO_MEMORY_TEXTS: Final = ("allocate memory", "failed to map segment", "not enough memory")
_NO_THREAD_TEXTS: Final = ("can't start new thread", "Thread creation failed")


def memory_limits() -> str | None:
    """The limits of memory in force, and what to do; None if there are none."""
    named, commands = [], []
    for what, command, which, name in _MEMORY:
        limit, _ = resource.getrlimit(which)
        if limit != resource.RLIM_INFINITY:
            size = f"{limit / (1 << 20):,.0f} MiB ({command}, {name})"
            named.append(f"the {what} of a process is limited to {size}")
            commands.append(f"{command} unlimited")
    if not named:
        return None
    limits, fix = " and ".join(named), " and ".join(commands)
    return f"{limits}. Run {fix}, and limit memory with a control group."


def limit_reached(error: BaseException) -> str | None:
    """What happened and what to do, in one line, if a limit can have caused this error."""
    for cause in _causes(error):
        text = " ".join(str(cause).split())[:300] or type(cause).__name__
        is_thread = any(each in text for each in _NO_THREAD_TEXTS)
        is_memory = (
            isinstance(cause, MemoryError)
            or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM)
            or any(each in text for each in _NO_MEMORY_TEXTS)
        )
        if (is_memory or is_thread) and (limits := memory_limits()) is not None:
            return f"memory could not be mapped ({text}): {limits}"
        if is_thread:
            limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
            number = "not limited" if limit == resource.RLIM_INFINITY else f"limited to {limit:,}"
            return (
                f"a thread could not be started ({text}): the processes and threads of this user "
                f"are {number} (ulimit -u, RLIMIT_NPROC), and those of its control group by "
                "pids.max. Raise these limits, or set --threads to fewer."
            )
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what has caused it, the innermost first."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _causes(part)
    if error.__cause__ is not None:
        yield from _causes(error.__cause__)
    yield error
