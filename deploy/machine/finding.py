"""One finding about the machine: its state, what that means, and what to do."""

from collections.abc import Iterable
from typing import Final, Literal, TypeAlias

import msgspec
from rich.table import Table
from rich.text import Text

State: TypeAlias = Literal["ok", "absent", "warning", "problem"]

_STYLES: Final[dict[State, str]] = {
    "ok": "",
    "absent": "dim",
    "warning": "yellow",
    "problem": "bold red",
}


class Finding(msgspec.Struct, frozen=True):
    """state: `absent` is optional and missing; `warning` costs speed or a feature; with `problem`
    something will fail. means: the consequence. fix: what to do, if anything."""

    what: str
    found: str
    state: State = "ok"
    means: str = ""
    fix: str = ""


def table(findings: Iterable[Finding]) -> Table:
    """Make a table for a terminal of 80 columns or more."""
    lines = Table(title="This machine", title_justify="left", show_header=False)
    lines.add_column(no_wrap=True)
    lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold")
    for finding in findings:
        text = ". ".join(part for part in (finding.found, finding.means) if part)
        if finding.fix:
            text += f"\n→ {finding.fix}"
        lines.add_row(finding.what, finding.state, Text(text), style=_STYLES[finding.state])
    return lines


def summary(findings: Iterable[Finding]) -> str:
    """The last line: the number of problems and warnings."""
    states = [finding.state for finding in findings]
    problems, warnings = states.count("problem"), states.count("warning")
    if problems or warnings:
        return f"Problems: {problems}. Warnings: {warnings}."
    return "No problems found."
