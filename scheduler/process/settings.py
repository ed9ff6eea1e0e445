"""What users can set of the scheduler process: how it can be looked into, and its grammars."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from longshore.protocol.settings import Setting, Settings

StructuredOutputBackend: TypeAlias = Literal["auto", "xgrammar", "llguidance"]


@dataclass(frozen=True, kw_only=True)
class InspectionSettings(Settings):
    """What users can set to look into the scheduler: a trace, a record, and a check of its plans.
    Each engine has files of its own."""

    sched_trace_path: Annotated[
        Path | None,
        Setting(
            "Operation",
            "File in which the scheduler records what it sees and decides in each step "
            "(docs/trace.md). With several engines, the number of each is added to its name. An "
            "existing file is not overwritten; the next free name is used. Default: no trace.",
            alias="--sched-trace",
        ),
    ] = None
    sched_trace_mib: Annotated[
        int,
        Meta(ge=1, le=1 << 20),
        Setting("Operation", "Size of the trace of an engine at which it ends, with a warning."),
    ] = 4096
    verify_plan: Annotated[
        bool,
        Setting(
            "Operation", "Send the full state with every plan and compare it (slow; for debugging)."
        ),
    ] = False
    record: Annotated[
        Path | None,
        Setting(
            "Operation",
            "Record what the scheduler gets and plans in FILE.000000 and following files, for "
            "longshore replay. They contain prompts and outputs. Further engines add their names. "
            "Default: nothing is recorded.",
        ),
    ] = None
    record_mib: Annotated[
        int,
        Meta(ge=1, le=1 << 20),
        Setting(
            "Operation",
            "Maximum size of the recorded files of an engine, beside one snapshot; the oldest "
            "ones are removed.",
        ),
    ] = 256


@dataclass(frozen=True, kw_only=True)
class StructuredOutputSettings(Settings):
    """What users can set of grammars."""

    structured_output_backend: Annotated[
        StructuredOutputBackend,
        Setting(
            "Model",
            "Library that compiles the grammars of structured output. auto uses llguidance for "
            "what it supports, and xgrammar for the rest, if they are installed.",
        ),
    ] = "auto"
