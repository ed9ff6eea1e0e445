"""Counts calls with `sys.setprofile`. Imported by both sides of `benchmarks/hops.py`, so it knows neither."""

import sys
from collections import Counter


def calls_during(event, is_counted):
    """How often each function in a file that `is_counted(filename)` is entered while `event()` runs;
    comprehensions, generator expressions and lambdas are not."""
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
    """Distinct files, distinct functions, calls."""
    files = {code.co_filename for code in calls}
    return {"files": len(files), "functions": len(calls), "calls": calls.total()}


def described(calls):
    """A line per function, by file."""
    order = sorted(calls, key=lambda code: (code.co_filename, code.co_firstlineno))
    return [f"{calls[code]:4d}  {code.co_filename}:{code.co_qualname}" for code in order]
