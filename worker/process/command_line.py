"""The command line and the variables of a forked process, as `ps` shows them: those of a new
interpreter."""

import ctypes
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

_PR_SET_MM: Final = 35
_PR_SET_MM_MAP: Final = 14
_NO_FILE: Final = 0xFFFFFFFF
# Columns of /proc/PID/stat, see proc(5), counted from the state, which is the third one.
_STAT_COLUMNS: Final = {
    "start_code": 23,
    "end_code": 24,
    "start_data": 42,
    "end_data": 43,
    "start_brk": 44,
    "start_stack": 25,
}
_kept: list[object] = []  # the kernel reads this memory whenever the command line is shown


class _MemoryMap(ctypes.Structure):
    """`struct prctl_mm_map` of prctl(2)."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in (
                *("start_code", "end_code", "start_data", "end_data", "start_brk", "brk"),
                *("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv"),
            )
        ),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


def show_command_line(arguments: Sequence[str]) -> bool:
    """Let /proc/PID/cmdline show these arguments, and /proc/PID/environ the variables as they are
    now. It needs no privilege. Returns False, and changes nothing, if the kernel cannot (it is
    built without CONFIG_CHECKPOINT_RESTORE)."""
    command = b"".join(os.fsencode(argument) + b"\0" for argument in arguments)
    data = command + b"".join(b"%b=%b\0" % variable for variable in os.environb.items())
    memory = ctypes.create_string_buffer(data, len(data))
    begin = ctypes.addressof(memory)
    columns = Path("/proc/self/stat").read_bytes().rpartition(b") ")[2].split()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    area = _MemoryMap(
        **{name: int(columns[column]) for name, column in _STAT_COLUMNS.items()},
        brk=libc.sbrk(0),
        arg_start=begin,
        arg_end=begin + len(command),
        env_start=begin + len(command),
        env_end=begin + len(data),
        exe_fd=_NO_FILE,
    )
    size = ctypes.c_ulong(ctypes.sizeof(area))
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(area), size, ctypes.c_ulong(0)) != 0:
        logger.debug("the command line is not shown: %s", os.strerror(ctypes.get_errno()))
        return False
    _kept.append(memory)
    return True
