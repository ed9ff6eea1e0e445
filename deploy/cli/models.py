"""`longshore models` and `longshore pull`."""

import sys
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from longshore.deploy.model.hub import resolve_model
from longshore.deploy.model.known_models import KNOWN_MODELS, MEASURED_ON, pull, pulled_folder
from longshore.worker.process.byte_size import byte_size

WIDTH: Final = 130
"""In characters; a file or a pipe has no width of its own."""


def print_models(state_dir: Path | None) -> None:
    """Print a table of the known models."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    table = Table(box=None)
    for title in ("name", "makes", "format", "memory", "tokens/s", "license", "download"):
        table.add_column(title, no_wrap=True, justify="right" if title == "tokens/s" else "left")
    for model in KNOWN_MODELS.values():
        size = byte_size(model.download_bytes)
        download = f"{size} (is here)" if pulled_folder(model, state_dir) else size
        facts = (model.makes, model.format, model.memory, f"{model.tokens_per_s:,}", model.license)
        table.add_row(model.name, *facts, download)
    console.print(table)
    console.print(
        f"\ntokens/s: of one answer, or of one text to embed, at a time, on {MEASURED_ON}."
        "\n\nlongshore pull NAME fetches one, longshore serve NAME serves it. Other models are "
        "served by their folder, their GGUF file or their id on the hub: docs/models.md lists the "
        "families."
    )


def pull_model(name: str, state_dir: Path | None) -> Path:
    """Fetch a known model, or one of the hub. Returns its folder or GGUF file.

    Raises ConfigError.
    """
    known = KNOWN_MODELS.get(name)
    return resolve_model(name) if known is None else pull(known, state_dir)
