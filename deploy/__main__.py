"""The `longshore` command, also as `python -m longshore.deploy`.

Nothing else is imported before the limit of address space is checked: below it, libraries end the
process, or fail to load, with messages of their own.
"""

import resource
import sys
from typing import Final

MIN_ADDRESS_SPACE_BYTES: Final = 1 << 29
"""What a command maps, generously. A worker needs more, see `check_address_space`."""


def main() -> None:
    """The console script. Exit status 2: the limit is too low; else as `cli.main.main` says."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < MIN_ADDRESS_SPACE_BYTES:
        print(
            f"longshore: error: the address space of a process is limited to {limit >> 20} MiB "
            f"(ulimit -v, RLIMIT_AS), but a command needs {MIN_ADDRESS_SPACE_BYTES >> 20} MiB, and "
            "a server more. Run ulimit -v unlimited, and limit memory with a control group.",
            file=sys.stderr,
        )
        sys.exit(2)
    from longshore.deploy.cli.main import main as run_command

    run_command()


if __name__ == "__main__":
    main()
