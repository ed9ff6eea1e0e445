"""Runs the client programs, and has the table of docs/compatibility.md.

Each program runs in its client's environment, which `ensure_clients` in scripts/services.sh
creates.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from tests.conftest import ROOT

HERE: Final = Path(__file__).parent
PAGE: Final = ROOT / "docs" / "compatibility.md"
CLIENTS: Final = (  # in the order of the table
    "openai",
    "anthropic",
    "langchain",
    "llama_index",
    "litellm",
    "instructor",
    "pydantic_ai",
    "ai_sdk",
    "guidellm",
    "lm_eval",
)
TIMEOUT_S: Final = 600  # importing a client's packages can take a minute
_TABLE: Final = re.compile(r"^\| \|.*?\n(?=\n)", re.MULTILINE | re.DOTALL)
_WORDS: Final = {"json": "JSON", "responses": "Responses"}


@dataclass(frozen=True)
class UsedClient:
    """What a client program printed: its package, the version, and which features work."""

    package: str
    version: str
    features: tuple[str, ...]


class NotInstalledError(Exception):
    """A client's environment does not exist."""


def use_client(name: str, url: str, folder: Path) -> UsedClient:
    """Use all features of a client with the server at `url`, in a folder for its files. Nothing is
    downloaded. Raises NotInstalledError, or AssertionError with the output if a feature fails."""
    ended = subprocess.run(
        [*_program(name), url, str(DEMO_MODEL_DIR)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={
            "HOME": str(folder),
            "HF_HUB_OFFLINE": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # the list of prices
            "PATH": os.defpath,
        },
    )
    assert ended.returncode == 0, f"{name}: {ended.stdout}{ended.stderr}"
    client, *features = re.findall(r"^@ (.+)", ended.stdout, re.MULTILINE)
    package, version = client.split()
    return UsedClient(package, version, tuple(_title(name) for name in features))


def _program(name: str) -> list[str]:
    if name == "ai_sdk":
        node = shutil.which("node")
        if node is None or not (HERE / name / "node_modules").exists():
            raise NotInstalledError(name)
        return [node, str(HERE / name / "client.mjs")]
    python = ROOT / ".venv-clients" / name / "bin" / "python"
    if not python.exists():
        raise NotInstalledError(name)
    return [str(python), str(HERE / f"{name}_client.py")]


def features_of(name: str) -> set[str]:
    """The features that a client's program uses, by its source."""
    if name == "ai_sdk":
        found = re.findall(
            r"^  async (\w+)\(", (HERE / name / "client.mjs").read_text(), re.MULTILINE
        )
    else:
        source = (HERE / f"{name}_client.py").read_text()
        found = re.findall(r"^@feature\ndef (\w+)", source, re.MULTILINE)
    return set(map(_title, found))


def table(clients: Sequence[UsedClient]) -> str:
    """Rows are features, in the order in which the clients use them first; columns are clients."""
    features = dict.fromkeys(feature for client in clients for feature in client.features)
    rows = [
        ["", *(f"`{client.package}`" for client in clients)],
        ["---"] * (1 + len(clients)),
        ["version", *(client.version for client in clients)],
        *([title, *("✓" * (title in client.features) for client in clients)] for title in features),
    ]
    return "".join(f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in row)}|\n" for row in rows)


def _title(name: str) -> str:
    return " ".join(_WORDS.get(word, word) for word in name.split("_"))


def page_with(page: str, new_table: str) -> str:
    """The page with another table."""
    return _TABLE.sub(lambda _: new_table, page, count=1)


def clients_of(page: str) -> list[UsedClient]:
    """The clients of a page's table."""
    (found,) = _TABLE.findall(page)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in found.splitlines()]
    (_, *packages), _, (_, *versions), *features = rows
    return [
        UsedClient(
            package.strip("`"),
            version,
            tuple(title for title, *cells in features if cells[column] == "✓"),
        )
        for column, (package, version) in enumerate(zip(packages, versions, strict=True))
    ]
