"""Bytes for people to read. Loads no tensor library."""


def byte_size(num_bytes: int) -> str:
    """In the largest unit up to GiB that leaves a number of at least 1."""
    size, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:,.0f} bytes" if unit == "bytes" else f"{size:,.2f} {unit}"
