"""What all benchmarks share: it writes rows with the conditions of the measurement, and runs a peer
(a program to compare with) in the peer's own interpreter."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np

from longshore.deploy.bench.report import machine

ROOT = Path(__file__).resolve().parent.parent
PEERS = Path(__file__).resolve().parent / "peers"


def parser(description: str | None, *, peer: str | None = None) -> argparse.ArgumentParser:
    """An argument parser with the option `--json F`. `peer`, the name of a peer's environment
    (`core`), adds `--peer-python P`."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", type=Path, metavar="F", help="write rows and conditions here")
    if peer is not None:
        base = Path(os.environ.get("PEER_DIR") or Path.home() / ".cache" / "longshore-peers")
        made.add_argument(
            "--peer-python",
            type=Path,
            metavar="P",
            default=base / peer / "bin" / "python",
            help="interpreter of the peer's environment (benchmarks/peers/setup.sh): %(default)s",
        )
    return made


def write(path: Path | None, rows: Sequence[dict[str, Any]], **more: Any) -> None:
    """Print the rows as a table. With a path, also write them as JSON, with the conditions and
    `more`. A dict in a row is printed as several columns; a list is not printed."""
    flat = [_flat(row) for row in rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    widths = {name: max(10, len(name)) for name in columns}
    print("  ".join(f"{name:>{widths[name]}}" for name in columns))
    for row in flat:
        print("  ".join(f"{_text(row.get(name)):>{widths[name]}}" for name in columns))
    if path is not None:
        result = {"conditions": conditions(), **more, "rows": list(rows)}
        path.write_text(json.dumps(result, indent=1))


def times(samples_us: Sequence[float], name: str = "step") -> dict[str, float]:
    """Median, mean and 99th percentile in microseconds: `step_us`, `mean_us`, `p99_us`."""
    return {
        f"{name}_us": float(np.median(samples_us)),
        "mean_us": float(np.mean(samples_us)),
        "p99_us": float(np.percentile(samples_us, 99)),
    }


class Peer:
    """A program of `benchmarks/peers` that reads jobs and writes answers, one line of JSON each. It
    is idle between jobs, so that the two sides can take turns. `about` is its own description."""

    def __init__(
        self,
        python: Path,
        script: str,
        errors: IO[str],
        *arguments: str,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._errors = errors
        self._process = subprocess.Popen(
            [str(python), str(PEERS / script), *arguments],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.about = self._answer()

    def measure(self, **job: Any) -> Any:
        """The answer to one job. Raises RuntimeError if the peer ends instead."""
        assert self._process.stdin is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            raise RuntimeError(f"the peer ended with status {status}: {self._errors.read()}")
        return json.loads(line)


@contextmanager
def peer(
    python: Path,
    script: str,
    *arguments: str,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Peer | None]:
    """The peer during a `with` block; None, with a warning, if it is not installed."""
    if not python.exists():
        print(
            f"*** NO PEER: {python} does not exist, so there is no comparison.\n"
            f"*** Install it with {PEERS / 'setup.sh'}, or set --peer-python.",
            file=sys.stderr,
        )
        yield None
        return
    with tempfile.TemporaryFile("w+") as errors:
        other = Peer(python, script, errors, *arguments, environment=environment)
        try:
            yield other
        finally:
            other.close()


def conditions() -> dict[str, Any]:
    """Machine, commit, versions, command."""
    return {
        **machine(),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "commit": _commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {name: _version(name) for name in ("torch", "numpy", "pyzmq", "msgspec")},
    }


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return {name: value for name, value in flat.items() if not isinstance(value, list)}


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
