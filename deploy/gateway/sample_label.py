"""Labels that are added to samples in Prometheus' text format."""


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
