"""Instructions that the core executes per step, request, block or token, compared with
`instructions.json`.

    python benchmarks/instructions.py [--load NAME ...] [--json F]
    python benchmarks/instructions.py --write [--load NAME ...]

Times differ too much between runs on a shared machine to show a loss of a few percent. Counts of
instructions differ by less than one, however busy the machine is. valgrind's callgrind counts them;
`instruction_loads.py` has the loads. Each runs for a number of rounds and then for another, and
only the second ones count, so imports and preparations do not.

The exit status is 1 if a load executes over 3 % more instructions than the file has. Make it
cheaper, or write the new counts with `--write`, and say in the commit what they buy. After a gain
of more than 3 %, write them too, or else a later change may lose it unseen.

Counts depend on the interpreter and the libraries, which the file names. With other versions the
counts are printed and compared, but the exit status is 0.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import report
from instruction_loads import LOADS

RECORD: Final = report.ROOT / "benchmarks" / "instructions.json"
TOLERANCE: Final = 0.03
ENVIRONMENT: Final = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def versions() -> dict[str, str]:
    """What the counts depend on, beside the code."""
    return {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "compiler": _compiler(),
        "libc": os.confstr("CS_GNU_LIBC_VERSION") or "unknown",
        "numpy": version("numpy"),
        "msgspec": version("msgspec"),
    }


def _compiler() -> str:
    """That of the kernels, if they are compiled on this machine."""
    found = shutil.which("c++")
    if found is None:
        return "unknown"
    command = [found, "-dumpfullversion", "-dumpversion"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def count(names: Sequence[str]) -> dict[str, int]:
    """The instructions of each load, per unit. Raises SystemExit if one fails."""
    if shutil.which("valgrind") is None:
        raise SystemExit("counting needs valgrind: install the package valgrind as root")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *("valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no"),
            *("--trace-children=yes", "--trace-children-skip=*vgdb"),  # forks take commands, too
            *("--dump-before=getsid", f"--callgrind-out-file={folder}/%p", sys.executable),
            *(str(report.ROOT / "benchmarks" / "instruction_loads.py"), *names, "--count"),
        ]
        variables = {**os.environ, **ENVIRONMENT}
        ran = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True)
        processes = dict(line.split() for line in ran.stdout.splitlines())
        if failed := [name for name in names if name not in processes]:
            raise SystemExit(f"the load {failed[0]} failed")
        return {name: per_unit(name, Path(folder, f"{processes[name]}.2")) for name in names}


def per_unit(name: str, profile: Path) -> int:
    load = LOADS[name]
    return round(instructions_of(profile.read_text()) / (load.rounds * load.units))


def instructions_of(profile: str) -> int:
    """The total of a part of callgrind's output."""
    found = re.search(r"^totals: (\d+)$", profile, re.M)
    if found is None:
        raise ValueError("callgrind's output has no line `totals:`")
    return int(found[1])


def compare(counted: Mapping[str, int], recorded: Mapping[str, int]) -> list[dict[str, Any]]:
    """A row per load. `change`: None for a load that is not recorded yet."""
    return [
        {
            "load": name,
            "per": LOADS[name].unit,
            "instructions": instructions,
            "recorded": recorded.get(name),
            "change": instructions / recorded[name] - 1 if name in recorded else None,
        }
        for name, instructions in counted.items()
    ]


def has_grown(row: Mapping[str, Any]) -> bool:
    return row["change"] is None or row["change"] > TOLERANCE


def advice(row: Mapping[str, Any]) -> str | None:
    """What to do about a load whose count differs; None: nothing."""
    command = f"`python benchmarks/instructions.py --write --load {row['load']}`"
    if row["change"] is None:
        return f"{row['load']} is not in {RECORD.name}: run {command}"
    if abs(row["change"]) <= TOLERANCE:
        return None
    kind = "more" if row["change"] > 0 else "fewer"
    found = (
        f"{row['load']} executes {abs(row['change']):.1%} {kind} instructions per {row['per']}: "
        f"{row['instructions']:,}, instead of {row['recorded']:,}."
    )
    if row["change"] > 0:
        return f"{found} Make it cheaper, or run {command} and say in the commit what this buys."
    return f"{found} Run {command}, so that it stays so."


def write(counted: Mapping[str, int], recorded: Mapping[str, int]) -> None:
    """Write the counts, and those `recorded` of loads that were not counted."""
    known = {**recorded, **counted}
    instructions = {name: known[name] for name in LOADS if name in known}
    RECORD.write_text(
        json.dumps({"versions": versions(), "instructions": instructions}, indent=2) + "\n"
    )


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument(
        "--load", nargs="+", choices=LOADS, default=list(LOADS), help="only these loads"
    )
    arguments.add_argument("--write", action="store_true", help=f"write {RECORD.name}")
    options = arguments.parse_args()
    record = json.loads(RECORD.read_text())
    counted = count(options.load)
    rows = compare(counted, record["instructions"])
    report.write(options.json, rows)
    is_comparable = record["versions"] == versions()
    if options.write:
        write(counted, record["instructions"] if is_comparable else {})
        return
    print("\n".join(filter(None, map(advice, rows))))
    if not is_comparable:
        print(f"{RECORD.name} has counts of {record['versions']}; these are of {versions()}")
    elif any(map(has_grown, rows)):
        sys.exit(1)


if __name__ == "__main__":
    main()
