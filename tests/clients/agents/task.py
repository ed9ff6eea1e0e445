"""The task of all agents that are libraries, and the tools for it.

A program of an agent runs in the agent's environment and in a folder of files, with the server's
URL and the name of the task as arguments. It does the task, and prints the package with its
version, and the last answer.
"""

import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

URL: Final = sys.argv[1]
MODEL: Final = "scripted"
QUESTION: Final = (
    f"Task {sys.argv[2]}: where is C417? Look into the files, and write its berth to answer.txt."
)


def list_files() -> str:
    """The names of all files."""
    return "\n".join(sorted(path.name for path in Path().iterdir() if path.is_file()))


def read_file(name: str) -> str:
    """The text of a file.

    Args:
        name: Its name.
    """
    return Path(name).read_text("utf-8")


def write_file(name: str, text: str) -> str:
    """Write a text to a file.

    Args:
        name: Its name.
        text: What it will hold.
    """
    Path(name).write_text(text, "utf-8")
    return f"{name} is written"


TOOLS: Final[tuple[Callable[..., str], ...]] = (list_files, read_file, write_file)


def schema_of(tool: Callable[..., str]) -> dict[str, Any]:
    """The JSON schema of its parameters, which are texts."""
    names = [name for name in tool.__annotations__ if name != "return"]
    properties = {name: {"type": "string"} for name in names}
    return {"type": "object", "properties": properties, "required": names}


def call(name: str, arguments: dict[str, str]) -> str:
    """The result of a tool."""
    return next(tool for tool in TOOLS if tool.__name__ == name)(**arguments)


def done(package: str, answer: object) -> None:
    print("@", package, version(package))
    print("=", answer)
