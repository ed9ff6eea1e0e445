"""Counts calls with `sys.setprofile`. Imported by both sides of `benchmarks/hops.py`, so it must not
depend on either."""

import sys
from collections import Counter


def calls_during(event, is_counted):
    """How often each function is called while `event()` runs, in files for which `is_counted(filename)` is
    true."""
    calls = Counter()

    def note(frame, kind, _):
        code = frame.f_code
        if kind == "call" and is_counted(code.co_filename):
            calls[code] += 1

    sys.setprofile(note)
    try:
        event()
    finally:
        sys.setprofile(None)
    return calls


def count(calls):
    """Numbers of distinct files, of distinct functions and of calls."""
    files = {code.co_filename for code in calls}
    return {"files": len(files), "functions": len(calls), "calls": calls.total()}


def described(calls):
    """A line per function, by file."""
    order = sorted(calls, key=lambda code: (code.co_filename, code.co_firstlineno))
    return [f"{calls[code]:4d}  {code.co_filename}:{code.co_qualname}" for code in order]
