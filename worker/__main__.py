"""`python -m longshore.worker CONFIG.json`: the worker process of one rank."""

import gc
import logging
import sys
from importlib import import_module
from pathlib import Path

from longshore.protocol.errors import LongshoreError
from longshore.protocol.logs.records import send_records
from longshore.protocol.settings import read_config
from longshore.protocol.transport.lifeline import (
    Failed,
    Lifeline,
    Progress,
    stop_signals,
)
from longshore.worker.config import WorkerProcessConfig
from longshore.worker.errors import OutOfMemory, RankLost
from longshore.worker.process.ending import end_process, exit_at, ignore
from longshore.worker.process.low_priority import at_low_priority


def main() -> int:
    """Return exit status 0 after Shutdown or a stop signal, 1 after a reported error, 2 for bad
    usage."""
    if len(sys.argv) != 2:
        print("usage: python -m longshore.worker CONFIG.json", file=sys.stderr)
        return 2
    try:
        config = read_config(Path(sys.argv[1]), WorkerProcessConfig)
    except LongshoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    is_relayed = config.lifeline_fd is not None
    send_records(config.log_level, is_relayed=is_relayed, engine=config.engine_id, rank=config.rank)
    if config.log_level == "info":
        logging.getLogger("torch").setLevel(logging.WARNING)  # it logs statistics at its exit
    runtime_dir = None if config.runtime_dir is None else Path(config.runtime_dir)
    signals = stop_signals(config.lifeline_fd)
    exit_at(signals)
    lifeline = Lifeline(config.lifeline_fd, runtime_dir)
    lifeline.report(Progress("loading torch"))
    gc.disable()  # until the worker is ready: what is loaded stays
    try:
        # Imported only now: it takes seconds, and the lifeline must already watch the supervisor.
        if config.is_standby:
            at_low_priority(lambda: import_module("longshore.worker.process.startup"))
        from longshore.worker.process.startup import serve

        serve(config, lifeline)
    except LongshoreError as error:
        if config.lifeline_fd is None:  # otherwise the supervisor prints the reason
            print(f"error: {error}", file=sys.stderr)
        lifeline.report(
            Failed(
                str(error),
                is_consequence=isinstance(error, RankLost),
                is_out_of_memory=isinstance(error, OutOfMemory),
            )
        )
        return 1
    except Exception as error:
        if not lifeline.report_limit(error):
            raise
        return 1
    finally:
        ignore(signals)  # a second one must not interrupt the clean-up
    return 0


if __name__ == "__main__":
    try:
        exit_status: object = main()
    except SystemExit as stopped:  # by a signal
        exit_status = stopped.code
    end_process(exit_status)
