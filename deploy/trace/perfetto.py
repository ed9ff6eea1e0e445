"""Exports a scheduler trace as Chrome trace events, which ui.perfetto.dev opens.

One process has a track per request, with its phases; the other has the steps and counters. Times
are microseconds since the beginning of the trace.
"""

import heapq
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from longshore.deploy.trace.reading import BEGINS, RequestLife, Step, Trace

Event: TypeAlias = dict[str, Any]

STEPS: Final = 1
REQUESTS: Final = 2
FIRST_TRACK: Final = 3
"""The viewer takes a track with the number of its process for a main thread, and shows it first."""


def export_perfetto(trace: Trace, path: Path) -> int:
    """Write the events; returns their number."""
    events = list(trace_events(trace))
    begin = trace.begin
    content = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {} if begin is None else msgspec.to_builtins(begin),
    }
    path.write_bytes(msgspec.json.encode(content))
    return len(events)


def trace_events(trace: Trace) -> Iterator[Event]:
    """The events of the whole trace; those of a track are in order."""
    clock = _Clock(trace.first_s, trace.last_s)
    engine = "engine" if trace.begin is None else trace.begin.engine
    yield _name("process_name", STEPS, f"{engine}: steps")
    yield _name("process_name", REQUESTS, f"{engine}: requests")
    yield from _step_events(trace.steps, clock)
    tracks = {id(life): number for number, life in enumerate(trace.requests, FIRST_TRACK)}
    for life in trace.requests:
        yield from _request_events(life, tracks[id(life)], clock)
    yield from _hit_events(trace, tracks, clock)


class _Clock:
    def __init__(self, first_s: float, last_s: float) -> None:
        self._first_s, self.last_s = first_s, last_s

    def us(self, time_s: float) -> float:
        return round((time_s - self._first_s) * 1e6, 3)

    def between(self, start_s: float, end_s: float | None) -> Event:
        """What has not ended lasts until the end of the trace."""
        start = self.us(start_s)
        end = self.us(self.last_s if end_s is None else end_s)
        return {"ts": start, "dur": max(round(end - start, 3), 0.0)}


def _step_events(steps: Iterable[Step], clock: _Clock) -> Iterator[Event]:
    # Steps in flight overlap, and slices of a track must not: each takes the first free track.
    free: list[int] = []
    busy: list[tuple[float, int]] = []  # until when, track
    new_tracks = itertools.count(FIRST_TRACK)
    for step in steps:
        snapshot, decision = step.snapshot, step.decision
        while busy and busy[0][0] <= decision.now:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            track = next(new_tracks)
            heapq.heappush(free, track)
            yield _name("thread_name", STEPS, "steps", track)
        track = heapq.heappop(free)
        end_s = clock.last_s if step.output_s is None else step.output_s
        heapq.heappush(busy, (max(end_s, decision.now), track))
        yield {
            "ph": "X",
            "name": f"step {decision.step}",
            "cat": "step",
            "pid": STEPS,
            "tid": track,
            **clock.between(decision.now, end_s),
            "args": {
                "epoch": decision.epoch,
                "tokens": decision.tokens,
                "prefill tokens": decision.prefill_tokens,
                "requests": len(decision.new) + len(decision.resumed) + len(decision.running),
                "new": len(decision.new),
                "resumed": len(decision.resumed),
                "preempted": len(decision.preempted),
                "running before": snapshot.running,
                "waiting before": snapshot.waiting,
            },
        }
        gpu, cpu, ts = snapshot.gpu, snapshot.cpu, clock.us(snapshot.now)
        counters = {
            "requests": {"running": snapshot.running, "waiting": snapshot.waiting},
            "GPU blocks": {"held": gpu.total - gpu.free, "cached": gpu.cached},
            "tokens per step": {
                "prefill": decision.prefill_tokens,
                "decode": decision.tokens - decision.prefill_tokens,
            },
        }
        if cpu.total:
            counters["host blocks"] = {"cached": cpu.cached}
        if snapshot.pins.count:
            counters["blocks"] = {"pinned": snapshot.pins.blocks}
        for name, args in counters.items():
            yield {"ph": "C", "name": name, "pid": STEPS, "tid": 0, "ts": ts, "args": args}


def _request_events(life: RequestLife, track: int, clock: _Clock) -> Iterator[Event]:
    yield _name("thread_name", REQUESTS, life.request, track)
    yield {
        "ph": "M",
        "name": "thread_sort_index",
        "pid": REQUESTS,
        "tid": track,
        "args": {"sort_index": track},
    }
    about = {"request": life.request, "job": life.job, "prompt tokens": life.prompt_tokens}
    for phase in life.phases:
        yield {
            "ph": "X",
            "name": phase.name,
            "cat": "request",
            "pid": REQUESTS,
            "tid": track,
            **clock.between(phase.start_s, phase.end_s),
            "args": about,
        }
        if phase.name == "preempted":
            yield _instant("preemption", track, clock.us(phase.start_s), {"request": life.request})
    if (end := life.end) is not None:
        args = {"output tokens": end.output_tokens, "preemptions": end.preemptions}
        yield _instant(f"end: {end.reason}", track, clock.us(end.now), args)


def _hit_events(trace: Trace, tracks: dict[int, int], clock: _Clock) -> Iterator[Event]:
    """Lookups with hits, on the track of the request that lived then."""
    lives: dict[str, list[RequestLife]] = {}
    for life in trace.requests:
        lives.setdefault(life.request, []).append(life)
    for lookup in trace.lookups:
        num_external = lookup.external_hit_tokens or 0
        if lookup.result not in BEGINS or not lookup.local_hit_tokens + num_external:
            continue
        owners = [
            life
            for life in lives.get(lookup.request, ())
            if life.phases and life.phases[0].start_s <= lookup.now
        ]
        if owners:
            args = {
                "local tokens": lookup.local_hit_tokens,
                "external tokens": num_external,
                "of tokens": lookup.total_tokens,
            }
            yield _instant("prefix hit", tracks[id(owners[-1])], clock.us(lookup.now), args)


def _name(kind: str, process: int, name: str, track: int = 0) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}


def _instant(name: str, track: int, ts: float, args: Event) -> Event:
    return {
        "ph": "i",
        "s": "t",
        "name": name,
        "cat": "request",
        "pid": REQUESTS,
        "tid": track,
        "ts": ts,
        "args": args,
    }
