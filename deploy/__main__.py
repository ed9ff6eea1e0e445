"""The `longshore` command, also as `python -m longshore.deploy`.

Nothing else is imported before the limit of address space is checked: below it, libraries end the
process, or fail to load, with messages of their own.
"""

import locale
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Final

MIN_ADDRESS_SPACE_BYTES: Final = 1 << 29
"""What a command maps, generously. A worker needs more, see `check_address_space`."""

_ONLY_PRINT: Final = ("--help", "-h", "--version", "--check", "--launcher")
"""With one of these, `serve` and `node` start no workers in this process."""


def main() -> None:
    """The console script. Exit status 2: the limit is too low; else as `cli.main.main` says."""
    if needs_utf8_mode(locale.getpreferredencoding(False), os.environ):
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < MIN_ADDRESS_SPACE_BYTES:
        print(
            f"longshore: error: the address space of a process is limited to {limit >> 20} MiB "
            f"(ulimit -v, RLIMIT_AS), but a command needs {MIN_ADDRESS_SPACE_BYTES >> 20} MiB, and "
            "a server more. Run ulimit -v unlimited, and limit memory with a control group.",
            file=sys.stderr,
        )
        sys.exit(2)
    # A descriptor below 3 cannot be inherited, and is only free if the standard streams are closed.
    has_streams = None not in (sys.stdin, sys.stdout, sys.stderr)
    if has_streams and will_serve(sys.argv[1:]):  # first of all: it takes longest
        from longshore.deploy.supervisor.fork_server import start_first
        from longshore.deploy.supervisor.home_dir import provide_caches

        provide_caches(os.environ)  # which the fork server inherits
        start_first()
    from longshore.deploy.cli.main import main as run_command

    run_command()


def needs_utf8_mode(encoding: str, variables: Mapping[str, str]) -> bool:
    """Whether the locale would read paths, files and arguments in another encoding than UTF-8, in
    this process and in all that it starts. In UTF-8 mode, Python ignores the locale."""
    return encoding.lower() not in ("utf-8", "utf8") and variables.get("PYTHONUTF8") != "1"


def will_serve(arguments: Sequence[str]) -> bool:
    """Whether the command starts workers, if its settings are valid."""
    return arguments[:1] in (["serve"], ["node"], ["run-batch"]) and not {*_ONLY_PRINT} & {
        *arguments
    }


if __name__ == "__main__":
    main()
