"""A scheduler that records all its calls, so that they can be repeated: see `docs/replay.md`."""

import copy
import functools
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from longshore.protocol.outputs import ModelRunnerOutput
from longshore.protocol.plan import SampleMask, SchedulerOutput
from longshore.protocol.requests import AddRequest
from longshore.scheduler.process.record_files import SegmentWriter
from longshore.scheduler.queue.outside_policies import CheckedPolicy, checked, load_policy
from longshore.scheduler.recorder import surroundings
from longshore.scheduler.recorder.entries import (
    Added,
    Answered,
    Called,
    Chunk,
    Entry,
    Header,
    Planned,
)
from longshore.scheduler.recorder.graph import encode_graph
from longshore.scheduler.recorder.structure import structure_digest
from longshore.scheduler.recorder.surroundings import PolicyRecorder, Tape, encode_argument
from longshore.scheduler.scheduler import Scheduler

RECORDED_CALLS: Final = (
    "reject_message",
    "continue_session",
    "abort_requests",
    "release_transfers",
    "abort_client",
    "stop_found",
    "update_drafts",
    "update_from_transfers",
    "set_pause",
    "lower_demand",
    "begin_epoch",
    "take_kv_events",
    "reset_prefix_cache",
    "reset_encoder_cache",
    "reset_connector_cache",
    "make_report",
    "make_block_snapshot",
    "make_stats",
    "shutdown",
)
"""Calls that change the scheduler or ask an object that it was given, besides those of a step. All
others only read."""

CHUNK_BYTES: Final = 256 << 10
"""A chunk is written when it has this many. To wake the thread costs more than to encode a step."""

CHUNKS_OF_A_RING: Final = 16
"""At least; those of a small ring are smaller."""

MAX_FULLNESS: Final = 2.0
"""The next file begins when the workers have all plans that they may have, or this one is as full
as this."""

_NO_ARGUMENTS: Final = encode_graph(((), {}))

OUTSIDE_HOOKS: Final = ("hold", "release")
"""What a connector asks for while no call is going on."""


