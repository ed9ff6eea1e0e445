"""`python -m longshore.scheduler CONFIG.json`: the scheduler process."""

import gc
import logging
import resource
import sys
from pathlib import Path

from longshore.protocol.errors import LongshoreError
from longshore.protocol.logs.records import send_records
from longshore.protocol.settings import read_config
from longshore.protocol.transport.lifeline import Failed, Lifeline, stop_signals
from longshore.scheduler.config import SchedulerProcessConfig


def main() -> int:
    """Exit status 0 after a stop signal, 1 after an error that was reported, 2 for bad usage."""
    if len(sys.argv) != 2:
        print("usage: python -m longshore.scheduler CONFIG.json", file=sys.stderr)
        return 2
    try:
        config = read_config(Path(sys.argv[1]), SchedulerProcessConfig)
    except LongshoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    is_relayed = config.lifeline_fd is not None
    engine = f"{config.engine_id}.{config.epoch}"
    send_records(config.log_level, is_relayed=is_relayed, engine=engine)
    runtime_dir = None if config.runtime_dir is None else Path(config.runtime_dir)
    # ZMQ aborts a process that has no descriptor left for a connection.
    _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
    stop_signals(config.lifeline_fd)  # ignore from the start what a supervised process ignores
    lifeline = Lifeline(config.lifeline_fd, runtime_dir)
    gc.disable()  # until the engine runs: what is loaded stays
    try:
        from longshore.scheduler.process.startup import serve

        serve(config, lifeline)
    except LongshoreError as error:
        if config.lifeline_fd is None:  # otherwise the supervisor logs it
            logging.getLogger(__name__).error("%s", error)
        lifeline.report(Failed(str(error)))
        return 1
    except Exception as error:
        if not lifeline.report_limit(error):
            raise
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
