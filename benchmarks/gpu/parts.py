"""The parts of scripts/gpu_check, in order of value, and the program that runs one of them:

    python -m benchmarks.gpu.parts FILE NUMBER MINUTES [dry]

scripts/gpu_check starts it.
"""

import importlib
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.gpu.environment import ROOT
from benchmarks.gpu.results import Run, add_device


@dataclass(frozen=True)
class Part:
    """minutes: after these no further check begins.
    functions: `module:function` in this package, called with the Run."""

    title: str
    minutes: float
    functions: tuple[str, ...]


PARTS: Final = (
    Part("ceilings", 0.5, ("ceilings:measure",)),
    Part("kernels against float64", 3.5, ("kernel_checks:check", "packed_products:check")),
    Part("tokens of one model on every path", 1, ("token_checks:check_paths",)),
    Part("tokens of the first families", 2.5, ("token_checks:check_first_families",)),
    Part("tokens of the other families", 2.5, ("token_checks:check_other_families",)),
    Part(
        "sampling, waits, the demo model",
        1,
        (
            "token_checks:check_sampling",
            "token_checks:check_no_step_waits",
            "token_checks:check_demo_model",
        ),
    ),
    Part(
        "offloading: tokens and copies",
        1.5,
        ("offload_checks:check_tokens", "offload_checks:measure_copies"),
    ),
    Part(
        "attention, products of quantised weights",
        1.5,
        ("attention_speed:measure", "packed_products:measure"),
    ),
    Part("steps of the 0.6B", 1, ("step_speed:measure_0_6b",)),
    Part("steps of the 8B", 2, ("step_speed:measure_8b",)),
    Part("steps of the 32B", 1.5, ("step_speed:measure_32b",)),
    Part("engines, and transformers", 3.5, ("engine_speed:measure",)),
    Part(
        "offloading: decodes and first tokens",
        2.5,
        ("offload_checks:measure_decodes", "offload_checks:measure_first_tokens"),
    ),
    Part("memory", 0.5, ("memory_checks:check",)),
)


def run_part(number: int, run: Run) -> None:
    for function in PARTS[number - 1].functions:
        module_name, _, name = function.partition(":")
        with run.failures(f"{PARTS[number - 1].title}: {module_name}.{name}"):
            getattr(importlib.import_module(f"benchmarks.gpu.{module_name}"), name)(run)


def main() -> None:
    sys.path.insert(1, str(ROOT / "benchmarks"))  # the programs there import each other
    path, number, minutes, *is_dry = sys.argv[1:]
    if not is_dry:
        add_device(Path(path))
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        run = Run(
            Path(path),
            int(number),
            device="cpu" if is_dry else "cuda",
            is_dry=bool(is_dry),
            folder=Path(folder),
            limit_s=60 * float(minutes),
        )
        run_part(int(number), run)


if __name__ == "__main__":
    main()