class Recorder:
    """The record of one scheduler. path, forks: see `SegmentWriter`."""

    def __init__(self, path: Path, limit_bytes: int, *, forks: bool = True) -> None:
        self.path = path
        self.tape = Tape()
        self._segments = SegmentWriter(path, limit_bytes, forks=forks)
        self._chunk_bytes = min(CHUNK_BYTES, limit_bytes // CHUNKS_OF_A_RING)
        self._run = secrets.token_hex(8)
        self._num_entries = 0  # without those of the chunk
        self._chunk = Chunk()
        self._is_full = False

    def begin(self, scheduler: "RecordedScheduler", policy: str, *, is_outside: bool) -> None:
        """The scheduler exists, and its calls follow."""
        self._scheduler, self._policy, self._is_outside = scheduler, policy, is_outside
        self._segments.begin(self._header(), self._snapshot)

    def _header(self) -> Header:
        return Header(
            self._run, self._num_entries, self._policy, structure_digest(), self._is_outside
        )

    def _snapshot(self) -> bytes:
        state = dict(vars(self._scheduler))
        del state["recorder"]
        return encode_graph(state)

    def write(self, entry: Entry) -> None:
        """A call is over."""
        chunk = self._chunk
        chunk.append(entry)
        if len(chunk.data) >= self._chunk_bytes:
            self.flush()
            if self._segments.fullness >= MAX_FULLNESS:
                self.begin_file()

    def all_plans_sent(self) -> None:
        """Nothing is to be done before a worker answers: the time to begin a new file."""
        if self._is_full:
            self.begin_file()

    def begin_file(self) -> None:
        """Begin the next file, with a snapshot of now."""
        self.flush()
        self._segments.begin_next(self._header(), self._snapshot)
        self._is_full = False

    def write_outside_hook(self, method: str, argument: Any) -> None:
        """The connector asked for this while no call was going on."""
        self.write(Called(method, encode_argument(((argument,), {}))))

    def flush(self, *, waits: bool = False) -> None:
        """Write all entries to the file soon; with `waits`, before this returns."""
        if self._chunk.num_entries:
            self._num_entries += self._chunk.num_entries
            self._segments.write(self._chunk.end())
            self._chunk = Chunk()
            self._is_full = self._segments.fullness >= 1.0
        if waits:
            self._segments.wait()

    def close(self) -> None:
        """Write the rest."""
        self.flush()
        self._segments.close()


class RecordedScheduler(Scheduler):
    """Takes the arguments of `Scheduler`, and `recorder`."""

    def __init__(self, *arguments: Any, recorder: Recorder, **given: Any) -> None:
        tape, self.recorder = recorder.tape, recorder
        config = arguments[0]
        policy = checked(given.pop("policy", None) or load_policy(config.policy))
        is_outside, name = isinstance(policy, CheckedPolicy), config.policy
        if isinstance(policy, CheckedPolicy):
            name = policy.name
            policy = CheckedPolicy(PolicyRecorder(policy.policy, tape), name)
        if (connector := given.get("connector")) is not None:
            given["connector"] = surroundings.record_connector(
                connector, tape, recorder.write_outside_hook
            )
        if (of_encoder := given.get("encoder_connector")) is not None:
            given["encoder_connector"] = surroundings.record_encoder_connector(of_encoder, tape)
        if (grammars := given.get("grammars")) is not None:
            given["grammars"] = surroundings.record_grammars(grammars, tape)
        if (decode := given.get("decode")) is not None:
            given["decode"] = surroundings.record_decoder(decode, tape)
        for name_of in surroundings.SILENT:
            if given.get(name_of) is not None:
                given[name_of] = surroundings.silence(given[name_of], tape, name_of)
        super().__init__(*arguments, policy=policy, **given)
        recorder.begin(self, name, is_outside=is_outside)

    def schedule(self, now: float) -> SchedulerOutput | None:
        recorder = self.recorder
        if len(self._in_flight.steps) >= self.config.max_steps_in_flight:
            recorder.all_plans_sent()
            return None  # nothing changes
        tape = recorder.tape
        tape.is_open = True
        try:
            plan = Scheduler.schedule(self, now)
        except Exception as error:
            self._record("schedule", (now,), {}, type(error).__name__)
            raise
        recorder.write(Planned(now, plan, tape.take_events()))
        return plan

    def update_from_output(self, output: ModelRunnerOutput, now: float) -> None:
        recorder = self.recorder
        tape = recorder.tape
        tape.is_open = True
        try:
            Scheduler.update_from_output(self, output, now)
        except Exception as error:
            self._record("update_from_output", (output, now), {}, type(error).__name__)
            raise
        recorder.write(Answered(output, now, tape.take_events()))

    def add_request(self, message: AddRequest, *, client: int, now: float) -> None:
        recorder = self.recorder
        tape = recorder.tape
        noted = message
        if (params := message.options.kv_transfer_params) is not None:
            params = copy.deepcopy(params)  # a connector may change them
            options = msgspec.structs.replace(message.options, kv_transfer_params=params)
            noted = msgspec.structs.replace(message, options=options)
        tape.is_open = True
        try:
            Scheduler.add_request(self, message, client=client, now=now)
        except Exception as error:
            named = {"client": client, "now": now}
            self._record("add_request", (noted,), named, type(error).__name__)
            raise
        recorder.write(Added(noted, client, now, tape.take_events()))

    def take_masks(self) -> list[SampleMask]:
        """Recorded if grammars are asked for masks; else nothing changes that a plan depends on."""
        if self._grammars is None:
            return []
        tape = self.recorder.tape
        tape.is_open = True
        try:
            masks = Scheduler.take_masks(self)
        except Exception as error:
            self._record("take_masks", (), {}, type(error).__name__)
            raise
        if events := tape.take_events():
            self.recorder.write(Called("take_masks", _NO_ARGUMENTS, events))
        return masks

    def call(
        self,
        name: str,
        method: Callable[..., Any],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Any:
        """Call a method and record it, unless it is part of a recorded call."""
        tape = self.recorder.tape
        if tape.is_open:
            return method(self, *arguments, **named)
        tape.is_open = True
        raised = ""
        try:
            return method(self, *arguments, **named)
        except Exception as error:
            raised = type(error).__name__
            raise
        finally:
            self._record(name, arguments, named, raised)

    def _record(
        self, name: str, arguments: tuple[Any, ...], named: dict[str, Any], raised: str
    ) -> None:
        events = self.recorder.tape.take_events()
        self.recorder.write(Called(name, encode_argument((arguments, named)), events, raised))


def _recorded(name: str) -> Callable[..., Any]:
    method = getattr(Scheduler, name)

    @functools.wraps(method)
    def call(self: RecordedScheduler, *arguments: Any, **named: Any) -> Any:
        return self.call(name, method, arguments, named)

    return call


for _name in RECORDED_CALLS:
    setattr(RecordedScheduler, _name, _recorded(_name))
