"""The code on the pages: fenced blocks, and commands within sentences."""

import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from tests.conftest import ROOT

PROGRAMS: Final = (".venv/bin/", "benchmarks/", "chrt ", "curl ", "longshore ", "pip ", "python ")
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
_SPAN = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A fenced block. `line` is that of its first line, counted from 1."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """The id of a test: `docs/serving.md:61`."""
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A shell command of a page, with continuation lines joined.

    is_block: it is in a block, which the reader can copy; otherwise within a sentence.
    """

    place: str
    text: str
    is_block: bool

    @property
    def words(self) -> list[str]:
        """The words without comments and assignments of variables, as a shell would split them."""
        words = shlex.split(self.text.replace("\\\n", " "), comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        return words


@cache
def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@cache
def read_blocks() -> list[Block]:
    """Every fenced block of every page, in order."""
    blocks = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start(3)) + 1
            blocks.append(Block(page, line, match[2], match[3]))
    return blocks


@cache
def read_commands() -> list[Command]:
    """The commands in `sh` blocks, and the spans that begin with one of PROGRAMS or a script."""
    commands = [each for block in read_blocks() if block.language == "sh" for each in _split(block)]
    for page in pages():
        text = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text("utf-8"))
        for match in _SPAN.finditer(text):
            said = " ".join(match[1].split())
            if said.startswith(PROGRAMS) or re.match(r"scripts/\w+( |$)", said):
                line = text.count("\n", 0, match.start()) + 1
                place = f"{page.relative_to(ROOT).as_posix()}:{line}"
                commands.append(Command(place, said, is_block=False))
    return commands


def spans(page: Path) -> list[str]:
    """The texts in backticks outside of blocks."""
    text = _FENCE.sub("", page.read_text("utf-8"))
    return [" ".join(span.split()) for span in _SPAN.findall(text)]


def flags_mentioned() -> dict[str, str]:
    """The flags in spans, with one place where each occurs."""
    flags: dict[str, str] = {}
    for page in pages():
        for span in _SPAN.findall(page.read_text("utf-8")):
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", span):
                flags.setdefault(flag, page.relative_to(ROOT).as_posix())
    return flags


def _split(block: Block) -> list[Command]:
    """The commands of a block. A command ends with its line, unless a quotation or a backslash
    continues it."""
    commands: list[Command] = []
    begun = ""
    for number, line in enumerate(block.text.splitlines()):
        begun += line + "\n"
        if line.endswith("\\") or not _is_complete(begun):
            continue
        if shlex.split(begun, comments=True):
            place = f"{block.place.rpartition(':')[0]}:{block.line + number}"
            commands.append(Command(place, begun.strip(), is_block=True))
        begun = ""
    assert not begun, f"{block.place}: a quotation does not end"
    return commands


def _is_complete(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True
