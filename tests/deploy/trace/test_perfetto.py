"""The export of a scheduler trace as Chrome trace events, against the format's rules."""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from longshore.deploy.trace.perfetto import REQUESTS, STEPS, export_perfetto, trace_events
from longshore.deploy.trace.reading import Trace, read_trace
from tests.deploy.trace.traces import driven, short_of_blocks
from tests.harness.tokens import prompt_of

METADATA = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}


def exported(tmp_path: Path) -> tuple[Trace, list[dict[str, Any]]]:
    short_of_blocks(tmp_path / "t")
    trace = read_trace(tmp_path / "t")
    num_events = export_perfetto(trace, tmp_path / "out.json")
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["displayTimeUnit"] in ("ms", "ns")
    assert len(content["traceEvents"]) == num_events
    return trace, content["traceEvents"]


def test_every_event_has_the_fields_of_its_phase(tmp_path: Path) -> None:
    _, events = exported(tmp_path)
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["args"].keys() == {METADATA[event["name"]]}
            continue
        assert event["ts"] >= 0
        match event["ph"]:
            case "X":
                assert event["dur"] >= 0
            case "i":
                assert event["s"] in ("t", "p", "g")
            case "C":
                assert all(isinstance(value, int | float) for value in event["args"].values())
            case phase:
                raise AssertionError(f"{phase} is not used here")
    assert {event["ph"] for event in events} == {"M", "X", "i", "C"}


def test_slices_of_a_track_are_in_order_and_do_not_overlap(tmp_path: Path) -> None:
    driver = driven(tmp_path / "t", max_steps_in_flight=2)
    driver.add("r", prompt_of(9), max_tokens=8)
    driver.plan()
    while driver.plan() is not None:
        driver.now += 0.5
        driver.answer()
    events = list(trace_events(read_trace(tmp_path / "t")))
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    assert len([track for track in tracks if track[0] == STEPS]) == 2, "two steps are in flight"
    for slices in tracks.values():
        end = 0.0
        for event in slices:
            assert event["ts"] >= end - 0.001
            end = event["ts"] + event["dur"]


def test_every_track_has_a_name_and_every_request_a_track(tmp_path: Path) -> None:
    trace, events = exported(tmp_path)
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    used = {(event["pid"], event["tid"]) for event in events if event["ph"] in "Xi"}
    assert used == set(names)
    requests = [name for (process, _), name in names.items() if process == REQUESTS]
    assert requests == [life.request for life in trace.requests]
    assert not {process for process, _ in names} & {track for _, track in names}, "a main thread"


def test_steps_preemptions_hits_and_counters_are_all_there(tmp_path: Path) -> None:
    trace, events = exported(tmp_path)
    instants = Counter(event["name"] for event in events if event["ph"] == "i")
    assert instants["preemption"] == sum(life.num_preemptions for life in trace.requests) > 0
    used = [lookup for lookup in trace.lookups if lookup.result == "admitted"]
    assert instants["prefix hit"] == sum(lookup.local_hit_tokens > 0 for lookup in used) > 0
    assert instants["end: length_capped"] == 4
    counters = Counter(event["name"] for event in events if event["ph"] == "C")
    names = ("requests", "GPU blocks", "tokens per step")
    assert counters == dict.fromkeys(names, len(trace.steps))
    steps = [event for event in events if event.get("cat") == "step"]
    assert [event["name"] for event in steps] == [f"step {s.decision.step}" for s in trace.steps]
