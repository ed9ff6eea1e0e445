"""`shown_facts FILE`: prints what a new process can see, and ends with status 7. With the variable
STAY, it waits for a signal; else for the end of its input."""

import gc
import json
import os
import signal
import sys

if __name__ == "__main__":
    facts = {
        "argv": sys.argv,
        "collects": gc.isenabled(),
        "cpus": sorted(os.sched_getaffinity(0)),
        "cwd": os.getcwd(),
        "fds": sorted(map(int, os.listdir("/proc/self/fd"))),
        "ignores_term": signal.getsignal(signal.SIGTERM) == signal.SIG_IGN,
        "name": __name__,
        "ppid": os.getppid(),
        "random": sys.modules["numpy"].random.random() if "numpy" in sys.modules else None,
        "sid": os.getsid(0),
        "threads": len(os.listdir("/proc/self/task")),
        "value": os.environ.get("LATE"),
    }
    print(json.dumps(facts), flush=True)
    if "STAY" in os.environ:
        signal.pause()
    sys.stdin.read()
    sys.exit(7)
