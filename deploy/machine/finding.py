"""One thing that was looked at: what it is like, what that means, and what to do."""

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
    """state: `absent` is optional and not there; `warning` costs speed or a feature; with
    `problem` something will fail. means: what follows from it. fix: what to do, if anything."""

    what: str
    found: str
    state: State = "ok"
    means: str = ""
    fix: str = ""


def table(findings: Iterable[Finding]) -> Table:
    """For a terminal of 80 columns or more."""
    lines = Table(title="This machine", title_justify="left", show_header=False)
    lines.add_column(no_wrap=True)
    lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold")
    for finding in findings:
        said = ". ".join(text for text in (finding.found, finding.means) if text)
        if finding.fix:
            said += f"\n→ {finding.fix}"
        lines.add_row(finding.what, finding.state, Text(said), style=_STYLES[finding.state])
    return lines


def summary(findings: Iterable[Finding]) -> str:
    """The last line: whether anything will fail."""
    states = [finding.state for finding in findings]
    problems, warnings = states.count("problem"), states.count("warning")
    if problems or warnings:
        return f"Problems, which make something fail: {problems}. Warnings: {warnings}."
    return "All is well."
