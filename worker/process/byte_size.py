"""Human-readable byte sizes. Does not import torch."""


def byte_size(num_bytes: int) -> str:
    """`num_bytes` in the largest unit, up to GiB, that gives a number of at least 1."""
    size, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:,.0f} bytes" if unit == "bytes" else f"{size:,.2f} {unit}"
