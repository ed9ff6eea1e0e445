"""Runs a command that gets SIGTERM when its parent ends in any way, also by SIGKILL.

python -P -m longshore.deploy.topology.with_parent PARENT_PID PROGRAM ARGUMENTS...
"""

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Replaces this process by the command."""
    parent, *command = sys.argv[1:]
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        sys.exit("prctl is not available")
    if os.getppid() != int(parent):  # it has ended before
        sys.exit("the parent has ended")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
