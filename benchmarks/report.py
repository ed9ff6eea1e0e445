"""What every benchmark here writes: its rows, and what they were measured on and with."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from longshore.deploy.bench.report import machine

ROOT = Path(__file__).resolve().parent.parent


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser that knows `--json F`."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", type=Path, metavar="F", help="write rows and conditions here")
    return made


def write(path: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows as a table, and write them with their conditions if a path was given."""
    if rows:
        columns = list(rows[0])
        print("  ".join(f"{name:>14}" for name in columns))
        for row in rows:
            print("  ".join(f"{_text(row.get(name)):>14}" for name in columns))
    if path is not None:
        path.write_text(json.dumps({"conditions": conditions(), "rows": list(rows)}, indent=1))


def conditions() -> dict[str, Any]:
    """Machine, commit, versions, command."""
    return {
        **machine(),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "commit": _commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {name: _version(name) for name in ("torch", "numpy", "pyzmq", "msgspec")},
    }


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _commit() -> str:
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return result.stdout.strip() or "unknown"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
