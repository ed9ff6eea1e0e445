"""Results of a benchmark as JSON: figures with the conditions of the measurement."""

import dataclasses
import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import numpy as np

import longshore
from longshore.protocol.errors import ConfigError


def percentiles_ms(samples_s: Sequence[float]) -> dict[str, float | None]:
    """p50, p99 and mean in milliseconds; None without samples."""
    if not samples_s:
        return {"p50": None, "p99": None, "mean": None}
    p50, p99 = np.percentile(samples_s, (50, 99))
    return {
        "p50": round(float(p50) * 1e3, 3),
        "p99": round(float(p99) * 1e3, 3),
        "mean": round(float(np.mean(samples_s)) * 1e3, 3),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum of the repeats."""
    return {
        "median": round(float(np.median(values)), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def conditions(options: Any) -> dict[str, Any]:
    """Software, machine and settings (a dataclass) of this run. Results may be published, so fields
    excluded from the repr, which may hold secrets, and credentials in a URL are omitted."""
    settings: dict[str, Any] = {
        field.name: _plain(getattr(options, field.name))
        for field in dataclasses.fields(options)
        if field.repr
    }
    if "url" in settings:
        parts = urlsplit(settings["url"])
        netloc = parts.netloc.rpartition("@")[2]
        settings["url"] = urlunsplit((parts.scheme, netloc, parts.path, "", ""))
    return {**machine(), "settings": settings}


def machine() -> dict[str, Any]:
    """Software versions and processor of this machine."""
    return {
        "longshore": longshore.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
    }


def check_writable(path: Path | None, setting: str = "json") -> None:
    """Raise ConfigError if the result file cannot be written. Call it before measuring."""
    if path is None:
        return
    is_new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"{setting}={str(path)!r} cannot be written: {error.strerror}") from error
    if is_new:  # an empty file could be taken for a result
        path.unlink(missing_ok=True)


def write(result: dict[str, Any], path: Path | None) -> None:
    """Write to the file, or to standard output."""
    text = json.dumps(result, indent=2, allow_nan=False)
    if path is None:
        print(text)
    else:
        path.write_text(text + "\n", encoding="utf-8")
        print(f"results written to {path}", file=sys.stderr)


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return value


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
