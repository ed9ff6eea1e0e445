"""A child process for tests of the supervisor: `python -m tests.deploy.fake_child CONFIG.json`.

behaviour: serve     report readiness, exit 0 when told to stop
           deaf      report readiness, ignore the request to stop
           fail      report a reason and exit 1
           suffer    the same, as a consequence of another child's end
           lack      like serve, and report a lack of memory when told to stop
           die       exit 3 without a report
           hang      never report anything
           alive     like serve, and report regularly to be alive
           late      like alive, with something that is late
           stand by  report readiness, and again when it has taken over, as a standby does
           listen    like serve, print why others are restarted, and report readiness again
           mute      like alive, and report progress and nothing more when others are restarted
           socket    like serve, with a socket file in the runtime directory
           tell      like serve, and notify the waiting children
           outlive   like tell, and end when they have ended
           import    like serve, and report that it has imported `late`
           wait      like serve, and exit 0 when notified by another child
           refuse    like serve, and refuse commands to gateways
           await others  like serve, and end when all children with this behaviour were told to stop
"""

import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType

import msgspec

from longshore.protocol.commands import CommandAnswer, GatewayCommand
from longshore.protocol.transport.lifeline import (
    STOP_SIGNAL,
    Acknowledged,
    Alive,
    Failed,
    Lifeline,
    Progress,
    Ready,
)


class FakeChildConfig(msgspec.Struct, frozen=True):
    behaviour: str
    log_level: str = "info"
    paused: str | None = None
    is_drained: bool = False
    is_asleep: bool = False
    late_imports: tuple[str, ...] = ()
    epoch: int = 1
    lifeline_fd: int | None = None
    runtime_dir: str | None = None


TOLD = "told"


def main(config_file: str) -> int:
    config = msgspec.json.decode(Path(config_file).read_bytes(), type=FakeChildConfig)
    assert config.runtime_dir is not None
    told = Path(config.runtime_dir) / TOLD
    waiting = Path(config.runtime_dir) / f"waits.{os.getpid()}"

    def exit_well(number: int, frame: FrameType | None) -> None:
        print("told to stop", flush=True)
        if config.behaviour == "lack":
            lifeline.report(Failed("no memory", is_out_of_memory=True))
            sys.exit(1)
        waiting.unlink(missing_ok=True)
        while config.behaviour == "await others" and any(told.parent.glob("waits.*")):
            time.sleep(0.02)
        if config.behaviour in ("tell", "outlive"):
            told.touch()
        while config.behaviour == "outlive" and any(map(_is_there, told.parent.glob("waits.*"))):
            time.sleep(0.02)
        sys.exit(0)

    signal.signal(STOP_SIGNAL, signal.SIG_IGN if config.behaviour == "deaf" else exit_well)

    def of_gateway(number: int, command: GatewayCommand) -> None:
        is_used = config.behaviour != "refuse"
        lifeline.report(CommandAnswer(number, is_used, "" if is_used else "it is another model"))

    lifeline = Lifeline(config.lifeline_fd, Path(config.runtime_dir), of_gateway)
    print(f"this is {config.behaviour}", flush=True)
    match config.behaviour:
        case "fail":
            lifeline.report(Failed("no such model; choose another"))
            return 1
        case "suffer":
            lifeline.report(Failed("the other one is gone", is_consequence=True))
            return 1
        case "die":
            return 3
        case "hang":
            lifeline.report(Progress("thinking"))
        case _:
            if config.behaviour == "socket":
                listener = socket.socket(socket.AF_UNIX)
                listener.bind(f"{config.runtime_dir}/child.sock")
            if config.behaviour in ("wait", "await others"):
                waiting.touch()
            late_imports = ("late",) if config.behaviour == "import" else ()
            lifeline.report(Ready({"answer": "42"}, late_imports))
    if config.behaviour == "stand by":
        lifeline.wait_for_take_over()
        print("takes over", flush=True)
        lifeline.report(Ready({"answer": "of a worker"}))
    if config.behaviour == "wait":
        while not told.exists():
            time.sleep(0.02)
        print("heard of it", flush=True)
        return 0
    while config.behaviour in ("alive", "late"):
        lifeline.report(Alive("step 3 takes too long" if config.behaviour == "late" else None))
        time.sleep(0.1)
    while config.behaviour == "mute" and not lifeline.take_received():
        lifeline.report(Alive())
        time.sleep(0.1)
    if config.behaviour == "mute":
        lifeline.report(Acknowledged())
        lifeline.report(Progress("waiting"))
    while config.behaviour == "listen":
        select.select([lifeline], [], [])
        for message in lifeline.take_received():
            remedy = " (smaller steps)" if message.is_out_of_memory else ""
            print(f"heard: {message.reason}{remedy}", flush=True)
            lifeline.report(Acknowledged())
            lifeline.report(Ready())
    while True:
        time.sleep(60)


def _is_there(waiting: Path) -> bool:
    """Wait until the parent has noticed the end of this process."""
    try:
        os.kill(int(waiting.suffix[1:]), 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
