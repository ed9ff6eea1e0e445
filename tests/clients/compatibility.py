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
    "openai_js",
    "anthropic_js",
    "langchain_js",
    "ollama",
    "ollama_js",
    "huggingface_hub",
    "guidellm",
    "lm_eval",
)
NODE: Final = "node"
ENVIRONMENTS: Final = {  # of clients that share one; the others have their own
    "openai": ("anthropic", "huggingface_hub", "langchain", "ollama", "pydantic_ai"),
    NODE: ("ai_sdk", "openai_js", "anthropic_js", "langchain_js", "ollama_js"),
    "litellm": ("instructor", "llama_index"),
}
INSTALLED: Final = ROOT / ".venv-clients"
NEWEST: Final = INSTALLED / "newest"
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


def use_client(name: str, url: str, folder: Path, installed: Path = INSTALLED) -> UsedClient:
    """Use all features of a client with the server at `url`, in a folder for its files. Nothing is
    downloaded. Raises NotInstalledError, or AssertionError with the output if a feature fails.

    installed: folder of the environments, which may be NEWEST.
    """
    ended = subprocess.run(
        [*_program(name, installed), url, str(DEMO_MODEL_DIR)],
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


def _program(name: str, installed: Path) -> list[str]:
    if environment_of(name) == NODE:
        node, folder = shutil.which("node"), node_packages(NODE, installed).parent
        if node is None:
            raise NotInstalledError(name)
        return [node, str(folder / f"{name}.mjs")]
    return [str(python_of(environment_of(name), installed)), str(HERE / f"{name}_client.py")]


def environment_of(name: str) -> str:
    """The environment of a client, which a file of `requirements/` describes."""
    return next((env for env, names in ENVIRONMENTS.items() if name in names), name)


def python_of(environment: str, installed: Path) -> Path:
    """Its interpreter. Raises NotInstalledError."""
    python = installed / environment / "bin" / "python"
    if not python.exists():
        raise NotInstalledError(environment)
    return python


def node_packages(name: str, installed: Path) -> Path:
    """What npm has installed for `node` or `agents`. Raises NotInstalledError."""
    folder = (HERE if installed == INSTALLED else installed) / name / "node_modules"
    if not folder.exists():
        raise NotInstalledError(name)
    return folder


def features_of(name: str) -> set[str]:
    """The features that a client's program uses, by its source."""
    if environment_of(name) == NODE:
        source = (HERE / NODE / f"{name}.mjs").read_text()
        found = re.findall(r"^  async (\w+)\(", source, re.MULTILINE)
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
