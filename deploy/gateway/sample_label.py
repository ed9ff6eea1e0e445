"""Texts in Prometheus' format: labels that are added to samples, and texts that are joined."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Family(NamedTuple):
    """A metric. head: its lines of help and type, without line ends. samples: likewise."""

    name: bytes
    head: bytes
    samples: list[bytes]


def families_of(text: bytes) -> Iterator[Family]:
    """The metrics of a text."""
    for family in text.split(b"# HELP ")[1:]:
        lines = family.splitlines()
        head = b"# HELP " + b"\n".join(lines[:2])
        yield Family(family.split(b" ", 1)[0], head, lines[2:])


def joined(families: Iterable[Family]) -> bytes:
    """A text in which each metric stands once, with all its samples."""
    heads: dict[bytes, bytes] = {}
    samples: dict[bytes, list[bytes]] = {}
    for name, head, own in families:
        heads.setdefault(name, head)
        samples.setdefault(name, []).extend(own)
    lines = [line for name, head in heads.items() for line in (head, *samples[name])]
    return b"\n".join(lines) + b"\n"


def sample_label(name: str, value: str) -> bytes:
    """`name="value"`, escaped."""
    escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'{name}="{escaped}"'.encode()


def labelled(line: bytes, label: bytes) -> bytes:
    """Add a label to a sample: in front of its labels, or after its name if it has none."""
    name, _, value = line.partition(b" ")
    if b"{" not in name:
        return b"%s{%s} %s" % (name, label, value)
    name, _, rest = line.partition(b"{")
    return b"%s{%s,%s" % (name, label, rest)


def label_samples(text: bytes, label: bytes, prefixes: tuple[bytes, ...]) -> bytes:
    """Add a label to the samples whose names have one of these prefixes."""
    return b"".join(
        labelled(line, label) if line.startswith(prefixes) else line
        for line in text.splitlines(keepends=True)
    )
