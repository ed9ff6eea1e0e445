"""What scripts/gpu_check found: checks, figures with their targets, and what was not verified. The
file is written after each of them, so that a part that is killed leaves what it has."""

import json
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, TypeVar

NOT_VERIFIED: Final = "not verified on device"
PACKAGES: Final = (
    "torch", "triton", "transformers", "cuda-bindings", "cupy-cuda13x", "flashinfer-python",
)  # fmt: skip
"""Their versions are recorded; None is absent."""

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Target:
    """A limit of a share, or of the value if there is no share."""

    limit: float
    is_minimum: bool = True

    def __str__(self) -> str:
        return f"{'≥' if self.is_minimum else '≤'} {self.limit:g}"

    def is_met(self, value: float) -> bool:
        return value >= self.limit if self.is_minimum else value <= self.limit


def at_least(limit: float) -> Target:
    return Target(limit)


def at_most(limit: float) -> Target:
    return Target(limit, is_minimum=False)


class Run:
    """One part's view of the results.

    device:  "cuda" or, in a dry run, "cpu".
    is_dry:  sizes are small, and no target counts as met or missed.
    folder:  for checkpoints and other files of this part.
    limit_s: checks that would begin later are not verified.
    """

    def __init__(
        self, path: Path, part: int, *, device: str, is_dry: bool, folder: Path, limit_s: float
    ) -> None:
        self.device = device
        self.is_dry = is_dry
        self.folder = folder
        self._path = path
        self._part = part
        self._end_s = time.monotonic() + limit_s

    @property
    def time_left_s(self) -> float:
        return self._end_s - time.monotonic()

    def check(self, name: str, function: Callable[[], _Result]) -> _Result | None:
        """Call `function`, and return what it returns. An exception is a wrong result, which does
        not end the part; then None is returned. Without time, or without a package that the
        function imports, it is not verified."""
        if self.time_left_s <= 0:
            self.not_verified(name, "the time of this part is over")
            return None
        started_s, result = time.perf_counter(), None
        with self.failures(name) as errors:
            result = function()
        if not errors:
            seconds = round(time.perf_counter() - started_s, 2)
            self._add("checks", {"name": name, "ok": True, "seconds": seconds})
            print(f"ok   {name} ({seconds} s)", flush=True)
        return result

    @contextmanager
    def failures(self, name: str) -> Iterator[list[Exception]]:
        """Record an exception of the block as a failed check, or, if a package is absent, as not
        verified. The list then holds it."""
        errors: list[Exception] = []
        try:
            yield errors
        except Exception as error:
            errors.append(error)
            absent = _absent_package(error)
            if absent is not None:
                self.not_verified(name, absent)
                return
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"[:2000]
            self._add("checks", {"name": name, "ok": False, "error": text})
            print(f"FAIL {name}", flush=True)

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        ceiling: float | None = None,
        floor: float | None = None,
        target: Target | None = None,
        **about: Any,
    ) -> None:
        """Record a measurement. Its share is value / ceiling for rates, and floor / value for
        times; ceiling and floor have the value's unit. about: conditions and further values."""
        entry: dict[str, Any] = {"name": name, "value": value, "unit": unit, **about}
        compared = value
        if ceiling is not None:
            compared = value / ceiling
            entry |= {"ceiling": ceiling, "share": compared}
        elif floor is not None:
            compared = floor / value
            entry |= {"floor": floor, "share": compared}
        if target is not None:
            met = None if self.is_dry else target.is_met(compared)
            entry |= {"target": str(target), "met": met}
        self._add("figures", entry)
        print(f"     {name}: {value:.4g} {unit}{_comparison(entry)}", flush=True)

    def not_verified(self, name: str, reason: str) -> None:
        self._add("not_verified", {"name": name, "reason": reason})
        print(f"--   {name}: {NOT_VERIFIED}: {reason}", flush=True)

    def once(self, name: str, measure: Callable[[], float]) -> float:
        """A ceiling, measured by the first part that needs it."""
        document = read(self._path)
        if name not in document["ceilings"]:
            document["ceilings"][name] = measure()
            write(self._path, document)
        return document["ceilings"][name]

    def _add(self, kind: str, entry: Mapping[str, Any]) -> None:
        document = read(self._path)
        document[kind].append({"part": self._part, **entry})
        write(self._path, document)


def new_document(device: str, *, is_dry: bool) -> dict[str, Any]:
    """Results without an entry."""
    return {
        "conditions": _conditions(device),
        "dry_run": is_dry,
        "parts": [],
        "ceilings": {},
        "checks": [],
        "figures": [],
        "not_verified": [],
    }


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def write(path: Path, document: Mapping[str, Any]) -> None:
    """A program killed while writing leaves the file of before."""
    written = path.with_name(f"{path.name}.part")
    written.write_text(json.dumps(document, indent=1, ensure_ascii=False))
    os.replace(written, path)


def add_device(path: Path) -> None:
    """Describe the GPU. Only parts do: a program that looks at a GPU takes some of its memory."""
    import torch

    document, properties = read(path), torch.cuda.get_device_properties(0)
    document["conditions"] |= {
        "gpu": properties.name,
        "gpu_memory_gib": properties.total_memory / 2**30,
    }
    write(path, document)


def _conditions(device: str) -> dict[str, Any]:
    return {
        "device": device,
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def summary(document: Mapping[str, Any]) -> str:
    """All figures as a table for docs/benchmarks.md, then what failed or was not verified."""
    lines = ["| | value | ceiling | share | target | |", "|---|--:|--:|--:|---|---|"]
    for figure in document["figures"]:
        bound = figure.get("ceiling", figure.get("floor"))
        cells = (
            figure["name"],
            f"{figure['value']:.4g} {figure['unit']}",
            "" if bound is None else f"{bound:.4g}",
            f"{figure['share']:.2f}" if "share" in figure else "",
            figure.get("target", ""),
            {True: "met", False: "missed", None: ""}[figure.get("met")],
        )
        lines.append(f"| {' | '.join(cells)} |")
    failed = [check for check in document["checks"] if not check["ok"]]
    targets = [figure["met"] for figure in document["figures"] if figure.get("met") is not None]
    lines.append("")
    lines += [f"FAIL {check['name']}: {check['error']}" for check in failed]
    lines += [f"{NOT_VERIFIED}: {e['name']}: {e['reason']}" for e in document["not_verified"]]
    lines.append(
        f"{len(document['checks']) - len(failed)} checks passed, {len(failed)} failed; "
        f"{sum(targets)} targets met, {len(targets) - sum(targets)} missed; "
        f"{len(document['not_verified'])} not verified"
    )
    return "\n".join(lines)


def _comparison(entry: Mapping[str, Any]) -> str:
    text = ""
    if "share" in entry:
        bound = "ceiling" if "ceiling" in entry else "floor"
        text += f", {entry['share']:.2f} of the {bound} {entry[bound]:.4g}"
    if "target" in entry:
        text += f" (target {entry['target']})"
    return text


def _absent_package(error: Exception) -> str | None:
    """What to say if the error is the absence of a package that is not ours."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    if error.name is None:
        return str(error)
    is_ours = error.name.partition(".")[0] in ("benchmarks", "longshore", "tests")
    return None if is_ours else f"{error.name} is not installed"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
